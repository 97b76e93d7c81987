"""What happened in a decode, round by round, and the numbers made of it: tau and the acceptances, defined here alone.

A round is one verification: tokens were drafted, the target ran once over them, some were accepted and one more token
(the bonus or the correction) came from the target itself. The token that the prefill gives belongs to no round. What
the user did not get (past an end-of-sequence token or a stop string) is counted nowhere. It knows nothing of models.

Letters: P_j joint acceptance: share of rounds in which at least j drafted tokens were kept (papers 0, 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

LOOP_REPEATS, LOOP_TOKENS = 3, 24  # what `ends_in_loop` calls a loop


@dataclass
class Round:
    """drafted: tokens proposed.   accepted: of those, kept on the accepted path.   emitted: tokens the user got:
    accepted, plus one of the target's own unless the round ended the text inside the draft. Seconds: draft_s is all of
    the drafter's time, head_s the part of it in head products (NaN off the CPU), commit_s the part after verification, cache and policies
    included; verify_s the target's forward pass; sample_s making laws, choosing tokens and stop checks.   live: rows of the head that
    were live; 0 = all.   is_covered: whether the target's own token (correction or bonus) could have been drafted from them.   levels:
    of a drafted tree; None = a chain, as deep as it is long. In a batch of B rows all seconds are the row's share, a B-th of what the
    batch took."""

    drafted: int
    accepted: int
    emitted: int
    draft_s: float = 0.0
    head_s: float = 0.0
    verify_s: float = 0.0
    sample_s: float = 0.0
    live: int = 0
    is_covered: bool = True
    levels: int | None = None
    commit_s: float = 0.0

    @property
    def depth(self) -> int:
        """Tokens of the longest drafted path."""
        return self.drafted if self.levels is None else self.levels

    @property
    def seconds(self) -> float:
        return self.draft_s + self.verify_s + self.sample_s


@dataclass
class DecodeTrace:
    """One request. prefill_s: the target over the prompt; draft_prefill_s: the drafter over its states; seconds:
    everything, both prefills included.   tokens: new tokens, the prefill's one included."""

    prompt_tokens: int
    tokens: int = 0
    seconds: float = 0.0
    prefill_s: float = 0.0
    draft_prefill_s: float = 0.0
    rounds: list[Round] = field(default_factory=list)


def tau(traces: Sequence[DecodeTrace]) -> float:
    """Tokens per verify round, bonus included, micro-averaged: all emitted tokens over all rounds (papers 10).

    tau = 1 + sum_j P_j - (share of rounds that ended the text inside their draft, and so have no token of the target's
    own). NaN without rounds.
    """
    rounds = _rounds(traces)
    return _ratio(sum(r.emitted for r in rounds), len(rounds))


def mean_request_tau(traces: Sequence[DecodeTrace]) -> float:
    """The mean of each request's own tau (macro average); requests without rounds are left out."""
    own = [tau([trace]) for trace in traces if trace.rounds]
    return _ratio(sum(own), len(own))


def joint_acceptance(traces: Sequence[DecodeTrace]) -> list[float]:
    """P_j for j = 1..K: share of all rounds in which at least j drafted tokens were kept."""
    rounds = _rounds(traces)
    return [_ratio(sum(r.accepted >= j for r in rounds), len(rounds)) for j in range(1, _longest(rounds) + 1)]


def conditional_acceptance(traces: Sequence[DecodeTrace]) -> list[float]:
    """alpha_j for j = 1..K: of the rounds that tried position j (it was drafted, all before it were accepted, and the text had
    not ended), the share that accepted it. NaN for a position never tried. In a tree position j was drafted where the tree is
    that deep: a path that ends earlier counts as not accepted at j."""
    counts = acceptance_counts(traces)
    return [_ratio(accepted, tried) for accepted, tried in counts]


def acceptance_counts(traces: Sequence[DecodeTrace]) -> list[tuple[int, int]]:
    """(accepted, tried) for positions 1..K."""
    rounds = _rounds(traces)
    positions = range(1, _longest(rounds) + 1)
    return [(sum(r.accepted >= j for r in rounds), sum(_tried(r, j) for r in rounds)) for j in positions]


def ended_inside_draft(traces: Sequence[DecodeTrace]) -> float:
    """Share of rounds whose last token is a drafted one: the term that the identity of `tau` subtracts."""
    rounds = _rounds(traces)
    return _ratio(sum(r.emitted == r.accepted for r in rounds), len(rounds))


def tokens_per_second(traces: Sequence[DecodeTrace]) -> float:
    """All new tokens over all seconds, prefill included."""
    return _ratio(sum(t.tokens for t in traces), sum(t.seconds for t in traces))


def first_divergence(one: Sequence[int], other: Sequence[int]) -> int | None:
    """First index at which two outputs part (a missing token parts from a present one); None if they are equal."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return None if len(one) == len(other) else min(len(one), len(other))


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Whether an output ends by saying one thing over and over: a block of at most a third of it stands at its end at least
    LOOP_REPEATS times in a row (the last time perhaps cut), LOOP_TOKENS tokens or more in all. Greedy decoding of small
    models does that, and any drafter soon guesses all of it."""
    for period in range(1, len(tokens) // LOOP_REPEATS + 1):
        length = period  # of the longest suffix in which every token equals the one a period before
        while length < len(tokens) and tokens[-1 - length] == tokens[-1 - length + period]:
            length += 1
        if length >= max(LOOP_REPEATS * period, LOOP_TOKENS):
            return True
    return False


def top2_margin(logits: Tensor) -> float:
    """[V] -> largest minus second largest logit: how near the target itself was to saying something else."""
    best, second = logits.float().topk(2).values.tolist()
    return best - second


def _tried(r: Round, position: int) -> bool:
    ended = r.emitted == r.accepted
    return r.depth >= position and r.accepted >= position - 1 and not (ended and position > r.accepted)


def _rounds(traces: Sequence[DecodeTrace]) -> list[Round]:
    return [r for trace in traces for r in trace.rounds]


def _longest(rounds: Sequence[Round]) -> int:
    return max((r.depth for r in rounds), default=0)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")
