"""Training state on disk: atomic folders with a completeness mark, newest-complete lookup, rotation, best weights.

    <output>/state/step-00000120/   model, optimiser and random states as accelerate writes them, then complete.json
    <output>/best.safetensors       the drafter at its best evaluation, fp32; what that evaluation said stands in the header

complete.json is written last, lists every file with its size, and carries the loop's own state. A folder without it, or
whose files do not have the listed sizes, was not finished: it is skipped. This file knows nothing of what is trained, and
the drafter's checkpoint that users load (models/checkpoint.py) is another thing.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from specdraft.config import UserError
from specdraft.provenance import atomic_path, follow_umask, require_disk, write_json

MARK = "complete.json"
BEST = "best.safetensors"
TEMPORARY = ".writing-"


def save_state(output: Path, accelerator: Accelerator, step: int, state: dict[str, Any], needed_bytes: int) -> Path:
    """Write everything that a later run needs to go on. Every process calls this.

    needed_bytes: what the state will take at most; checked before anything is written.
    Raises UserError where the disk is full, or does not take it; nothing is left of it then.
    """
    folder = output / "state" / f"step-{step:08d}"
    if accelerator.is_main_process:
        require_disk(output, needed_bytes, "saving the training state")
    with _whole_folder(folder, accelerator) as temporary:
        try:
            accelerator.save_state(str(temporary))
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{folder}: cannot be saved ({reason}); free some space, or give another output folder"
            ) from error
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            follow_umask(temporary)
            _mark(temporary, state)
    return folder


def load_state(folder: Path, accelerator: Accelerator) -> None:
    """Model, optimisers and random states from a complete folder, into what `accelerator` prepared.

    Raises UserError where accelerate cannot read the folder.
    """
    accelerator.wait_for_everyone()
    try:
        accelerator.load_state(str(folder))
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"{folder}: cannot be resumed from ({reason}); delete this folder, or give another output folder"
        ) from error
    accelerator.wait_for_everyone()


def newest_state(output: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest complete folder and the state in its mark; None where there is none. Broken ones are skipped with a warning."""
    for folder in sorted((output / "state").glob("step-*"), reverse=True):
        state = read_mark(folder)
        if state is not None:
            return folder, state
        warnings.warn(f"{folder}: not complete, skipped", stacklevel=2)
    return None


def read_mark(folder: Path) -> dict[str, Any] | None:
    """The state in a folder's mark, or None where the folder is not complete."""
    try:
        mark = json.loads((folder / MARK).read_text())
        sizes = {name: (folder / name).stat().st_size for name in mark["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return mark["state"] if sizes == mark["files"] else None


def rotate(output: Path, keep: int) -> None:
    """Delete all but the newest `keep` complete training states, and what was left half-written. The best weights stay."""
    folders = sorted((output / "state").glob("step-*"))
    complete = [folder for folder in folders if read_mark(folder) is not None]
    kept = set(complete[-keep:])
    for folder in [*(folder for folder in folders if folder not in kept), *(output / "state").glob(f"{TEMPORARY}*")]:
        shutil.rmtree(folder)


def save_best(
    output: Path, accelerator: Accelerator, model: torch.nn.Module, prefix: str, state: dict[str, Any]
) -> None:
    """Keep the weights under `prefix` of the prepared model as the best so far. Every process calls this (weights may be sharded)."""
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        own = {name.removeprefix(prefix): tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        with atomic_path(output / BEST) as temporary:
            save_file(own, temporary, metadata={"state": json.dumps(state)})
    accelerator.wait_for_everyone()


def best_state(output: Path) -> dict[str, Any] | None:
    """What `save_best` noted, or None where there is nothing."""
    try:
        with safe_open(output / BEST, framework="pt") as file:
            return json.loads(file.metadata()["state"])
    except (OSError, SafetensorError):
        return None


def best_weights(output: Path) -> dict[str, torch.Tensor]:
    """The best weights so far, by the drafter's own parameter names. Raises UserError where there are none."""
    try:
        return load_file(output / BEST)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{output / BEST}: cannot be read ({error}); train first, or give the output folder of a run"
        ) from None


@contextlib.contextmanager
def _whole_folder(folder: Path, accelerator: Accelerator) -> Iterator[Path]:
    """A temporary folder that every process may write to and that takes its name only when all are done.

    An older folder of that name goes just before: should the machine stop between the two, the older states are still there.
    """
    temporary = folder.with_name(f"{TEMPORARY}{folder.name}")
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    yield temporary
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    accelerator.wait_for_everyone()


def _mark(folder: Path, state: dict[str, Any]) -> None:
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    write_json(folder / MARK, {"files": files, "state": state})
