"""The paper's constants (arXiv 2603.05210), and every way to choose a size against brute force."""

import sys

import numpy as np
import pytest
import torch

from specdraft.config import UserError
from specdraft.data.vocab import VocabMap, admission_order, coverage
from specdraft.data.vocab_size import (
    SizeConfig,
    choose_size,
    coverage_curve,
    draft_flops,
    head_flops,
    latency_reduction,
    smallest,
    tau_of,
    utility,
)

LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
V = 128256


def zipf(exponent: float, size: int = V, seed: int = 0) -> torch.Tensor:
    """Counts of a text of a few million tokens, most of whose tokens are rare, in no order of id."""
    counts = (2e6 / torch.arange(1, size + 1, dtype=torch.float64) ** exponent).long()
    return counts[torch.randperm(size, generator=torch.Generator().manual_seed(seed))]


def test_constants_of_the_paper():
    parts = draft_flops(**LLAMA)
    assert {name: round(flops / 1e6, 1) for name, flops in parts.items()} == {
        "fc": 100.7,
        "attention": 134.2,
        "mlp": 352.3,
    }
    head = head_flops(4096, V)
    assert round(sum(parts.values()) / 1e6, 1) == 587.2
    assert round(head / 1e6, 1) == 1050.7
    assert round(head / (head + sum(parts.values())), 4) == 0.6415
    reduction = latency_reduction(**LLAMA, vocab_size=V)
    assert round(reduction(13264), 3) == 0.575
    assert round(reduction(32000), 3) == 0.481
    assert reduction(V) == 0
    assert reduction(np.array([0, V])).tolist() == [pytest.approx(0.6415, abs=1e-4), 0]


def test_a_low_rank_head_scores_0_779_on_the_papers_utility():
    """papers.md 6: R = 512 covers everything, for the FLOPs of some 16,500 rows; and beats k = 13,264 unless that covers 0.984."""
    reduction = latency_reduction(**LLAMA, vocab_size=V)
    rows = head_flops(4096, V, rank=512) / (2 * 4096)
    assert round(0.5 * 1 + 0.5 * reduction(rows), 3) == 0.779
    assert round(2 * (0.779 - 0.5 * reduction(13264)), 2) == 0.98


def test_coverage_of_every_size_is_that_of_its_map():
    """Required ids are in from the start; the map of size k is the first k of the admission order."""
    counts, held_out = zipf(1.0, 60), zipf(1.0, 60, seed=1)
    always = [59, 3, 7]
    admission = admission_order(counts, always)
    curve = coverage_curve(held_out, admission)
    assert len(curve) == 61
    assert curve[-1] == 1
    for k in range(3, 61):
        vocab = VocabMap.from_counts(counts, k, always)
        assert sorted(vocab.target_ids.tolist()) == sorted(admission[:k].tolist())
        assert curve[k] == pytest.approx(coverage(held_out, vocab))
    with pytest.raises(UserError, match="no tokens to cover"):
        coverage_curve(torch.zeros(60), admission)


def test_smallest_that_covers():
    curve = np.array([0, 0.5, 0.5, 0.8, 0.95])
    assert [smallest(curve, share).size for share in (0.5, 0.6, 0.8, 0.9)] == [1, 3, 3, 4]
    assert smallest(curve, 0.5, least=3).size == 3
    with pytest.raises(UserError, match=r"got 0.96, allowed: up to 0.9500"):
        smallest(curve, 0.96)


@pytest.mark.parametrize("exponent", [0.9, 1.1, 1.4])
@pytest.mark.parametrize("minimum", [0.0, 0.9])
def test_exhaustive_search_is_the_best_of_all(exponent, minimum):
    curve = coverage_curve(zipf(exponent), admission_order(zipf(exponent)))
    reduction = latency_reduction(**LLAMA, vocab_size=V)
    config = SizeConfig("utility", min_coverage=min(minimum, float(curve[40_000])), highest=50_000)
    choice = choose_size(config, curve, 1, utility(curve, reduction, 0.5))
    allowed = [k for k in range(50, 50_001) if curve[k] >= config.min_coverage]
    best = max(allowed, key=lambda k: (0.5 * curve[k] + 0.5 * reduction(k), -k))
    assert choice.size == best
    assert choice.value == pytest.approx(0.5 * curve[best] + 0.5 * reduction(best))
    assert choice.coverage == curve[best]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("minimum", [0.0, 0.97])
def test_tpe_reaches_the_oracle(seed, minimum):
    """As the paper searches: Optuna's TPESampler, integer k in 50..50,000, 100 trials. Within 1e-3 of exhaustive search's utility."""
    curve = coverage_curve(zipf(1.3), admission_order(zipf(1.3)))
    value = utility(curve, latency_reduction(**LLAMA, vocab_size=V), 0.5)
    found = {
        search: choose_size(SizeConfig("utility", min_coverage=minimum, search=search, seed=seed), curve, 1, value)
        for search in ("exhaustive", "tpe")
    }
    assert found["tpe"].coverage >= minimum
    assert 0 <= found["exhaustive"].value - found["tpe"].value < 1e-3
    if minimum:
        assert found["exhaustive"].size == smallest(curve, minimum).size, "the constraint binds here"


def test_tpe_without_optuna_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    config = SizeConfig("utility", search="tpe", lowest=1, min_coverage=0)
    with pytest.raises(UserError, match=r"pip install 'specdraft\[vocab\]', or choose exhaustive"):
        choose_size(config, np.array([0, 0.5, 1.0]), 1, lambda k: k * 1.0)


def test_bounds_of_the_choice():
    curve = np.linspace(0, 1, 101)
    assert choose_size(SizeConfig(size=40), curve, 5).size == 40
    value = lambda k: -1.0 * k  # noqa: E731
    config = SizeConfig("utility", min_coverage=0, lowest=1)
    assert choose_size(config, curve, 5, value).size == 5, "never less than the required ids"
    for bad, least, message in [
        (SizeConfig(size=4), 5, r"got 4, allowed: 5 \(ids that are always in\) to 100"),
        (SizeConfig(size=101), 5, "got 101"),
        (SizeConfig("utility", lowest=60, highest=60, min_coverage=0.7), 5, "up to 0.6000, what 60 tokens cover"),
        (SizeConfig("utility", lowest=1, highest=4), 5, r"lowest, highest: got 1 to 4, allowed: .* 5 .* to 100"),
        (SizeConfig("utility", lowest=101), 5, r"lowest, highest: got 101 to 50000, allowed: .* 5 .* to 100"),
    ]:
        with pytest.raises(UserError, match=message):
            choose_size(bad, curve, least, value)


@pytest.mark.parametrize(
    "options",
    [{"min_coverage": 1.1}, {"weight": -1}, {"acceptance": (1.2,)}, {"acceptance": ()}, {"trials": 0}, {"lowest": 0}],
    ids=str,
)
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(UserError, match=next(iter(options))):
        SizeConfig(**options)


def test_tau_is_bounded_by_coverage():
    """1 + sum_j prod alpha_i C; with everything covered it is the full head's, with nothing 1."""
    assert tau_of((0.5, 0.4), np.ones(())) == pytest.approx(1 + 0.5 + 0.5 * 0.4)
    assert tau_of((0.5, 0.4), np.array([0.0, 0.8])).tolist() == pytest.approx([1, 1 + 0.4 + 0.4 * 0.32])
    assert np.all(np.diff(tau_of((0.9, 0.9), np.linspace(0, 1, 50))) > 0)
