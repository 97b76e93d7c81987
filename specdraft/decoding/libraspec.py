"""LibraSpec (arXiv 2608.08721; papers 4): extend a draft for as long as its extension is worth verifying.

It knows nothing of models or of other policies. Letters: q_k confidence at position k, d drafted tokens, K most of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdraft.config import UserError
from specdraft.decoding.costs import CostTable
from specdraft.decoding.length_policy import DraftLaw, LengthPolicy, require_length


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
