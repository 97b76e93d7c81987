"""A sample of the vocabulary against all of it: what is always in, unbiased sums, and the same objective where nothing is left out."""

import pytest
import torch
from test_objective import STEPS, count, make_drafter, run
from tiny_training import tiny_examples

from specdraft.data.vocab import count_tokens
from specdraft.losses import LOSSES, LossConfig
from specdraft.testing import TINY_VOCAB, tiny_target
from specdraft.training.metrics import FIELDS
from specdraft.training.objective import Objective, ObjectiveConfig
from specdraft.training.sampled import ColumnSample, Sampler

BY_FREQUENCY = torch.arange(99, -1, -1)  # column 99 is the most frequent of 100


def test_labels_and_frequent_columns_are_always_in():
    sample = ColumnSample.draw(BY_FREQUENCY, torch.tensor([[3, 3, -1], [98, 5, 0]]), size=40)
    assert len(sample.columns) == 40 == len(set(sample.columns.tolist()))
    always = {3, 98, 5, 0} | set(range(99, 67, -1))  # 35 = 7/8 of 40: four labels, and the 31 most frequent others
    assert set(sample.columns[:35].tolist()) == always
    assert sample.raised[:35].tolist() == [0.0] * 35
    assert sample.raised[35:].exp().tolist() == pytest.approx([(100 - 35) / 5] * 5)
    assert sample.place[[3, 98]].tolist() == [sample.columns.tolist().index(3), sample.columns.tolist().index(98)]


def test_more_labels_than_room():
    """Labels are never dropped, and some others are always drawn."""
    sample = ColumnSample.draw(BY_FREQUENCY, torch.arange(60), size=40)
    assert set(range(60)) <= set(sample.columns.tolist())
    assert len(sample.columns) == 65


def test_a_trimmed_head_and_what_is_outside_its_map():
    """Columns of the head first, in both numberings; of the tokens outside the labels and the most frequent, and never one of the map."""
    counts, draft_index = torch.arange(100), torch.full((100,), -1)
    draft_index[torch.arange(98, -1, -2)] = torch.arange(50)  # column c is the token 98 - 2c
    sampler = Sampler(counts, draft_index, size=40)
    sample = sampler.draw(torch.tensor([[6, 7, 0], [98, 1, 1]]))
    own, outside = sample.ids[sample.inside], sample.ids[len(sample.inside) :]
    assert draft_index[own].tolist() == sample.columns.tolist()
    assert {6, 0, 98} <= set(own.tolist())
    assert len(own) == 40
    assert (draft_index[outside] < 0).all()
    assert {7, 1, 99, 97} == set(outside.tolist()[:4])
    assert len(outside) == 5
    assert sample.raised[len(own) :].exp().tolist() == pytest.approx([1, 1, 1, 1, 46])
    assert sample.labels(draft_index[torch.tensor([6, 7])]).tolist() == [sample.columns.tolist().index(46), -1]
    everything = Sampler(counts, draft_index, size=64).draw(torch.tensor([6]))
    assert sorted(everything.columns.tolist()) == list(range(50))
    assert not everything.raised[:50].any()


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


@pytest.mark.parametrize("term", ["forward_kl", "tv"])
@pytest.mark.parametrize(("family", "kind"), [("llama", "full"), ("llama", "trimmed"), ("gemma2", "lowrank")])
def test_gradient_is_that_of_the_whole_vocabulary_on_average(family, kind, term):
    """Many samples of a quarter: their mean gradient points where the whole vocabulary's does; evaluation is not sampled. Acceptance is
    that of the true law, of which a trimmed head holds a part."""
    target, examples = tiny_target(family), tiny_examples(3, seed=3)
    drafter = make_drafter(target, kind)
    loss_config = LossConfig(terms={name: float(name == term) for name in LOSSES})
    config = ObjectiveConfig(steps=STEPS, loss=loss_config)
    counts = count_tokens(examples, TINY_VOCAB)
    whole, sums = run(Objective(drafter, target, config), target, examples, count(examples))
    whole.backward()
    expected = drafter.fc.weight.grad.clone()
    object.__setattr__(config, "sampled_vocab", len(drafter.lm_head.weight) // 2)
    objective = Objective(drafter, target, config, counts)
    evaluated, _ = run(objective.eval(), target, examples, count(examples))
    torch.testing.assert_close(evaluated, whole)
    objective.train()
    drafter.zero_grad()
    torch.manual_seed(1)
    alpha = 0
    for _ in range(40):
        loss, sampled = run(objective, target, examples, count(examples))
        (loss / 40).backward()
        alpha += sampled[FIELDS.index("alpha")] / 40
    assert abs(loss - whole) > 1e-6, "nothing was sampled"
    assert torch.cosine_similarity(drafter.fc.weight.grad.flatten(), expected.flatten(), dim=0) > 0.9
    torch.testing.assert_close(alpha, sums[FIELDS.index("alpha")], rtol=0.1, atol=0)
