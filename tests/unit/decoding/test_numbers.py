"""The numbers of a benchmark, from traces that are made up: every one can be worked out by hand."""

import json
import math

import pytest
import torch

from specdraft.decoding import numbers
from specdraft.decoding.costs import CostTable
from specdraft.decoding.trace import DecodeTrace, Round
from specdraft.models.drafter import head_clock


def trace(rounds, seconds=None):
    tokens = 1 + sum(r.emitted for r in rounds)
    return DecodeTrace(3, tokens, seconds or sum(r.seconds for r in rounds) + 0.5, 0.3, 0.2, rounds)


def drafted(count, accepted, head=0.01, live=0, is_covered=True, emitted=None):
    return Round(count, accepted, accepted + 1 if emitted is None else emitted, 0.1, head, 0.8, 0.1, live, is_covered)


PLAIN = Round(0, 0, 1, 0.0, 0.0, 0.9, 0.1)
ALONE = [[trace([PLAIN] * 8), trace([PLAIN] * 4)]] * 3
OWN = [
    [
        trace([drafted(4, 4, live=10), drafted(4, 1, live=20, is_covered=False), drafted(4, 0, live=30)]),
        trace([drafted(2, 2, live=20, emitted=2), Round(0, 0, 1, 0, 0, 0.9, 0.1, 0, False)]),
    ]
] * 3


def test_acceptance():
    found = numbers.acceptance(OWN)
    assert found["rounds"] == 5
    assert found["tau"] == pytest.approx(found["tau_identity"]) == (5 + 2 + 1 + 2 + 1) / 5
    assert found["mean_request_tau"] == (8 / 3 + 3 / 2) / 2
    assert found["joint_acceptance"] == [3 / 5, 2 / 5, 1 / 5, 1 / 5]
    assert found["conditional_acceptance"] == [3 / 4, 2 / 3, 1, 1]
    assert found["mean_drafted"] == 14 / 4
    assert found["live_rows"] == 20


def test_coverage_counts_what_could_have_been_drafted():
    """Seven drafted tokens were kept. Two positions were rejected, one of them for want of a row. Of the target's own four tokens
    (the last round ended inside its draft) two were not held: one bonus, one of them in a round without a draft."""
    found = numbers.acceptance(OWN)
    assert found["coverage_draft"] == (7 + 1) / 9
    assert found["out_of_vocabulary"] == 1 / 9
    assert found["coverage_committed"] == (7 + 2) / 11


def test_positions_of_a_tree_are_its_levels():
    """A tree of six nodes on two levels: a path that goes down both was not rejected, and its bonus token is no miss."""
    whole, cut = (Round(6, accepted, accepted + 1, is_covered=False, levels=2) for accepted in (2, 1))
    found = numbers.acceptance([[trace([whole, whole, cut], 1.0)]])
    assert (found["coverage_draft"], found["out_of_vocabulary"]) == (5 / 6, 1 / 6)
    assert found["coverage_committed"] == 5 / 8


def test_the_target_alone_has_no_draft_to_report():
    found = numbers.acceptance(ALONE)
    assert found["tau"] == 1
    assert math.isnan(found["coverage_draft"])
    times = numbers.times(ALONE, ALONE)
    assert math.isnan(times["draft_ms"])
    assert times["target_ms"] == pytest.approx(1000)
    assert numbers.without_nan({"a": [float("nan"), 1.0], "b": {"c": float("nan")}}) == {
        "a": [None, 1.0],
        "b": {"c": None},
    }


def test_times_are_those_of_rounds_that_drafted():
    found = numbers.times(OWN, ALONE)
    assert found["draft_ms"] == pytest.approx(100)
    assert found["head_ms"] == pytest.approx(10)
    assert found["verify_ms"] == pytest.approx(800)
    assert found["prefill_ms"] == pytest.approx(500)


def with_seconds(repeats, *seconds):
    return [
        [DecodeTrace(t.prompt_tokens, t.tokens, s, 0.1, 0.1, t.rounds) for t, s in zip(traces, own, strict=True)]
        for traces, own in zip(repeats, seconds, strict=True)
    ]


def test_a_request_takes_the_median_of_its_repeats():
    own = with_seconds(OWN, (5.0, 2.0), (4.0, 99.0), (30.0, 3.0))
    alone = with_seconds(ALONE, (9.0, 5.0), (9.0, 5.0), (9.0, 5.0))
    found = numbers.speed(own, alone)
    assert found["tokens"] == 9 + 4
    assert found["tokens_per_second"] == pytest.approx(13 / (5 + 3))
    assert found["target_tokens_per_second"] == pytest.approx(14 / 14)
    assert found["speedup"] == pytest.approx(13 / 8)
    assert found["speedup_repeats"] == pytest.approx([13 / 7, 13 / 103, 13 / 33])
    assert found["speedup_low"] <= found["speedup"] <= found["speedup_high"]
    assert found["speedup_low"] < found["speedup_high"]


def test_hindsight_and_the_best_single_length():
    costs = CostTable([0.0, 0.1, 0.2, 0.3, 0.4], [1.0] * 5, [0.0] * 5, 1.0, "tiny", "float32", {})
    found = numbers.hindsight(OWN, costs)
    assert found["hindsight_length"] == (4 + 1 + 0 + 2 + 0) / 5
    assert found["hindsight_distance"] == (0 + 3 + 4 + 0 + 0) / 5
    assert found["hindsight_lower_bounds"] == 3 / 5
    assert found["best_fixed_length"] == costs.best_length([3 / 4, 2 / 3, 1, 1])
    for nothing in (numbers.hindsight([[DecodeTrace(3, 1)]], costs), numbers.hindsight(OWN, None)):
        assert nothing == dict.fromkeys(found)


def side(head, rest, accepted, rounds=20):
    made = [Round(3, accepted, accepted + 1, head + rest - 0.5, head, 0.4, 0.1) for _ in range(rounds)]
    return [[trace(made)]] * 2


def test_the_prediction_is_equation_1_1():
    """A round whose rest stays as it was is predicted exactly."""
    full, cheap = side(0.2, 0.8, 2), side(0.05, 0.8, 1)
    found = numbers.against_full_head(cheap, full)
    assert found["nu"] == pytest.approx(0.25)
    assert found["kappa"] == pytest.approx(0.25)
    assert found["rho_tau"] == pytest.approx(2 / 3)
    assert (
        found["rho_tps_predicted"] == pytest.approx(found["rho_tps_measured"]) == pytest.approx(2 / 3 * 1.25 / 1.0625)
    )
    assert found["prediction_warning"] == ""
    same = numbers.against_full_head(full, full)
    assert (same["nu"], same["rho_tps_predicted"]) == (1, 1)


def test_a_prediction_that_is_off_is_flagged():
    slower = side(0.05, 1.2, 1)
    found = numbers.against_full_head(slower, side(0.2, 0.8, 2))
    assert found["rho_tps_predicted"] / found["rho_tps_measured"] > 1.05
    assert "(1.1) is +" in found["prediction_warning"]
    assert numbers.against_full_head(ALONE, side(0.2, 0.8, 2)) == {}


def test_head_times_that_nobody_knows_are_none():
    """Off the CPU a head product is not waited for; everything else of the round is known."""
    now = head_clock(torch.device("cuda"))
    cheap, full = side(0.2, 0.8, 1), side(0.2, 0.8, 2)
    for r in cheap[0][0].rounds + full[0][0].rounds:
        r.head_s = now() - now()
    row = json.loads(json.dumps(numbers.trace_to_row(cheap[0][0]), allow_nan=False))
    assert math.isnan(numbers.trace_from_row(row).rounds[0].head_s)
    found = numbers.without_nan(numbers.times(cheap, ALONE) | numbers.against_full_head(cheap, full))
    assert found["draft_ms"] == pytest.approx(500)
    assert [found[name] for name in ("head_ms", "nu", "kappa", "rho_tps_predicted")] == [None] * 4
    assert found["rho_tau"] == found["rho_tps_measured"] == pytest.approx(2 / 3)
    assert found["prediction_warning"] == ""
    assert head_clock(torch.device("cpu"))() > 0


def test_traces_round_trip_through_json():
    for one in OWN[0]:
        assert numbers.trace_from_row(json.loads(json.dumps(numbers.trace_to_row(one)))) == one
