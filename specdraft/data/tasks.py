"""Prompts: the built-in ones, prompts files of several formats, and mixing, deduplicating and splitting them.

It knows text only: no tokenizer, no target, no answers. The built-in text is in prompts/<category>.jsonl, in the
format that `write_prompts` writes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdraft.config import UserError
from specdraft.provenance import atomic_path, hash_json, json_fault

CATEGORIES = ("chat", "reasoning", "maths", "code", "translation", "summarisation", "question_answering", "retrieval")
DOMAINS = ("code", "law", "medicine")  # law and medicine are for measurements only: nothing is trained on them
TEXT_KEYS = ("turns", "messages", "prompt", "text")
MT_BENCH = "mt_bench"
MT_BENCH_CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True)
class Prompt:
    """User turns without answers.

    Attributes:
        id: Unique within its file.
        category: One of `CATEGORIES` for the built-in prompts, any text for others.
        turns: What the user says, first turn first; an answer follows each.
        system: The system turn, if any.
        group: Prompts of one group (two questions on one passage, one exercise with two sets of numbers) are never
            parted by `split_held_out`. None: a group of its own.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    system: str | None = None
    group: str | None = None


def builtin_prompts() -> list[Prompt]:
    """All built-in prompts, in a fixed order of which every prefix is balanced over the categories."""
    folder = Path(__file__).parent / "prompts"
    return interleave([prompt for category in CATEGORIES for prompt in read_prompts(folder / f"{category}.jsonl")])


def domain_prompts(name: str) -> list[Prompt]:
    """Built-in prompts of one of DOMAINS, those that no recipe trains on first. UserError for another name."""
    if name not in DOMAINS:
        raise UserError(f"domain: got {name!r}, allowed: {', '.join(DOMAINS)}, or the path of a JSONL file of prompts")
    train, held_out = split_held_out(read_prompts(Path(__file__).parent / "prompts" / f"{name}.jsonl"))
    return held_out + train


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a JSONL file. A row holds its text as one of

    - `turns`: [user, user, ..] (ours, MT-bench, Spec-Bench)
    - `messages`: [{"role", "content"}, ..], of which the user turns and the system turn are kept
    - `prompt` or `text`: one user turn

    and may have `id` or `question_id`, `task`, `category` or `source` (the first of them is the category), `system`, `group`.
    MT-bench's and Spec-Bench's own files are rows of `question_id`, `category` and `turns`: there MT-bench's eight categories are
    one task, `mt_bench`, as in Spec-Bench's tables.

    Raises:
        UserError: a file or row that cannot be used, with the number of its line.
    """
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(_read_lines(Path(path)), start=1):
        where = f"{path}, line {number}"
        if not (text := _decode(line, where).strip()):
            continue
        prompt = _parse_row(text, where, default_id=f"{Path(path).stem}-{number}")
        if prompt.id in seen:
            raise UserError(
                f"{where}: id {prompt.id!r} is that of line {seen[prompt.id]} too; ids must differ, or leave them out"
            )
        seen[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise UserError(
            f"{path}: got no prompts; expected one JSON object a line, with one of the keys {', '.join(TEXT_KEYS)}"
        )
    return prompts


def write_prompts(path: str | Path, prompts: Sequence[Prompt]) -> None:
    """Write a JSONL file that `read_prompts` gives back unchanged; atomic."""
    with atomic_path(Path(path)) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for prompt in prompts:
            row = {key: value for key, value in asdict(prompt).items() if value is not None}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def deduplicate(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Keep the first of those prompts that differ only in case, spaces and punctuation."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(normalised(prompt), prompt)
    return list(first.values())


def normalised(prompt: Prompt) -> str:
    """Lower-case words and signs of all turns, the system turn first. Signs other than punctuation count (2 + 2, 2 * 2)."""
    text = "\n".join((prompt.system or "", *prompt.turns)).casefold()
    return " ".join(re.sub(r"[.,;:!?\"'`\u2018-\u201f()\[\]]+", " ", text).split()) or text


def interleave(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompt of every category, then the second ones, ..: every prefix is balanced, until a category is used up."""
    count: Counter[str] = Counter()
    ranks = []
    for prompt in prompts:
        ranks.append(count[prompt.category])
        count[prompt.category] += 1
    return [prompt for _, prompt in sorted(zip(ranks, prompts, strict=True), key=lambda pair: pair[0])]


def mix(sources: Sequence[Sequence[Prompt]], weights: Sequence[float] | None = None) -> list[Prompt]:
    """Interleave so that every prefix has the sources' shares to within one prompt, the order inside each source kept.

    Args:
        weights: Shares, up to a factor. The mix ends where a source has no more to give. None: the sizes of the
            sources, so that all prompts are used.
    """
    weights = [len(source) for source in sources] if weights is None else weights
    if len(weights) != len(sources) or min(weights, default=0) < 0 or not 0 < sum(weights) < float("inf"):
        raise UserError(
            f"weights: got {list(weights)}, expected {len(sources)} non-negative numbers, finite and not all zero"
        )
    mixed: list[Prompt] = []
    taken = [0] * len(sources)
    while True:
        deficits = [
            weight * (len(mixed) + 1) - count * sum(weights) for weight, count in zip(weights, taken, strict=True)
        ]
        i = deficits.index(max(deficits))
        if taken[i] == len(sources[i]):
            return mixed
        mixed.append(sources[i][taken[i]])
        taken[i] += 1


def split_held_out(prompts: Sequence[Prompt], every: int = 20) -> tuple[list[Prompt], list[Prompt]]:
    """(train, held out), about one in `every` held out. The hash of a prompt's group, or of its normalised text, decides:
    a prompt is on the same side whatever else is in the file, and whatever its id. `train` keeps its order, the held-out
    part is interleaved, so that a part of it can stand for the whole."""
    train: list[Prompt] = []
    held_out: list[Prompt] = []
    for prompt in prompts:
        bucket = int(hash_json(prompt.group or normalised(prompt)), 16) % every
        (train if bucket else held_out).append(prompt)
    return train, interleave(held_out)


def _read_lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); give the path of a JSONL file of prompts"
        ) from None


def _decode(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{where}: got bytes that are not UTF-8; save the file as UTF-8") from None


def _parse_row(text: str, where: str, default_id: str) -> Prompt:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({json_fault(error)}); one JSON object a line is expected") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: got {text[:60]}, expected a JSON object")
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: got half a character ({error.object[error.start]!r}, a lone surrogate), expected whole ones; remove it"
        ) from None
    turns, system = _turns_and_system(row, where)
    texts = turns if system is None else [system, *turns]
    if not turns or any(not isinstance(text, str) or not text.strip() for text in texts):
        raise UserError(f"{where}: got turns {texts!r:.80}, expected texts that are not empty")
    return Prompt(
        id=_first(row, ("id", "question_id"), default_id),
        category=_category(row),
        turns=tuple(turns),
        system=system,
        group=row.get("group"),
    )


def _turns_and_system(row: dict[str, Any], where: str) -> tuple[list[Any], Any]:
    key = next((key for key in TEXT_KEYS if key in row), None)
    if key is None:
        raise UserError(f"{where}: got the keys {', '.join(row) or 'none'}, expected one of {', '.join(TEXT_KEYS)}")
    if key in ("prompt", "text"):
        return [row[key]], row.get("system")
    if not isinstance(row[key], list):
        raise UserError(f"{where}: got {key} {row[key]!r:.60}, expected a list")
    if key == "turns":
        return row[key], row.get("system")
    if not all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in row[key]):
        raise UserError(f"{where}: got messages {row[key]!r:.60}, expected a list of objects with role and content")
    contents = {role: [m["content"] for m in row[key] if m["role"] == role] for role in ("system", "user")}
    return contents["user"], next(iter(contents["system"]), row.get("system"))


def _category(row: dict[str, Any]) -> str:
    category = _first(row, ("task", "category", "source"), "other")
    is_of_mt_bench = "question_id" in row and "task" not in row and category in MT_BENCH_CATEGORIES
    return MT_BENCH if is_of_mt_bench else category


def _first(row: dict[str, Any], keys: tuple[str, ...], default: str) -> str:
    return next((str(row[key]) for key in keys if row.get(key) is not None), default)
