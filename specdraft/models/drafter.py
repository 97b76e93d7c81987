"""The seam between drafters and the decoder: what a drafter gives, and what it is told.

Any drafter (EAGLE-3 chain, block, the target drafting for itself) gives these three calls; the decoder knows no other.
Letters: T committed tokens the target has run, A taps, H width, N drafted tokens, S columns of the draft law.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

# Draws one column from a draft law: logits [1, S] -> (column [1] int64, the law it was drawn from [S]; None = point mass).
Choose = Callable[[Tensor], tuple[Tensor, Tensor | None]]


@dataclass
class Proposal:
    """Drafted tokens as a tree that hangs from the last committed token.

    tokens: [N] int64, target ids.   parents: node index of each token's parent, -1 = the last committed token; a chain is
    [-1, 0, 1, ...].   q: [N, S] laws the tokens were drawn from, before drawing; None = deterministic (point masses).
    ids: [S] target ids of q's columns; None = all of 0..V-1.   head_seconds: time spent in head products.
    """

    tokens: Tensor
    parents: list[int]
    q: Tensor | None = None
    ids: Tensor | None = None
    head_seconds: float = 0.0


class Drafter(Protocol):
    """All that the decoder needs of a drafter. Batch 1; a drafter serves one sequence at a time."""

    def prefill(self, taps: Tensor, input_ids: Tensor) -> None:
        """Start a sequence. taps [1, T, A*H] of positions 0..T-1; input_ids [1, T+1], whose last token is committed but
        has not been run through the target."""

    def propose(self, budget: int, choose: Choose, live: Tensor | None = None) -> Proposal:
        """Draft at most `budget` tokens. `live` [S]: head rows to use this round; None = all."""

    def observe(self, tokens: Tensor, taps: Tensor) -> None:
        """After verification: tokens [a+1] = the a accepted drafted tokens and the target's own next token, all committed;
        taps [1, a+1, A*H] of the a+1 positions that the target ran and that are kept."""
