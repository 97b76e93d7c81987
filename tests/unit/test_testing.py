"""The tiny models and the tokenizer that other tests stand on."""

import pytest
import torch

from specdraft.testing import FAMILIES, TINY_VOCAB, tiny_model, tiny_target, tiny_tokenizer


def test_tokenizer_has_exactly_the_vocabulary_of_the_models():
    tokenizer = tiny_tokenizer()
    assert sorted(tokenizer.get_vocab().values()) == list(range(TINY_VOCAB))
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    assert tokenizer.get_vocab() == tiny_tokenizer().get_vocab()


@pytest.mark.parametrize("text", ["the sea\n\n", "Grüße, 你好 🙂", " leading", ""])
def test_any_text_round_trips(text):
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template():
    messages = [{"role": "user", "content": "Hi"}]
    text = tiny_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("family", FAMILIES)
def test_models_depend_on_the_seed_alone(family):
    state = torch.random.get_rng_state()
    first, second, other = tiny_model(family), tiny_model(family), tiny_model(family, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    pairs = list(zip(first.parameters(), second.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not any(torch.equal(a, c) for a, _, c in pairs)


def test_a_vocabulary_too_small_for_the_tokenizer_goes_without():
    assert tiny_target(vocab=16).tokenizer is None
    assert tiny_target(vocab=16).vocab_size == 16
