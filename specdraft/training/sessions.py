"""An online session on disk: what was learnt, the optimiser, the buffer and the guard, so that it goes on exactly where it stopped.

    <folder>/session.safetensors    weights.*, optimizer.<number>.*, buffer.*, generator
    <folder>/session.json           settings, the drafter it belongs to, and counts

Save between requests: a text on its way is not part of it, nor is the state of a vocabulary policy.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specdraft.config import UserError, config_to_dict
from specdraft.provenance import atomic_path, write_json
from specdraft.training.online import OnlineAlignment

COUNTS = ("rounds", "waiting", "judged", "updates", "rollbacks", "texts", "elapsed", "spent")
FREE = ("time_share", "across_requests")  # settings that may change from one part of a session to the next


def save_session(alignment: OnlineAlignment, folder: Path) -> None:
    """Raises UserError where the folder cannot be written."""
    tensors = {f"weights.{name}": weight.detach() for name, weight in alignment.trained.named.items()}
    tensors |= {f"buffer.{name}": field for name, field in alignment.positions.fields.items()}
    for number, state in alignment.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{key}": value for key, value in state.items()}
    tensors["generator"] = alignment.generator.get_state()
    known = {
        "drafter": alignment.drafter_hash,
        "config": config_to_dict(alignment.config),
        "written": alignment.positions.written,
        "guard": list(alignment.guard),
        **{name: getattr(alignment, name) for name in COUNTS},
    }
    with atomic_path(Path(folder)) as temporary:
        temporary.mkdir()
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, temporary / "session.safetensors"
        )
        write_json(temporary / "session.json", known)


@torch.no_grad()
def load_session(alignment: OnlineAlignment, folder: Path) -> None:
    """Go on with a saved session.

    Raises:
        UserError: no session there, a broken one, or one of another drafter or with other settings. Nothing is changed then.
    """
    known, tensors = _read(Path(folder))
    _check(alignment, known, folder)
    _check_whole(alignment, known, tensors, folder)
    for name, weight in alignment.trained.named.items():
        weight.copy_(tensors[f"weights.{name}"])
    for name, field in alignment.positions.fields.items():
        field.copy_(tensors[f"buffer.{name}"])
    states: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, number, key = name.split(".")
            states.setdefault(int(number), {})[key] = tensor
    groups = alignment.optimizer.state_dict()["param_groups"]
    alignment.optimizer.load_state_dict({"state": states, "param_groups": groups})
    alignment.generator.set_state(tensors["generator"])
    alignment.positions.written = known["written"]
    alignment.guard = deque(tuple(entry) for entry in known["guard"])
    for name in COUNTS:
        setattr(alignment, name, known[name])
    alignment.give()


def _read(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    try:
        known, tensors = json.loads((folder / "session.json").read_text()), load_file(folder / "session.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"session {folder}: cannot be read ({error}); give a folder that save_session wrote") from None
    if not isinstance(known, dict) or not isinstance(known.get("config"), dict):
        raise UserError(f"session {folder}: session.json holds no session; give a folder that save_session wrote")
    return known, tensors


def _check_whole(alignment: OnlineAlignment, known: dict, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Everything that is read from it is there, in the shape that it is needed in."""
    wanted = {f"weights.{name}": weight.shape for name, weight in alignment.trained.named.items()}
    wanted |= {f"buffer.{name}": field.shape for name, field in alignment.positions.fields.items()}
    wanted["generator"] = alignment.generator.get_state().shape
    wrong = [name for name, shape in wanted.items() if name not in tensors or tensors[name].shape != shape]
    wrong += [name for name in ("written", "guard", *COUNTS) if name not in known]
    if wrong:
        raise UserError(
            f"session {folder}: {wrong[0]} is missing or of another shape ({len(wrong)} in all); the session is broken, begin anew"
        )


def _check(alignment: OnlineAlignment, known: dict, folder: Path) -> None:
    if known.get("drafter") != alignment.drafter_hash:
        raise UserError(
            f"session {folder}: of the drafter {known.get('drafter')}, got {alignment.drafter_hash}; give the drafter that it began with"
        )
    for name, value in config_to_dict(alignment.config).items():
        if name not in FREE and known["config"].get(name) != value:
            raise UserError(
                f"session {folder}: online.{name} was {known['config'].get(name)}, got {value}; use the same settings, or begin anew"
            )
