"""The numbers of a benchmark, each made here once from traces (papers 10): one decoder against the target alone, on the same requests,
and against the same decoder with a full head.

It knows nothing of models or files. Times of a request are medians over the repeats; intervals are bootstrapped over requests.

Letters: R repeats, M requests; tau, P_j, alpha_j as in trace.py; nu, kappa, rho as in papers (1.1).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np

from specdraft.decoding.costs import CostTable, Hindsight, relative_throughput
from specdraft.decoding.trace import (
    DecodeTrace,
    Round,
    conditional_acceptance,
    ended_inside_draft,
    joint_acceptance,
    mean_request_tau,
    tau,
    tokens_per_second,
)

RESAMPLES = 2000
IDENTITY_ERROR = 1e-6
PREDICTION_ERROR = 0.05
Repeats = Sequence[Sequence[DecodeTrace]]  # [R][M], the same requests in the same order


def speed(own: Repeats, alone: Repeats) -> dict[str, Any]:
    """Rates and their ratio, prefills included, and the ratio without them.

    speedup: of all tokens over all seconds; speedup_low, speedup_high: 95 % over requests; speedup_repeats: of each repeat.
    """
    tokens = [np.array([trace.tokens for trace in side[0]]) for side in (own, alone)]
    seconds = [median_seconds(side) for side in (own, alone)]
    rates = [t.sum() / s.sum() for t, s in zip(tokens, seconds, strict=True)]
    low, high = ratio_interval(tokens, seconds)
    return {
        "tokens_per_second": rates[0],
        "target_tokens_per_second": rates[1],
        "speedup": rates[0] / rates[1],
        "speedup_low": low,
        "speedup_high": high,
        "speedup_repeats": [
            tokens_per_second(mine) / tokens_per_second(theirs) for mine, theirs in zip(own, alone, strict=True)
        ],
        "decode_speedup": statistics.median(
            round_rate(mine) / round_rate(theirs) for mine, theirs in zip(own, alone, strict=True)
        ),
        "tokens": int(tokens[0].sum()),
        "target_tokens": int(tokens[1].sum()),
    }


def ratio_interval(tokens: Sequence[np.ndarray], seconds: Sequence[np.ndarray]) -> tuple[float, float]:
    """95 % bootstrap interval of the ratio of two sides' total rates, the requests resampled together on both. tokens, seconds: [M] of
    each side."""
    count = len(tokens[0])
    picks = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
    own, alone = (t[picks].sum(1) / s[picks].sum(1) for t, s in zip(tokens, seconds, strict=True))
    low, high = np.percentile(own / alone, [2.5, 97.5])
    return float(low), float(high)


def acceptance(own: Repeats) -> dict[str, Any]:
    """tau and what it is made of. The repeats are the same computation, so the first one is counted.

    tau_identity: 1 + sum_j P_j - the share of rounds that ended the text inside their draft; equal to tau.
    coverage_draft: share of the positions that were tried whose token the live rows held; coverage_committed: the same of all
    committed tokens, bonus included; out_of_vocabulary: share of the tried positions that were lost for want of a row.
    """
    traces = own[0]
    rounds = [r for trace in traces for r in trace.rounds]
    drafting = [r for r in rounds if r.drafted]
    joint = joint_acceptance(traces)
    identity = 1 + sum(joint) - ended_inside_draft(traces)
    found = tau(traces)
    assert not rounds or abs(identity - found) < IDENTITY_ERROR, (identity, found)
    accepted = sum(r.accepted for r in rounds)
    rejected = [r for r in drafting if r.accepted < r.depth and r.emitted > r.accepted]
    held = sum(r.is_covered for r in rejected)
    own_tokens = [r for r in rounds if r.emitted > r.accepted]
    tried = accepted + len(rejected)
    return {
        "rounds": len(rounds),
        "tau": found,
        "tau_identity": identity,
        "mean_request_tau": mean_request_tau(traces),
        "conditional_acceptance": conditional_acceptance(traces),
        "joint_acceptance": joint,
        "mean_drafted": _mean(r.drafted for r in drafting),
        "live_rows": _mean(r.live for r in drafting),
        "coverage_draft": _ratio(accepted + held, tried),
        "coverage_committed": _ratio(accepted + sum(r.is_covered for r in own_tokens), accepted + len(own_tokens)),
        "out_of_vocabulary": _ratio(len(rejected) - held, tried),
    }


def times(own: Repeats, alone: Repeats) -> dict[str, Any]:
    """Milliseconds of a round: medians over the rounds that drafted (draft_ms includes head_ms, which is NaN off the CPU), and of one
    token of the target alone; commit_ms, a part of draft_ms, is a mean: a vocabulary may do much in one round of several.
    prefill_ms includes the drafter's."""
    drafting = [r for traces in own for trace in traces for r in trace.rounds if r.drafted]
    plain = [r for traces in alone for trace in traces for r in trace.rounds]
    return {
        "draft_ms": _median_ms([r.draft_s for r in drafting]),
        "head_ms": _median_ms([r.head_s for r in drafting]),
        "commit_ms": 1e3 * _mean(r.commit_s for r in drafting),
        "verify_ms": _median_ms([r.verify_s for r in drafting]),
        "sample_ms": _median_ms([r.sample_s for r in drafting]),
        "target_ms": _median_ms([r.seconds for r in plain]),
        "prefill_ms": _median_ms([t.prefill_s + t.draft_prefill_s for traces in own for t in traces]),
    }


def hindsight(own: Repeats, costs: CostTable | None) -> dict[str, Any]:
    """See CostTable.hindsight; and best_fixed_length: the one length that pays most by (0.1) at the acceptances that were seen.
    costs: of chains of one request; without them, and without rounds, every number is None."""
    rounds = [(r.drafted, r.accepted) for trace in own[0] for r in trace.rounds]
    if not rounds or costs is None:
        return dict.fromkeys([*(f"hindsight_{field.name}" for field in fields(Hindsight)), "best_fixed_length"])
    seen = [alpha for alpha in conditional_acceptance(own[0]) if not math.isnan(alpha)]
    return {
        **{f"hindsight_{key}": value for key, value in asdict(costs.hindsight(rounds)).items()},
        "best_fixed_length": costs.best_length(seen[: len(costs.draft) - 1]),
    }


def against_full_head(own: Repeats, full: Repeats) -> dict[str, Any]:
    """What a cheaper head should bring by papers (1.1), from its own head time and the full head's round, and what it does bring.

    nu: ratio of head times.   kappa: the full head's time over the rest of its round.   rho_tau: ratio of taus.
    prediction_warning: not empty where predicted and measured ratio of decode rates are more than 5 % apart.
    Nothing where one of them never drafted; nu, kappa and the prediction are NaN where head times are not known.
    """
    seconds, full_seconds = (_mean_seconds(side, "seconds") for side in (own, full))
    if math.isnan(seconds) or math.isnan(full_seconds):
        return {}
    head, full_head = (_mean_seconds(side, "head_s") for side in (own, full))
    nu, kappa, rho_tau = (
        _ratio(head, full_head),
        _ratio(full_head, full_seconds - full_head),
        tau(own[0]) / tau(full[0]),
    )
    predicted = relative_throughput(rho_tau, nu, kappa)
    measured = statistics.median(round_rate(m) / round_rate(f) for m, f in zip(own, full, strict=True))
    error = predicted / measured - 1
    warning = f"(1.1) is {error:+.0%} off what was measured" if abs(error) > PREDICTION_ERROR else ""
    return {
        "nu": nu,
        "kappa": kappa,
        "rho_tau": rho_tau,
        "rho_tps_predicted": predicted,
        "rho_tps_measured": measured,
        "prediction_warning": warning,
    }


def median_seconds(side: Repeats) -> np.ndarray:
    """[M] seconds of every request, medians over the repeats."""
    return np.median([[trace.seconds for trace in traces] for traces in side], axis=0)


def trace_to_row(trace: DecodeTrace) -> dict[str, Any]:
    """For a JSON file: rounds as lists; None where the time in the head is not known."""
    row = asdict(trace)
    return {**row, "rounds": [without_nan(list(r.values())) for r in row["rounds"]]}


def trace_from_row(row: dict[str, Any]) -> DecodeTrace:
    rounds = [Round(*values) for values in row["rounds"]]
    return DecodeTrace(**{**row, "rounds": [replace(r, head_s=math.nan) if r.head_s is None else r for r in rounds]})


def without_nan(value: Any) -> Any:
    """For JSON, which has no NaN: None stands for a number that there is not."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _mean_seconds(side: Repeats, part: str) -> float:
    """Mean seconds a round of those that drafted."""
    return _mean(getattr(r, part) for traces in side for trace in traces for r in trace.rounds if r.drafted)


def round_rate(traces: Sequence[DecodeTrace]) -> float:
    """Tokens per second in rounds, prefills left out. NaN where every text ended with its first token."""
    rounds = [r for trace in traces for r in trace.rounds]
    return _ratio(sum(r.emitted for r in rounds), sum(r.seconds for r in rounds))


def _mean(values: Any) -> float:
    values = list(values)
    return _ratio(sum(values), len(values))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")


def _median_ms(seconds: list[float]) -> float:
    return 1e3 * statistics.median(seconds) if seconds else float("nan")
