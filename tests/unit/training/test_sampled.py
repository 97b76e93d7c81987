"""A sample of the vocabulary against all of it: what is always in, unbiased sums, and the same objective where nothing is left out."""

import pytest
import torch
from test_objective import STEPS, count, make_drafter, run
from tiny_training import tiny_examples

from specdraft.data.vocab import count_tokens
from specdraft.testing import TINY_VOCAB, tiny_target
from specdraft.training.objective import Objective, ObjectiveConfig
from specdraft.training.sampled import ColumnSample

BY_FREQUENCY = torch.arange(99, -1, -1)  # column 99 is the most frequent of 100


def test_labels_and_frequent_columns_are_always_in():
    sample = ColumnSample.draw(BY_FREQUENCY, torch.tensor([[3, 3, -1], [98, 5, 0]]), size=40)
    assert len(sample.columns) == 40 == len(set(sample.columns.tolist()))
    always = {3, 98, 5, 0} | set(range(99, 67, -1))  # 35 = 7/8 of 40: four labels, and the 31 most frequent others
    assert set(sample.columns[:35].tolist()) == always
    assert sample.raised[:35].tolist() == [0.0] * 35
    assert sample.raised[35:].exp().tolist() == pytest.approx([(100 - 35) / 5] * 5)
    assert sample.labels(torch.tensor([3, -1, 98])).tolist() == [
        sample.columns.tolist().index(3),
        -1,
        sample.columns.tolist().index(98),
    ]


def test_more_labels_than_room():
    """Labels are never dropped, and some others are always drawn."""
    sample = ColumnSample.draw(BY_FREQUENCY, torch.arange(60), size=40)
    assert set(range(60)) <= set(sample.columns.tolist())
    assert len(sample.columns) == 65


def test_sums_are_unbiased():
    """The mean over many samples of sum_S exp(z + raised) is sum_V exp(z), within four standard errors."""
    torch.manual_seed(0)
    weight, hidden = torch.randn(100, 6, dtype=torch.float64) / 4, torch.randn(1, 6, dtype=torch.float64)
    truth = (hidden @ weight.T).exp().sum()
    sums = []
    for _ in range(2000):
        sample = ColumnSample.draw(BY_FREQUENCY, torch.tensor([1]), size=32)
        sums.append((hidden @ weight[sample.columns].T + sample.raised).exp().sum())
    sums = torch.stack(sums)
    assert abs(sums.mean() - truth) < 4 * sums.std() / len(sums) ** 0.5
    without = (hidden @ weight[BY_FREQUENCY[:32]].T).exp().sum()
    assert abs(without - truth) > 40 * sums.std() / len(sums) ** 0.5, (
        "the test would not see a sample that is not raised"
    )


@pytest.mark.parametrize(("family", "kind"), [("llama", "full"), ("llama", "trimmed"), ("gemma2", "lowrank")])
def test_gradient_is_that_of_the_whole_vocabulary_on_average(family, kind):
    """Many samples of a quarter: their mean gradient points where the whole vocabulary's does; evaluation is not sampled."""
    target, examples = tiny_target(family), tiny_examples(3, seed=3)
    drafter = make_drafter(target, kind)
    config = ObjectiveConfig(steps=STEPS)
    counts = count_tokens(examples, TINY_VOCAB)
    whole, _ = run(Objective(drafter, target, config), target, examples, count(examples))
    whole.backward()
    expected = drafter.fc.weight.grad.clone()
    object.__setattr__(config, "sampled_vocab", len(drafter.lm_head.weight) // 2)
    objective = Objective(drafter, target, config, counts)
    evaluated, _ = run(objective.eval(), target, examples, count(examples))
    torch.testing.assert_close(evaluated, whole)
    objective.train()
    drafter.zero_grad()
    torch.manual_seed(1)
    for _ in range(40):
        loss, _ = run(objective, target, examples, count(examples))
        (loss / 40).backward()
    assert abs(loss - whole) > 1e-6, "nothing was sampled"
    assert torch.cosine_similarity(drafter.fc.weight.grad.flatten(), expected.flatten(), dim=0) > 0.9
