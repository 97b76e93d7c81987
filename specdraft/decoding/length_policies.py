"""How many tokens to draft in a round, and when to stop.

What is verified must not depend on the tokens being verified, or on later ones (papers 9.4). So a policy may choose a length
beforehand by past rounds, and may stop the drafting after any token by what it has seen, as long as all that was drafted is
verified. One that drops drafted tokens again would bias sampled outputs, unless it decides by laws that do not depend on what
was drawn: it says why, and is refused at T > 0. It knows nothing of models.

Letters: S columns of the draft law, k drafted tokens, K most of them, alpha_i conditional and P_i joint acceptance, H(q) entropy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from specdraft.config import UserError
from specdraft.decoding.costs import CostTable


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


class Fixed(LengthPolicy):
    """The same number of tokens in every round."""

    def __init__(self, tokens: int):
        if tokens < 0:
            raise UserError(f"draft length: got {tokens}, allowed: 0 or more")
        self.tokens = tokens

    def length(self) -> int:
        return self.tokens


class Heuristic(LengthPolicy):
    """transformers' `heuristic_transient` schedule: two more after a round that was accepted whole, else one fewer (at least 1)."""

    def __init__(self, start: int = 5, most: int = 20):
        require_length("Heuristic", most)
        self.start, self.most = min(start, most), most
        self.begin()

    def begin(self) -> None:
        self.tokens = self.start

    def length(self) -> int:
        return self.tokens

    def observe(self, drafted: int, accepted: int) -> None:
        self.tokens = min(self.tokens + 2, self.most) if accepted == drafted else max(self.tokens - 1, 1)


class ConfidenceThreshold(LengthPolicy):
    """transformers' dynamic length: stop after a token that the drafter gave less than `threshold`. It reads what was drawn, and
    is lossless at T > 0 all the same: the token that it stops at is verified (papers 9.4)."""

    watches = True
    reads_samples = True

    def __init__(self, threshold: float = 0.4, most: int = 20):
        require_length("ConfidenceThreshold", most)
        self.threshold, self.most = threshold, most

    def length(self) -> int:
        return self.most

    def go_on(self, law: DraftLaw) -> bool:
        return law.probability >= self.threshold


class Svip(LengthPolicy):
    """SVIP (arXiv 2411.18462): stop after a token whose law has sqrt(scale * H(q)) > threshold."""

    watches = True

    def __init__(self, scale: float = 0.15, threshold: float = 0.3, most: int = 20):
        require_length("Svip", most)
        self.scale, self.threshold, self.most = scale, threshold, most

    def length(self) -> int:
        return self.most

    def go_on(self, law: DraftLaw) -> bool:
        return math.sqrt(self.scale * law.entropy) <= self.threshold


class AdaEdl(LengthPolicy):
    """AdaEDL (arXiv 2410.18351): stop after a token whose law has 1 - sqrt(scale * H(q)) < lambda; 1 - sqrt(.) is a lower bound of
    its acceptance.

    lambda follows the acceptance: where the average share of accepted tokens (kept with weight `memory`) is under `wanted`, it
    aims `step` higher, else lower, and moves there with weight 1 - `inertia`. (The paper gives the rule, not these numbers.)
    """

    watches = True

    def __init__(
        self,
        scale: float = 0.2,
        start: float = 0.4,
        wanted: float = 0.9,
        step: float = 0.01,
        memory: float = 0.5,
        inertia: float = 0.9,
        most: int = 20,
    ):
        require_length("AdaEdl", most)
        self.scale, self.start, self.wanted, self.step = scale, start, wanted, step
        self.memory, self.inertia, self.most = memory, inertia, most
        self.begin()

    def begin(self) -> None:
        self.bound, self.acceptance = self.start, self.wanted

    def length(self) -> int:
        return self.most

    def go_on(self, law: DraftLaw) -> bool:
        return 1 - math.sqrt(self.scale * law.entropy) >= self.bound

    def observe(self, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        self.acceptance = self.memory * self.acceptance + (1 - self.memory) * accepted / drafted
        aim = self.bound + (self.step if self.acceptance < self.wanted else -self.step)
        self.bound = min(max(self.inertia * self.bound + (1 - self.inertia) * aim, 0.0), 1.0)


class EntropyController(LengthPolicy):
    """The controller of SparseSpec-L (arXiv 2607.27735; papers 5): k* = argmax_k tau_k / (T_draft(k) + T_verify(k+1)) with the chance
    p_i that token i is accepted read off its entropy H_i: the accept part of the softmax over {-|H_i - mu_acc|, -|H_i - mu_rej|} /
    temperature. The centres are moving averages over the tokens that were accepted, and over those at which a round was rejected.

    Drafting stops after token k as soon as no longer draft is expected to pay more, by the measured costs, if all later tokens
    are as likely as this one; all that was drafted is verified.
    """

    watches = True

    def __init__(
        self,
        costs: CostTable,
        accepted_centre: float = 0.3,
        rejected_centre: float = 2.0,
        rate: float = 0.1,
        temperature: float = 0.5,
    ):
        self.costs, self.most = costs, len(costs.draft) - 1
        require_length("EntropyController", self.most)
        self.centres = (accepted_centre, rejected_centre)
        self.rate, self.temperature = rate, temperature
        self.begin()

    def begin(self) -> None:
        self.mu_accepted, self.mu_rejected = self.centres
        self.entropies: list[float] = []
        self.chances: list[float] = []

    def length(self) -> int:
        self.entropies, self.chances = [], []
        return self.most

    def chance(self, entropy: float) -> float:
        """p_i, from an entropy in nats."""
        apart = abs(entropy - self.mu_accepted) - abs(entropy - self.mu_rejected)
        return 1 / (1 + math.exp(apart / self.temperature))

    def go_on(self, law: DraftLaw) -> bool:
        self.entropies.append(law.entropy)
        self.chances.append(self.chance(self.entropies[-1]))
        k = len(self.chances)
        expected = self.chances + self.chances[-1:] * (self.most - k)
        speedups = [self.costs.expected_speedup(length, expected) for length in range(k, self.most + 1)]
        return speedups[0] < max(speedups)

    def observe(self, drafted: int, accepted: int) -> None:
        for entropy in self.entropies[:accepted]:
            self.mu_accepted += self.rate * (entropy - self.mu_accepted)
        for entropy in self.entropies[:drafted][accepted : accepted + 1]:
            self.mu_rejected += self.rate * (entropy - self.mu_rejected)


class ExpectedSpeedup(LengthPolicy):
    """The length of the largest expected speedup (papers (0.1)), by exact search over the measured costs each round.

    The acceptance at each position starts at `acceptance` (alpha_1.., conditional, as measured on other prompts), weighs
    as much as `prior_rounds` rounds, and moves with the rounds of the request. Every round makes older ones count `decay`
    times as much, so that a position that is no longer tried goes back to where it started, and is tried again.
    """

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


class LibraSpec(LengthPolicy):
    """LibraSpec (arXiv 2608.08721; papers (4.1)): draft a block of n, then, with q_k the confidence at position k,

        eps_i = floor(a * sum_{j=i..d} prod_{k=i..j} q_k + i),   eps* = min_i eps_i;   eps* <= d: verify eps* and stop;
                                                                                       else extend the draft to eps*, at most K

    a: tokens of verification that one expected token is worth; `balance_from_costs` derives it.
    retreats: whether a draft may be cut back to eps*, as published. The confidences are known before sampling only where the
        drafter's laws do not depend on its own samples (block drafters: `is_marginal`); behind a chain the later ones depend on
        the earlier tokens, and at T > 0 a cut would bias the output. With retreats=False all that was drafted is verified.
    """

    watches = True

    def __init__(
        self, a: float = 2.0, block: int = 10, most: int = 60, retreats: bool = True, is_marginal: bool = False
    ):
        require_length("LibraSpec", most)
        if not a >= 0 or block < 1:
            raise UserError(
                f"LibraSpec: got a = {a} and a block of {block}, allowed: a of 0 or more, a block of 1 or more"
            )
        self.a, self.block, self.most, self.retreats = a, min(block, most), most, retreats
        if retreats and not is_marginal:
            self.bias = (
                "it cuts a draft back by the confidence of later positions, which depend on the tokens drawn before them; "
                "use retreats=False"
            )

    def length(self) -> int:
        self.confidences: list[float] = []
        self.goal, self.kept = self.block, self.most
        return self.most

    def go_on(self, law: DraftLaw) -> bool:
        self.confidences.append(law.confidence)
        drafted = len(self.confidences)
        if drafted < self.goal:
            return True
        best = balance(self.confidences, self.a)
        if best <= drafted:
            self.kept = best if self.retreats else drafted
            return False
        self.goal = min(best, self.most)
        return True

    def keep(self, drafted: int) -> int:
        return min(drafted, self.kept)


def balance(confidences: Sequence[float], a: float) -> int:
    """eps* of (4.1). The sums obey R_i = q_i (1 + R_{i+1}), so that all of them take one pass from the end."""
    best, reach = math.inf, 0.0
    for i in range(len(confidences), 0, -1):
        reach = confidences[i - 1] * (1 + reach)
        best = min(best, math.floor(a * reach + i))
    return int(best)


def libra_length(confidences: Sequence[float], a: float, block: int) -> int:
    """The length that LibraSpec ends at if the drafter's confidences are these (as many as it may draft)."""
    most = len(confidences)
    drafted = min(block, most)
    while (best := balance(confidences[:drafted], a)) > drafted and drafted < most:
        drafted = min(best, most)
    return min(best, drafted)


def balance_from_costs(costs: CostTable, block: int = 10) -> float:
    """The a of (4.1) that keeps most of the best expected speedup (0.1) by the measured costs, on average over drafts whose
    confidence is the same at every position: searched from 0.1 to 20 (the derivation is ours; the paper tunes a by hand)."""
    most = len(costs.draft) - 1
    drafts = [[share / 20] * most for share in range(6, 20)]
    best = [max(costs.expected_speedup(k, draft) for k in range(1, most + 1)) for draft in drafts]

    def kept(a: float) -> float:
        lengths = [max(1, libra_length(draft, a, block)) for draft in drafts]
        return sum(costs.expected_speedup(k, draft) / top for k, draft, top in zip(lengths, drafts, best, strict=True))

    return max((1.1**step / 10 for step in range(56)), key=kept)


def require_length(who: str, most: int) -> None:
    if most < 1:
        raise UserError(f"{who}: got at most {most} tokens, allowed: 1 or more")


LENGTH_POLICIES = {
    "fixed": Fixed,
    "heuristic": Heuristic,
    "confidence": ConfidenceThreshold,
    "svip": Svip,
    "adaedl": AdaEdl,
    "entropy": EntropyController,
    "expected_speedup": ExpectedSpeedup,
    "libraspec": LibraSpec,
}
