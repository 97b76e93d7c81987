"""Where a drafter's target comes from, as its card must say it: name and revision on the Hub, licence, and what its weights are.

It knows nothing of drafters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import metadata_load, model_info

from specdraft.config import UserError
from specdraft.export.hub import explain
from specdraft.models.default_target import PACKAGED, is_packaged
from specdraft.models.load import HUB_ID

LICENSE_KEYS = ("license", "license_name", "license_link")


@dataclass
class Origin:
    """base_model, base_revision: the target on the Hub; None = not known.   license: entries of a card's header (LICENSE_KEYS).
    option: what `--target` of our programs takes for it.   note: a sentence on weights that are not the Hub's own, or nothing."""

    base_model: str
    base_revision: str | None
    license: dict[str, str]
    option: str
    note: str = ""


def find_origin(target: str, base_model: str | None, revision: str | None, license: Mapping[str, str | None]) -> Origin:
    """What is given (not None, not empty) goes before what the Hub or the target's own card say.

    Raises:
        UserError: a target of which only a folder is known; no licence to be read, or an `other` one without name and link.
    """
    name = hub_name(target, base_model)
    given = {key: value for key, value in license.items() if value}
    known = {packaged.hub_id: packaged.license for packaged in PACKAGED.values()}
    folder, commit = Path(target).expanduser(), None
    entries = {"license": known[name]} if name in known else {}
    is_settled = "license" in given or name in known
    if folder.exists() and not is_settled:
        entries = entries_of_folder(folder)
    elif not folder.exists() and not (is_packaged(target) and is_settled):
        asked, commit = ask_hub(name, revision, is_settled)
        entries = asked or entries
    entries = given if "license" in given else absolute(entries, name) | given
    require_license(entries, name)
    if is_packaged(target):
        note = (
            f"The weights of the target that it was trained and measured with are not the Hub's own but those of a "
            f"{PACKAGED[target].quantisation} GGUF of it, dequantised: `--target {target}` of this library."
        )
        return Origin(name, revision, entries, target, note)
    return Origin(name, revision or (commit if target == name else None), entries, name)


def hub_name(target: str, base_model: str | None) -> str:
    """The target's name on the Hub. Raises UserError for a target of which only a folder is known."""
    if base_model is not None:
        if not HUB_ID.fullmatch(base_model):
            raise UserError(f"base_model: got {base_model!r}, allowed: a Hub id, owner/name")
        return base_model
    if is_packaged(target):
        return PACKAGED[target].hub_id
    if Path(target).expanduser().exists():
        raise UserError(
            f"base_model: the target is {target}, which others do not have; give its Hub id, --base-model owner/name"
        )
    return target


def ask_hub(name: str, revision: str | None, may_fail: bool) -> tuple[dict[str, str], str | None]:
    """Licence entries and commit of a model on the Hub. Raises UserError where it cannot be asked; with `may_fail` nothing is known
    then."""
    try:
        info = model_info(name, revision=revision)
    except Exception as error:  # see hub.py
        if may_fail:
            return {}, None
        raise UserError(f"license: the card of {name} cannot be read: {explain(error)}; give --license") from None
    return license_entries({} if info.card_data is None else info.card_data.to_dict()), info.sha


def entries_of_folder(folder: Path) -> dict[str, str]:
    """From a model folder's card. Raises UserError for one that cannot be read."""
    path = folder / "README.md"
    if not path.exists():
        return {}
    try:
        return license_entries(metadata_load(path) or {})
    except Exception as error:  # whatever a foreign file makes the client's parser raise
        raise UserError(f"license: {path} cannot be read ({type(error).__name__}); give it with --license") from None


def license_entries(header: Mapping[str, object]) -> dict[str, str]:
    return {key: header[key] for key in LICENSE_KEYS if isinstance(header.get(key), str)}


def absolute(entries: dict[str, str], name: str) -> dict[str, str]:
    """A link that the target's card means within its own repository, for readers of another one."""
    link = entries.get("license_link")
    if link is None or "://" in link:
        return entries
    return entries | {"license_link": f"https://huggingface.co/{name}/blob/main/{link}"}


def require_license(entries: dict[str, str], name: str) -> None:
    """Raises UserError where the Hub could not show one."""
    if "license" not in entries:
        raise UserError(f"license: {name} says none, and a drafter carries its target's; give it with --license")
    missing = [key for key in LICENSE_KEYS if key not in entries]
    if entries["license"] == "other" and missing:
        flags = " and ".join(f"--{key.replace('_', '-')}" for key in missing)
        raise UserError(f"license: got other, which needs a name and a link; give {flags}")
