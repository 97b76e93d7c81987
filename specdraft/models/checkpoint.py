"""Drafter checkpoints on disk: config.json, model.safetensors (no frozen target weights), provenance.json, README.md, and, where it is
known, frequent_tokens.json: a list of target ids, see Eagle3Drafter.frequent.

Tensor names are those of EAGLE-3 checkpoints; a low-rank head is `lm_head.down` and `lm_head.weight`, a trimmed one adds
the offsets `d2t` and the mask `t2d`. It knows nothing of training state (training/checkpoint.py) or of engines (export/).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specdraft.config import UserError, config_from_dict, config_to_dict
from specdraft.data.vocab import VocabMap
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.eagle3_layer import Eagle3Config
from specdraft.models.heads import HeadDtype
from specdraft.models.target import TargetModel
from specdraft.provenance import atomic_path, provenance, read_json, write_json

FORMAT = "specdraft-eagle3-1"
FREQUENT = "frequent_tokens.json"
DTYPES = ("bfloat16", "float16", "float32", "float64")
NEEDED, NEEDED_OF_TARGET = {"drafter", "target", "vocab_hash", "dtype"}, {"name", "hash", "vocab_size"}


def save_drafter(
    folder: Path,
    drafter: Eagle3Drafter,
    target: TargetModel,
    card: str,
    run: dict[str, Any],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write the checkpoint folder atomically. `card`: text of README.md; `run`: the resolved configuration of the run."""
    weights = {name: tensor.detach().to(dtype).contiguous().cpu() for name, tensor in drafter.state_dict().items()}
    vocab_map = drafter.lm_head.vocab_map
    if vocab_map is not None:
        weights |= vocab_map.tensors()
    config = {
        "format": FORMAT,
        "drafter": config_to_dict(drafter.config),
        "target": {
            "name": target.name,
            "hash": target.hash,
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
        },
        "vocab_hash": None if vocab_map is None else vocab_map.hash,
        "dtype": str(dtype).removeprefix("torch."),
    }
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        write_json(temporary / "config.json", config)
        if drafter.frequent is not None:
            (temporary / FREQUENT).write_text(json.dumps(drafter.frequent.target_ids.tolist()) + "\n")
        write_json(temporary / "provenance.json", {**provenance(), "run": run})
        (temporary / "README.md").write_text(card)


def load_drafter(
    folder: Path,
    target: TargetModel,
    dtype: torch.dtype | None = None,
    device: str | None = None,
    head_dtype: HeadDtype = "own",
) -> Eagle3Drafter:
    """Read a checkpoint folder for use with `target`, in the target's dtype and on its device unless told otherwise.
    head_dtype: `int8` decodes with the head's rows in INT8; the output law stays the target's.

    Raises:
        UserError: not a drafter folder; a drafter of another target, or of other layers of it; a corrupt or incomplete
            checkpoint; a bad vocabulary map; INT8 elsewhere than on a CPU.
    """
    folder = Path(folder)
    device = torch.device(device or target.device)
    if head_dtype == "int8" and device.type != "cpu":
        raise UserError(
            f"head_dtype: got int8 on {device}, allowed: int8 on a CPU only; leave it out, or decode on the CPU"
        )
    config = read_config(folder)
    made_for = config["target"]
    if made_for["hash"] != target.hash:
        raise UserError(
            f"drafter {folder}: trained for the target {made_for['name']} ({made_for['hash']}), got {target.name} ({target.hash}); "
            "give the target that it was trained for"
        )
    weights = _read_weights(folder / "model.safetensors")
    vocab_map = None
    if config["vocab_hash"] is not None:
        vocab_map = VocabMap.from_tensors(weights, vocab_size=made_for["vocab_size"])
        if vocab_map.hash != config["vocab_hash"]:
            raise UserError(
                f"drafter {folder}: vocabulary map {vocab_map.hash}, config.json says {config['vocab_hash']}; the checkpoint is corrupt"
            )
        weights = {name: tensor for name, tensor in weights.items() if name not in ("d2t", "t2d")}
    shape = config_from_dict(Eagle3Config, config["drafter"], f"{folder}/config.json")
    try:
        drafter = Eagle3Drafter(shape, vocab_map)
    except Exception as error:  # whatever impossible numbers make torch and transformers raise
        raise UserError(
            f"drafter {folder}: config.json describes no drafter ({type(error).__name__}: {' '.join(str(error).split())[:120]}); the "
            "checkpoint is corrupt, restore or retrain it"
        ) from None
    if drafter.config.tap_layers != target.tap_layers:
        raise UserError(
            f"drafter {folder}: reads the target's layers {drafter.config.tap_layers}, this target gives {target.tap_layers}; "
            f"load it with tap_layers={drafter.config.tap_layers}"
        )
    _load_exactly(drafter, weights, folder)
    drafter.to(dtype=dtype or target.dtype, device=device).eval().requires_grad_(False)
    drafter.head_dtype = head_dtype
    if (folder / FREQUENT).exists():
        drafter.frequent = read_frequent(folder / FREQUENT, made_for["vocab_size"])
    return drafter.bind(target.embedding_weight)


def read_frequent(path: Path, vocab_size: int) -> VocabMap:
    """A list of target ids in JSON, most frequent first. Raises UserError where it is none, or has ids out of range or twice."""
    ids = read_json(path, "frequent tokens", "restore it, or remove it and draft from the whole vocabulary")
    if not isinstance(ids, list) or not all(type(item) is int for item in ids):
        raise UserError(f"frequent tokens {path}: got no list of token ids; restore it, or remove it")
    return VocabMap(torch.tensor(ids, dtype=torch.int64), vocab_size, f"frequent tokens {path}")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a drafter folder. Raises UserError where it is missing, unreadable, or of another kind."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError:
        raise UserError(
            f"drafter {folder}: has no config.json; give a folder that a recipe wrote, such as runs/<name>/drafter"
        ) from None
    except (ValueError, RecursionError):
        raise UserError(
            f"drafter {folder}: config.json is not JSON; the checkpoint is corrupt, restore or retrain it"
        ) from None
    kind = config.get("format") if isinstance(config, dict) else None
    if kind != FORMAT:
        raise UserError(
            f"drafter {folder}: config.json has format {kind!r}, allowed: {FORMAT!r}; give a folder that a recipe wrote"
        )
    made_for = config.get("target")
    missing = sorted(
        NEEDED - config.keys() | (NEEDED_OF_TARGET - (made_for.keys() if isinstance(made_for, dict) else set()))
    )
    if missing:
        raise UserError(
            f"drafter {folder}: config.json has no {missing[0]}; the checkpoint is corrupt, restore or retrain it"
        )
    if config["dtype"] not in DTYPES:
        raise UserError(
            f"drafter {folder}: config.json has dtype {config['dtype']!r}, allowed: {', '.join(DTYPES)}; the checkpoint is corrupt, "
            "restore or retrain it"
        )
    return config


def read_taps(folder: Path) -> tuple[int, ...]:
    """The target's layers that a drafter folder reads, for loading its target. Raises UserError as `read_config` does."""
    settings = read_config(folder)["drafter"]
    taps = settings.get("tap_layers") if isinstance(settings, dict) else None
    if not isinstance(taps, list) or not all(isinstance(layer, int) for layer in taps):
        raise UserError(
            f"drafter {folder}: config.json has no tap_layers; the checkpoint is corrupt, restore or retrain it"
        )
    return tuple(taps)


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); the checkpoint is corrupt, restore or retrain it") from None


def _load_exactly(drafter: Eagle3Drafter, weights: dict[str, torch.Tensor], folder: Path) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if wanted != found:
        names = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        first = names[0]
        raise UserError(
            f"drafter {folder}: {len(names)} tensors do not fit, the first: {first} is {found.get(first, 'missing')}, "
            f"expected {wanted.get(first, 'nothing of that name')}; the checkpoint is corrupt or from another version"
        )
    bad = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
    if bad:
        raise UserError(
            f"drafter {folder}: {bad[0]} has NaN or infinite weights; the checkpoint is corrupt, restore or retrain it"
        )
    drafter.load_state_dict(weights)
