"""Built-in prompts, JSONL files and Hub data sets -> one prompts file: mixed, deduplicated, with a fixed held-out part.

python data_prep/make_prompts.py                                                        # the built-in prompts
python data_prep/make_prompts.py --source builtin my_prompts.jsonl --weights 1 3
python data_prep/make_prompts.py --source hub:org/name --split train --column question  # or a local folder: hub:./folder

Writes OUTPUT (all prompts), and beside it OUTPUT's .train and .held_out parts; the training programs make the same split.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from tqdm import tqdm

from specdraft.config import UserError, run_program
from specdraft.data.tasks import Prompt, builtin_prompts, deduplicate, mix, read_prompts, split_held_out, write_prompts

USER_ROLES = ("user", "human")


@dataclass
class PromptsConfig:
    """source: `builtin`, JSONL files, or `hub:name` data sets.   weights: shares of the sources, until one of them is used
    up; None = all of all.   split, subset, column: of the Hub data sets; the column holds a text, a list of user turns,
    or a list of messages.   max_rows: rows read from each Hub data set.   max_prompts: prompts kept in the end."""

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
    sources = [deduplicate(read_source(source, config)) for source in config.source]
    prompts = deduplicate(mix(sources, config.weights))[: config.max_prompts]
    train, held_out = split_held_out(prompts, config.held_out_every)
    parts = {"": prompts, ".train": train, ".held_out": held_out}
    for suffix, part in parts.items():
        write_prompts(config.output.with_suffix(f"{suffix}.jsonl"), part)
    counts = Counter(prompt.category for prompt in prompts)
    print(f"{config.output}: {len(prompts)} prompts, {len(train)} for training, {len(held_out)} held out")
    print("; ".join(f"{category} {count}" for category, count in counts.most_common()))


def read_source(source: str, config: PromptsConfig) -> list[Prompt]:
    if source == "builtin":
        return builtin_prompts()
    if source.startswith("hub:"):
        return list(hub_prompts(source.removeprefix("hub:"), config))
    return read_prompts(source)


def hub_prompts(name: str, config: PromptsConfig) -> Iterator[Prompt]:
    """Rows one by one, in this process: tokenizers and data-set workers do not mix. Unusable rows are counted."""
    try:
        rows = datasets.load_dataset(name, config.subset, split=config.split, streaming=True)
        columns = rows.column_names or list(next(iter(rows)))
    except Exception as error:  # whatever the Hub client, a file system or a parser raises
        raise UserError(
            f"data set {name}, split {config.split}: cannot be read ({' '.join(str(error).split()):.300})"
        ) from None
    column = config.column or next((name for name in ("messages", "turns", "prompt", "text") if name in columns), None)
    if column not in columns:
        raise UserError(f"data set {name}: got column {column}, it has {', '.join(columns)}; choose one with --column")
    skipped = 0
    for number, row in enumerate(
        tqdm(rows if config.max_rows is None else rows.take(config.max_rows), desc=name, unit="row")
    ):
        turns, system = user_turns(row[column])
        if turns:
            yield Prompt(f"{name}/{number}", row.get("category") or Path(name).name, tuple(turns), system)
        else:
            skipped += 1
    print(f"{name}: {skipped} rows skipped, without a user text in column {column}")


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
