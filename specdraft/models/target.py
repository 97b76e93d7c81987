"""The frozen target: taps, teacher logits and a decoding forward pass, for any Hugging Face decoder-only model.

It knows nothing of drafters, prompts or losses. Files are read in load.py; the layers are run by lean.py (Llama-like
models) or by generic.py (all others).

Letters: B rows, T tokens, n new tokens, H width, V vocabulary (real tokens: padded rows of the head are left out),
A taps, L layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdraft.config import UserError
from specdraft.models import lean as lean_path
from specdraft.models.attention import Attention, Watcher
from specdraft.models.cache import Append, KVCache
from specdraft.models.default_target import is_packaged, packaged_target
from specdraft.models.generic import GenericModel
from specdraft.models.layers import FrozenLinear, compute_dtype, step_dtype
from specdraft.models.load import load_model
from specdraft.provenance import hash_json, hash_tensors

MIN_LAYERS = 7  # with fewer, the default taps (2, L//2, L-3) are not three different layers
CHECKED_TOKENS = 8
HASHED_VALUES = 4096  # of each tensor
HASHED_CONFIG = ("model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rope_parameters")


@dataclass
class Features:
    """What a drafter is trained on: taps [B,T,A*H] (ascending, joined), last [B,T,H] = input of the final norm."""

    taps: Tensor
    last: Tensor


@dataclass
class Step:
    """One decoding forward pass: logits [B, n or 1, V] or None, taps [B,n,A*H] or None, last [B,n,H]."""

    logits: Tensor | None
    taps: Tensor | None
    last: Tensor


def in_own_dtype(method: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a method of `TargetModel` as it would run outside of a training loop's autocast."""

    @functools.wraps(method)
    def call(self: TargetModel, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(self.device.type):
            return method(self, *args, **kwargs)
        with torch.autocast(self.device.type, enabled=False):
            return method(self, *args, **kwargs)

    return call


class TargetModel:
    """The frozen target. Not an nn.Module on purpose: it must never enter a drafter's parameters or checkpoints.

    Tap k is Hugging Face's hidden_states[k], the input of decoder layer k (0 = the embeddings).
    logits = soft_cap(logit_scale * head_weight @ norm(last)), soft_cap(z) = c tanh(z / c), c None = none.
    dtype: of weights and of stored states.   compute_dtype: of states, keys and logits while it runs texts and batches.
    step_dtype: the same while it decodes one sequence. With bf16 weights on a CPU the last is fp32 in the families of lean.py
    (thin_products.py), and so is compute_dtype where the processor has no bf16 instructions.
    """

    def __init__(
        self,
        model: PreTrainedModel,
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
        embedding, head = model.get_input_embeddings().weight.detach(), model.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise UserError(f"target {name}: its head has a bias, allowed: heads without one; choose another target")
        self.dtype, self.device = embedding.dtype, embedding.device
        self.vocab_size = min(len(embedding), len(embedding) if tokenizer is None else _token_count(tokenizer))
        self.embedding_weight = embedding[: self.vocab_size]
        self.head_weight = head.weight.detach()[: self.vocab_size]
        self.logit_scale = LOGIT_SCALES[config.model_type](config) if config.model_type in LOGIT_SCALES else 1.0
        self.soft_cap: float | None = getattr(config, "final_logit_softcapping", None)
        self.eos_token_ids = _eos_token_ids(model, tokenizer, self.vocab_size)
        self.is_lean = lean and lean_path.is_supported(model)
        self._layers = lean_path.LeanModel(model) if self.is_lean else GenericModel(model)
        self._head = FrozenLinear(self.head_weight)
        self.compute_dtype = compute_dtype(embedding) if self.is_lean else self.dtype
        self.step_dtype = step_dtype(embedding) if self.is_lean else self.dtype
        self.watcher: Watcher | None = None
        self._check()

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
        """Read a target: "default" or another of PACKAGED, a Hugging Face folder, a folder or file with a GGUF, or a Hub id.

        Raises:
            UserError: not there, not a complete decoder-only model, or one whose logits we cannot reproduce.
        """
        where = str(packaged_target(path_or_id)) if is_packaged(path_or_id) else str(path_or_id)
        model, tokenizer = load_model(where, dtype, device, revision)
        return cls(model, tokenizer, Path(where).name if Path(where).exists() else where, tap_layers, lean)

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        tap_layers: tuple[int, ...] | None = None,
        lean: bool = True,
    ) -> TargetModel:
        """Wrap a Hugging Face model that is in memory already."""
        return cls(model, tokenizer, model.config.name_or_path or type(model).__name__, tap_layers, lean)

    @functools.cached_property
    def teacher_head(self) -> Tensor:
        """The rows of the head [V,H] in the dtype that teachers are computed in."""
        return self.head_weight.to(self.compute_dtype)

    @property
    def precision(self) -> str:
        """What stands beside every figure: the dtype, or those of weights and states where they differ while decoding."""
        weights, states = (str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.step_dtype))
        return weights if weights == states else f"{weights} weights, {states} states"

    @in_own_dtype
    @torch.no_grad()
    def features(self, input_ids: Tensor, lengths: Tensor) -> Features:
        """Taps and last states of right-padded rows; no logits are made. input_ids [B,T], lengths [B].

        Attention is causal, so padding on the right changes nothing before it; what stands at and after a row's length
        means nothing."""
        assert lengths.shape == input_ids.shape[:1], (lengths.shape, input_ids.shape)
        append = Append([0] * len(input_ids), input_ids.shape[1], input_ids.shape[1], input_ids.device)
        taps, last = self._layers.forward(input_ids, None, append, self.tap_layers)
        return Features(torch.cat(taps, dim=-1), last)

    @in_own_dtype
    @torch.no_grad()
    def norm(self, last: Tensor) -> Tensor:
        """The final norm, [..,H] -> [..,H]."""
        return self._layers.norm(last)

    @in_own_dtype
    @torch.no_grad()
    def teacher_logits(self, last: Tensor) -> Tensor:
        """The target's own logits [..,V], from the input of the final norm [..,H], in its dtype."""
        return self.scale_logits(self._head(self.norm(last)))

    def scale_logits(self, logits: Tensor) -> Tensor:
        """Products of the head's rows with the normed state -> logits: the scale and the soft cap."""
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        """An empty cache of `max_length` slots a row. Raises UserError past the model's positions."""
        if max_length > self.max_positions:
            raise UserError(
                f"target {self.name}: got {max_length} tokens (prompt and answer), allowed: up to {self.max_positions}; "
                "shorten the prompt or max_new_tokens"
            )
        return self._layers.new_cache(batch_size, max_length)

    @in_own_dtype
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
        logits_for: Literal["all", "last", "none"] = "all",
        attention: Attention | None = None,
    ) -> Step:
        """Append n tokens to every row of the cache and run them. The results are inference tensors.

        input_ids: [B,n].   positions: [B,n] rotary positions; by default the slots that the tokens take.
        mask: boolean [B or 1, 1, n, end], True = may attend, end = longest row + n; by default causal.
        counts: number of real tokens of each row where `input_ids` is padded on the right: the rows grow by that many.
        logits_for: every position, the last (real) one of each row, or none.
        attention: what the layers attend with (see attention.py); None = what the watcher says, or as usual.
        """
        assert input_ids.shape[0] == cache.batch_size, (input_ids.shape, cache.batch_size)
        n = input_ids.shape[1]
        append = cache.place(n, input_ids.device, positions, mask)
        if attention is None and self.watcher is not None:
            attention = self.watcher.attention(cache, append)
        taps, last = self._layers.forward(input_ids, cache, append, self.tap_layers if want_taps else (), attention)
        cache.grow([n] * cache.batch_size if counts is None else counts)
        logits = None
        if logits_for != "none":
            logits = self.teacher_logits(last if logits_for == "all" else _last_rows(last, counts))
        return Step(logits, torch.cat(taps, dim=-1) if want_taps else None, last)

    def _check(self) -> None:
        """Once, on random ids: teacher logits and the cached forward pass give the model's own logits.

        Raises:
            UserError: a family that scales, caps or orders things in a way that this file does not know.
        """
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.vocab_size, (1, CHECKED_TOKENS), generator=generator).to(self.device)
        try:
            with torch.inference_mode():
                own = self.model(input_ids=ids).logits[..., : self.vocab_size].float()
                append = Append([0], CHECKED_TOKENS, CHECKED_TOKENS, self.device)
                _, last = GenericModel(self.model).forward(ids, None, append, ())
                cache = self.new_cache(1, CHECKED_TOKENS)
                steps = [self.forward(part, cache, want_taps=False).logits for part in ids.split((3, 1, 4), dim=1)]
                found = {"teacher logits": self.teacher_logits(last), "cached forward pass": torch.cat(steps, dim=1)}
        except (RuntimeError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise UserError(
                f"target {self.name}: a {self.hf_config.model_type} model cannot be run through our cache "
                f"({' '.join(str(error).split())[:160]}); choose a decoder-only model that generates with a plain cache"
            ) from error
        if not own.isfinite().all():
            raise UserError(
                f"target {self.name}: its own logits are NaN or infinite in {str(self.dtype).removeprefix('torch.')}; check its "
                "weights, or load it in another dtype"
            )
        for what, logits in found.items():
            error = float((logits.float() - own).abs().mean() / own.std())
            if not error < CHECK_TOLERANCE[self.dtype]:
                raise UserError(
                    f"target {self.name}: our {what} differ from the model's own logits by {error:.2g} of their spread; "
                    f"the family {self.hf_config.model_type} is not supported, choose another target"
                )


def _last_rows(last: Tensor, counts: list[int] | None) -> Tensor:
    """[B,n,H] -> [B,1,H]: the state of each row's last real token."""
    if counts is None:
        return last[:, -1:]
    return last[range(len(counts)), [count - 1 for count in counts]][:, None]


def _tap_layers(given: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    allowed = f"different layers from 0 to {num_layers - 1}, ascending"
    if given is None:
        if num_layers < MIN_LAYERS:
            raise UserError(
                f"tap_layers: got none for a target of {num_layers} layers, and the default (2, L//2, L-3) needs "
                f"{MIN_LAYERS}; give tap_layers, {allowed}"
            )
        return (2, num_layers // 2, num_layers - 3)
    if not given or list(given) != sorted(set(given)) or given[0] < 0 or given[-1] >= num_layers:
        raise UserError(f"tap_layers: got {tuple(given)}, allowed: {allowed}")
    return tuple(given)


def _token_count(tokenizer: PreTrainedTokenizerBase) -> int:
    return max(tokenizer.get_vocab().values()) + 1


def _eos_token_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> tuple[int, ...]:
    """Every id that ends an answer, in generation_config, config or tokenizer. Nothing else of generation_config is
    read: temperature, penalties and the like are the caller's."""
    sources = [model.generation_config.eos_token_id, model.config.eos_token_id]
    sources.append(None if tokenizer is None else tokenizer.eos_token_id)
    ids: list[int] = []
    for source in sources:
        ids += [source] if isinstance(source, int) else list(source or ())
    return tuple(dict.fromkeys(token for token in ids if token < vocab_size))


def _hash(model: PreTrainedModel) -> str:
    """Hash of weights and config: up to 8,191 evenly spaced values of every tensor, rounded to bf16 so that a target has
    one hash in all dtypes, and the settings that change what the weights compute."""
    sampled = {}
    for name, tensor in model.named_parameters():
        flat = tensor.detach().flatten()
        sampled[f"{name} {tuple(tensor.shape)}"] = flat[:: max(1, flat.numel() // HASHED_VALUES)].bfloat16()
    config = model.config.to_dict()
    return hash_json([hash_tensors(sampled), {key: config.get(key) for key in HASHED_CONFIG}])


LOGIT_SCALES = {
    "cohere": lambda config: config.logit_scale,
    "cohere2": lambda config: config.logit_scale,
    "granite": lambda config: 1.0 / config.logits_scaling,
}
CHECK_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
