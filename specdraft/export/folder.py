"""What every engine's drafter folder has in common: its tensors, the layer's settings, writing it, and comparing it with the drafter.

Engines count the padded rows of a target's embedding as tokens, our drafters do not: V here is the engines' number, and where
our full head has fewer rows it is written like a trimmed one. Exported draft ids are always ascending: some readers select rows
with t2d instead of gathering through d2t. This file knows nothing of one engine's own keys (eagle3.py, speculators.py, sglang.py)
and nothing of reading (reading.py).

Letters: H width, A taps, V target vocabulary with padded rows, D draft vocabulary, R rank, K steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdraft.config import UserError
from specdraft.data.vocab import VocabMap
from specdraft.models.checkpoint import FREQUENT
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.eagle3_layer import Eagle3Config
from specdraft.models.heads import FullHead, LowRankHead, TrimmedHead
from specdraft.models.target import TargetModel
from specdraft.provenance import atomic_path, write_json

WRITTEN = {"config.json", "model.safetensors", "README.md", "provenance.json", FREQUENT}
FLAGS = ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")
LAYER = "midlayer."
PROBE_TOKENS, PROBE_STEPS = 16, 3


@dataclass
class Layout:
    """A drafter as engines count: vocab_size V, draft_vocab_size D; rank: R of a head that stays two factors, else None.
    always_map: d2t and t2d even where D = V.   with_embedding: the target's embedding too."""

    config: Eagle3Config
    vocab_size: int
    draft_vocab_size: int
    rank: int | None = None
    always_map: bool = False
    with_embedding: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the folder, as formats know them: no more and no less. d2t and t2d where D != V."""
        c, taps = self.config, len(self.config.tap_layers)
        h, q, kv = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        shapes = {
            "fc.weight": (h, taps * h),
            "norm.weight": (h,),
            LAYER + "hidden_norm.weight": (h,),
            LAYER + "input_layernorm.weight": (h,),
            LAYER + "post_attention_layernorm.weight": (h,),
            LAYER + "self_attn.q_proj.weight": (q, 2 * h),
            LAYER + "self_attn.k_proj.weight": (kv, 2 * h),
            LAYER + "self_attn.v_proj.weight": (kv, 2 * h),
            LAYER + "self_attn.o_proj.weight": (h, q),
            LAYER + "mlp.gate_proj.weight": (c.intermediate_size, h),
            LAYER + "mlp.up_proj.weight": (c.intermediate_size, h),
            LAYER + "mlp.down_proj.weight": (h, c.intermediate_size),
        }
        if c.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (h,) for i in range(taps)}
        if c.norm_before_fc:
            shapes["input_norm.weight"] = (taps * h,)
        if self.rank is None:
            shapes["lm_head.weight"] = (self.draft_vocab_size, h)
        else:
            shapes["lm_head.down.weight"] = (self.rank, h)
            shapes["lm_head.up.weight"] = (self.draft_vocab_size, self.rank)
        if self.draft_vocab_size != self.vocab_size or self.always_map:
            shapes |= {"d2t": (self.draft_vocab_size,), "t2d": (self.vocab_size,)}
        if self.with_embedding:
            shapes["embed_tokens.weight"] = (self.vocab_size, h)
        return shapes


def canonical(tensors: dict[str, Any]) -> dict[str, Any]:
    """Under EAGLE-3's names: `layers.0.` is its `midlayer.`."""
    return {
        LAYER + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name: x
        for name, x in tensors.items()
    }


def lay_out(
    drafter: Eagle3Drafter, target: TargetModel, dtype: torch.dtype, factors: bool = False
) -> tuple[Layout, dict[str, Tensor]]:
    """The drafter's tensors in `dtype` under EAGLE-3's names, on the CPU. A low-rank head is merged to W_up W_down [D, H] (multiplied
    in fp32, then rounded), or kept as two factors.

    Raises:
        UserError: factors asked of a head that has none; a head, or a shape, that engines do not have.
    """
    width, heads = drafter.config.hidden_size, drafter.config.num_attention_heads
    if width % heads:
        raise UserError(
            f"export: got {heads} attention heads in a width of {width}, allowed: a divisor of it, as engines read Llama's configuration; "
            "use --format specdraft"
        )
    head, vocab_size = drafter.lm_head, int(target.hf_config.vocab_size)
    if type(head) not in (FullHead, TrimmedHead, LowRankHead):
        raise UserError(f"export: got a {type(head).__name__}, allowed: full, trimmed and low-rank heads")
    if factors and not isinstance(head, LowRankHead):
        raise UserError(
            f"export: two factors asked of a {drafter.config.head.kind} head, which has none; leave --factors out"
        )
    weights = {name: tensor.detach().cpu().to(dtype) for name, tensor in drafter.state_dict().items()}
    tensors = {name: tensor for name, tensor in weights.items() if not name.startswith("lm_head.")}
    rows = weights["lm_head.weight"]
    ids = torch.arange(len(rows)) if head.vocab_map is None else head.vocab_map.target_ids
    order = ids.argsort()
    if factors:
        tensors |= {"lm_head.down.weight": weights["lm_head.down"], "lm_head.up.weight": rows[order]}
    else:
        if isinstance(head, LowRankHead):
            rows = (rows.float() @ weights["lm_head.down"].float()).to(dtype)
        tensors["lm_head.weight"] = rows[order]
    if len(rows) != vocab_size:
        tensors |= VocabMap(ids[order], vocab_size).tensors()
    layout = Layout(drafter.config, vocab_size, len(rows), rank=rows.shape[1] if factors else None)
    return layout, {name: tensor.contiguous() for name, tensor in tensors.items()}


def layer_settings(config: Eagle3Config, target: TargetModel, dtype: torch.dtype) -> dict[str, Any]:
    """The Llama keys of the one layer: widths, positions, and the rotary scheme in both schemas (transformers 5 reads
    `rope_parameters`, engines and older versions `rope_theta` and `rope_scaling`)."""
    rope = {
        key: value for key, value in config.rope_parameters.items() if key != "partial_rotary_factor"
    }  # ours turn all
    theta = float(rope["rope_theta"])
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": int(target.hf_config.vocab_size),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": rope,
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
        **{name: getattr(target.hf_config, name, None) for name in ids},
    }


def norm_flags(config: Eagle3Config) -> dict[str, bool]:
    """All of them, always: readers differ in what they take a missing one for."""
    return {name: getattr(config, name) for name in FLAGS}


def write_folder(
    folder: Path,
    config: dict[str, Any],
    layout: Layout,
    tensors: dict[str, Tensor],
    drafter: Eagle3Drafter,
    target: TargetModel,
    read_back: Callable[[Path], Eagle3Drafter],
) -> None:
    """Write config.json and model.safetensors, read them back and compare; only then does the folder appear.

    Raises:
        UserError: the folder holds other things; no space.
    """
    require_replaceable(folder)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert canonical(found) == layout.shapes(), sorted(set(canonical(found).items()) ^ set(layout.shapes().items()))
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        write_json(temporary / "config.json", config)
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        compare(drafter, read_back(temporary), target, tensors["fc.weight"].dtype)


def require_replaceable(folder: Path) -> None:
    """Raises UserError for a folder (or file) that holds anything but a former export: it would be lost."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or {path.name for path in folder.iterdir()} - WRITTEN):
        raise UserError(f"export {folder}: holds other things, which would be lost; give a new folder")


def compare(drafter: Eagle3Drafter, reloaded: Eagle3Drafter, target: TargetModel, dtype: torch.dtype) -> float:
    """The logits of both on random tokens, K steps, by target id, in fp32 from weights rounded to `dtype`. Returns their root mean square
    difference as a share of the logits' own; asserts that it is rounding (of a merged head) or nothing."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (1, PROBE_TOKENS), generator=generator)
    taps = target.features(ids.to(target.device), torch.tensor([PROBE_TOKENS])).taps.float().cpu()
    rows = torch.arange(PROBE_TOKENS - PROBE_STEPS - 1)[None]
    found = []
    for original in (drafter, reloaded):
        model = Eagle3Drafter(original.config, original.lm_head.vocab_map)  # its rotary tables were never rounded
        model.load_state_dict({name: x.cpu().to(dtype).float() for name, x in original.state_dict().items()})
        model.bind(target.embedding_weight.float().cpu())
        with torch.no_grad():
            logits = model.lm_head.logits(model.unroll(taps, ids, rows, PROBE_STEPS))
        columns = model.lm_head.target_ids()
        found.append(logits if columns is None else logits[..., columns.argsort()])
    difference = float((found[0] - found[1]).square().mean().sqrt() / found[0].square().mean().sqrt())
    merged = isinstance(drafter.lm_head, LowRankHead) and not isinstance(reloaded.lm_head, LowRankHead)
    allowed = max(1e-5, 4 * torch.finfo(dtype).eps if merged else 0.0)
    assert difference <= allowed, (
        f"what was written gives other logits: {difference:.2g} of their size, allowed {allowed:.2g}"
    )
    return difference
