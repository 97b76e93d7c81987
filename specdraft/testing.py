"""Tiny random targets and a tokenizer made in memory, for tests and smoke runs. Nothing is read from disk or a hub."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from specdraft.models.target import TargetModel

TINY_VOCAB = 320
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEXT = (
    "user\nassistant\nsystem\nYou are a helpful assistant.\n\nWhat is the sum of two and three? The answer is five.\n\n"
    "Write a short story about the sea and the wind. Once upon a time there was a small boat.\n"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of exactly TINY_VOCAB tokens with a ChatML template: ids 0..2 are <|endoftext|> (pad), <|im_start|>,
    <|im_end|> (eos); any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )


def tiny_model(
    family: str = "llama",
    vocab: int = TINY_VOCAB,
    hidden: int = 32,
    layers: int = 8,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tied: bool = True,
) -> PreTrainedModel:
    """A random Hugging Face causal language model: 4 query heads over 2 key/value heads, 512 positions, eos id 2.

    The weights are larger than a real initialisation's, so that the logits are far from uniform and tests can tell two
    tokens apart."""
    config = FAMILIES[family](
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **FAMILY_OPTIONS[family](hidden),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # initialised to constants: make every one of them matter
                torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.2)
    return model.eval()


def tiny_target(
    family: str = "llama",
    hidden: int = 32,
    layers: int = 8,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    vocab: int = TINY_VOCAB,
    tap_layers: tuple[int, ...] | None = None,
    lean: bool = True,
) -> TargetModel:
    """A `TargetModel` around `tiny_model`, with `tiny_tokenizer` where the vocabulary is large enough for it."""
    tokenizer = tiny_tokenizer() if vocab >= TINY_VOCAB else None
    return TargetModel.from_model(tiny_model(family, vocab, hidden, layers, seed, dtype), tokenizer, tap_layers, lean)


FAMILIES = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "granite": GraniteConfig,
    "cohere": CohereConfig,
    "cohere2": Cohere2Config,
}
FAMILY_OPTIONS = {  # what makes the family different, set to values that a wrong implementation cannot miss
    "llama": lambda hidden: {},
    "mistral": lambda hidden: {"sliding_window": None},
    "qwen2": lambda hidden: {},
    "qwen3": lambda hidden: {"head_dim": hidden // 4},
    "gemma2": lambda hidden: {
        "head_dim": hidden // 4,
        "query_pre_attn_scalar": hidden // 4,
        "sliding_window": 8,
        "final_logit_softcapping": 5.0,
        "attn_logit_softcapping": 5.0,
    },
    "gemma3": lambda hidden: {"head_dim": hidden // 4, "query_pre_attn_scalar": hidden // 4, "sliding_window": 8},
    "granite": lambda hidden: {
        "embedding_multiplier": 3.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
    },
    "cohere": lambda hidden: {"logit_scale": 0.25},
    "cohere2": lambda hidden: {"logit_scale": 0.25, "sliding_window": 8},
}
