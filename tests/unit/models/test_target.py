"""The target: taps, teacher logits, vocabulary, hash, for every family. Files are tested in test_load.py, the layers in
test_lean.py."""

import pytest
import torch
from torch import nn

from specdraft.config import UserError
from specdraft.models import target as target_module
from specdraft.models.layers import step_dtype
from specdraft.models.target import TargetModel
from specdraft.testing import FAMILIES, TINY_VOCAB, tiny_model, tiny_target, tiny_tokenizer


def random_ids(*shape: int, vocab: int = TINY_VOCAB, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, vocab, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_teacher_logits_are_the_models_own(family, tied):
    """Fault 11: wrong norm family (Gemma's 1+w), logit scale (Cohere, Granite) or soft cap (Gemma-2)."""
    model = tiny_model(family, tied=tied)
    ids = random_ids(2, 24)
    with torch.no_grad():
        own = model(ids).logits
    target = TargetModel.from_model(model, tiny_tokenizer())
    last = target.features(ids, torch.tensor([24, 24])).last
    torch.testing.assert_close(target.teacher_logits(last), own, atol=1e-4, rtol=0)
    assert (target.teacher_logits(last / 2) - own).abs().max() < 1e-3, "the final norm is part of the teacher"
    assert own.std() > 0.1, "a comparison of constants shows nothing"


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_head_scaled_and_capped(family):
    """What the fused loss relies on: logits = soft_cap(logit_scale * head_weight @ norm(last))."""
    target = tiny_target(family)
    last = target.features(random_ids(1, 9), torch.tensor([9])).last
    logits = target.logit_scale * target.norm(last) @ target.head_weight.T
    if target.soft_cap is not None:
        logits = target.soft_cap * torch.tanh(logits / target.soft_cap)
    torch.testing.assert_close(target.teacher_logits(last), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_taps_are_hugging_face_hidden_states(family, lean):
    """Fault 10: off by one in the captured layer; tap k = hidden_states[k]. `last` is the final norm's input, which
    transformers does not list: its last entry is normed already."""
    model = tiny_model(family)
    ids = random_ids(2, 12)
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states
    target = TargetModel.from_model(model, tap_layers=(0, 2, 4, 7), lean=lean)
    features = target.features(ids, torch.tensor([12, 12]))
    torch.testing.assert_close(
        features.taps, torch.cat([hidden[k] for k in (0, 2, 4, 7)], dim=-1), atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(target.norm(features.last), hidden[-1], atol=1e-4, rtol=1e-4)
    step = target.forward(ids, target.new_cache(2, 12))
    torch.testing.assert_close(step.taps, features.taps, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_padding_on_the_right_changes_nothing(family):
    target = tiny_target(family)
    ids = random_ids(3, 20)
    lengths = torch.tensor([20, 11, 1])
    features = target.features(ids, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = target.features(ids[row : row + 1, :length], lengths[row : row + 1])
        torch.testing.assert_close(features.taps[row, :length], alone.taps[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(features.last[row, :length], alone.last[0], atol=1e-5, rtol=1e-4)


def test_default_taps():
    assert tiny_target(layers=8).tap_layers == (2, 4, 5)
    assert tiny_target(layers=7).tap_layers == (2, 3, 4)


@pytest.mark.parametrize("layers", [1, 4, 6])
def test_too_few_layers_for_the_default_taps(layers):
    """Fault 12: duplicate layers for small targets."""
    with pytest.raises(UserError, match=rf"{layers} layers.*tap_layers"):
        tiny_target(layers=layers)
    assert tiny_target(layers=layers, tap_layers=(0,)).tap_layers == (0,)


@pytest.mark.parametrize("taps", [(), (2, 2, 5), (5, 4, 2), (-1, 2, 3), (2, 4, 8)])
def test_taps_that_are_refused(taps):
    with pytest.raises(UserError, match=r"tap_layers: got .* allowed"):
        tiny_target(tap_layers=taps)


def test_the_target_never_enters_a_module():
    """Fault 13: saved into checkpoints, counted as trainable."""
    target = tiny_target()
    holder = nn.Module()
    holder.target = target
    assert not list(holder.parameters())
    assert not holder.state_dict()
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    features = target.features(random_ids(1, 5), torch.tensor([5]))
    assert not features.taps.requires_grad
    weight = torch.ones(features.taps.shape[-1], requires_grad=True)
    (features.taps @ weight).sum().backward()  # an inference tensor could not be trained on
    assert weight.grad is not None


@pytest.mark.parametrize("lean", [True, False])
def test_padded_vocabulary_rows_do_not_exist(lean):
    """Fault 12: rows of the head that are no token are never scored."""
    model = tiny_model(vocab=TINY_VOCAB + 32)
    ids = random_ids(1, 9)
    with torch.no_grad():
        own = model(ids).logits[..., :TINY_VOCAB]
    target = TargetModel.from_model(model, tiny_tokenizer(), lean=lean)
    assert target.vocab_size == len(target.head_weight) == len(target.embedding_weight) == TINY_VOCAB
    step = target.forward(ids, target.new_cache(1, 9))
    assert step.logits.shape == (1, 9, TINY_VOCAB)
    torch.testing.assert_close(step.logits, own, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("in_generation_config", "in_config", "expected"),
    [([5, 7], 7, (5, 7, 2)), (9, [4, 9], (9, 4, 2)), (None, None, (2,)), ([2, TINY_VOCAB + 5], 2, (2,))],
)
def test_every_end_of_answer(in_generation_config, in_config, expected):
    """Fault 34: there may be several, here and there; the tokenizer's own (2) is one of them."""
    model = tiny_model()
    model.generation_config.eos_token_id = in_generation_config
    model.config.eos_token_id = in_config
    assert TargetModel.from_model(model, tiny_tokenizer()).eos_token_ids == expected


def test_generation_defaults_do_not_reach_the_logits():
    model = tiny_model()
    ids = random_ids(1, 9)
    plain = TargetModel.from_model(model)
    expected = plain.forward(ids, plain.new_cache(1, 9)).logits
    config = model.generation_config
    config.do_sample, config.temperature, config.top_k, config.top_p, config.repetition_penalty = True, 0.1, 3, 0.5, 1.9
    config.suppress_tokens, config.no_repeat_ngram_size = [7], 2
    target = TargetModel.from_model(model)
    assert torch.equal(target.forward(ids, target.new_cache(1, 9)).logits, expected)


def test_hash_tells_targets_apart_and_not_their_dtype():
    one = tiny_target(seed=0)
    assert one.hash == tiny_target(seed=0).hash == tiny_target(seed=0, lean=False).hash
    assert one.hash == tiny_target(seed=0, dtype=torch.bfloat16).hash
    assert one.hash != tiny_target(seed=1).hash
    assert one.hash != tiny_target("mistral", seed=0).hash
    model = tiny_model()
    model.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    assert one.hash != TargetModel.from_model(type(model)(model.config)).hash


def test_a_family_that_we_get_wrong_is_refused(monkeypatch):
    """Fault 11, for families that nobody has thought of: checked at load."""
    monkeypatch.setattr(target_module, "LOGIT_SCALES", {})
    with pytest.raises(UserError, match=r"teacher logits differ.*cohere"):
        tiny_target("cohere")


def test_weights_that_are_not_numbers_are_refused():
    model = tiny_model("llama")
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(UserError, match="its own logits are NaN or infinite in float32"):
        TargetModel.from_model(model)


@pytest.mark.parametrize("device", ["banana", "cuda:99"])
def test_a_device_that_is_not_there(device):
    with pytest.raises(UserError, match=f"device: got '{device}' .*, allowed: cpu"):
        TargetModel.load("nowhere", device=device)


def test_a_head_with_a_bias_is_refused():
    model = tiny_model(tied=False)
    model.lm_head.bias = nn.Parameter(torch.zeros(TINY_VOCAB))
    with pytest.raises(UserError, match="bias"):
        TargetModel.from_model(model)


def test_a_bidirectional_model_is_refused():
    model = tiny_model("gemma3")
    model.config.use_bidirectional_attention = True
    with pytest.raises(UserError, match="cached forward pass differ"):
        TargetModel.from_model(model)


def test_a_text_longer_than_the_model_is_refused():
    target = tiny_target()
    with pytest.raises(UserError, match=r"got 513 tokens.*allowed: up to 512"):
        target.new_cache(1, 513)


@pytest.mark.parametrize("lean", [True, False])
def test_autocast_of_a_training_loop_does_not_reach_the_target(lean):
    target = tiny_target(lean=lean)
    ids = random_ids(1, 16)

    def run():
        features = target.features(ids, torch.tensor([16]))
        step = target.forward(ids, target.new_cache(1, 16))
        return features.taps, target.norm(features.last), target.teacher_logits(features.last), step.logits

    expected = run()
    with torch.autocast("cpu", torch.bfloat16):
        found = run()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_bf16(family):
    """The same within bf16's rounding, through the cache; weights stay in bf16, states are in what the processor computes in."""
    exact, target = tiny_target(family), tiny_target(family, dtype=torch.bfloat16)
    ids = random_ids(1, 16)
    expected = exact.forward(ids, exact.new_cache(1, 16)).logits
    logits = target.forward(ids, target.new_cache(1, 16)).logits
    assert target.dtype == target.embedding_weight.dtype == torch.bfloat16
    assert (
        logits.dtype == target.step_dtype == (step_dtype(target.embedding_weight) if target.is_lean else torch.bfloat16)
    )
    assert ("states" in target.precision) == (target.step_dtype != torch.bfloat16)
    assert (logits.float() - expected).abs().mean() < 0.05 * expected.std()
