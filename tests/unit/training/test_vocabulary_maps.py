"""Training with a vocabulary map: what is stored does not depend on it, and a run goes on with its own map only."""

from dataclasses import replace

import pytest
import torch
from tiny_training import small_run, tiny_examples

from specdraft.config import UserError
from specdraft.data.shards import ShardConfig, Shards, extract
from specdraft.data.source import Online
from specdraft.data.vocab import VocabMap
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, new_drafter
from specdraft.testing import TINY_VOCAB, tiny_target
from specdraft.training.loop import Trainer
from specdraft.training.metrics import make_report
from specdraft.training.objective import Objective, ObjectiveConfig, Rows, denominators, supervised_counts

EVEN = VocabMap(torch.arange(0, TINY_VOCAB, 2), TINY_VOCAB)
SWAPPED = VocabMap(EVEN.target_ids.flip(0), TINY_VOCAB)
SMALL = VocabMap(torch.arange(0, TINY_VOCAB, 4), TINY_VOCAB)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def trimmed(target, vocab):
    torch.manual_seed(0)
    return new_drafter(target, DrafterConfig(), HeadConfig("trimmed"), vocab)


def test_resume_with_another_map_is_refused_with_both_hashes(target, accelerator, tmp_path):
    """Fault 18: of the same size, only the order differs."""

    def trainer(vocab):
        accelerator.free_memory()
        identity = {"target": target.hash, "vocabulary map": vocab.hash}
        config = replace(small_run(), max_steps=2, eval_every=0)
        data = (tiny_examples(8, 1), tiny_examples(2, 2))
        return Trainer(
            accelerator, trimmed(target, vocab), target, Online(target), *data, config, tmp_path / "run", identity
        )

    trainer(EVEN).run()
    with pytest.raises(UserError, match=f"vocabulary map = {EVEN.hash}, got {SWAPPED.hash}"):
        trainer(SWAPPED).run()
    trainer(EVEN).run()


def forward(target, vocab, batch, examples):
    objective = Objective(trimmed(target, vocab), target, ObjectiveConfig(steps=3))
    masks = [example.loss_mask for example in examples]
    share = denominators(supervised_counts(masks, 3), "rows")
    return objective(batch.taps, batch.last, batch.input_ids, Rows.from_masks(masks, 3), share)


def test_a_smaller_vocabulary_needs_no_new_states(target, tmp_path):
    """Fault 17: what is on disk knows no map, and trains heads of any."""
    examples = tiny_examples(4, 3)
    extract(target, examples, tmp_path / "states", 64, ShardConfig())
    files = {path: path.read_bytes() for path in sorted((tmp_path / "states").iterdir())}
    assert not any(
        word in (tmp_path / "states" / "index.json").read_text() for word in ("d2t", "vocabulary map", EVEN.hash)
    )
    for vocab in (EVEN, SMALL):
        loss, _ = forward(target, vocab, Shards(tmp_path / "states", target).batch(examples), examples)
        assert torch.isfinite(loss)
    assert {path: path.read_bytes() for path in sorted((tmp_path / "states").iterdir())} == files


def test_a_token_outside_the_map_is_a_miss_that_breaks_the_chain(target):
    """Fault 29: a drafter that is the target itself on its rows hits only where the target's argmax is inside, and a chain of hits
    ends at the first that is not; alpha is of the true law, never above the mass inside; KL is of the renormalised one, so 0."""
    examples = tiny_examples(4, 4)
    batch = Online(target).batch(examples)
    drafter = trimmed(target, EVEN)
    masks = [example.loss_mask for example in examples]
    rows = Rows.from_masks(masks, 3)
    normed = target.norm(batch.last.flatten(0, 1)[rows.teacher_at])
    drafter.lm_head.project = lambda hidden: rows.shifted(normed)  # its logits are the target's, on the rows of the map
    objective = Objective(drafter, target, ObjectiveConfig(steps=3))
    share = denominators(supervised_counts(masks, 3), "rows")
    loss, sums = objective(batch.taps, batch.last, batch.input_ids, rows, share)
    report = make_report(sums.double())
    law = rows.shifted(target.teacher_logits(batch.last.flatten(0, 1)[rows.teacher_at]).float().softmax(-1))
    inside = EVEN.membership()
    is_hit = inside[law.argmax(-1)] & rows.valid
    for k in range(3):
        count = int(rows.valid[k].sum())
        assert report.hit[k] == pytest.approx(int(is_hit[k].sum()) / count)
        assert report.joint[k] == pytest.approx(int(is_hit[: k + 1].all(0).sum()) / count)
        mass = float(law[k][rows.valid[k]][:, inside].sum(-1).mean())
        assert report.alpha[k] == pytest.approx(mass, abs=1e-3)
    assert report.alpha[0] < 0.95
    assert report.tau == pytest.approx(1 + sum(report.joint))
    assert float(loss.detach()) == pytest.approx(0, abs=1e-3)
    assert 0 < report.outside < 1
