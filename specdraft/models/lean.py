"""The target's forward pass for Llama-like models (Llama, Mistral, Qwen2, Qwen3), with nothing that a step does not need.

It knows nothing of tokenizers, files or other families: those take the path of generic.py. A test holds both equal.

Letters: B rows, n new tokens, T slots in use, H width, N query heads, G key/value heads, D head width, I MLP width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdraft.models.cache import Append, KVCache
from specdraft.models.layers import FrozenLinear, FrozenRMSNorm

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those whose table does not depend on the length of the text


def is_supported(model: nn.Module) -> bool:
    """Whether `LeanModel` computes the same as this Hugging Face model."""
    config = model.config
    if config.model_type not in MODEL_TYPES or config.hidden_act != "silu":
        return False
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    windowed = config.model_type == "mistral" and config.sliding_window is not None
    if (
        windowed
        or any(kind != "full_attention" for kind in kinds)
        or config.rope_parameters["rope_type"] not in ROPE_TYPES
    ):
        return False
    return all(type(projection) is nn.Linear for layer in model.model.layers for projection in _projections(layer))


@dataclass(frozen=True)
class Layer:
    """One decoder layer. qkv: H -> (N+2G)*D; out: N*D -> H; gate_up: H -> 2*I; down: I -> H."""

    input_norm: FrozenRMSNorm
    qkv: FrozenLinear
    q_norm: FrozenRMSNorm | None
    k_norm: FrozenRMSNorm | None
    out: FrozenLinear
    mlp_norm: FrozenRMSNorm
    gate_up: FrozenLinear
    down: FrozenLinear


@dataclass(frozen=True)
class Rotary:
    """cos, sin: [n, 1, D] for all rows, or [B, n, 1, D]; the first half of sin is negated."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """[B, n, heads, D], rotated by the position of each token."""
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, dims=-1), self.sin)


class LeanModel:
    """Functional forward pass over fused weights, for decoding one row and for ragged batches."""

    def __init__(self, model: nn.Module):
        assert is_supported(model), model.config.model_type
        config, trunk = model.config, model.model
        self.num_heads, self.num_kv = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = trunk.layers[0].self_attn.head_dim
        self.embedding = trunk.embed_tokens.weight.detach()
        self.layers = [_fuse(layer, config.rms_norm_eps) for layer in trunk.layers]
        self.norm = FrozenRMSNorm(trunk.norm.weight, config.rms_norm_eps)
        positions = torch.arange(config.max_position_embeddings, device=self.embedding.device)
        cos, sin = (table[0, :, None] for table in trunk.rotary_emb(self.embedding, positions[None]))
        left, right = sin.chunk(2, dim=-1)
        self.cos, self.sin = cos, torch.cat((-left, right), dim=-1)

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        """An empty cache of `max_length` slots a row."""
        return KVCache(batch_size, max_length, len(self.layers))

    def forward(
        self, input_ids: Tensor, cache: KVCache | None, append: Append, taps: tuple[int, ...]
    ) -> tuple[list[Tensor], Tensor]:
        """[B,n] -> the inputs of the layers in `taps`, each [B,n,H], and the input of the final norm [B,n,H]."""
        where = slice(append.start, append.end) if append.positions is None else append.positions
        rotary = Rotary(self.cos[where], self.sin[where])
        mask = self._mask(append)
        hidden = F.embedding(input_ids, self.embedding)
        tapped = []
        for index, layer in enumerate(self.layers):
            if index in taps:
                tapped.append(hidden)
            q, keys, values = self._project(layer, hidden, rotary)
            if cache is not None:
                keys, values = cache.write(index, keys, values, append)
            hidden = hidden + layer.out(self._attend(q, keys, values, mask, append.is_causal))
            gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate) * up)
        return tapped, hidden

    def _project(self, layer: Layer, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """[B,n,H] -> queries [B,n,N,D], keys and values [B,n,G,D]; queries and keys are rotated."""
        heads, turned = self.num_heads, self.num_heads + self.num_kv
        qkv = layer.qkv(layer.input_norm(hidden)).unflatten(-1, (-1, self.head_dim))
        qk = qkv[:, :, :turned]
        if layer.q_norm is not None:
            qk = torch.cat((layer.q_norm(qk[:, :, :heads]), layer.k_norm(qk[:, :, heads:])), dim=2)
        qk = rotary(qk)
        return qk[:, :, :heads], qk[:, :, heads:], qkv[:, :, turned:]

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """q [B,n,N,D], keys and values [B,T,G,D] -> [B,n,N*D]. Key heads are never repeated in memory: the N/G queries
        that share one become rows of the same product."""
        batch, n = q.shape[:2]
        q, keys, values = q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        if is_causal:
            out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
        else:
            q = q.reshape(batch, self.num_kv, -1, self.head_dim)
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask).reshape(batch, -1, n, self.head_dim)
        return out.transpose(1, 2).reshape(batch, n, -1)

    def _mask(self, append: Append) -> Tensor | None:
        """The mask as numbers to add, repeated for the queries that share a key head: [B or 1, 1, N/G*n, end]."""
        if append.mask is None:
            return None
        mask = torch.zeros(append.mask.shape, dtype=self.embedding.dtype, device=append.device)
        return mask.masked_fill_(~append.mask, float("-inf")).repeat(1, 1, self.num_heads // self.num_kv, 1)


def _projections(layer: nn.Module) -> tuple[nn.Linear, ...]:
    attention, mlp = layer.self_attn, layer.mlp
    return (*_qkv(attention), attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)


def _qkv(attention: nn.Module) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    return attention.q_proj, attention.k_proj, attention.v_proj


def _fuse(layer: nn.Module, eps: float) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    has_norms = hasattr(attention, "q_norm")
    return Layer(
        input_norm=FrozenRMSNorm(layer.input_layernorm.weight, eps),
        qkv=_concatenate(_qkv(attention)),
        q_norm=FrozenRMSNorm(attention.q_norm.weight, eps) if has_norms else None,
        k_norm=FrozenRMSNorm(attention.k_norm.weight, eps) if has_norms else None,
        out=FrozenLinear(attention.o_proj.weight, attention.o_proj.bias),
        mlp_norm=FrozenRMSNorm(layer.post_attention_layernorm.weight, eps),
        gate_up=_concatenate((mlp.gate_proj, mlp.up_proj)),
        down=FrozenLinear(mlp.down_proj.weight, mlp.down_proj.bias),
    )


def _concatenate(projections: tuple[nn.Linear, ...]) -> FrozenLinear:
    """One product for several projections of the same input. The modules keep views of the joined weight, so that it
    is not held twice."""
    weight = torch.cat([projection.weight.detach() for projection in projections])
    parts = weight.split([projection.out_features for projection in projections])
    for projection, part in zip(projections, parts, strict=True):
        projection.weight = nn.Parameter(part, requires_grad=False)
    biases = [projection.bias for projection in projections]
    return FrozenLinear(weight, None if biases[0] is None else torch.cat([bias.detach() for bias in biases]))
