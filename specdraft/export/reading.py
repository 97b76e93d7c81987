"""Reads the drafter folders that others wrote: their settings, tensors and vocabulary map, each checked before it is believed.

It knows nothing of one format's own keys (eagle3.py, speculators.py, sglang.py) and nothing of writing (folder.py).

Letters: H width, V target vocabulary with padded rows, D draft vocabulary.
"""

from __future__ import annotations

import json
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from specdraft.config import UserError
from specdraft.data.vocab import VocabMap
from specdraft.export.folder import FLAGS, Layout, canonical
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.eagle3_layer import Eagle3Config
from specdraft.models.heads import HeadConfig
from specdraft.models.target import TargetModel

POINTER = b"version https://git-lfs"
CODE = "holds more than tensors, and reading it would run its code; ask for .safetensors"
VERIFIER = ("verifier_norm.weight", "verifier_lm_head.weight")  # the target's own, in folders of some versions


def read_json(folder: Path) -> dict[str, Any]:
    """config.json of somebody's drafter folder. Raises UserError: none, no JSON, or one that asks for code of its own."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError:
        raise UserError(f"drafter {folder}: has no config.json; give the folder of an EAGLE-3 drafter") from None
    except (ValueError, RecursionError):
        raise UserError(f"drafter {folder}: config.json is not JSON; fetch the drafter again") from None
    if not isinstance(config, dict):
        raise UserError(f"drafter {folder}: config.json holds no settings; fetch the drafter again")
    if config.get("auto_map") and "speculators_model_type" not in config:  # its converter names its own class there
        raise UserError(
            f"drafter {folder}: asks for code of its own (auto_map), which is not run; allowed: plain EAGLE-3 folders"
        )
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder: *.safetensors, else *.bin, of which only plain tensors are unpickled.

    Raises:
        UserError: no weights, unreadable ones, or a .bin that would run code.
    """
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise UserError(f"drafter {folder}: has neither .safetensors nor .bin weights; fetch the drafter again")
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            if path.suffix == ".safetensors":
                tensors |= load_file(path)
            else:
                tensors |= torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            with open(path, "rb") as file:
                is_pointer = file.read(len(POINTER)) == POINTER
            what = "is Git LFS's pointer to a file, not the file; fetch it again" if is_pointer else CODE
            raise UserError(f"{path}: {what}") from None
        except Exception as error:  # whatever a foreign file makes a parser raise
            raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())[:160]}); fetch it again") from None
    if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise UserError(f"drafter {folder}: its weights hold other things than tensors; ask for .safetensors")
    return tensors


def read_layer(
    settings: dict[str, Any], taps: tuple[int, ...], flags: dict[str, bool], target: TargetModel, where: str
) -> Eagle3Config:
    """Our config from the Llama keys of somebody's drafter. Positions are the target's: templates often say 2,048 (known fault 36).

    Raises:
        UserError: a key missing; a layer that ours is not (several layers, biases, another activation); another width or vocabulary
            than the target's.
    """
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [key for key in needed if not isinstance(settings.get(key), int)]
    if missing:
        raise UserError(f"drafter {where}: config.json has no {missing[0]}; fetch the drafter again")
    for key, allowed in LAYER_ALLOWED.items():
        if settings.get(key, allowed) not in (allowed, None):
            raise UserError(f"drafter {where}: {key} is {settings[key]!r}, allowed: {allowed!r}")
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    for key, expected in {"hidden_size": target.hidden_size, "vocab_size": int(target.hf_config.vocab_size)}.items():
        if settings[key] != expected:
            raise UserError(
                f"drafter {where}: {key} {settings[key]}, the target {target.name} has {expected}; give the target that it was made for"
            )
    if taps != target.tap_layers:
        raise UserError(
            f"drafter {where}: reads the target's layers {taps}, this target gives {target.tap_layers}; load it with tap_layers={taps}"
        )
    return Eagle3Config(
        hidden_size=hidden,
        intermediate_size=settings["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=settings.get("num_key_value_heads") or heads,
        head_dim=settings.get("head_dim") or hidden // heads,
        vocab_size=target.vocab_size,
        max_position_embeddings=target.max_positions,
        rope_parameters=read_rope(settings, where),
        tap_layers=taps,
        rms_norm_eps=settings.get("rms_norm_eps", 1e-6),
        **flags,
    )


LAYER_ALLOWED = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bias": False,
    "tie_word_embeddings": False,
    "pretraining_tp": 1,
}


def read_rope(settings: dict[str, Any], where: str) -> dict[str, Any]:
    """The rotary scheme of either schema. Raises UserError where both are there and differ, and where it turns a part of a head only."""
    new, theta, scaling = settings.get("rope_parameters"), settings.get("rope_theta"), settings.get("rope_scaling")
    for part in (settings, new or {}, scaling or {}):
        factor = part.get("partial_rotary_factor")
        if factor not in (None, 1):
            raise UserError(f"drafter {where}: partial_rotary_factor is {factor!r}, allowed: 1; it cannot be used here")
    old = {"rope_type": "default", "rope_theta": float(10000.0 if theta is None else theta), **(scaling or {})}
    old["rope_type"] = (scaling or {}).get("rope_type") or old.pop("type", None) or "default"
    old.pop("partial_rotary_factor", None)
    if not new:
        return old
    new = {"rope_type": "default", "rope_theta": old["rope_theta"], **new}
    new.pop("partial_rotary_factor", None)
    if theta is not None and (float(theta) != float(new["rope_theta"]) or old["rope_type"] != new["rope_type"]):
        raise UserError(
            f"drafter {where}: rope_parameters ({new['rope_type']}, {new['rope_theta']}) and rope_theta, rope_scaling "
            f"({old['rope_type']}, {theta}) differ; repair its config.json"
        )
    return new


def assemble(
    layout: Layout, tensors: dict[str, Tensor], target: TargetModel, where: str, dtype: torch.dtype | None = None
) -> Eagle3Drafter:
    """A drafter from the tensors of a folder, for use with `target`, in its dtype and on its device unless told otherwise.

    Raises:
        UserError: a tensor missing, too many, or of another shape; an embedding that is not the target's; a bad vocabulary map.
    """
    tensors = {name: tensor for name, tensor in canonical(tensors).items() if name not in VERIFIER}
    embedding = tensors.pop("embed_tokens.weight", None)
    if embedding is not None:
        require_same_embedding(embedding, target, where)
    require_shapes(layout, tensors, where)
    vocab_map = read_map(layout, tensors, target, where)
    weights = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    if layout.rank is not None:
        weights["lm_head.down"], weights["lm_head.weight"] = (
            weights.pop("lm_head.down.weight"),
            weights.pop("lm_head.up.weight"),
        )
    kind = "lowrank" if layout.rank is not None else "full" if vocab_map is None else "trimmed"
    layout.config.head = HeadConfig(kind, rank=layout.rank)
    if kind == "trimmed":
        layout.config.head.vocab_size = layout.draft_vocab_size
    weights["lm_head.weight"] = weights["lm_head.weight"][: target.vocab_size]  # padded rows, where there are any
    bad = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
    if bad:
        raise UserError(f"drafter {where}: {bad[0]} has NaN or infinite weights; fetch it again")
    drafter = Eagle3Drafter(layout.config, vocab_map)
    drafter.load_state_dict(weights)
    drafter.to(dtype=dtype or target.dtype, device=target.device).eval().requires_grad_(False)
    return drafter.bind(target.embedding_weight)


def require_shapes(layout: Layout, tensors: dict[str, Tensor], where: str) -> None:
    """Raises UserError for the first tensor that is missing, superfluous or misshapen. A map is no fault where it is not needed, and
    t2d follows from d2t."""
    wanted, found = layout.shapes(), {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if "d2t" in wanted and "d2t" not in found:
        raise UserError(
            f"drafter {where}: has no d2t, and {layout.draft_vocab_size} draft ids of {layout.vocab_size} mean nothing without; "
            "fetch it again"
        )
    for name in ("d2t", "t2d"):
        if name not in wanted or name not in found:
            wanted.pop(name, None)
            found.pop(name, None)
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        first = wrong[0]
        raise UserError(
            f"drafter {where}: {len(wrong)} tensors do not fit, the first: {first} is {found.get(first, 'missing')}, "
            f"expected {wanted.get(first, 'nothing of that name')}; the folder is of another kind, or broken"
        )


def require_same_embedding(embedding: Tensor, target: TargetModel, where: str) -> None:
    """Our drafters read the target's embedding. Raises UserError for any other, rounding aside."""
    own = target.embedding_weight.float().cpu()
    given = embedding[: target.vocab_size].float() if embedding.dim() else embedding
    if given.shape != own.shape or float((given - own).abs().max()) > 0.01 * float(own.abs().max()):
        raise UserError(f"drafter {where}: has an embedding of its own, allowed: the target's; it cannot be used here")


def read_map(layout: Layout, tensors: dict[str, Tensor], target: TargetModel, where: str) -> VocabMap | None:
    """The vocabulary map, in the order that the folder has; None for all of the target's tokens in their own order.

    Raises:
        UserError: out of range, repeated, padded rows, or d2t and t2d at odds.
    """
    if "d2t" not in tensors:
        return None
    d2t = tensors["d2t"]
    if d2t.dtype.is_floating_point or list(d2t.shape) != [layout.draft_vocab_size]:
        raise UserError(
            f"drafter {where}: d2t is {d2t.dtype} {list(d2t.shape)}, expected int64 [{layout.draft_vocab_size}]"
        )
    d2t = d2t.to(torch.int64)
    if not d2t.any() and "t2d" not in tensors and len(d2t) < target.vocab_size:
        raise UserError(
            f"drafter {where}: d2t is all zero and there is no t2d to say that this is meant; fetch it again"
        )
    tables = {"d2t": d2t}
    if "t2d" in tensors:
        tables["t2d"] = tensors["t2d"].bool()
        VocabMap.from_tensors(tables, layout.vocab_size, f"drafter {where}")
    ids = d2t + torch.arange(len(d2t))
    if len(ids) == layout.vocab_size and not d2t.any():
        return None
    found = VocabMap(ids, target.vocab_size, f"drafter {where}")
    return None if found.is_identity else found


def vocab_sizes(settings: dict[str, Any], draft: Any, where: str) -> tuple[int, int]:
    """V and D. Raises UserError for a D outside 1..V."""
    vocab_size = settings["vocab_size"]
    draft = vocab_size if draft is None else draft
    if not isinstance(draft, int) or not 1 <= draft <= vocab_size:
        raise UserError(f"drafter {where}: draft_vocab_size {draft!r}, allowed: 1 to {vocab_size}")
    return vocab_size, draft


def read_flags(settings: dict[str, Any], where: str) -> dict[str, bool]:
    """Norm flags; one that is missing is off, in both formats. Raises UserError for two that exclude each other."""
    flags = {name: bool(settings.get(name, False)) for name in FLAGS}
    if flags["fc_norm"] and flags["norm_before_fc"]:
        raise UserError(f"drafter {where}: fc_norm and norm_before_fc exclude each other; repair its config.json")
    return flags


def read_taps(ids: Any, num_layers: int, where: str) -> tuple[int, ...]:
    """Tap layers from a list of ids that counts as ours does; the field's default where there is none.

    Raises:
        UserError: no list of different layers, ascending.
    """
    if ids is None:
        return (2, num_layers // 2, num_layers - 3)
    with suppress(TypeError, ValueError):
        taps = tuple(int(i) for i in ids)
        if taps and list(taps) == sorted(set(taps)) and taps[0] >= 0 and taps[-1] < num_layers:
            return taps
    raise UserError(
        f"drafter {where}: eagle_aux_hidden_state_layer_ids {ids!r}, allowed: different layers from 0 to {num_layers - 1}, ascending"
    )
