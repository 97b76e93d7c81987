"""The EAGLE-3 folder for SGLang: export and import. Three things differ from vLLM's (eagle3.py).

Its ids are those of layers whose output is read: hidden_states[k] is k - 1 there (`set_eagle3_layers_to_capture` adds 1). Its reader
wants d2t and t2d even where D = V. It knows no `norm_before_residual` and no `norm_before_fc`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from specdraft.config import UserError
from specdraft.data.vocab import VocabMap
from specdraft.export.eagle3 import eagle3_settings, import_eagle3
from specdraft.export.folder import lay_out, write_folder
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.target import TargetModel

UNKNOWN_FLAGS = ("norm_before_residual", "norm_before_fc")


def export_sglang(
    drafter: Eagle3Drafter, target: TargetModel, folder: Path, *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write the folder. A low-rank head is merged.

    Raises:
        UserError: a norm flag that SGLang does not know; tap 0; the folder holds other things; no space.
    """
    for flag in UNKNOWN_FLAGS:
        if getattr(drafter.config, flag):
            raise UserError(
                f"export {folder}: the drafter has {flag}, which SGLang would leave out without a word; export it for vLLM"
            )
    if drafter.config.tap_layers[0] == 0:
        raise UserError(
            f"export {folder}: the drafter reads the embeddings (tap 0), SGLang gives outputs of layers only; export it for vLLM"
        )
    layout, tensors = lay_out(drafter, target, dtype)
    if layout.draft_vocab_size == layout.vocab_size:
        layout.always_map = True
        tensors |= VocabMap.identity(layout.vocab_size).tensors()
    config = eagle3_settings(layout, target, dtype, [k - 1 for k in layout.config.tap_layers])
    write_folder(folder, config, layout, tensors, drafter, target, lambda path: import_sglang(path, target))


def import_sglang(folder: Path, target: TargetModel, *, dtype: torch.dtype | None = None) -> Eagle3Drafter:
    """Read an EAGLE-3 folder whose layer ids are known to be SGLang's. See import_eagle3."""
    return import_eagle3(folder, target, layer_ids="sglang", dtype=dtype)
