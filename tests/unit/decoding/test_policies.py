"""Length and vocabulary policies: what they answer, and that none of them changes a greedy output."""

import pytest
import torch
from scripted import ScriptedDrafter, ScriptedTarget, scripted_head

from specdraft.config import UserError
from specdraft.decoding.costs import CostTable
from specdraft.decoding.generate import speculative_generate
from specdraft.decoding.length_policies import (
    LENGTH_POLICIES,
    AdaEdl,
    ConfidenceThreshold,
    EntropyController,
    ExpectedSpeedup,
    Fixed,
    Heuristic,
    Svip,
)
from specdraft.decoding.libraspec import LibraSpec
from specdraft.decoding.vocab_policies import AllTokens, FrequencyList

COSTS = CostTable([0.0, 0.1, 0.2, 0.3], [1.0, 1.1, 1.2, 1.3], [0.0] * 4, 1.0, "scripted", "float64", {})
POLICIES = {
    "fixed": lambda: Fixed(3),
    "heuristic": lambda: Heuristic(start=2),
    "confidence": lambda: ConfidenceThreshold(0.5),
    "svip": lambda: Svip(threshold=0.35),
    "adaedl": lambda: AdaEdl(most=5),
    "entropy": lambda: EntropyController(COSTS),
    "expected_speedup": lambda: ExpectedSpeedup(COSTS, [0.6, 0.5, 0.4]),
    "libraspec": lambda: LibraSpec(block=2, most=6),
}


@pytest.mark.parametrize("name", LENGTH_POLICIES)
def test_no_length_policy_changes_a_greedy_output(name):
    target = ScriptedTarget()
    drafter = ScriptedDrafter(ScriptedTarget(seed=9).logits)
    output = speculative_generate(target, drafter, [1, 2], max_new_tokens=30, length_policy=POLICIES[name]())
    assert output.tokens == target.greedy([1, 2], 30)


def test_fixed():
    policy = Fixed(3)
    policy.observe(3, 0)
    assert policy.length() == 3
    with pytest.raises(UserError, match="got -1"):
        Fixed(-1)


def test_expected_speedup_starts_at_the_prior_and_follows_the_rounds():
    policy = ExpectedSpeedup(COSTS, [0.6, 0.5, 0.4], prior_rounds=4)
    start = policy.length()
    assert start == COSTS.best_length([0.6, 0.5, 0.4])
    for _ in range(30):
        policy.observe(3, 3)
    assert policy.length() == 3
    for _ in range(60):
        policy.observe(3, 0)
    assert policy.length() == 0
    policy.begin()
    assert policy.length() == start


def test_expected_speedup_learns_only_of_positions_that_were_tried():
    policy = ExpectedSpeedup(COSTS, [0.6, 0.5, 0.4])
    policy.observe(drafted=3, accepted=1)
    assert policy.tried == [1, 1, 0]
    assert policy.accepted == [1, 0, 0]
    policy.observe(drafted=1, accepted=1)
    assert policy.tried == [1.95, 0.95, 0]
    assert policy.accepted == [1.95, 0, 0]


def test_expected_speedup_tries_again_after_giving_up():
    policy = ExpectedSpeedup(COSTS, [0.6, 0.5, 0.4], prior_rounds=4)
    for _ in range(60):
        policy.observe(3, 0)
    assert policy.length() == 0
    rounds = 0
    while policy.length() == 0:
        policy.observe(0, 0)
        rounds += 1
    assert rounds < 100


def test_expected_speedup_needs_costs_for_every_position():
    with pytest.raises(UserError, match="got 4 positions"):
        ExpectedSpeedup(COSTS, [0.5] * 4)


def test_all_tokens():
    assert AllTokens().live() is None
    assert AllTokens().covers(3)
    head = scripted_head(10, [9, 2, 7])
    assert [AllTokens(head).covers(token) for token in (2, 3, 9)] == [True, False, True]


def test_a_frequency_list_gives_the_first_ids_and_keeps_one_packed_copy():
    policy = FrequencyList(scripted_head(10), [7, 2, 9, 4], size=3)
    assert policy.live().ids.tolist() == [7, 2, 9]
    assert policy.live() is policy.live()
    hidden = torch.randn(1, 10, dtype=torch.float64)
    assert torch.equal(policy.live().logits(hidden), hidden[:, [7, 2, 9]])
    assert [policy.covers(token) for token in (2, 4)] == [True, False]


def test_a_frequency_list_on_a_trimmed_head_names_its_rows():
    """Fault 15: rows in the map's own order, never in ascending order of ids."""
    policy = FrequencyList(scripted_head(10, [9, 2, 7]), [7, 4, 2, 9], size=2)
    assert policy.live().ids.tolist() == [7, 2]
    hidden = torch.randn(1, 10, dtype=torch.float64)
    assert torch.equal(policy.live().logits(hidden), hidden[:, [7, 2]])


@pytest.mark.parametrize(
    ("ids", "size", "message"),
    [([1, 2], 3, "got 2 ids"), ([1, 1], 2, "twice"), ([1], 0, "asked for 0"), ([1, 10], 2, "ids from 1 to 10")],
)
def test_bad_frequency_lists_are_refused(ids, size, message):
    with pytest.raises(UserError, match=message):
        FrequencyList(scripted_head(10), ids, size)
