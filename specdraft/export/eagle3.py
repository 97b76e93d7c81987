"""The EAGLE-3 folder (SafeAILab, SpecForge; vLLM reads it): export and import.

Layer ids come in two conventions, and nothing in a folder says which. vLLM's and ours: k is hidden_states[k], what enters decoder
layer k. SGLang's and SpecForge's: k is what leaves layer k, hidden_states[k + 1].
A low-rank head is merged to a dense one, or kept as two factors for vLLM with our plugin (vllm_plugin.py).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import torch

from specdraft.config import UserError
from specdraft.export.folder import Layout, lay_out, layer_settings, norm_flags, write_folder
from specdraft.export.reading import assemble, read_flags, read_json, read_layer, read_taps, read_tensors, vocab_sizes
from specdraft.export.vllm_plugin import FACTORS_ARCHITECTURE
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.target import TargetModel

ARCHITECTURE = "LlamaForCausalLMEagle3"

LayerIds = Literal["auto", "vllm", "sglang"]


def export_eagle3(
    drafter: Eagle3Drafter,
    target: TargetModel,
    folder: Path,
    *,
    factors: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write the folder, for vLLM as it is; with `factors`, a low-rank head stays two factors, for vLLM with our plugin.

    Raises:
        UserError: factors of a head that has none; the folder holds other things; no space.
    """
    layout, tensors = lay_out(drafter, target, dtype, factors)
    config = eagle3_settings(layout, target, dtype, list(layout.config.tap_layers))
    write_folder(
        folder, config, layout, tensors, drafter, target, lambda path: import_eagle3(path, target, layer_ids="vllm")
    )


def eagle3_settings(layout: Layout, target: TargetModel, dtype: torch.dtype, layer_ids: list[int]) -> dict[str, Any]:
    """config.json. `target_hidden_size` is a number even where it says nothing new: vLLM multiplies by it. Layer ids stand at two
    places and so does, where it is not 3, their number: versions of vLLM differ in where they look."""
    return {
        "architectures": [ARCHITECTURE if layout.rank is None else FACTORS_ARCHITECTURE],
        **layer_settings(layout.config, target, dtype),
        "draft_vocab_size": layout.draft_vocab_size,
        "target_hidden_size": layout.config.hidden_size,
        **norm_flags(layout.config),
        **({} if layout.rank is None else {"head_rank": layout.rank}),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layer_ids, "use_aux_hidden_state": True},
        "eagle_aux_hidden_state_layer_ids": layer_ids,
        **({} if len(layer_ids) == 3 else {"num_aux_hidden_states": len(layer_ids)}),
    }


def import_eagle3(
    folder: Path, target: TargetModel, *, layer_ids: LayerIds = "auto", dtype: torch.dtype | None = None
) -> Eagle3Drafter:
    """Read an EAGLE-3 folder by anyone, for use with `target`. layer_ids: the convention of its ids; `auto` takes them for vLLM's unless
    they are exactly the default ones as SGLang and SpecForge write them.

    Raises:
        UserError: not such a folder, one of another target, unsound weights or map (reading.py says which).
    """
    settings, where = read_json(folder), str(folder)
    require_eagle3(settings, where)
    taps = eagle3_taps(settings, target.num_layers, layer_ids, where)
    config = read_layer(settings, taps, read_flags(settings, where), target, where)
    rank = settings.get("head_rank")
    vocab_size, draft_size = vocab_sizes(settings, settings.get("draft_vocab_size"), where)
    return assemble(Layout(config, vocab_size, draft_size, rank), read_tensors(folder), target, where, dtype)


def require_eagle3(settings: dict[str, Any], where: str) -> None:
    """Raises UserError for a folder of another kind. SafeAILab's say LlamaForCausalLM; then the size of a draft vocabulary tells, and
    the tensors' shapes are the test."""
    names = settings.get("architectures") or []
    if names == ["LlamaForCausalLM"] and settings.get("draft_vocab_size") is not None:
        return
    if not any("eagle3" in str(name).lower() for name in names):
        raise UserError(f"drafter {where}: architectures {names}, allowed: an EAGLE-3 drafter, such as {ARCHITECTURE}")


def eagle3_taps(settings: dict[str, Any], num_layers: int, convention: LayerIds, where: str) -> tuple[int, ...]:
    """The layers that a folder reads, as our taps (hidden_states[k])."""
    ids = (settings.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = settings.get("eagle_aux_hidden_state_layer_ids") if ids is None else ids
    if ids is None:
        return read_taps(None, num_layers, where)
    shifted = [i + 1 for i in ids] if all(isinstance(i, int) for i in ids) else ids
    if convention == "auto" and shifted == [2, num_layers // 2, num_layers - 3]:
        convention = "sglang"
        logging.getLogger(__name__).warning(
            "drafter %s: layer ids %s are the default ones counted as SGLang and SpecForge do; read as hidden_states%s",
            where,
            ids,
            shifted,
        )
    return read_taps(shifted if convention == "sglang" else ids, num_layers, where)
