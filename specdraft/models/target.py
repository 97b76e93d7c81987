"""The frozen target: taps, teacher logits and a decoding forward pass, for any Hugging Face decoder-only model.

It knows nothing of drafters, prompts or losses. Files are read in load.py; the two ways to run the layers are lean.py (Llama-like
models) and generic.py (all others).

Letters: B rows, T tokens, n new tokens, H width, V vocabulary (real tokens: padded rows of the head are left out), A taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from specdraft.config import UserError
from specdraft.models import lean as lean_path
from specdraft.models.cache import Append, KVCache
from specdraft.models.default_target import default_target
from specdraft.models.generic import GenericModel
from specdraft.models.layers import FrozenLinear
from specdraft.models.load import load_model
from specdraft.provenance import hash_json, hash_tensors

MIN_LAYERS = 7  # below this the default taps (2, L//2, L-3) are not three different layers
HASHED_PER_TENSOR = 4096


@dataclass
class Features:
    """What a drafter is trained on: taps [B,T,A*H] (ascending, concatenated), last [B,T,H] = input of the final norm."""

    taps: Tensor
    last: Tensor


@dataclass
class Step:
    """One decoding forward pass: logits [B, n or 1, V] or None, taps [B,n,A*H] or None, last [B,n,H]."""

    logits: Tensor | None
    taps: Tensor | None
    last: Tensor


class TargetModel:
    """The frozen target. Not an nn.Module on purpose: it must never enter a drafter's parameters or checkpoints."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None,
        name: str,
        tap_layers: tuple[int, ...] | None = None,
        lean: bool = True,
    ):
        config = model.config
        self.model = model.eval().requires_grad_(False)
        self.tokenizer, self.name, self.hf_config = tokenizer, name, config
        self.num_layers = config.num_hidden_layers
        self.tap_layers = _tap_layers(tap_layers, self.num_layers)
        self.hidden_size = config.hidden_size
        self.max_positions = config.max_position_embeddings
        self.hash = _hash(model)
        embedding = model.get_input_embeddings().weight.detach()
        self.dtype, self.device = embedding.dtype, embedding.device
        self.vocab_size = embedding.shape[0] if tokenizer is None else min(embedding.shape[0], _token_count(tokenizer))
        self.embedding_weight = embedding[: self.vocab_size]
        self.head_weight = model.get_output_embeddings().weight.detach()[: self.vocab_size]
        self._head = FrozenLinear(self.head_weight)
        self.eos_token_ids = _eos_token_ids(model, tokenizer, self.vocab_size)
        self.embed_scale = EMBED_SCALES[config.model_type](config) if config.model_type in EMBED_SCALES else 1.0
        self.logit_scale = LOGIT_SCALES[config.model_type](config) if config.model_type in LOGIT_SCALES else 1.0
        self.logit_cap: float | None = getattr(config, "final_logit_softcapping", None)
        self.is_lean = lean and lean_path.is_supported(model)
        self._layers = lean_path.LeanModel(model) if self.is_lean else GenericModel(model)

    @classmethod
    def load(
        cls,
        path_or_id: str,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        tap_layers: tuple[int, ...] | None = None,
        revision: str | None = None,
        lean: bool = True,
    ) -> TargetModel:
        """Read a target: "default", a Hugging Face folder, a folder or file with a GGUF, or a Hub id.

        Raises:
            UserError: not there, not a complete decoder-only model, or one whose logits we cannot reproduce.
        """
        where = str(default_target()) if path_or_id == "default" else str(path_or_id)
        model, tokenizer = load_model(where, dtype, device, revision)
        return cls(model, tokenizer, Path(where).name if Path(where).exists() else where, tap_layers, lean)

    @classmethod
    def from_model(
        cls, model, tokenizer=None, tap_layers: tuple[int, ...] | None = None, lean: bool = True
    ) -> TargetModel:
        """Wrap a Hugging Face model that is in memory already."""
        return cls(model, tokenizer, model.config.name_or_path or type(model).__name__, tap_layers, lean)

    @torch.no_grad()
    def features(self, input_ids: Tensor, lengths: Tensor) -> Features:
        """Taps and last states of right-padded rows; no logits are made. input_ids [B,T], lengths [B]; states at and after a
        row's length mean nothing (the attention is causal, so padding on the right changes nothing before it)."""
        append = Append([0] * input_ids.shape[0], input_ids.shape[1], input_ids.device, None, None)
        taps, last = self._layers.forward(input_ids, None, append, self.tap_layers)
        return Features(torch.cat(taps, dim=-1), last)

    def norm(self, last: Tensor) -> Tensor:
        """The final norm, [..,H] -> [..,H]."""
        return self._layers.norm(last)

    def teacher_logits(self, last: Tensor) -> Tensor:
        """The target's own logits [..,V], in its dtype, from the input of the final norm [..,H]."""
        return self.head(self.norm(last))

    def head(self, normed: Tensor) -> Tensor:
        """Head, logit scale and soft cap: [..,H] -> [..,V]."""
        logits = self._head(normed)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_cap is not None:
            logits = torch.tanh(logits / self.logit_cap) * self.logit_cap
        return logits

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        """An empty cache of `max_length` slots a row."""
        if max_length > self.max_positions:
            raise UserError(
                f"target {self.name}: got a cache of {max_length} tokens, allowed: up to {self.max_positions}; "
                "shorten the prompt or max_new_tokens"
            )
        return self._layers.new_cache(batch_size, max_length)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        cache: KVCache,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        counts: list[int] | None = None,
        want_taps: bool = True,
        logits_for: str = "all",
    ) -> Step:
        """Append n tokens to every row and run them. input_ids [B,n].

        positions [B,n]: rotary positions, by default the slots. mask: boolean [B or 1, 1, n, end], end = longest row + n, True =
        may attend; causal by default. counts: real tokens of each row where `input_ids` is padded on the right: the row grows by
        that many, and `logits_for="last"` means its last real token. logits_for: "all", "last" or "none".
        """
        assert input_ids.shape[0] == cache.batch_size, (input_ids.shape, cache.batch_size)
        n = input_ids.shape[1]
        append = Append(cache.lengths, n, input_ids.device, positions, mask)
        assert append.end <= cache.max_length, (append.end, cache.max_length)
        taps, last = self._layers.forward(input_ids, cache, append, self.tap_layers if want_taps else ())
        grown = [n] * cache.batch_size if counts is None else counts
        cache.lengths = [length + count for length, count in zip(cache.lengths, grown, strict=True)]
        logits = None
        if logits_for == "all":
            logits = self.teacher_logits(last)
        elif logits_for == "last":
            logits = self.teacher_logits(_last_rows(last, counts))
        return Step(logits, torch.cat(taps, dim=-1) if want_taps else None, last)


def _last_rows(last: Tensor, counts: list[int] | None) -> Tensor:
    if counts is None:
        return last[:, -1:]
    index = torch.tensor(counts, device=last.device) - 1
    return last[torch.arange(last.shape[0], device=last.device), index][:, None]


def _tap_layers(given: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    if given is None:
        if num_layers < MIN_LAYERS:
            raise UserError(
                f"tap_layers: got none for a target of {num_layers} layers; the default (2, L//2, L-3) needs at least "
                f"{MIN_LAYERS}; give three different layers from 0 to {num_layers}"
            )
        return (2, num_layers // 2, num_layers - 3)
    if not given or list(given) != sorted(set(given)) or given[0] < 0 or given[-1] >= num_layers:
        raise UserError(f"tap_layers: got {given}, allowed: different layers from 0 to {num_layers - 1}, ascending")
    return tuple(given)


def _token_count(tokenizer: PreTrainedTokenizerBase) -> int:
    return max(tokenizer.get_vocab().values()) + 1


def _eos_token_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> tuple[int, ...]:
    """Every id that ends an answer, of generation_config, config and tokenizer."""
    sources = [
        model.generation_config.eos_token_id,
        model.config.eos_token_id,
        tokenizer.eos_token_id if tokenizer else None,
    ]
    ids: list[int] = []
    for source in sources:
        ids += [source] if isinstance(source, int) else list(source or ())
    return tuple(dict.fromkeys(i for i in ids if i < vocab_size))


def _hash(model: nn.Module) -> str:
    """Hash of weights and config: of up to 4,096 evenly spaced values of every tensor, rounded to bf16 so that a target has one
    hash in all dtypes."""
    sampled = {}
    for name, tensor in model.named_parameters():
        flat = tensor.detach().flatten()
        sampled[f"{name} {tuple(tensor.shape)}"] = flat[:: max(1, flat.numel() // HASHED_PER_TENSOR)].bfloat16()
    config = model.config.to_dict()
    for key in ("dtype", "torch_dtype", "_name_or_path", "transformers_version", "use_cache", "quantization_config"):
        config.pop(key, None)
    return hash_json([hash_tensors(sampled), config])


EMBED_SCALES = {
    "gemma": lambda config: config.hidden_size**0.5,
    "gemma2": lambda config: config.hidden_size**0.5,
    "gemma3_text": lambda config: config.hidden_size**0.5,
    "granite": lambda config: config.embedding_multiplier,
}
LOGIT_SCALES = {
    "cohere": lambda config: config.logit_scale,
    "cohere2": lambda config: config.logit_scale,
    "granite": lambda config: 1.0 / config.logits_scaling,
}
