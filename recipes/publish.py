"""Writes a drafter as an engine's folder with a model card, and publishes it on the Hugging Face Hub if asked to.

python recipes/publish.py --drafter runs/slimspec/drafter --repo my-org/my-drafter            # dry run: only writes the folder
python recipes/publish.py --drafter runs/slimspec/drafter --repo my-org/my-drafter --push     # and uploads it
python recipes/publish.py --drafter runs/slimspec/drafter --factors                           # two factors: vLLM with our plugin
python recipes/publish.py --drafter runs/slimspec/drafter --repo my-org/my-drafter --format sglang --revision sglang --push

The token is the Hub client's own: HF_TOKEN, or `hf auth login`. It is never asked for here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from specdraft import summary
from specdraft.config import UserError, run_program
from specdraft.export.card import Publication, model_card
from specdraft.export.folder import require_replaceable
from specdraft.export.formats import EXPORTS
from specdraft.export.hub import publish, require_repository
from specdraft.export.origin import LICENSE_KEYS, find_origin
from specdraft.models.checkpoint import load_drafter, read_taps, save_drafter
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.target import TargetModel
from specdraft.provenance import read_json, write_json


@dataclass
class PublishConfig:
    """drafter: a checkpoint folder.   target: as the recipes take it.   repo: owner/name.   format: whose folder; `specdraft` is our own
    checkpoint.   factors: keep a low-rank head as two factors (eagle3).   output: where the folder is written.   push: upload it;
    without, nothing leaves this machine.   revision, private: branch, and visibility of a new repository.   base_model,
    target_revision, license: of the target, where they are not known from it.   license_name, license_link: of the license `other`.
    summary: the run's summary.json; None = the one beside the drafter, if it is there and of this drafter."""

    drafter: Path = Path("runs/slimspec/drafter")
    target: str = "default"
    repo: str = ""
    format: Literal["eagle3", "speculators", "sglang", "specdraft"] = "eagle3"
    factors: bool = False
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    output: Path = Path("build/publish")
    push: bool = False
    revision: str = "main"
    private: bool = False
    base_model: str | None = None
    target_revision: str | None = None
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    summary: Path | None = None


def main(config: PublishConfig) -> None:
    repo = config.repo or f"local/{config.drafter.absolute().parent.name}"
    if config.repo:
        require_repository(repo)
    elif config.push:
        raise UserError("repo: got none, needed with --push; give owner/name")
    if config.factors and config.format != "eagle3":
        raise UserError(f"factors: allowed with --format eagle3 only, got {config.format}")
    taps = read_taps(config.drafter)
    if config.output.resolve() == config.drafter.resolve():
        raise UserError(f"output: got the drafter's own folder {config.output}; give another")
    require_replaceable(config.output)
    provenance = read_provenance(config.drafter)
    license = {key: getattr(config, key) for key in LICENSE_KEYS}
    origin = find_origin(config.target, config.base_model, config.target_revision, license)
    if origin.note:
        print(origin.note)
    target = TargetModel.load(config.target, revision=config.target_revision, tap_layers=taps)
    # as it is on disk: rounded once, to the dtype asked for
    drafter = load_drafter(config.drafter, target, torch.float32)
    publication = Publication(
        repo=repo,
        revision=config.revision,
        format=config.format,
        factors=config.factors,
        origin=origin,
        measured=measured(config, drafter, target),
        run=provenance.pop("run", {}),
        provenance=provenance,
    )
    write(config, publication, drafter, target)
    files = sorted(path for path in config.output.iterdir() if path.is_file())
    listing = ", ".join(f"{path.name} ({path.stat().st_size / 1e6:.1f} MB)" for path in files)
    where = f"{repo}, {'private' if config.private else 'public'} if new, branch {config.revision}"
    if not config.push:
        print(f"dry run: {config.output} holds {listing}\nnothing was uploaded; with --push it goes to {where}")
        return
    print(f"uploading to {where}: {listing}")
    print("published:", publish(config.output, repo, revision=config.revision, private=config.private))


def read_provenance(drafter: Path) -> dict[str, Any]:
    """provenance.json of a checkpoint, as far as a card needs it. Raises UserError where it is none."""
    path, advice = drafter / "provenance.json", "restore it, or retrain the drafter"
    found = read_json(path, "provenance", advice)
    kinds = {"date": str, "versions": dict, "run": dict}
    if not isinstance(found, dict) or not all(isinstance(found.get(key, kind()), kind) for key, kind in kinds.items()):
        raise UserError(f"provenance {path}: is not one of a checkpoint, with {', '.join(kinds)}; {advice}")
    return found


def write(config: PublishConfig, publication: Publication, drafter: Eagle3Drafter, target: TargetModel) -> None:
    """The folder of `config.format` at `config.output`, with its card."""
    dtype, card = getattr(torch, config.dtype), model_card(publication, drafter, target)
    if config.format == "specdraft":
        save_drafter(config.output, drafter, target, card, publication.run, dtype)
        write_json(config.output / "provenance.json", {**publication.provenance, "run": publication.run})
        return
    options = {"factors": config.factors} if config.format == "eagle3" else {}
    if config.format == "speculators":
        options["verifier"] = publication.origin.base_model
    EXPORTS[config.format](drafter, target, config.output, dtype=dtype, **options)
    write_json(config.output / "provenance.json", {**publication.provenance, "run": publication.run})
    (config.output / "README.md").write_text(card)


def measured(config: PublishConfig, drafter: Eagle3Drafter, target: TargetModel) -> str:
    """The table of the run's summary.json, with its hardware; or that there is none. One of another drafter is none."""
    path = config.summary or config.drafter.absolute().parent / "summary.json"
    try:
        found = json.loads(path.read_text())
        page = f"{summary.describe(target, found)}\n\n{summary.table(found)}"
        if summary.is_of(found, drafter):
            return page
        if config.summary is not None:
            raise UserError(
                f"summary {path}: is of another drafter, by its head and size; give that of the drafter's own run"
            )
    except OSError:
        if config.summary is not None:
            raise UserError(f"summary {path}: cannot be read; give the summary.json of the drafter's run") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"summary {path}: is not one of a run ({type(error).__name__}: {error}); give another"
        ) from None
    print(f"warning: there is no {path} of this drafter: the card will say that nothing was measured")
    return "Not measured."


if __name__ == "__main__":
    run_program(main, PublishConfig)
