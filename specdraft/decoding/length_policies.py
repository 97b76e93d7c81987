"""How many tokens to draft in a round: every policy but LibraSpec (libraspec.py), and the table of all.

What a policy may do without biasing sampled outputs is in length_policy.py. It knows nothing of models.

Letters: k drafted tokens, alpha_i conditional and P_i joint acceptance, H(q) entropy of a draft law.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdraft.config import UserError
from specdraft.decoding.costs import CostTable
from specdraft.decoding.length_policy import DraftLaw, LengthPolicy, require_length
from specdraft.decoding.libraspec import LibraSpec


class Fixed(LengthPolicy):
    """The same number of tokens in every round."""

    def __init__(self, tokens: int):
        if tokens < 0:
            raise UserError(f"draft length: got {tokens}, allowed: 0 or more")
        self.tokens = tokens

    def __repr__(self) -> str:
        return f"Fixed({self.tokens})"

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
    aims `step` higher, else lower, and moves there with weight 1 - `inertia`. (papers 7 says only that it follows an
    acceptance average: the rest is ours.)
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
    """The length of the largest expected speedup (papers (0.1)), by exact search over the measured costs each round. A round that drafts
    nothing costs more than one of the target alone: the drafter and the vocabulary follow the text.

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
        alphas = [(prior * alpha + hits) / (prior + tries) for alpha, hits, tries in estimates]
        return max(range(len(alphas) + 1), key=lambda k: self.costs.expected_speedup(k, alphas))

    def observe(self, drafted: int, accepted: int) -> None:
        for i in range(len(self.acceptance)):
            self.tried[i] = self.decay * self.tried[i] + (i < min(drafted, accepted + 1))
            self.accepted[i] = self.decay * self.accepted[i] + (i < accepted)


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
