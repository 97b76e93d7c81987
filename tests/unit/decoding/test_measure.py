"""Speedups and costs on a scripted pair: the counting, not the clock."""

import json
import math
import time

import pytest
import torch
from scripted import ScriptedDrafter, ScriptedTarget

from specdraft.config import UserError
from specdraft.decoding.costs import CostTable
from specdraft.decoding.length_policies import Fixed
from specdraft.decoding.measure import Contender, OthersCpu, measure_costs, measure_speedups
from specdraft.decoding.vocab_policies import AllTokens

PROMPTS = [[i, 3, 1] for i in range(5)]


def drafter_of(target):
    return ScriptedDrafter(target.logits)


def measure(target, drafter, prompts, length_policy=None, **options):
    return measure_speedups(target, {"drafter": Contender(drafter, length_policy)}, prompts, **options)["drafter"]


class Rounding(ScriptedTarget):
    """Says something else in forwards of several tokens once its context is long: what low precision does."""

    def forward(self, input_ids, cache, **options):
        (before,) = cache.lengths
        step = super().forward(input_ids, cache, **options)
        if input_ids.shape[1] > 1 and before >= 8:
            step.logits = -step.logits
        return step


class Looping(ScriptedTarget):
    """Repeats four tokens after the prompts that begin with 0 or 1."""

    def logits(self, prefix):
        if prefix[0] > 1:
            return super().logits(prefix)
        return torch.nn.functional.one_hot(torch.tensor(2 + len(prefix) % 4), self.vocab_size).double()


def test_numbers_of_a_perfect_drafter():
    target = ScriptedTarget(vocab_size=8)
    result = measure(target, drafter_of(target), PROMPTS, max_new_tokens=21, length_policy=Fixed(4))
    assert result.tau == result.mean_request_tau == 5
    assert result.conditional_acceptance == result.joint_acceptance == [1, 1, 1, 1]
    assert result.mean_drafted == 4
    assert result.tokens == result.target_tokens == 5 * 21
    assert result.match_rate == 1
    assert result.divergences == []
    assert result.speedup == pytest.approx(result.tokens_per_second / result.target_tokens_per_second)
    assert result.speedup_low <= result.speedup <= result.speedup_high
    assert min(result.draft_ms, result.verify_ms, result.sample_ms, result.target_ms) > 0
    assert json.loads(json.dumps(result.to_dict()))["tau"] == 5


def test_both_sides_are_cut_at_the_end_token():
    """Fault 30."""
    target = ScriptedTarget(vocab_size=8, eos=(5, 7))
    result = measure(target, drafter_of(target), PROMPTS, max_new_tokens=50, length_policy=Fixed(4))
    assert result.tokens == result.target_tokens == sum(len(target.greedy(prompt, 50)) for prompt in PROMPTS)


def test_prompts_that_end_in_a_loop_are_set_apart():
    """Greedy loops are easy to draft: a drafter that knows nothing else looks good on them."""
    target = Looping(vocab_size=8)
    drafter = ScriptedDrafter(lambda prefix: target.logits(prefix) if prefix[0] < 2 else -target.logits(prefix))
    result = measure(target, drafter, PROMPTS, max_new_tokens=31, length_policy=Fixed(4))
    assert result.looping_prompts == 2
    assert result.tau_without_loops == 1
    assert result.tau == pytest.approx((2 * 30 + 3 * 30) / (2 * 6 + 3 * 30))
    loops_only = measure(target, drafter, PROMPTS[:2], max_new_tokens=31, length_policy=Fixed(4))
    assert loops_only.looping_prompts == 2
    assert loops_only.to_dict()["tau_without_loops"] is None
    assert loops_only.to_dict()["speedup_without_loops"] is None


def test_divergences_are_reported_with_their_margin():
    target = Rounding(vocab_size=8)
    result = measure(target, drafter_of(target), PROMPTS, max_new_tokens=21, length_policy=Fixed(4))
    assert result.match_rate == 0
    assert [d.prompt for d in result.divergences] == [0, 1, 2, 3, 4]
    first = result.divergences[0]
    assert first.index == 1 + 5  # the prefill's token, one round of five; the second round starts at 8 cached tokens
    best, second = target.logits(PROMPTS[0] + target.greedy(PROMPTS[0], first.index)).topk(2).values.tolist()
    assert first.margin == pytest.approx(best - second)


def test_contenders_turn_and_share_the_baseline(monkeypatch):
    target = ScriptedTarget(vocab_size=8)
    contenders = {"two": Contender(drafter_of(target), Fixed(2)), "none": Contender(drafter_of(target), Fixed(0))}
    results = measure_speedups(target, contenders, PROMPTS, max_new_tokens=19)
    assert {name: result.tau for name, result in results.items()} == {"two": 3, "none": 1}
    assert results["none"].mean_drafted == 0
    assert results["two"].target_tokens_per_second == results["none"].target_tokens_per_second


def test_sampled_runs_have_no_match_rate_and_follow_the_seed():
    target = ScriptedTarget(vocab_size=8, eos=(5,))
    runs = [
        measure(target, drafter_of(target), PROMPTS, max_new_tokens=30, temperature=1.0, seed=seed)
        for seed in (0, 0, 1)
    ]
    assert math.isnan(runs[0].match_rate)
    assert runs[0].to_dict()["match_rate"] is None
    assert runs[0].tokens == runs[1].tokens != runs[2].tokens


def test_a_busy_machine_is_named(monkeypatch):
    target = ScriptedTarget(vocab_size=8)
    monkeypatch.setattr(OthersCpu, "share", lambda self: 0.4)
    assert "40% of the machine" in measure(target, drafter_of(target), PROMPTS, max_new_tokens=4).warning
    monkeypatch.setattr(OthersCpu, "share", lambda self: 0.01)
    assert measure(target, drafter_of(target), PROMPTS, max_new_tokens=4).warning == ""


@pytest.mark.parametrize(
    ("idle", "own", "share"), [(12.0, 8.0, 0.0), (0.0, 10.0, 0.5), (16.0, 0.0, 0.2), (20.5, 0.0, 0.0)]
)
def test_others_use_what_is_neither_idle_nor_ours(monkeypatch, idle, own, share):
    """Ten seconds of two cores."""
    readings = iter([(100.0, 30.0, 7.0), (110.0, 30.0 + idle, 7.0 + own)])
    monkeypatch.setattr(OthersCpu, "_now", lambda self: next(readings))
    others = OthersCpu()
    others.cores = 2
    assert others.share() == pytest.approx(share)


def test_the_clocks_of_the_machine_can_be_read():
    others = OthersCpu()
    time.sleep(0.1)
    assert 0 <= others.share() <= 1


def test_no_prompts_is_an_error():
    target = ScriptedTarget()
    with pytest.raises(UserError, match="no prompts"):
        measure(target, drafter_of(target), [], max_new_tokens=4)
    with pytest.raises(UserError, match="no prompts"):
        measure_costs(target, drafter_of(target), [], max_length=2)


def test_a_bad_prompt_is_refused_before_anything_runs():
    target = ScriptedTarget(vocab_size=8)
    with pytest.raises(UserError, match="prompt: got token ids from 1 to 8"):
        measure(target, drafter_of(target), [*PROMPTS, [1, 8]], max_new_tokens=4)
    assert target.forwards == 0


def test_costs_cover_every_length():
    target = ScriptedTarget(vocab_size=8)
    table, acceptance = measure_costs(target, drafter_of(target), PROMPTS, max_length=3, max_new_tokens=40)
    assert len(table.draft) == len(table.verify) == len(table.sample) == 4
    assert min(table.draft[1:] + table.verify + table.sample + [table.alone]) > 0
    assert acceptance == [1, 1, 1]
    assert isinstance(table.best_length(acceptance), int)


def test_costs_know_of_what_a_vocabulary_does_in_one_round_of_several():
    """A median of rounds would not: T_draft of a vocabulary that takes 20 ms in every fourth round is some 5 ms more."""

    class Refreshing(AllTokens):
        rounds = 0

        def observe(self, seen):
            self.rounds += 1
            if self.rounds % 4 == 0:
                time.sleep(0.02)

    target = ScriptedTarget(vocab_size=8)
    options = {"max_length": 3, "max_new_tokens": 40}
    plain, _ = measure_costs(target, drafter_of(target), PROMPTS, **options)
    table, _ = measure_costs(target, drafter_of(target), PROMPTS, vocab_policy=Refreshing(), **options)
    assert min(own - without for own, without in zip(table.draft, plain.draft, strict=True)) > 0.003


def test_costs_of_too_few_rounds_are_refused():
    target = ScriptedTarget(vocab_size=8)
    with pytest.raises(UserError, match="fewer than 5 rounds that drafted"):
        measure_costs(target, drafter_of(target), PROMPTS[:1], max_length=6, max_new_tokens=20)


def test_costs_drop_positions_that_were_never_reached():
    target = ScriptedTarget(vocab_size=8)
    blind = ScriptedDrafter(lambda prefix: -target.logits(prefix))
    _, acceptance = measure_costs(target, blind, PROMPTS, max_length=2, max_new_tokens=40)
    assert acceptance == [0]


def test_the_table_is_usable_at_once():
    target = ScriptedTarget(vocab_size=8)
    table, acceptance = measure_costs(target, drafter_of(target), PROMPTS, max_length=2, max_new_tokens=40)
    assert isinstance(table, CostTable)
    assert torch.isfinite(torch.tensor([table.expected_speedup(k, acceptance) for k in range(3)])).all()
