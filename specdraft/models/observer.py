"""The seam between the decoder and whatever learns while it decodes: what it is told when texts begin, and after every round.

Between two rounds nothing drafts, so an observer may change the drafter's weights there: that changes q for what is drafted later,
never the target's law (papers 9.1). It knows nothing of what is learnt.

Letters: T prompt tokens, n positions, A taps, H width, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specdraft.models.drafter import LiveRows


@dataclass
class Begun:
    """A text that begins.   row: its number in the batch.   tokens: [T] the prompt.   taps: [T, A*H] the target's over it."""

    row: int
    tokens: list[int]
    taps: Tensor


@dataclass
class Observed:
    """What a round settled for the text of a row: n positions that follow those known before.

    tokens: [n] at these positions: the last committed one before the round, then what was accepted.   taps: [n, A*H] and logits:
    [n, V]: the target's there, so logits[j] is the law of the token after tokens[j].   alpha: [n] chance that what was drafted after
    position j is accepted, sum min(p, q) (mass of the drafted tokens where the draft is deterministic; p is then at T = 1); NaN
    where nothing was drafted.   hits: [n] whether the token that followed was live.   live: the rows of the head in that round;
    None = all.
    """

    row: int
    tokens: list[int]
    taps: Tensor
    logits: Tensor
    alpha: list[float]
    hits: list[bool]
    live: LiveRows | None


class Observer(Protocol):
    """Tensors are the decoder's own: what is kept must be copied."""

    def begin(self, texts: list[Begun]) -> None:
        """A batch begins, before anything is drafted. Texts that ended with their first token are not in it."""

    def observe(self, rounds: list[Observed]) -> None:
        """A round is over: one entry for each row that was in it."""
