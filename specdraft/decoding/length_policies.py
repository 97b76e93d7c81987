"""How many tokens to draft in a round.

A policy sees past rounds only, so that what is verified never depends on the tokens being verified (papers 9.4); one
that reads tokens sampled in the same round says so and is refused at T > 0. It knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specdraft.config import UserError
from specdraft.decoding.costs import CostTable


class LengthPolicy(Protocol):
    """reads_samples: whether `length` uses tokens sampled in the round that it decides on."""

    reads_samples: bool

    def begin(self) -> None:
        """A new request: forget everything about the last one, so that outputs do not depend on the order of
        requests."""

    def length(self) -> int:
        """Tokens to draft in the coming round; 0 = none, the target alone."""

    def observe(self, drafted: int, accepted: int) -> None:
        """What became of the round."""


class Fixed:
    """The same number of tokens in every round."""

    reads_samples = False

    def __init__(self, tokens: int):
        if tokens < 0:
            raise UserError(f"draft length: got {tokens}, allowed: 0 or more")
        self.tokens = tokens

    def begin(self) -> None:
        pass

    def length(self) -> int:
        return self.tokens

    def observe(self, drafted: int, accepted: int) -> None:
        pass


class ExpectedSpeedup:
    """The length of the largest expected speedup (papers (0.1)), by exact search over the measured costs each round.

    The acceptance at each position starts at `acceptance` (alpha_1.., conditional, as measured on other prompts), weighs
    as much as `prior_rounds` rounds, and moves with the rounds of the request. Every round makes older ones count `decay`
    times as much, so that a position that is no longer tried goes back to where it started, and is tried again.
    """

    reads_samples = False

    def __init__(self, costs: CostTable, acceptance: Sequence[float], prior_rounds: float = 10.0, decay: float = 0.95):
        self.costs = costs
        self.acceptance = list(acceptance)
        self.prior_rounds = prior_rounds
        self.decay = decay
        costs.best_length(self.acceptance)  # refuses an acceptance that the costs do not cover
        self.begin()

    def begin(self) -> None:
        self.tried = [0.0] * len(self.acceptance)
        self.accepted = [0.0] * len(self.acceptance)

    def length(self) -> int:
        prior = self.prior_rounds
        estimates = zip(self.acceptance, self.accepted, self.tried, strict=True)
        return self.costs.best_length([(prior * alpha + hits) / (prior + tries) for alpha, hits, tries in estimates])

    def observe(self, drafted: int, accepted: int) -> None:
        for i in range(len(self.acceptance)):
            self.tried[i] = self.decay * self.tried[i] + (i < min(drafted, accepted + 1))
            self.accepted[i] = self.decay * self.accepted[i] + (i < accepted)


LENGTH_POLICIES = {"fixed": Fixed, "expected_speedup": ExpectedSpeedup}
