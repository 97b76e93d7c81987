"""Which format is which: the exports by name, and an import for whatever kind of folder is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from specdraft.config import UserError
from specdraft.export.eagle3 import LayerIds, eagle3_taps, export_eagle3, import_eagle3, require_eagle3
from specdraft.export.reading import read_json, read_taps
from specdraft.export.sglang import export_sglang
from specdraft.export.speculators import export_speculators, import_speculators
from specdraft.models.checkpoint import FORMAT, load_drafter
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.target import TargetModel


def import_drafter(
    folder: Path, target: TargetModel, *, layer_ids: LayerIds = "auto", dtype: torch.dtype | None = None
) -> Eagle3Drafter:
    """A drafter from a folder of ours, of speculators, or of EAGLE-3's format. Raises UserError where it is none of them, or unsound."""
    settings = read_json(folder)
    with _of_somebody_else(folder):
        if settings.get("format") == FORMAT:
            return load_drafter(folder, target, dtype)
        if "speculators_model_type" in settings:
            return import_speculators(folder, target, dtype=dtype)
        return import_eagle3(folder, target, layer_ids=layer_ids, dtype=dtype)


def folder_taps(folder: Path, num_layers: int, layer_ids: LayerIds = "auto") -> tuple[int, ...]:
    """The layers of a target of `num_layers` that a drafter folder reads: what to load the target with. Raises UserError."""
    settings, where = read_json(folder), str(folder)
    with _of_somebody_else(folder):
        if settings.get("format") == FORMAT:
            return read_taps(settings["drafter"]["tap_layers"], num_layers, where)
        if "speculators_model_type" in settings:
            return read_taps(settings.get("eagle_aux_hidden_state_layer_ids"), num_layers, where)
        require_eagle3(settings, where)
        return eagle3_taps(settings, num_layers, layer_ids, where)


@contextmanager
def _of_somebody_else(folder: Path) -> Iterator[None]:
    """Whatever a foreign config.json makes its reader raise becomes one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # among them errors of transformers' own
        raise UserError(
            f"drafter {folder}: config.json is not that of a drafter ({type(error).__name__}: {' '.join(str(error).split())[:120]}); fetch "
            "the drafter again"
        ) from None


EXPORTS = {"eagle3": export_eagle3, "speculators": export_speculators, "sglang": export_sglang}
