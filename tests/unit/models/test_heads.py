"""Trimming a trained head without training, and what a head's vocabulary may not be."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdraft.config import UserError
from specdraft.data.vocab import VocabMap
from specdraft.decoding.generate import speculative_generate
from specdraft.models.checkpoint import load_drafter, save_drafter
from specdraft.models.heads import FullHead, HeadConfig, LowRankHead, TrimmedHead, build_head, check_vocabulary
from specdraft.models.initialise import DrafterConfig, new_drafter, trimmed_copy, warm_start
from specdraft.testing import TINY_VOCAB, tiny_target

KEPT = VocabMap(torch.arange(1, TINY_VOCAB, 2).flip(0), TINY_VOCAB)  # neither ascending nor the first ids


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def make_drafter(target, kind, vocab_map=None, seed=0):
    torch.manual_seed(seed)
    drafter = new_drafter(target, DrafterConfig(), HeadConfig(kind, rank=8, init="random"), vocab_map)
    return drafter.eval().requires_grad_(False)


@pytest.mark.parametrize("full", [FullHead(16, TINY_VOCAB), LowRankHead(16, TINY_VOCAB, 4)], ids=["full", "low rank"])
def test_a_trimmed_head_gives_the_full_heads_logits_of_its_tokens(full):
    """Faults 10 and 15: rows in the map's order, whatever it is."""
    head = TrimmedHead.from_full(full, KEPT)
    hidden = torch.randn(3, 16)
    assert torch.equal(head.logits(hidden), full.logits(hidden)[:, KEPT.target_ids])
    assert head.target_ids().tolist() == KEPT.target_ids.tolist()
    assert head.weight.shape == (len(KEPT), 4 if isinstance(full, LowRankHead) else 16)
    assert isinstance(head, LowRankHead if isinstance(full, LowRankHead) else TrimmedHead)
    live = torch.tensor([5, 2])
    torch.testing.assert_close(head.logits(hidden, live), full.logits(hidden)[:, KEPT.target_ids[live]])
    with torch.no_grad():
        head.weight.zero_()
    assert full.weight.any(), "the full head keeps its own weights"


def test_only_a_full_vocabulary_can_be_trimmed():
    trimmed = TrimmedHead.from_full(FullHead(16, TINY_VOCAB), KEPT)
    for head, vocab in ((trimmed, KEPT), (FullHead(16, 100), KEPT)):
        with pytest.raises(UserError, match=f"and a map for {TINY_VOCAB} tokens, allowed: a head with one row"):
            TrimmedHead.from_full(head, vocab)


@pytest.mark.parametrize("kind", ["full", "lowrank"])
def test_a_drafter_trimmed_after_training(target, kind, tmp_path):
    """It saves, loads, and decodes like the one in memory, losslessly, only tokens of the map being drafted; body weights are shared."""
    drafter = make_drafter(target, kind)
    trimmed = trimmed_copy(drafter, KEPT)
    assert trimmed.fc.weight is drafter.fc.weight
    assert drafter.lm_head.vocab_map is None
    save_drafter(tmp_path / "d", trimmed, target, "# card", {}, torch.float32)
    loaded = load_drafter(tmp_path / "d", target)
    assert loaded.lm_head.vocab_map == KEPT
    assert loaded.config.head.kind == ("lowrank" if kind == "lowrank" else "trimmed")
    prompt = [5, 9, 70, 33]
    alone = target.model.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    outputs = [speculative_generate(target, d, prompt, max_new_tokens=12) for d in (trimmed, loaded)]
    for output in outputs:
        assert output.tokens == alone[0, 4 : 4 + len(output.tokens)].tolist()
        assert output.trace.rounds
    assert [r.accepted for r in outputs[0].trace.rounds] == [r.accepted for r in outputs[1].trace.rounds]


@pytest.mark.parametrize("kind", ["full", "lowrank"])
def test_another_vocabulary_than_asked_is_an_error(kind):
    """Fault 19: reduced asked of a head that has everything, or the reverse, or two at once."""
    check_vocabulary(HeadConfig(kind))
    check_vocabulary(HeadConfig("trimmed"))
    for options in ({"vocab": "v.safetensors"}, {"vocab_size": 8192}):
        check_vocabulary(HeadConfig("trimmed", **options))
        with pytest.raises(UserError, match=f"head.{next(iter(options))}: got .* with head.kind {kind}"):
            check_vocabulary(HeadConfig(kind, **options))
    with pytest.raises(UserError, match="allowed: one of them"):
        check_vocabulary(HeadConfig("trimmed", vocab="v.safetensors", vocab_size=8192))


def test_a_checkpoint_at_odds_with_its_vocabulary_is_refused(target, tmp_path):
    """Faults 14 and 19: a map beside a full head; a trimmed head whose map is missing, zero, or another."""
    with pytest.raises(UserError, match="a full head with a vocabulary map"):
        build_head(HeadConfig("full"), 16, TINY_VOCAB, KEPT)
    save_drafter(tmp_path / "full", make_drafter(target, "full"), target, "# card", {})
    save_drafter(tmp_path / "trimmed", make_drafter(target, "trimmed", KEPT), target, "# card", {})
    other = VocabMap(KEPT.target_ids.flip(0), TINY_VOCAB)
    broken = {
        "full": (KEPT.tensors(), r"d2t|t2d"),
        "trimmed": ({"d2t": None}, "expected d2t and t2d"),
    }
    path = tmp_path / "trimmed" / "model.safetensors"
    whole = load_file(path)
    for name, (change, message) in broken.items():
        file = tmp_path / name / "model.safetensors"
        weights = {**load_file(file), **change}
        save_file({key: value for key, value in weights.items() if value is not None}, file)
        with pytest.raises(UserError, match=message):
            load_drafter(tmp_path / name, target)
    save_file({**whole, "d2t": torch.zeros_like(whole["d2t"])}, path)
    with pytest.raises(UserError, match="d2t and t2d disagree"):
        load_drafter(tmp_path / "trimmed", target)
    save_file({**whole, **other.tensors()}, path)
    with pytest.raises(UserError, match=f"{other.hash}, config.json says {KEPT.hash}"):
        load_drafter(tmp_path / "trimmed", target)


def test_warm_start_takes_everything_over_or_refuses(target):
    """Fault 18: with another map of the same size, by both hashes; and with another shape."""
    trained = make_drafter(target, "trimmed", KEPT, seed=1)
    drafter = make_drafter(target, "trimmed", KEPT)
    warm_start(drafter, trained, "warm_start x")
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), trained.parameters(), strict=True))
    other = VocabMap(KEPT.target_ids.flip(0), TINY_VOCAB)
    drafter = make_drafter(target, "trimmed", other)
    before = drafter.lm_head.weight.clone()
    with pytest.raises(UserError, match=f"warm_start x: got vocabulary map {KEPT.hash}.*expected {other.hash}"):
        warm_start(drafter, trained, "warm_start x")
    assert torch.equal(drafter.lm_head.weight, before)
    for kind in ("full", "lowrank"):
        with pytest.raises(UserError, match=f"got vocabulary map {KEPT.hash}.*expected none"):
            warm_start(make_drafter(target, kind), trained, "warm_start x")
    with pytest.raises(UserError, match=r"lm_head\.down is missing, expected"):
        warm_start(make_drafter(target, "lowrank"), make_drafter(target, "full"), "warm_start x")


def test_old_checkpoints_with_a_size_beside_another_head_still_load(target, tmp_path):
    """config.json of earlier versions names vocab_size 8192 for every head."""
    drafter = make_drafter(target, "lowrank")
    drafter.config = replace(drafter.config, head=replace(drafter.config.head, vocab_size=8192))
    save_drafter(tmp_path / "d", drafter, target, "# card", {})
    assert load_drafter(tmp_path / "d", target).lm_head.vocab_map is None
