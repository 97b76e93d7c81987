"""Costs of a few draft lengths, and rounds of which the accepted share is prescribed: counts and formulas, not times."""

import pytest
import torch

from specdraft.config import UserError
from specdraft.decoding import long_context
from specdraft.decoding.long_context import (
    RandomModel,
    costs_of_lengths,
    needed_positions,
    prescribed_rounds,
    random_target,
)
from specdraft.decoding.trace import Round
from specdraft.models.sparse_self import SparseSelfConfig, SparseSelfDrafter
from specdraft.testing import tiny_target

CONFIG = SparseSelfConfig(0.2, recent=8, longest=6)


def test_costs_between_the_measured_lengths_lie_on_straight_lines(monkeypatch):
    target = tiny_target(layers=3, tap_layers=(0,))
    drafter, drawn = SparseSelfDrafter(target, CONFIG), []

    class Noting(long_context._Shuffled):
        def length(self):
            drawn.append(super().length())
            return drawn[-1]

    monkeypatch.setattr(long_context, "_Shuffled", Noting)
    costs = costs_of_lengths(target, drafter, [[5, 80, 33]], [6, 2], max_new_tokens=30)
    assert set(drawn) == {1, 2, 6}  # nothing between the target alone, which nobody watches, and the first draft
    for curve in (costs.draft, costs.verify, costs.sample):
        assert len(curve) == 7
        assert curve[3] == pytest.approx((3 * curve[2] + curve[6]) / 4)
    assert costs.draft[0] < costs.draft[2]  # the target alone drafts nothing
    with pytest.raises(UserError, match=r"fewer than 5 rounds that drafted \[6\]"):
        costs_of_lengths(target, drafter, [[5, 80, 33]], [1, 6], max_new_tokens=6)


def test_prescribed_rounds_accept_what_they_are_told(monkeypatch):
    """On a cache that is full of random numbers: the next index holds the context, accepted shares follow alpha, and what the
    target alone is timed on leaves nothing behind."""
    lengths, rounds, context = [2, 5], 8, 300
    shape = RandomModel(hidden=32, layers=2, heads=4, kv_heads=2, vocab=64)
    target = random_target(shape, context + needed_positions(lengths, rounds), torch.float32, "cpu", 0)
    done, sizes, used = [], [], []
    run_round = long_context._round

    def noted(target, drafter, cache, k, accepted):
        before = cache.lengths[0]
        done.append(run_round(target, drafter, cache, k, accepted))
        sizes.append((cache.lengths[0] - before, int(drafter.sequence.packed.chosen[0]), drafter.sequence.length))
        return done[-1]

    monkeypatch.setattr(long_context, "_round", noted)
    summarise = long_context._summarise
    monkeypatch.setattr(long_context, "_summarise", lambda *args: used.append(args[-1].tolist()) or summarise(*args))
    costs = prescribed_rounds(target, CONFIG, context, lengths, [0.75, 2 / 3, 0.5], rounds)
    counted = done[len(lengths) :]  # without the warm-up
    assert [r.drafted for r in counted] == lengths * rounds
    assert sum(r.accepted for r in counted if r.drafted == 2) == rounds * (0.75 + 0.5)
    joint = [0.75, 0.5, 0.25, 0.125, 0.0625]
    deep = [r.accepted for r in counted if r.drafted == 5]
    assert sum(deep) == pytest.approx(rounds * sum(joint), abs=1)
    assert used == [
        [sum(a >= j for a in deep) / rounds for j in range(1, 6)]
    ]  # what is predicted with is what was done
    assert all(0 < r.commit_s < r.draft_s for r in counted)
    assert [grown for grown, _, _ in sizes] == [r.accepted + 1 for r in done]
    assert all(chosen == CONFIG.size(length, grown) for grown, chosen, length in sizes)
    assert set(costs.measured) == set(costs.predicted) == {2, 5}
    assert target.watcher is not None


def test_the_prediction_is_the_efficiency_formula():
    """C_AR 1, C_d 0.1, C_v 1.2; alpha 0.8."""
    joint = [0.8**j for j in range(1, 9)]
    rounds = {
        k: [Round(k, 1, 2, draft_s=0.1 * k + 0.06, verify_s=1.1, sample_s=0.04, commit_s=0.06)] * 3 for k in (1, 4, 8)
    }
    costs = long_context._summarise(1000, 0.1, [1.0] * 3, rounds, torch.tensor(joint).numpy())
    assert costs.draft_s == pytest.approx(0.1)
    assert costs.verify_s == pytest.approx(1.2)
    speedups = [(1 + sum(joint[:k])) / (0.1 * k + 1.2) for k in range(9)]
    assert costs.predicted == pytest.approx({k: speedups[k] for k in (1, 4, 8)})
    assert costs.measured == pytest.approx({k: 2 / (0.1 * k + 1.2) for k in (1, 4, 8)})
    best = max(range(9), key=speedups.__getitem__)
    assert 0 < best < 8
    assert costs.rule_length == best  # the rule finds the argmax (papers 0: T is affine)
