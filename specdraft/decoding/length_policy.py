"""What a length policy is: how many tokens to draft in a round, and when to stop; and what it may look at.

What is verified must not depend on the tokens being verified, or on later ones (papers 9.4). So a policy may choose a length
beforehand by past rounds, and may stop the drafting after any token by what it has seen, as long as all that was drafted is
verified. One that drops drafted tokens again would bias sampled outputs, unless it decides by laws that do not depend on what
was drawn: it says why, and is refused at T > 0. It knows nothing of models; the policies are in length_policies.py.

Letters: S columns of the draft law, H(q) entropy.
"""

from __future__ import annotations

from torch import Tensor

from specdraft.config import UserError


class DraftLaw:
    """The law of one drafted token, for policies that look at it: the one it was drawn from, or at T = 0 the softmax of
    the head's logits. Numbers are made when they are asked for."""

    def __init__(self, logits: Tensor, law: Tensor | None, column: Tensor | None):
        """logits: [1, S].   law: [S] or None.   column: [1], what was drawn; None for a policy that does not read it."""
        self._q = logits[0].float().softmax(-1) if law is None else law
        self._column = column

    @property
    def entropy(self) -> float:
        """H(q), nats."""
        return float(-self._q.xlogy(self._q).sum())

    @property
    def confidence(self) -> float:
        """The largest probability: known before anything is drawn."""
        return float(self._q.max())

    @property
    def probability(self) -> float:
        """That of the drawn token."""
        assert self._column is not None, "this policy says that it does not read sampled tokens"
        return float(self._q[self._column])


class LengthPolicy:
    """What every policy does unless it says otherwise; the class itself drafts nothing.

    watches: whether `go_on` is to be asked.   reads_samples: whether it is told which tokens were drawn.   bias: why sampled
    outputs would not follow the target's law; empty if they do.
    """

    watches = False
    reads_samples = False
    bias = ""

    def begin(self) -> None:
        """A new request: forget everything about the last one, so that outputs do not depend on the order of
        requests."""

    def length(self) -> int:
        """Tokens to draft in the coming round at most; 0 = none, the target alone."""
        return 0

    def go_on(self, law: DraftLaw) -> bool:
        """Asked after every drafted token: whether to draft one more."""
        return True

    def keep(self, drafted: int) -> int:
        """How many of the drafted tokens to verify, from the first on."""
        return drafted

    def observe(self, drafted: int, accepted: int) -> None:
        """What became of the round. drafted: tokens that were verified."""


def require_length(who: str, most: int) -> None:
    if most < 1:
        raise UserError(f"{who}: got at most {most} tokens, allowed: 1 or more")
