"""The cost table: exact search over measured, not monotone costs; and the files it is kept in."""

import dataclasses
import itertools
import json

import pytest

from specdraft.config import UserError
from specdraft.decoding.costs import CostTable, break_even, relative_throughput
from specdraft.provenance import machine


def table(draft, verify, alone=1.0):
    return CostTable(draft, verify, [0.0] * len(draft), alone, "tiny", "float32", machine())


def test_expected_speedup_is_equation_0_1():
    costs = table(draft=[0.0, 0.2, 0.4], verify=[1.0, 1.1, 1.2])
    assert costs.expected_speedup(2, [0.8, 0.5]) == pytest.approx((1 + 0.8 + 0.4) / (0.4 + 1.2))
    assert costs.expected_speedup(1, [0.8, 0.5]) == pytest.approx(1.8 / 1.3)


def test_the_longest_draft_pays_when_everything_is_accepted_and_none_when_nothing_is():
    costs = table(draft=[0.0, 0.1, 0.2, 0.3], verify=[1.0, 1.05, 1.1, 1.15])
    assert costs.best_length([1, 1, 1]) == 3
    assert costs.best_length([0, 0, 0]) == 0
    assert costs.best_length([]) == 0


def test_a_step_in_the_costs_does_not_stop_the_search():
    """fp32 on a CPU: two and three tokens cost more than four (papers 0: a stepped T needs the argmax of the table)."""
    costs = table(draft=[0.0, 0.02, 0.04, 0.06], verify=[0.66, 1.08, 1.38, 1.0], alone=0.66)
    acceptance = [0.7, 0.7, 0.7]
    assert costs.expected_speedup(1, acceptance) < 1.04
    assert costs.best_length(acceptance) == 3


@pytest.mark.parametrize("acceptance", list(itertools.product([0.1, 0.5, 0.9], repeat=3)))
def test_best_length_is_the_argmax(acceptance):
    costs = table(draft=[0.0, 0.1, 0.2, 0.3], verify=[1.0, 1.2, 1.1, 1.4])
    speedups = [1.0] + [costs.expected_speedup(k, acceptance) for k in (1, 2, 3)]
    assert speedups[costs.best_length(acceptance)] == max(speedups)


def test_lengths_that_were_not_measured_are_refused():
    with pytest.raises(UserError, match="got 2 positions, allowed: the 1"):
        table(draft=[0.0, 0.1], verify=[1.0, 1.1]).best_length([0.5, 0.5])


def test_files_round_trip(tmp_path):
    costs = table(draft=[0.0, 0.1], verify=[1.0, 1.1])
    costs.save(tmp_path / "costs.json")
    assert CostTable.load(tmp_path / "costs.json") == costs


@pytest.mark.parametrize(("key", "value"), [("threads", 99), ("processor", "another")])
def test_costs_of_another_machine_are_refused(tmp_path, key, value):
    costs = table(draft=[0.0, 0.1], verify=[1.0, 1.1])
    dataclasses.replace(costs, machine={**costs.machine, key: value}).save(tmp_path / "costs.json")
    with pytest.raises(UserError, match=rf"measured with {key}.*measure the costs again"):
        CostTable.load(tmp_path / "costs.json")


@pytest.mark.parametrize("content", [None, "{", json.dumps({"draft": [1]}), "[]"])
def test_bad_files_are_refused(tmp_path, content):
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=r"cost table .* cannot be read"):
        CostTable.load(path)


@pytest.mark.parametrize(
    ("head", "rho_tau", "nu", "rho_tps"),
    [
        ("full", 1, 1, 1),
        ("64k rows", 1.00, 0.58, 1.09),
        ("SpecVocab", 1.01, 0.46, 1.16),
        ("H/8", 0.99, 0.21, 1.19),
        ("H/16", 0.98, 0.14, 1.18),
    ],
)
@pytest.mark.parametrize("kappa", [0.25, 0.27])
def test_the_performance_model_reproduces_the_papers_table(head, rho_tau, nu, rho_tps, kappa):
    """SlimSpec's table for Llama-3.1-8B at T = 0 (papers 1)."""
    assert relative_throughput(rho_tau, nu, kappa) == pytest.approx(rho_tps, abs=0.03)
    assert relative_throughput(break_even(nu, kappa), nu, kappa) == pytest.approx(1)


@pytest.mark.parametrize("draft", [[0.0, 0.1, 0.2, 0.3], [0.0, 0.5, 0.6, 0.62], [0.0, 0.9, 0.1, 0.2]])
@pytest.mark.parametrize("rounds", [[(2, 0), (3, 1), (1, 1), (3, 3)], [(1, 0)] * 5 + [(3, 3)], [(0, 0), (2, 2)]])
def test_hindsight_is_the_best_of_all_choices_of_lengths(draft, rounds):
    """Against every combination of lengths, costs that are not monotone included."""
    costs = table(draft=draft, verify=[1.0, 1.05, 1.1, 1.3])
    found = costs.hindsight(rounds)

    def rate(lengths):
        tokens = sum(1 + min(k, a) for k, (_, a) in zip(lengths, rounds, strict=True))
        return tokens / sum(costs.round_seconds(k) for k in lengths)

    best = max(rate(lengths) for lengths in itertools.product(range(4), repeat=len(rounds)))
    own = rate([drafted for drafted, _ in rounds])
    assert found.share_of_best == pytest.approx(own / best)
    assert found.lower_bounds == sum(d == a for d, a in rounds) / len(rounds)


def test_hindsight_of_rounds_that_chose_right():
    costs = table(draft=[0.0, 0.01, 0.02, 0.03], verify=[1.0] * 4)
    found = costs.hindsight([(3, 3), (1, 1), (2, 2)])
    assert (found.length, found.distance, found.share_of_best, found.lower_bounds) == (2, 0, pytest.approx(1), 1)
    late = costs.hindsight([(3, 1), (3, 1)])
    assert (late.length, late.distance, late.lower_bounds) == (1, 2, 0)
    assert late.share_of_best < 1


@pytest.mark.parametrize("rounds", [[], [(2, 1), (4, 0)]])
def test_hindsight_needs_rounds_that_the_costs_cover(rounds):
    with pytest.raises(UserError, match="allowed: 0 to the 3"):
        table(draft=[0.0] * 4, verify=[1.0] * 4).hindsight(rounds)
