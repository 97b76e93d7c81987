"""The objective against a literal reading of the paper: loops over (sequence, i, k), the target's own logits, autograd."""

import pytest
import torch
from test_rows import literal_rule
from tiny_training import tiny_examples

from specdraft.data.source import Online
from specdraft.data.vocab import VocabMap
from specdraft.losses import LossConfig
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, new_drafter
from specdraft.testing import TINY_VOCAB, tiny_target
from specdraft.training.metrics import FIELDS, Window, make_report, row_sums
from specdraft.training.objective import Objective, ObjectiveConfig, Rows, denominators, supervised_counts

STEPS = 3
KEPT = torch.arange(0, TINY_VOCAB, 2)  # a trimmed vocabulary: the even tokens


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def make_drafter(target, kind="lowrank"):
    torch.manual_seed(0)
    vocab_map = VocabMap(KEPT.flip(0), TINY_VOCAB) if kind == "trimmed" else None
    return new_drafter(target, DrafterConfig(), HeadConfig(kind=kind, rank=8, init="svd"), vocab_map)


def run(objective, target, examples, counts):
    """Objective of `examples` as one batch; `counts`: of all sequences of the optimiser step."""
    batch = Online(target).batch(examples)
    rows = Rows.from_masks([example.loss_mask for example in examples], STEPS)
    return objective(batch.taps, batch.last, batch.input_ids, rows, denominators(counts, objective.config.mean))


def count(examples):
    return supervised_counts([example.loss_mask for example in examples], STEPS)


def literal(target, drafter, examples, decay=0.8):
    """(loss, alpha, hits, joint, counts by step): one (sequence, i, k) at a time, one sequence at a time, no batch, no padding."""
    losses, alphas, hits, joints = ([[] for _ in range(STEPS)] for _ in range(4))
    ids = drafter.lm_head.target_ids()
    ids = torch.arange(TINY_VOCAB) if ids is None else ids
    for example in examples:
        x = example.input_ids[None]
        states = target.model(x, output_hidden_states=True)
        taps = torch.cat([states.hidden_states[i] for i in target.tap_layers], dim=-1)
        p = states.logits[0].float().softmax(-1)
        hidden = drafter.unroll(taps, x, torch.arange(x.shape[1])[None], STEPS)[:, 0]
        chain = {}
        for i, k in sorted(literal_rule(example.loss_mask.tolist(), STEPS), key=lambda row: row[1]):
            log_q = drafter.lm_head.logits(hidden[k, i]).float().log_softmax(-1)
            law = p[i + 1 + k]
            inside = law[ids] / law[ids].sum()
            losses[k].append((inside * (inside.log() - log_q)).sum())
            alphas[k].append(float(torch.minimum(law[ids], log_q.exp()).sum().detach()))
            hit = bool(ids[log_q.argmax()] == law.argmax())
            chain[i] = chain.get(i, True) and hit
            hits[k].append(hit)
            joints[k].append(chain[i])
    loss = sum(decay**k * torch.stack(of_step).mean() for k, of_step in enumerate(losses))
    means = [[sum(of_step) / len(of_step) for of_step in values] for values in (alphas, hits, joints)]
    return loss, *means, [len(of_step) for of_step in losses]


@pytest.mark.parametrize("kind", ["full", "trimmed", "lowrank"])
def test_loss_and_gradients_are_the_papers(target, kind):
    """Faults 20, 21, 24: values and gradients, on sequences of one and two turns, padded into one batch."""
    examples = tiny_examples(5, seed=3)
    drafter = make_drafter(target, kind)
    loss, sums = run(Objective(drafter, target, ObjectiveConfig(steps=STEPS)), target, examples, count(examples))
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    expected, alpha, hit, joint, rows = literal(target, drafter, examples)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(
            gradients[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    report = make_report(sums.double())
    assert report.rows == rows
    for got, wanted in ((report.alpha, alpha), (report.hit, hit), (report.joint, joint)):
        assert got == pytest.approx(wanted, abs=1e-5)
    assert report.tau == pytest.approx(1 + sum(joint))


@pytest.mark.parametrize("mean", ["rows", "sequences"])
@pytest.mark.parametrize("weights", ["geometric", "dpace", "first_failure"])
def test_parts_add_up(target, mean, weights):
    """Fault 21: micro-batches and processes of any size give together the loss and the gradient of the whole."""
    examples = tiny_examples(6, seed=4)
    drafter = make_drafter(target)
    config = ObjectiveConfig(steps=STEPS, mean=mean, loss=LossConfig(position_weights=weights))
    objective = Objective(drafter, target, config)
    whole, whole_sums = run(objective, target, examples, count(examples))
    whole.backward()
    gradient = drafter.fc.weight.grad.clone()
    drafter.zero_grad()
    parts = [run(objective, target, part, count(examples)) for part in (examples[:1], examples[1:4], examples[4:])]
    for loss, _ in parts:
        loss.backward()
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    torch.testing.assert_close(drafter.fc.weight.grad, gradient, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(sum(sums for _, sums in parts), whole_sums)


def test_labels_out_of_the_vocabulary_are_counted(target):
    """Fault 29: labels without a row are counted; that they are misses is shown in test_losses, test_fused and test_vocabulary."""
    examples = tiny_examples(6, seed=5)
    drafter = make_drafter(target, "trimmed")
    _, sums = run(Objective(drafter, target, ObjectiveConfig(steps=STEPS)), target, examples, count(examples))
    report = make_report(sums.double())
    labels = torch.cat(
        [
            torch.tensor([int(example.input_ids[i + 2]) for i, k in literal_rule(example.loss_mask.tolist(), 1)])
            for example in examples
        ]
    )
    assert report.outside == pytest.approx(float((labels % 2 == 1).double().mean()))
    assert 0 < report.outside < 1


def test_chain_breaks_at_the_first_miss():
    """Fault 29, 30: tau counts the bonus once, and nothing after a miss. Three rows: hits 110, 011 and 1 (one step only)."""
    hit = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 0]]).bool()
    valid = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 0]]).bool()
    sums = row_sums(valid, hit.float(), hit.float(), hit & valid, ~hit)
    report = make_report(sums.double())
    assert report.rows == [3, 2, 2]
    assert report.joint == pytest.approx([2 / 3, 1 / 2, 0])
    assert report.tau == pytest.approx(1 + 2 / 3 + 1 / 2)
    assert report.hit == pytest.approx([2 / 3, 1, 1 / 2])


def test_target_is_no_part_of_the_objective(target):
    """Fault 13."""
    drafter = make_drafter(target)
    objective = Objective(drafter, target, ObjectiveConfig(steps=STEPS))
    assert {f"drafter.{name}" for name in drafter.state_dict()} == set(objective.state_dict())
    assert sum(p.numel() for p in objective.parameters()) == sum(p.numel() for p in drafter.parameters())


def test_window_reduces_once(accelerator):
    """Fault 31: sums are reduced and then divided, once; adding up windows never gives a share above 1."""
    window = Window(2, accelerator.device)
    sums = torch.ones(len(FIELDS), 2) * 8
    for _ in range(3):
        window.add(torch.tensor(0.5), sums)
    loss, report = window.reduce(accelerator)
    assert loss == 1.5
    assert report.rows == [24, 24]
    assert report.alpha == report.hit == [1.0, 1.0]
    assert report.tau == 3.0
