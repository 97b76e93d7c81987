"""The seam between drafters and the decoder: what a drafter is asked, what it gives, and what it is told.

A drafter of one sequence gives three calls (`Drafter`), one that serves batches and drafts trees four (`BatchDrafter`); the
decoder knows no other. Letters: B rows, T committed tokens of a row that the target has run, A taps, H width, D width of what
the head's rows are multiplied with, N drafted tokens, S columns of the draft law.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from specdraft.config import UserError

if TYPE_CHECKING:
    from specdraft.models.tree import Shape


class Drawn(NamedTuple):
    """column: [1] int64, what was drawn.   law: [S] that it was drawn from; None = point mass.   is_last: draft no more
    after this token, which is verified all the same."""

    column: Tensor
    law: Tensor | None
    is_last: bool = False


# Draws one column from a draft law: logits [1, S] -> Drawn.
Choose = Callable[[Tensor], Drawn]


class LiveRows(Protocol):
    """Rows of a head that are live in a round, packed; as the head's weights are now."""

    @property
    def ids(self) -> Tensor:
        """[n] target ids of the rows."""

    def logits(self, projected: Tensor) -> Tensor:
        """[..., D] -> [..., n]: the product of the projected state with the live rows."""


@dataclass
class Proposal:
    """Drafted tokens as a tree that hangs from the last committed token.

    tokens: [N] int64, target ids.   parents: node index of each token's parent, smaller than its own, -1 = the last committed
    token; a chain is [-1, 0, 1, ...].   q: N laws [S] that the tokens were drawn from, before drawing; None = deterministic
    (point masses).   ids: [S] target ids of q's columns; None = all of 0..V-1.   head_seconds: time spent in head products; NaN where
    nobody knows (`head_clock`).
    """

    tokens: Tensor
    parents: list[int]
    q: Sequence[Tensor] | None = None
    ids: Tensor | None = None
    head_seconds: float = 0.0

    def first(self, count: int) -> Proposal:
        """Without the nodes from `count` on."""
        if count >= len(self.parents):
            return self
        q = None if self.q is None else self.q[:count]
        return Proposal(self.tokens[:count], self.parents[:count], q, self.ids, self.head_seconds)


def head_clock(device: torch.device) -> Callable[[], float]:
    """Reads seconds before and after a head product; NaN off the CPU: nobody waits for the device inside a draft step, and how long it
    takes to ask for a product is not how long the product takes."""
    return time.perf_counter if device.type == "cpu" else lambda: math.nan


def nothing() -> Proposal:
    """No token drafted."""
    return Proposal(torch.empty(0, dtype=torch.int64), [])


class Drafter(Protocol):
    """A drafter of chains for one sequence at a time."""

    def prefill(self, taps: Tensor, input_ids: Tensor) -> None:
        """Start a sequence. taps [1, T, A*H] of positions 0..T-1; input_ids [1, T+1], whose last token is committed but
        has not been run through the target."""

    def propose(self, budget: int, choose: Choose, live: LiveRows | None = None) -> Proposal:
        """Draft at most `budget` tokens; none after a `Drawn` that says so. `live`: rows of the head to use this round; None =
        all."""

    def observe(self, tokens: Tensor, taps: Tensor) -> None:
        """After verification: tokens [a+1] = the a accepted drafted tokens and the target's own next token, all committed;
        taps [1, a+1, A*H] of the a+1 positions that the target ran and that are kept."""


@dataclass
class Ask:
    """What one row is asked for in a round.   budget: how deep to draft at most (tokens of a chain, levels of a tree); 0 =
    nothing.   choose: its sampling, with its own random numbers.   live: rows of the head to use; None = all."""

    budget: int
    choose: Choose
    live: LiveRows | None = None


@runtime_checkable
class BatchDrafter(Protocol):
    """A drafter of batches, in any shape. It serves one batch at a time; rows differ in length. Lists have an entry for every
    row; what a row gets does not depend on the others."""

    def begin(self, taps: Tensor, tokens: list[list[int]], max_length: int) -> None:
        """Start a batch. tokens: T+1 for each row, whose last is committed but has not been run through the target; taps
        [B, max T, A*H] of positions 0..T-1, padded on the right.   max_length: tokens that a row may come to have."""

    def draft(self, asks: list[Ask], shape: Shape) -> list[Proposal]:
        """A proposal for every row, in the given shape."""

    def commit(self, tokens: list[list[int]], taps: Tensor) -> None:
        """After verification: tokens of each row = the a accepted drafted ones and the target's own next token, all committed;
        taps [B, max a+1, A*H] of the a+1 positions that the target ran and that are kept, padded on the right."""

    def select(self, rows: list[int]) -> None:
        """Only these rows go on, in this order. Comes before `commit`."""


class OneRow:
    """A `BatchDrafter` of one row made of a `Drafter`: chains only."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter

    def begin(self, taps: Tensor, tokens: list[list[int]], max_length: int) -> None:
        assert len(tokens) == 1, len(tokens)
        self.drafter.prefill(taps, torch.tensor(tokens, device=taps.device))

    def draft(self, asks: list[Ask], shape: Shape) -> list[Proposal]:
        """Raises UserError: a shape that is not a chain."""
        if shape.width > 1:
            name, got = type(self.drafter).__name__, type(shape).__name__
            raise UserError(f"drafter {name}: got a tree ({got}), allowed: chains; choose another drafter, or no tree")
        (ask,) = asks
        return [self.drafter.propose(ask.budget, ask.choose, ask.live)]

    def commit(self, tokens: list[list[int]], taps: Tensor) -> None:
        self.drafter.observe(torch.tensor(tokens[0], device=taps.device), taps)

    def select(self, rows: list[int]) -> None:
        assert rows == [0], rows
