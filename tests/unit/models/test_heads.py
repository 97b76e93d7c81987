"""Trimming and factoring a trained head without training, and what a head's vocabulary may not be."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdraft.config import UserError
from specdraft.data.vocab import VocabMap
from specdraft.decoding.generate import speculative_generate
from specdraft.models.checkpoint import load_drafter, save_drafter
from specdraft.models.heads import (
    FullHead,
    HeadConfig,
    LowRankHead,
    TrimmedHead,
    build_head,
    check_vocabulary,
    components,
    energy_rank,
    largest_rank,
)
from specdraft.models.initialise import (
    DrafterConfig,
    eagle3_config,
    factored_copy,
    new_drafter,
    trimmed_copy,
    warm_start,
)
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


def test_a_head_of_low_rank_is_factored_exactly():
    """W of rank 4: four components hold all energy and give its logits; with C and f up to a constant, which changes no law."""
    torch.manual_seed(0)
    head = FullHead(16, TINY_VOCAB)
    head.weight.data = torch.randn(TINY_VOCAB, 4) @ torch.randn(4, 16)
    hidden = torch.randn(50, 16)
    parts = components(head.weight)
    torch.testing.assert_close(parts.energy.sqrt().float(), torch.linalg.svdvals(head.weight), atol=1e-3, rtol=1e-4)
    factored = LowRankHead.from_dense(head, TINY_VOCAB, 4, parts)
    torch.testing.assert_close(factored.logits(hidden), head.logits(hidden), atol=1e-4, rtol=1e-4)
    features = torch.randn(500, 16) @ torch.randn(16, 16)
    parts = components(head.weight, features.T @ features / 500, torch.rand(TINY_VOCAB) + 0.1)
    factored = LowRankHead.from_dense(head, TINY_VOCAB, 4, parts)
    laws = [h.logits(hidden).softmax(-1) for h in (factored, head)]
    torch.testing.assert_close(*laws, atol=1e-5, rtol=1e-3)
    assert energy_rank(parts.energy, 1 - 1e-9) == 4


def test_the_rank_for_a_share_of_the_energy():
    energy = torch.tensor([6.0, 3.0, 1.0, 0.0])
    assert [energy_rank(energy, share) for share in (0.1, 0.6, 0.61, 0.9, 0.95, 1.0)] == [1, 1, 2, 2, 3, 3]


def test_what_cannot_be_factored():
    """A head that is low-rank already; a rank whose factors are no smaller than the head."""
    head = FullHead(16, TINY_VOCAB)
    parts, most = components(head.weight.detach()), largest_rank(head)
    assert most * (16 + TINY_VOCAB) < 16 * TINY_VOCAB <= (most + 1) * (16 + TINY_VOCAB)
    for rank in (0, most + 1):
        with pytest.raises(UserError, match=f"rank: got {rank}, allowed: 1 to {most}, where two factors are smaller"):
            LowRankHead.from_dense(head, TINY_VOCAB, rank, parts)
    with pytest.raises(UserError, match=r"low-rank already \(rank 4\), allowed: full and trimmed heads"):
        LowRankHead.from_dense(LowRankHead(16, TINY_VOCAB, 4), TINY_VOCAB, 2, parts)


@pytest.mark.parametrize("kind", ["full", "trimmed"])
def test_a_drafter_factored_after_training(target, kind, tmp_path):
    """A trimmed head keeps its map, in the map's order. It saves, loads and decodes losslessly; body weights are shared."""
    drafter = make_drafter(target, kind, KEPT if kind == "trimmed" else None)
    most = largest_rank(drafter.lm_head)
    factored = factored_copy(drafter, most, components(drafter.lm_head.weight))
    assert factored.fc.weight is drafter.fc.weight
    assert factored.lm_head.weight.shape == (len(drafter.lm_head.weight), most)
    hidden = torch.randn(20, target.hidden_size)
    wanted, found = drafter.lm_head.logits(hidden), factored.lm_head.logits(hidden)
    left = float((found - wanted).square().mean() / wanted.square().mean())
    assert 1e-6 < left < 1 - most / target.hidden_size, "rows in another order would be off by more than their size"
    save_drafter(tmp_path / "d", factored, target, "# card", {}, torch.float32)
    loaded = load_drafter(tmp_path / "d", target)
    assert (loaded.config.head.kind, loaded.config.head.rank) == ("lowrank", most)
    assert loaded.lm_head.vocab_map == drafter.lm_head.vocab_map
    torch.testing.assert_close(loaded.lm_head.logits(hidden), found)
    prompt = [5, 9, 70, 33]
    alone = target.model.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    output = speculative_generate(target, loaded, prompt, max_new_tokens=12)
    assert output.tokens == alone[0, 4 : 4 + len(output.tokens)].tolist()


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


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("norm_output", True, "has norm_output True, expected False; set drafter.norm_output to True"),
        (
            "norm_before_residual",
            True,
            "has norm_before_residual True, expected False; set drafter.norm_before_residual",
        ),
        ("fc_norm", True, "has fc_norm True, expected False; set drafter.fc_norm to True"),
        ("rms_norm_eps", 0.5, "has rms_norm_eps 0.5, expected 1e-06; give a drafter that has the target's"),
        ("num_attention_heads", 2, "has num_attention_heads 2, expected 4"),
        (
            "rope_parameters",
            {"rope_type": "default", "rope_theta": 5e5},
            "has rope_parameters {'rope_type': 'default', 'rope_",
        ),
    ],
)
def test_warm_start_refuses_what_no_tensor_tells_of(field, value, message, target):
    """It would become another model without a word; a rotary scheme that is written otherwise is no other one."""
    trained, drafter = make_drafter(target, "full", seed=1), make_drafter(target, "full")
    before = drafter.fc.weight.clone()
    trained.config = replace(trained.config, **{field: value})
    with pytest.raises(UserError) as caught:
        warm_start(drafter, trained, "warm_start x")
    assert message in str(caught.value)
    assert torch.equal(drafter.fc.weight, before)
    rope = {"rope_type": "linear", "factor": 1.0, "rope_theta": target.hf_config.rope_parameters["rope_theta"]}
    trained.config = replace(drafter.config, rope_parameters=rope)
    warm_start(drafter, trained, "warm_start x")


def test_old_checkpoints_with_a_size_beside_another_head_still_load(target, tmp_path):
    """config.json of earlier versions names vocab_size 8192 for every head."""
    drafter = make_drafter(target, "lowrank")
    drafter.config = replace(drafter.config, head=replace(drafter.config.head, vocab_size=8192))
    save_drafter(tmp_path / "d", drafter, target, "# card", {})
    assert load_drafter(tmp_path / "d", target).lm_head.vocab_map is None


def test_a_target_that_turns_a_part_of_its_heads():
    """The drafter's layer turns the whole, and says so to engines; a scheme whose numbers are for that part is refused."""
    target = tiny_target()
    config = DrafterConfig(), HeadConfig("full")
    rope = target.hf_config.rope_parameters
    target.hf_config.rope_parameters = {**rope, "partial_rotary_factor": 0.5}
    assert "partial_rotary_factor" not in eagle3_config(target, *config).rope_parameters
    target.hf_config.rope_parameters = {**rope, "rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
    with pytest.raises(UserError, match=r"rotary scheme linear with partial_rotary_factor 0.5, allowed: 1"):
        eagle3_config(target, *config)
