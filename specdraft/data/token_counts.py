"""How often every token stands in answers or in any text, by category: what vocabulary maps are chosen from.

Counts are kept on disk under the hash of what was counted and of the tokenizer, so that another vocabulary size needs no
new tokenisation, and no new hidden states ever. It knows nothing of maps, heads or targets.
C categories, V target vocabulary.
"""

from __future__ import annotations

import json
import pickle
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdraft.config import UserError
from specdraft.data.chat import Example, answers_to_examples, read_answers, read_examples, read_lines, tokenizer_hash
from specdraft.data.vocab import VocabMap, count_tokens
from specdraft.provenance import atomic_path, hash_file, hash_json

FORMAT = "token-counts-1"
BLOCK = 1 << 16  # characters of a text that are tokenised together
BATCH = 64  # texts
TEXT_KEYS = ("text", "content", "prompt")
LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which no tokenizer takes

Split = tuple[Literal["in", "out"], Collection[str]]


@dataclass(frozen=True)
class TokenCounts:
    """counts: [C, V] int64, occurrences of each token in each category.   categories: their C names.   account: one line,
    what became of the rows that were read."""

    counts: Tensor
    categories: tuple[str, ...]
    account: str

    @property
    def total(self) -> Tensor:
        """[V] over all categories."""
        return self.counts.sum(0)

    def save(self, path: Path, tokenizer: Any) -> None:
        """A counts file: one safetensors file, atomic."""
        notes = {"format": FORMAT, "tokenizer": tokenizer_hash(tokenizer), "account": self.account}
        with atomic_path(path) as temporary:
            save_file({"counts": self.counts}, temporary, metadata={**notes, "categories": json.dumps(self.categories)})

    @classmethod
    def load(cls, path: Path, tokenizer: Any, vocab_size: int) -> TokenCounts:
        """Read a counts file.

        Raises:
            UserError: no such file, not a counts file, or counts of another tokenizer or vocabulary (fault 5).
        """
        try:
            with safe_open(path, framework="pt") as file:
                notes, counts = file.metadata() or {}, file.get_tensor("counts")
        except (OSError, SafetensorError) as error:
            raise UserError(f"token counts {path}: cannot be read ({error}); count again") from None
        is_whole = {"tokenizer", "account", "categories"} <= notes.keys()
        if notes.get("format") != FORMAT or not is_whole or counts.dtype != torch.int64 or counts.dim() != 2:
            raise UserError(
                f"token counts {path}: got format {notes.get('format')!r}, allowed: {FORMAT!r}; count again"
            )
        made, here = (notes["tokenizer"], counts.shape[1]), (tokenizer_hash(tokenizer), vocab_size)
        if made != here:
            raise UserError(
                f"token counts {path}: of tokenizer {made[0]} with {made[1]} tokens, the target has {here[0]} with {here[1]}; "
                "count with this target"
            )
        return cls(counts, tuple(json.loads(notes["categories"])), notes["account"])


def add(parts: Iterable[TokenCounts]) -> TokenCounts:
    """One set of counts of several; categories of one name are added up.

    Raises:
        UserError: none of them has counted anything.
    """
    rows: dict[str, Tensor] = {}
    accounts = []
    for part in parts:
        accounts.append(part.account)
        for name, counts in zip(part.categories, part.counts, strict=True):
            rows[name] = rows[name] + counts if name in rows else counts
    if not rows:
        raise UserError(
            f"answers {'; '.join(accounts)}, so there is nothing to count; give answers of the target, and the prompts that they answer"
        )
    return TokenCounts(torch.stack(list(rows.values())), tuple(rows), "; ".join(accounts))


def cached_counts(
    kind: Literal["answers", "corpus"],
    path: Path,
    tokenizer: Any,
    vocab_size: int,
    folder: Path,
    split: Split | None = None,
) -> TokenCounts:
    """Counts of one file, from `folder` where they have been made before.

    kind: `answers` = only what an assistant wrote counts; `corpus` = everything.   split: ("in" or "out", ids): only the rows of
    an answers file whose id is (not) among these.

    Raises:
        UserError: a file that cannot be read, or a corpus with nothing to count.
    """
    if not Path(path).is_file():
        raise UserError(f"{kind} {path}: no such file")
    chosen = None if split is None else [split[0], sorted(split[1])]
    is_rows = kind == "corpus" and has_rows(path)
    key = hash_json([FORMAT, kind, is_rows, hash_file(path), tokenizer_hash(tokenizer), vocab_size, chosen])
    kept = folder / f"{key}.safetensors"
    if kept.exists():
        return TokenCounts.load(kept, tokenizer, vocab_size)
    found = COUNTERS[kind](path, tokenizer, vocab_size, split)
    found.save(kept, tokenizer)
    return found


def count_answers(path: Path, tokenizer: Any, vocab_size: int, split: Split | None = None) -> TokenCounts:
    """Tokens that an assistant wrote (the supervised ones), of answers.jsonl or of a JSONL file of conversations. No category where
    there is none: a side of a split may be empty (`add` refuses where all are)."""
    examples, categories, account = read_split(path, tokenizer, split)
    groups: dict[str, list[Example]] = {}
    for example in examples:
        groups.setdefault(categories.get(example.id, Path(path).stem), []).append(example)
    counts = [count_tokens(group, vocab_size) for group in groups.values()]
    whole = torch.stack(counts) if counts else torch.zeros(0, vocab_size, dtype=torch.int64)
    return TokenCounts(whole, tuple(groups), f"{path}: {account}")


def read_split(path: Path, tokenizer: Any, split: Split | None = None) -> tuple[list[Example], dict[str, str], str]:
    """Examples of answers.jsonl or of a JSONL file of conversations; categories by id (answers only); and the account."""
    _, first = next(read_lines(path), (0, ""))
    if '"messages"' in first:
        if split is not None:
            raise UserError(
                f"answers {path}: conversations cannot be split by prompts; give answers.jsonl, or held_out"
            )
        examples, account = read_examples(path, tokenizer, sys.maxsize)
        return examples, {}, str(account)
    rows = read_answers(path)
    if split is not None:
        side, ids = split
        wanted = set(ids)
        rows = [row for row in rows if (row.id in wanted) == (side == "in")]
    examples, account = answers_to_examples(rows)
    return examples, {row.id: row.category for row in rows}, str(account)


def count_corpus(path: Path, tokenizer: Any, vocab_size: int, split: Split | None = None) -> TokenCounts:
    """All tokens of a text file, or of the texts of a JSONL file (a string a line, or an object with `text`, `content`,
    `prompt`, `turns` or `messages`)."""
    assert split is None, "a corpus has no prompts"
    account: Counter[str] = Counter()
    texts = jsonl_texts(path, account) if has_rows(path) else text_blocks(path, account)
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for batch in batches(texts):
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            if ids and max(ids) >= vocab_size:
                raise UserError(f"corpus {path}: got token id {max(ids)}, allowed: 0 to {vocab_size - 1}")
            counts += torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=vocab_size)
    line = f"{path}: " + ", ".join(f"{count} {what}" for what, count in account.items())
    if not counts.any():
        raise UserError(f"corpus {line}, so there is nothing to count; give a text or a JSONL file with texts")
    return TokenCounts(counts[None], (Path(path).stem,), line)


def has_rows(path: Path) -> bool:
    """Whether a corpus is read as JSON rows, not as one text."""
    return Path(path).suffix == ".jsonl"


def text_blocks(path: Path, account: Counter[str]) -> Iterator[str]:
    """A text file in pieces of whole lines, so that no token is cut."""
    block, size = [], 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            block.append(line)
            size += len(line)
            account["lines"] += 1
            if size >= BLOCK:
                yield "".join(block)
                block, size = [], 0
    yield "".join(block)


def jsonl_texts(path: Path, account: Counter[str]) -> Iterator[str]:
    """The texts of every row; rows without one are counted (fault 4)."""
    for _, line in read_lines(path):
        text = row_text(line)
        account["rows kept" if text else "rows skipped, without a text"] += 1
        if text:
            yield text


def row_text(line: str) -> str:
    """The text of one JSON line, "" where there is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    if isinstance(row, dict):
        row = next((row[key] for key in (*TEXT_KEYS, "turns", "messages") if key in row), "")
    parts = row if isinstance(row, list) else [row]
    parts = [part.get("content") if isinstance(part, dict) else part for part in parts]
    text = "\n\n".join(part for part in parts if isinstance(part, str))
    return "" if LONE_SURROGATE.search(text) else text


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def read_frequency_list(path: Path, vocab_size: int) -> Tensor:
    """Ids of an FR-Spec list (`freq_32768.pt`: pickled ids, most frequent first, without counts). [n] int64

    Read as data: code in the file is not run.

    Raises:
        UserError: no such file, not a list of ids, or ids out of range or repeated.
    """
    where = f"frequency list {path}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle versions; what cannot be read is refused below
            ids = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(
            f"{where}: cannot be read as data ({reason}); give a file of token ids, saved with torch.save"
        ) from None
    if isinstance(ids, list | tuple) and all(type(item) is int for item in ids):
        ids = torch.tensor(ids, dtype=torch.int64)
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool or ids.dim() != 1:
        raise UserError(f"{where}: got {type(ids).__name__}, allowed: a list of token ids; give an FR-Spec list")
    return VocabMap(ids.long(), vocab_size, where).target_ids


def counts_of_ranking(ids: Tensor, vocab_size: int) -> Tensor:
    """Stand-ins for counts that keep the order of a list without any: n, n-1, .., 1, and 0 for what is not in it. [V] int64"""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    counts[ids] = torch.arange(len(ids), 0, -1)
    return counts


COUNTERS: dict[str, Callable[[Path, Any, int, Split | None], TokenCounts]] = {
    "answers": count_answers,
    "corpus": count_corpus,
}
