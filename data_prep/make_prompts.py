"""Built-in prompts, JSONL files and Hub data sets -> one prompts file: mixed, deduplicated, with a fixed held-out part.

python data_prep/make_prompts.py                                                        # the built-in prompts
python data_prep/make_prompts.py --source builtin my_prompts.jsonl --weights 1 3
python data_prep/make_prompts.py --source hub:org/name --split train --column question  # or a local folder: hub:./folder
HF_ENDPOINT=https://mirror HF_TOKEN=... python data_prep/make_prompts.py --source ...   # another Hub, a private data set

Writes OUTPUT (all prompts), and beside it OUTPUT's .train and .held_out parts; the training programs make the same split.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
from tqdm import tqdm

from specdraft.config import UserError, require_positive, run_program
from specdraft.data.tasks import Prompt, builtin_prompts, deduplicate, mix, read_prompts, split_held_out, write_prompts
from specdraft.provenance import require_no_folder

USER_ROLES = ("user", "human")


@dataclass
class PromptsConfig:
    """source: `builtin`, JSONL files, or data sets: `hub:org/name`, `hub:./folder`.   weights: shares of the sources, until one of
    them is used up; None = all of all.   split, subset, column: of the data sets, e.g. train, main, question; subset None = its
    default; column None = the first there is of messages, turns, prompt, text; it holds a text, a list of user turns, or a list
    of messages.   max_rows: rows read from each data set; None = all.   max_prompts: prompts kept in the end; None = all.
    held_out_every: one prompt in so many is held out.   output: JSONL file."""

    source: tuple[str, ...] = ("builtin",)
    weights: tuple[float, ...] | None = None
    split: str = "train"
    subset: str | None = None
    column: str | None = None
    max_rows: int | None = None
    max_prompts: int | None = None
    held_out_every: int = 20
    output: Path = Path("prompts.jsonl")


def main(config: PromptsConfig) -> None:
    parts = check(config)
    sources = [deduplicate(read_source(source, config)) for source in config.source]
    prompts = distinct_ids(deduplicate(mix(sources, config.weights))[: config.max_prompts])
    train, held_out = split_held_out(prompts, config.held_out_every)
    for path, part in zip(parts, (prompts, train, held_out), strict=True):
        write_prompts(path, part)
    counts = Counter(prompt.category for prompt in prompts)
    print(f"{config.output}: {len(prompts)} prompts, {len(train)} for training, {len(held_out)} held out")
    print("; ".join(f"{category} {count}" for category, count in counts.most_common()))


def check(config: PromptsConfig) -> list[Path]:
    """The three files that are written. Raises UserError for settings outside their range, and for a file that would be lost."""
    require_positive({"max_rows": config.max_rows, "max_prompts": config.max_prompts})
    if config.held_out_every < 2:
        raise UserError(
            f"held_out_every: got {config.held_out_every}, allowed: 2 or more: one prompt in so many is held out"
        )
    if not config.source:
        raise UserError("source: got none; give builtin, JSONL files, or data sets (hub:org/name)")
    if config.output.suffix != ".jsonl":
        raise UserError(f"output: got {config.output}, allowed: a path that ends with .jsonl")
    parts = [config.output.with_suffix(f"{part}.jsonl") for part in ("", ".train", ".held_out")]
    for path in parts:
        require_no_folder(path, "output")
        if path.resolve() in {Path(source).resolve() for source in config.source}:
            raise UserError(f"output: {path} would take the place of a source, which would be lost; give another path")
    return parts


def read_source(source: str, config: PromptsConfig) -> list[Prompt]:
    if source == "builtin":
        return builtin_prompts()
    if source.startswith("hub:"):
        return list(hub_prompts(source.removeprefix("hub:"), config))
    return read_prompts(source)


def distinct_ids(prompts: list[Prompt]) -> list[Prompt]:
    """Sources may use the same ids: a later one of those gets a number behind it."""
    taken, given = set(), []
    for prompt in prompts:
        names = itertools.chain([prompt.id], (f"{prompt.id}-{number}" for number in itertools.count(2)))
        given.append(replace(prompt, id=next(name for name in names if name not in taken)))
        taken.add(given[-1].id)
    return given


def hub_prompts(name: str, config: PromptsConfig) -> Iterator[Prompt]:
    """Rows one by one, in this process: tokenizers and data-set workers do not mix. Unusable rows are counted."""
    with one_line(name, config):
        rows = datasets.load_dataset(name, config.subset, split=config.split, streaming=True)
        columns = rows.column_names or list(next(iter(rows)))
    column = config.column or next((name for name in ("messages", "turns", "prompt", "text") if name in columns), None)
    if column not in columns:
        raise UserError(f"data set {name}: got column {column}, it has {', '.join(columns)}; choose one with --column")
    skipped = 0
    rows = rows if config.max_rows is None else rows.take(config.max_rows)
    for number, row in enumerate(tqdm(guarded(rows, name, config), desc=name, unit="row")):
        turns, system = user_turns(row[column])
        if turns:
            yield Prompt(f"{name}/{number}", str(row.get("category") or Path(name).name), tuple(turns), system)
        else:
            skipped += 1
    print(f"{name}: {skipped} rows skipped, without a user text in column {column}")


def guarded(rows: datasets.IterableDataset, name: str, config: PromptsConfig) -> Iterator[dict[str, Any]]:
    """The rows; a connection that breaks, or a broken file, is an error of one line too."""
    with one_line(name, config):
        yield from rows


@contextmanager
def one_line(name: str, config: PromptsConfig) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever the Hub client, a file system or a parser raises
        subset = "" if config.subset is None else f", subset {config.subset}"
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"data set {name}{subset}, split {config.split}: cannot be read ({reason:.300}); check its name, --subset, --split and "
            "the connection, or give a local folder (hub:./folder)"
        ) from None


def user_turns(value: Any) -> tuple[list[str], str | None]:
    """User texts and system text of one cell; no texts where it cannot be used."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        return [], None
    system = None
    turns = []
    for item in items:
        if isinstance(item, dict):  # {"role", "content"}, or {"from", "value"} in older sets
            role, item = item.get("role", item.get("from")), item.get("content", item.get("value"))
            if role == "system":
                system = item or None
            if role not in USER_ROLES:
                continue
        if not isinstance(item, str) or not item.strip():
            return [], None
        turns.append(item)
    return turns, system


if __name__ == "__main__":
    run_program(main, PromptsConfig)
