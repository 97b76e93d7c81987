"""Which rows of the draft head are live in a round. A policy changes the draft law q only, never the target's law p.

Every policy works on every head: what is live are rows of W, or rows of W_up, or those of a trimmed W; a token that the head has
no row for is passed over. It knows nothing of drafters beyond their head. Packed rows are in live_rows.py, EvoSpec's
vocabulary in evospec.py.

Letters: T prompt tokens, N drafted tokens, H width, V target vocabulary, S rows of the head, A live set, C capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from specdraft.config import UserError
from specdraft.decoding.evospec import EvoSpecVocabulary
from specdraft.decoding.live_rows import FixedRows, RowBuffer, Verified, rows_by_target_id
from specdraft.models.drafter import LiveRows
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.heads import Head
from specdraft.models.thin_products import largest_into

PROMPT_BLOCK = (
    32  # prompt positions whose target logits exist at once: 17 MB of 262,144 tokens; malloc maps 32 MB anew each time
)


class VocabPolicy(Protocol):
    """is_per_request: whether the live set belongs to one request: in a batch every row then needs a policy of its own."""

    is_per_request: bool

    def begin(self, prompt: list[int], last: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
        """A new request. prompt: [T] ids.   last: [T, H] the target's states over the prompt (inputs of its final norm).
        logits_of: [n, H] such states -> [n, V] the target's logits."""

    def live(self) -> LiveRows | None:
        """The rows of the coming round; None = all. Asked once a round, before anything is drafted."""

    def covers(self, token: int) -> bool:
        """Whether the target id `token` can be drafted in this round."""

    def observe(self, seen: Verified) -> None:
        """What became of the round. What it adds is live from the next round on."""


class AllTokens:
    """Every row of the head.   head: for `covers`; None = one that has a row for every token."""

    is_per_request = False

    def __init__(self, head: Head | None = None):
        self._rows = None if head is None else rows_by_target_id(head)

    def begin(self, prompt: list[int], last: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
        pass

    def live(self) -> LiveRows | None:
        return None

    def covers(self, token: int) -> bool:
        return self._rows is None or bool(self._rows[token] >= 0)

    def observe(self, seen: Verified) -> None:
        pass


class FrequencyList:
    """The first `size` ids of a frequency list (FR-Spec, arXiv 2502.14856), fixed for all requests.

    ids: target ids, most frequent first; those that a trimmed head has no row for are passed over and do not count.

    Raises:
        UserError: fewer than `size` usable ids, one named twice, or one outside the vocabulary.
    """

    is_per_request = False

    def __init__(self, head: Head, ids: Sequence[int], size: int):
        self._live = FixedRows(head, usable_rows(head, ids, size, "FrequencyList"))
        self._ids = frozenset(self._live.ids.tolist())

    @classmethod
    def of(cls, drafter: Eagle3Drafter) -> FrequencyList:
        """Of the tokens that the drafter keeps as frequent. Raises UserError where it keeps none."""
        if drafter.frequent is None:
            raise UserError("FrequencyList: got a drafter without frequent_tokens.json; give a list of token ids")
        ids = drafter.frequent.target_ids.tolist()
        return cls(drafter.lm_head, ids, len(ids))

    def begin(self, prompt: list[int], last: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
        pass

    def live(self) -> LiveRows | None:
        return self._live

    def covers(self, token: int) -> bool:
        return token in self._ids

    def observe(self, seen: Verified) -> None:
        pass


class NanoSpec:
    """The tokens in context, training-free (NanoSpec, arXiv 2605.26444; papers 2):

        prefill:  A = prompt ids  U  the target's top 3 at every prompt position
        round:    draft with the rows A; then  A <- A  U  drafted ids  U  the target's top 3 at every node, rejected ones too
                  (its argmax is the first of them), live from the next round on

    kind: `grow` admits no more when C rows are full; `ring` overwrites the oldest row, first in first out. A token that is
    seen again keeps its place. Where no row is live the whole head is used.
    """

    is_per_request = True

    def __init__(self, head: Head, capacity: int = 3072, kind: Literal["grow", "ring"] = "grow", top: int = 3):
        if capacity < 1 or top < 1:
            raise UserError(f"NanoSpec: got capacity {capacity} and top {top}, allowed: 1 or more")
        if kind not in ("grow", "ring"):
            raise UserError(f"NanoSpec: got kind {kind!r}, allowed: 'grow', 'ring'")
        self.capacity, self.kind, self.top = capacity, kind, top
        self._rows = rows_by_target_id(head).tolist()
        self._buffer = RowBuffer(head, capacity)
        self._slots: dict[int, int] = {}  # live target ids
        self._ids: list[int] = []  # by slot
        self._next = 0  # the slot that the next new id gets
        self._values, self._best = torch.empty(0), torch.empty(0, dtype=torch.int64)

    def begin(self, prompt: list[int], last: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
        self._buffer.clear()
        self._slots.clear()
        self._ids.clear()
        self._next = 0
        for start in range(0, len(prompt), PROMPT_BLOCK):
            block = slice(start, start + PROMPT_BLOCK)
            self._admit(prompt[block])
            self._admit(self._top_ids(logits_of(last[block])))

    def live(self) -> LiveRows | None:
        return self._buffer if self._buffer.size else None

    def covers(self, token: int) -> bool:
        return token in self._slots if self._slots else self._rows[token] >= 0

    def observe(self, seen: Verified) -> None:
        self._admit(seen.drafted + self._top_ids(seen.logits))

    def _top_ids(self, logits: Tensor) -> list[int]:
        """[n, V] -> the ids of the `top` largest of every row, into memory that is kept from round to round."""
        if logits.dtype == torch.bfloat16 and logits.device.type == "cpu" and len(logits) < PROMPT_BLOCK:
            logits = (
                logits.float()
            )  # a round's few rows: .06 ms each to look through 262,144, where torch orders them in .5
        shape = (len(logits), min(self.top, logits.shape[-1]))
        size = shape[0] * shape[1]
        if self._best.numel() < size or self._values.dtype != logits.dtype:
            self._values = logits.new_empty(max(size, PROMPT_BLOCK * self.top))
            self._best = torch.empty_like(self._values, dtype=torch.int64)
        values, best = self._values[:size].view(shape), self._best[:size].view(shape)
        largest_into(logits, values, best)
        return best.flatten().tolist()

    def _admit(self, ids: Sequence[int]) -> None:
        """Make `ids` live, in their order; the gathers are one or, where a ring closes, more contiguous writes."""
        start, rows = self._next, []
        for token in ids:
            row = self._rows[token]
            if row < 0 or token in self._slots:
                continue
            if self._next == self.capacity:
                if self.kind == "grow":
                    break
                self._write(start, rows)
                start, rows, self._next = 0, [], 0
            if self._next < len(self._ids):
                del self._slots[self._ids[self._next]]
                self._ids[self._next] = token
            else:
                self._ids.append(token)
            self._slots[token] = self._next
            self._next += 1
            rows.append(row)
        self._write(start, rows)

    def _write(self, start: int, rows: list[int]) -> None:
        if rows:
            self._buffer.write(start, rows)


def usable_rows(head: Head, ids: Sequence[int], size: int, who: str) -> list[int]:
    """Rows of the first `size` of `ids` that the head has rows for. Raises UserError: too few, repeated, out of range."""
    table = rows_by_target_id(head)
    wanted = torch.tensor(list(ids), dtype=torch.int64)
    if len(wanted) and not 0 <= int(wanted.min()) <= int(wanted.max()) < len(table):
        raise UserError(
            f"{who}: got ids from {int(wanted.min())} to {int(wanted.max())}, allowed: 0 to {len(table) - 1}; "
            "give the list of this target's tokenizer"
        )
    rows = table[wanted]
    rows = rows[rows >= 0][:size]
    if not 0 < size == len(rows):
        raise UserError(
            f"{who}: got {len(rows)} ids that the head has rows for, asked for {size}; give a longer list or a smaller size"
        )
    if len(rows.unique()) != size:
        raise UserError(f"{who}: an id stands twice in the list; give every id once, most frequent first")
    return rows.tolist()


VOCAB_POLICIES = {"all": AllTokens, "frequency": FrequencyList, "nanospec": NanoSpec, "evospec": EvoSpecVocabulary}
