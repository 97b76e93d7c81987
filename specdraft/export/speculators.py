"""The folder of the library `speculators` 0.9.0, which vLLM serves by its own name (`vllm serve <folder>`): export and import.

Its weights are EAGLE-3's, with `layers.0.` for `midlayer.`; its settings lie apart, and name the target (`verifier`). A low-rank head
is merged. Layer ids count as ours do. The target's embedding goes with it: speculators 0.9.0 means to take a missing one from the
target, but with transformers 5.19 finds zeros in its place, takes them for loaded, and computes other logits without a word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specdraft.config import UserError
from specdraft.export.folder import LAYER, Layout, lay_out, layer_settings, norm_flags, write_folder
from specdraft.export.reading import assemble, read_flags, read_json, read_layer, read_taps, read_tensors, vocab_sizes
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.target import TargetModel

VERSION = "0.9.0"
SERVED_TOKENS = 3  # what `vllm serve` drafts where nobody says otherwise


def export_speculators(
    drafter: Eagle3Drafter,
    target: TargetModel,
    folder: Path,
    *,
    verifier: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write the folder. verifier: Hub id or path of the target, by which readers find it; None = the target's name.

    Raises:
        UserError: the folder holds other things; no space.
    """
    layout, tensors = lay_out(drafter, target, dtype)
    tensors = {name.replace(LAYER, "layers.0."): tensor for name, tensor in tensors.items()}
    layout.with_embedding = True
    tensors["embed_tokens.weight"] = target.model.get_input_embeddings().weight.detach().cpu().to(dtype).contiguous()
    config = speculators_settings(layout, target, dtype, verifier or target.name)
    write_folder(folder, config, layout, tensors, drafter, target, lambda path: import_speculators(path, target))


def speculators_settings(layout: Layout, target: TargetModel, dtype: torch.dtype, verifier: str) -> dict[str, Any]:
    """config.json. The number of taps stands in the layer's settings where it is not 3: vLLM looks for it there."""
    taps = list(layout.config.tap_layers)
    layer = layer_settings(layout.config, target, dtype) | (
        {} if len(taps) == 3 else {"num_aux_hidden_states": len(taps)}
    )
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": SERVED_TOKENS,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "draft_vocab_size": layout.draft_vocab_size,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": taps,
        **norm_flags(layout.config),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": layer["dtype"],
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": verifier,
                "architectures": list(target.hf_config.architectures or [type(target.model).__name__]),
            },
        },
        "transformer_layer_config": layer,
    }


def import_speculators(folder: Path, target: TargetModel, *, dtype: torch.dtype | None = None) -> Eagle3Drafter:
    """Read a folder of speculators by anyone, for use with `target`.

    Raises:
        UserError: not such a folder, one of another target, unsound weights or map (reading.py says which).
    """
    settings, where = read_json(folder), str(folder)
    kind = settings.get("speculators_model_type")
    if kind != "eagle3":
        raise UserError(f"drafter {where}: speculators_model_type {kind!r}, allowed: 'eagle3'")
    layer = settings.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise UserError(f"drafter {where}: config.json has no transformer_layer_config; fetch the drafter again")
    taps = read_taps(settings.get("eagle_aux_hidden_state_layer_ids"), target.num_layers, where)
    if settings.get("target_hidden_size") not in (None, target.hidden_size):
        raise UserError(
            f"drafter {where}: target_hidden_size {settings['target_hidden_size']}, the target has {target.hidden_size}"
        )
    config = read_layer(layer, taps, read_flags(settings, where), target, where)
    vocab_size, draft_size = vocab_sizes(layer, settings.get("draft_vocab_size"), where)
    return assemble(Layout(config, vocab_size, draft_size), read_tensors(folder), target, where, dtype)
