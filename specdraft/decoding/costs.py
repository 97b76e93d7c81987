"""What a round costs on this machine: seconds to draft k tokens and to verify n, as they are (no formula is fitted:
they are not even monotone on a CPU), and the draft length that pays most by them.

Measured inside the decoder on real prompts, so that caches are as cold as they will be. It knows nothing of how
drafters work.

Letters: k drafted tokens, n = k+1 tokens that the target runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from specdraft.config import UserError
from specdraft.provenance import machine, write_json


@dataclass
class Hindsight:
    """length: mean of the best lengths.   distance: mean |drafted - best|.   share_of_best: tokens a second by the measured costs
    over those of the best lengths.   lower_bounds: share of rounds that accepted all they drafted."""

    length: float
    distance: float
    share_of_best: float
    lower_bounds: float


@dataclass
class CostTable:
    """Median seconds of a round that drafts k tokens, k = 0..K: draft[k] for all that the drafter does, verify[k] for
    the target over k+1 tokens, sample[k] for choosing tokens. alone: a whole round of the target with no drafter.
    target, dtype, machine: what it holds for."""

    draft: list[float]
    verify: list[float]
    sample: list[float]
    alone: float
    target: str
    dtype: str
    machine: dict

    def round_seconds(self, k: int) -> float:
        """T_draft(k) + T_verify(k+1), everything included."""
        return self.draft[k] + self.verify[k] + self.sample[k]

    def expected_speedup(self, k: int, acceptance: Sequence[float]) -> float:
        """tau_k * T_AR / (T_draft(k) + T_verify(k+1)) (papers (0.1)), tau_k = 1 + sum_{j<=k} prod_{i<=j} alpha_i.

        acceptance: conditional acceptance alpha_1.. of at least k positions."""
        tau, joint = 1.0, 1.0
        for alpha in acceptance[:k]:
            joint *= alpha
            tau += joint
        return tau * self.alone / self.round_seconds(k)

    def best_length(self, acceptance: Sequence[float]) -> int:
        """argmax over k of `expected_speedup`: exact, over every length that was measured and has an acceptance. 0
        where the target alone is faster than any of them.

        Raises:
            UserError: more positions than lengths measured.
        """
        if len(acceptance) > len(self.draft) - 1:
            raise UserError(
                f"acceptance: got {len(acceptance)} positions, allowed: the {len(self.draft) - 1} that the costs "
                "cover; measure longer drafts"
            )
        speedups = [1.0] + [self.expected_speedup(k, acceptance) for k in range(1, len(acceptance) + 1)]
        return max(range(len(speedups)), key=speedups.__getitem__)

    def hindsight(self, rounds: Sequence[tuple[int, int]]) -> Hindsight:
        """The lengths that would have made the most of these rounds, (drafted, accepted) each, by the measured costs.

        With length k a round that accepted a tokens gives 1 + min(k, a) of them for T(k); the lengths that maximise all tokens
        over all seconds are those that maximise tokens - rate * T(k) in each round, at the rate that they reach (Dinkelbach).
        Where everything drafted was accepted more might have been: such a round's length is a lower bound.

        Raises:
            UserError: no rounds, or one that drafted more than was measured.
        """
        longest = max((drafted for drafted, _ in rounds), default=-1)
        if not 0 <= longest < len(self.draft):
            raise UserError(
                f"hindsight: got rounds of up to {longest} drafted tokens, allowed: 0 to the {len(self.draft) - 1} that the costs "
                "cover; measure longer drafts"
            )
        seconds = [self.round_seconds(k) for k in range(len(self.draft))]
        rate, lengths = 0.0, []
        while True:
            best = {
                a: max(range(len(seconds)), key=lambda k, a=a: 1 + min(k, a) - rate * seconds[k])
                for a in {accepted for _, accepted in rounds}
            }
            if lengths == (lengths := [best[accepted] for _, accepted in rounds]):
                break
            tokens = sum(1 + min(k, a) for k, (_, a) in zip(lengths, rounds, strict=True))
            rate = tokens / sum(seconds[k] for k in lengths)
        own = sum(1 + a for _, a in rounds) / sum(seconds[drafted] for drafted, _ in rounds)
        return Hindsight(
            length=sum(lengths) / len(rounds),
            distance=sum(abs(drafted - k) for k, (drafted, _) in zip(lengths, rounds, strict=True)) / len(rounds),
            share_of_best=own / rate,
            lower_bounds=sum(accepted == drafted for drafted, accepted in rounds) / len(rounds),
        )

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> CostTable:
        """Raises UserError: no such file, not a cost table, one measured on another machine or thread count."""
        try:
            table = cls(**json.loads(Path(path).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"cost table {path}: cannot be read ({error}); measure the costs again") from None
        here = machine()
        for key in ("processor", "threads", "gpus"):
            if table.machine.get(key) != here[key]:
                raise UserError(
                    f"cost table {path}: measured with {key} {table.machine.get(key)!r}, here it is {here[key]!r}; "
                    "measure the costs again"
                )
        return table


def relative_throughput(rho_tau: float, nu: float, kappa: float) -> float:
    """Tokens per second of a drafter with a cheaper head over those of the same one with a full head (papers (1.1)):
    rho_tau (1 + kappa) / (1 + nu kappa).

    rho_tau: ratio of their taus.   nu: ratio of their head times.   kappa: the full head's time over the rest of its
    round."""
    return rho_tau * (1 + kappa) / (1 + nu * kappa)


def break_even(nu: float, kappa: float) -> float:
    """The share of the full head's tau that a cheaper head must keep to be worth it: `relative_throughput` is 1 there."""
    return (1 + nu * kappa) / (1 + kappa)
