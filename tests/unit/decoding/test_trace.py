"""tau and the acceptances, on hand-made rounds."""

import math
import random

import pytest
import torch

from specdraft.decoding.trace import (
    DecodeTrace,
    Round,
    conditional_acceptance,
    ended_inside_draft,
    ends_in_loop,
    first_divergence,
    joint_acceptance,
    mean_request_tau,
    tau,
    tokens_per_second,
    top2_margin,
)


def request(*rounds, seconds=1.0):
    """rounds: (drafted, accepted, emitted)"""
    trace = DecodeTrace(prompt_tokens=3, rounds=[Round(*r) for r in rounds], seconds=seconds)
    trace.tokens = 1 + sum(r.emitted for r in trace.rounds)
    return trace


ONE = request((3, 0, 1), (3, 3, 4), (3, 1, 2))
OTHER = request((3, 2, 3), seconds=3.0)


def test_tau_counts_the_bonus_and_is_micro_averaged():
    """Fault 30: the bonus is counted; rounds, not requests, are averaged; the prefill's token belongs to no round."""
    assert tau([ONE]) == pytest.approx(7 / 3)
    assert tau([ONE, OTHER]) == pytest.approx(10 / 4)
    assert mean_request_tau([ONE, OTHER]) == pytest.approx((7 / 3 + 3) / 2)


def test_the_target_alone_has_tau_1():
    assert tau([request((0, 0, 1), (0, 0, 1))]) == 1


def test_acceptance_by_position():
    assert joint_acceptance([ONE, OTHER]) == [3 / 4, 2 / 4, 1 / 4]
    assert conditional_acceptance([ONE, OTHER]) == [3 / 4, 2 / 3, 1 / 2]


def test_positions_that_were_not_drafted_are_not_failures():
    """Near max_new_tokens the drafts are shorter."""
    traces = [request((3, 3, 4), (1, 1, 2), (0, 0, 1))]
    assert conditional_acceptance(traces) == [1, 1, 1]
    assert joint_acceptance(traces) == [2 / 3, 1 / 3, 1 / 3]


def test_positions_after_the_end_of_the_text_are_not_failures():
    """Fault 30: an end-of-sequence token was accepted as the second of four drafted ones."""
    traces = [request((4, 4, 5), (4, 2, 2))]
    assert tau(traces) == 7 / 2
    assert conditional_acceptance(traces) == [1, 1, 1, 1]


@pytest.mark.parametrize("seed", range(5))
def test_tau_is_one_plus_the_joint_acceptances(seed):
    """papers 10: exactly, but for rounds whose text ended inside the draft, which have no token of the target's own."""
    numbers = random.Random(seed)
    traces = []
    for _ in range(20):
        rounds = [
            (drafted, accepted, accepted + 1) for drafted in (4, 4, 2) for accepted in [numbers.randint(0, drafted)]
        ]
        traces.append(request(*rounds))
    assert tau(traces) == pytest.approx(1 + sum(joint_acceptance(traces)))
    traces.append(request((4, 1, 1)))
    assert ended_inside_draft(traces) == pytest.approx(1 / 61)
    assert tau(traces) == pytest.approx(1 + sum(joint_acceptance(traces)) - ended_inside_draft(traces))


def test_tokens_per_second_is_of_totals():
    assert tokens_per_second([ONE, OTHER]) == pytest.approx((8 + 4) / 4)


def test_no_rounds_is_not_a_number():
    assert math.isnan(tau([request()]))
    assert math.isnan(mean_request_tau([request()]))
    assert joint_acceptance([request()]) == []


@pytest.mark.parametrize(
    ("one", "other", "index"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [], None), ([5], [6], 0)],
)
def test_first_divergence(one, other, index):
    assert first_divergence(one, other) == index


def test_top2_margin():
    assert top2_margin(torch.tensor([1.0, 4.0, 3.5])) == pytest.approx(0.5)


BLOCK = list(range(10, 18))  # 8 tokens: three of them are the least that counts


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        ([1, 2, *BLOCK * 3], True),
        ([1, 2, *BLOCK * 3, *BLOCK[:3]], True),  # cut inside a block
        ([*BLOCK * 3, 9], False),  # what ends is no loop
        ([1, *BLOCK * 2, *BLOCK[:7]], False),  # one token short of three
        ([1, 2, *[7] * 24], True),
        ([1, 2, *[7] * 23], False),  # too short
        ([1, 2, *[5, 6] * 12], True),
        ([*range(20), *range(20), *range(20)], True),
        ([*range(20), *range(20)], False),
        (list(range(100)), False),
        ([], False),
    ],
)
def test_what_a_loop_is(tokens, loops):
    assert ends_in_loop(tokens) == loops
