"""Measured head times, what is predicted from them, and the table and plot of all sizes, on a tiny target."""

import copy
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from specdraft.data.chat import Example
from specdraft.data.token_counts import TokenCounts
from specdraft.data.vocab import admission_order
from specdraft.data.vocab_size import SizeConfig, choose_size, coverage_curve, latency_reduction, utility
from specdraft.decoding import head_times
from specdraft.decoding.costs import relative_throughput
from specdraft.decoding.frontier import Curves, frontier, plot, probability_mass, write_frontier
from specdraft.decoding.head_times import HeadTimes, cached_head_times, rank_throughput, timed_ranks, timed_sizes
from specdraft.testing import TINY_VOCAB, tiny_target

TIMES = HeadTimes(
    rows=[256, 1024, 4096],
    row_seconds=[1e-3, 2e-3, 10e-3],
    ranks=[2, 4, 8],
    rank_seconds=[1e-3, 2e-3, 4e-3],
    body=2e-3,
    verify=40e-3,
    alone=35e-3,
    drafted=2,
    target="made up",
    dtype="float32",
    machine={"processor": "none", "threads": 1},
    others_cpu_share=0.0,
    warning="",
)
ALPHA = (0.6, 0.5)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def test_sizes_and_ranks_that_are_timed():
    assert timed_sizes(1000) == [256, 512, 1000]
    assert timed_sizes(262144) == [256 << i for i in range(10)] + [262144]
    assert timed_sizes(200) == [200]
    assert timed_ranks(576) == [36, 72, 144]


def test_predictions_from_times():
    """(1.1) and (0.1) of papers.md, written out for one size half way between two that were timed."""
    k, cover = 640, 0.9
    head = 1.5e-3
    assert TIMES.seconds(k) == pytest.approx(head)
    tau, full_tau = 1 + 0.6 * 0.9 + 0.6 * 0.5 * 0.81, 1 + 0.6 + 0.3
    kappa = 2 * 10e-3 / (2 * 2e-3 + 40e-3)
    assert TIMES.kappa == pytest.approx(kappa)
    expected = relative_throughput(tau / full_tau, head / 10e-3, kappa)
    assert TIMES.relative(head, np.float64(cover), ALPHA) == pytest.approx(expected)
    assert expected == pytest.approx((tau / (2 * (2e-3 + head) + 40e-3)) / (full_tau / (2 * (2e-3 + 10e-3) + 40e-3)))
    assert TIMES.speedup(head, np.float64(cover), ALPHA) == pytest.approx(tau * 35e-3 / (2 * (2e-3 + head) + 40e-3))
    assert TIMES.reduction(4096) == 0
    assert TIMES.reduction(k) == pytest.approx(1 - (2e-3 + head) / 12e-3)


@pytest.fixture(scope="module")
def coverage():
    return coverage_curve(1e6 / torch.arange(1, 4097) ** 1.2, torch.arange(4096))


@pytest.mark.parametrize("minimum", [0.0, 0.5, 0.95])
def test_the_largest_throughput_is_found(coverage, minimum):
    """Cheap heads that miss too much and full ones both lose; the best that covers enough is where brute force finds it."""
    config = SizeConfig("throughput", min_coverage=minimum, acceptance=ALPHA)
    choice = choose_size(config, coverage, 1, TIMES.throughput(coverage, ALPHA))
    values = {k: float(TIMES.relative(TIMES.seconds(k), coverage[k], ALPHA)) for k in range(50, 4097)}
    allowed = [k for k in values if coverage[k] >= minimum]
    assert choice.size == max(allowed, key=lambda k: (values[k], -k))
    assert 300 < choice.size < 4000
    assert choice.value == pytest.approx(values[choice.size])
    assert (choice.size == allowed[0]) == (minimum == 0.95), "there the constraint binds"
    assert choice.value > 1 == pytest.approx(values[4096])


@pytest.mark.parametrize("minimum", [0.0, 0.95])
@pytest.mark.parametrize("weight", [0.2, 0.5, 0.8])
def test_the_best_measured_utility_is_found(coverage, minimum, weight):
    """a C(k) + (1 - a) R(k), R written out from seconds of a draft step, against brute force."""
    config = SizeConfig("measured", min_coverage=minimum, weight=weight)
    choice = choose_size(config, coverage, 1, utility(coverage, TIMES.reduction, weight))
    values = {}
    for k in range(50, 4097):
        seconds = 2e-3 + float(np.interp(k, [256, 1024, 4096], [1e-3, 2e-3, 10e-3]))
        values[k] = weight * coverage[k] + (1 - weight) * (1 - seconds / 12e-3)
    allowed = [k for k in values if coverage[k] >= minimum]
    assert choice.size == max(allowed, key=lambda k: (values[k], -k))
    assert choice.value == pytest.approx(values[choice.size])


def test_times_are_measured_once(target, tmp_path, monkeypatch):
    """Every head and the round get a positive time; another run reads the file, unless the machine was busy when it was made."""
    monkeypatch.setattr(head_times, "BUSY", 1.1)
    times = cached_head_times(target, tmp_path, drafted=2, repeats=2)
    assert times.rows == [256, TINY_VOCAB]
    assert times.ranks == [2, 4, 8]
    assert all(s > 0 for s in [*times.row_seconds, *times.rank_seconds, times.body, times.verify, times.alone])
    assert times.dtype == "float32"
    assert times.int8_full_seconds > 0
    assert [s > 0 for s in times.int8_rank_seconds] == [True] * 3
    made = []
    monkeypatch.setattr(head_times, "measure_head_times", lambda *_: made.append(1) or replace(times, warning="busy"))
    assert cached_head_times(target, tmp_path, drafted=2, repeats=2) == times
    assert not made
    for _ in range(2):
        assert cached_head_times(target, tmp_path, drafted=3, repeats=2).warning == "busy"
    assert len(made) == 2
    elsewhere = copy.copy(target)
    elsewhere.device = torch.device("meta")
    cached_head_times(elsewhere, tmp_path, drafted=2, repeats=2)
    assert len(made) == 3


def test_ranks_by_predicted_throughput(target, monkeypatch):
    """(1.1) with kappa of the dense head itself, whatever its rows."""
    timed = {("rows", 256): 9.0, ("rows", 100): 4e-3, ("rank", 2): 1e-3, ("rank", 4): 2e-3}
    monkeypatch.setattr(head_times, "cold_seconds", lambda _, heads, __: {name: timed[name] for name in heads})
    monkeypatch.setattr(head_times, "round_seconds", lambda *_: (2e-3, 40e-3, 35e-3))
    found = rank_throughput(target, 100, 1.9, {2: 1.5, 4: 1.85}, drafted=2)
    full = 1.9 / (2 * (2e-3 + 4e-3) + 40e-3)
    assert found[2] == pytest.approx(1.5 / (2 * (2e-3 + 1e-3) + 40e-3) / full)
    assert found[4] == pytest.approx(1.85 / (2 * (2e-3 + 2e-3) + 40e-3) / full)


def test_probability_mass_is_the_targets_mean_law(target, tmp_path):
    """At the positions that predict a supervised token, from the model's own logits; kept on disk."""
    generator = torch.Generator().manual_seed(0)
    examples = []
    for number, length in enumerate((9, 14)):
        mask = torch.zeros(length, dtype=torch.bool)
        mask[4:] = True
        examples.append(Example(str(number), torch.randint(3, TINY_VOCAB, (length,), generator=generator), mask))
    laws = [target.model(e.input_ids[None]).logits[0].softmax(-1)[3:-1] for e in examples]
    mass = probability_mass(target, examples, tmp_path)
    torch.testing.assert_close(mass, torch.cat(laws).mean(0), atol=1e-5, rtol=1e-3)
    assert float(mass.sum()) == pytest.approx(1, abs=1e-4)
    assert len(list(tmp_path.iterdir())) == 1
    assert torch.equal(probability_mass(target, examples, tmp_path), mass)


@pytest.fixture
def curves(target):
    counts = (1000 / torch.arange(1, TINY_VOCAB + 1)).long()
    held_out = TokenCounts(torch.stack([counts, counts.flip(0)]), ("chat", "code"), "made up")
    reduction = latency_reduction(
        hidden_size=32, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=TINY_VOCAB
    )
    times = replace(TIMES, rows=[256, TINY_VOCAB], row_seconds=[1e-3, 2e-3])
    mass = torch.full((TINY_VOCAB,), 1 / TINY_VOCAB)
    return Curves(admission_order(counts), range(1, TINY_VOCAB + 1), held_out, mass, reduction, times)


def test_frontier_has_every_head_on_the_same_axes(target, curves, tmp_path):
    config = SizeConfig(acceptance=ALPHA)
    points = frontier(curves, 32, config, {"utility": 100, "coverage": 256})
    assert [p.name for p in points] == ["100 rows", "256 rows", "320 rows", "rank 2", "rank 4", "rank 8"]
    assert [p.chosen_by for p in points[:3]] == [["utility"], ["coverage"], []]
    small, full, lowrank = points[0], points[2], points[4]
    assert small.token_coverage < full.token_coverage == lowrank.token_coverage == 1
    assert small.by_domain["chat"] > 0.8 > 0.2 > small.by_domain["code"]
    assert small.mass_coverage == pytest.approx(100 / TINY_VOCAB)
    assert full.head_mflop == pytest.approx(2 * 32 * 320 / 1e6)
    assert lowrank.head_mflop == pytest.approx(2 * 4 * (32 + 320) / 1e6)
    assert full.flops_saved == 0 < lowrank.flops_saved
    assert full.relative == 1
    assert lowrank.head_ms == 2
    page = write_frontier(tmp_path, points, curves, config, target)
    assert (tmp_path / "frontier.md").read_text() == page
    assert "| 100 rows | utility |" in page
    assert "| tokens covered | chat | code |" in page
    assert "kappa" in page
    record = json.loads((tmp_path / "frontier.json").read_text())
    assert [p["rows"] for p in record["points"]] == [100, 256, 320, 320, 320, 320]
    assert record["provenance"]["machine"]["processor"]


@pytest.mark.parametrize(
    ("buildable", "rows"), [(range(256, 321), [256, 320]), (range(257, 321), [320]), (range(1, 101), [320])]
)
def test_sizes_that_cannot_be_built_are_left_out(curves, buildable, rows):
    """Fewer than the ids that are always in, more than a list names; the full head is what they are compared with."""
    points = frontier(replace(curves, buildable=buildable), 32, SizeConfig(acceptance=ALPHA), {})
    assert [point.rows for point in points if point.rank is None] == rows


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("ending", ["svg", "png"])
def test_plot(curves, tmp_path, measured, ending):
    curves = curves if measured else replace(curves, times=None, mass=None)
    points = frontier(curves, 32, SizeConfig(acceptance=ALPHA), {"utility": 100})
    assert plot(tmp_path / f"f.{ending}", points, curves, SizeConfig())
    head = (tmp_path / f"f.{ending}").read_bytes()[:300]
    assert b"<svg" in head + (tmp_path / f"f.{ending}").read_bytes()[:2000] if ending == "svg" else head[1:4] == b"PNG"


def test_without_matplotlib_there_is_no_plot(target, curves, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    curves = replace(curves, times=None, mass=None)
    page = write_frontier(tmp_path, frontier(curves, 32, SizeConfig(), {}), curves, SizeConfig(), target)
    assert "pip install 'specdraft[vocab]'" in page
    assert "Times were not measured" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frontier.json", "frontier.md"]
