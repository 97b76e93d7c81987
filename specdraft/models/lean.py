"""The target's forward pass for Llama-like models (Llama, Mistral, Qwen2, Qwen3), with nothing that a step does not need.

It knows nothing of tokenizers, files or other families: those take the path of generic.py. A test holds both equal.

Letters: B rows, n new tokens, T slots in use, H width, h query heads, G key/value heads, D head width, I MLP width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from specdraft.models import row_attention
from specdraft.models.attention import Attention, AttentionInputs
from specdraft.models.cache import Append, KVCache
from specdraft.models.decode_layers import DecodeLayers, are_supported
from specdraft.models.layers import FEW_ROWS, FrozenLinear, FrozenRMSNorm, compute_dtype, step_dtype
from specdraft.models.thin_products import Sizes

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those whose table does not depend on the length of the text
CAUSAL_BLOCK = 64  # tokens whose scores are computed at once
PRODUCT_ROWS = 64  # up to so many queries a key head, a batch is attended to row by row, or by batched products


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
    """One decoder layer. qkv: H -> (h+2G)*D; out: h*D -> H; gate_up: H -> 2*I; down: I -> H."""

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
        self.dtype, self.step_dtype = compute_dtype(self.embedding), step_dtype(self.embedding)
        self.layers = [_fuse(layer, config.rms_norm_eps) for layer in trunk.layers]
        self.norm = FrozenRMSNorm(trunk.norm.weight, config.rms_norm_eps)
        self.rotary = {dtype: self._rotary(trunk, dtype) for dtype in {self.dtype, self.step_dtype}}
        self.compiled = self._compile(config) if are_supported(self.layers) else None

    def _rotary(self, trunk: nn.Module, dtype: torch.dtype) -> Rotary:
        """Of all positions."""
        positions = torch.arange(trunk.config.max_position_embeddings, device=self.embedding.device)
        like = torch.empty(0, dtype=dtype, device=self.embedding.device)
        cos, sin = (table[0, :, None] for table in trunk.rotary_emb(like, positions[None]))
        left, right = sin.chunk(2, dim=-1)
        return Rotary(cos, torch.cat((-left, right), dim=-1))

    def _compile(self, config: PreTrainedConfig) -> DecodeLayers:
        shape = (config.hidden_size, config.intermediate_size, self.num_heads, self.num_kv, self.head_dim)
        return DecodeLayers(self.layers, Sizes(*shape, config.rms_norm_eps))

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        """An empty cache of `max_length` slots a row."""
        dtype = self.step_dtype if batch_size == 1 else self.dtype
        return KVCache(batch_size, max_length, len(self.layers), dtype)

    def forward(
        self,
        input_ids: Tensor,
        cache: KVCache | None,
        append: Append,
        taps: tuple[int, ...],
        attention: Attention | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        """[B,n] -> the inputs of the layers in `taps`, each [B,n,H], and the input of the final norm [B,n,H].

        attention: what to attend with over the cache (see attention.py); None = as usual."""
        dtype = self.dtype if cache is None else cache.dtype
        where = slice(append.start, append.end) if append.positions is None else append.positions
        rotary = Rotary(self.rotary[dtype].cos[where], self.rotary[dtype].sin[where])
        hidden = F.embedding(input_ids, self.embedding).to(dtype)
        is_step = cache is not None and cache.is_single and append.n <= FEW_ROWS
        if self.compiled is not None and is_step and attention is None:
            return self.compiled.forward(hidden, rotary.cos, rotary.sin, cache, append, taps)
        by_rows = attention is None and cache is not None and self._reads_rows(hidden, append)
        mask = None if by_rows else self._mask(append, dtype)
        tapped = []
        for index, layer in enumerate(self.layers):
            if index in taps:
                tapped.append(hidden)
            q, keys, values = self._project(layer, hidden, rotary)
            if cache is not None:
                stored = cache.write(index, keys, values, append)
            attended = None
            if attention is not None:
                attended = attention(AttentionInputs(index, q.transpose(1, 2), *stored, mask, self.head_dim**-0.5))
            if attended is not None:
                attended = attended.flatten(2)
            elif append.is_causal:
                attended = attend_causally(q, keys, values)
            elif by_rows:
                attended = row_attention.attend_rows(q, *stored, append.before)
            else:
                attended = attend(q, *stored, mask)
            hidden = hidden + layer.out(attended)
            gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate) * up)
        return tapped, hidden

    def _project(self, layer: Layer, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """[B,n,H] -> queries [B,n,h,D], keys and values [B,n,G,D]; queries and keys are rotated."""
        heads, turned = self.num_heads, self.num_heads + self.num_kv
        qkv = layer.qkv(layer.input_norm(hidden)).view(*hidden.shape[:2], -1, self.head_dim)
        qk = qkv[:, :, :turned]
        if layer.q_norm is not None:
            qk = torch.cat((layer.q_norm(qk[:, :, :heads]), layer.k_norm(qk[:, :, heads:])), dim=2)
        qk = rotary(qk)
        return qk[:, :, :heads], qk[:, :, heads:], qkv[:, :, turned:]

    def _reads_rows(self, hidden: Tensor, append: Append) -> bool:
        """Whether each row of a batch attends to its own slots only, by `attend_rows`."""
        queries = append.n * self.num_heads // self.num_kv
        is_plain = len(hidden) > 1 and append.given_mask is None and not append.is_causal
        return is_plain and queries <= PRODUCT_ROWS and row_attention.is_supported(hidden)

    def _mask(self, append: Append, dtype: torch.dtype) -> Tensor | None:
        """The mask as numbers to add, for the rows of `attend`: [B or 1, 1, h/G*n or 1, width]."""
        if append.mask is None:
            return None
        return additive(append.mask, self.num_heads // self.num_kv, dtype)


def additive(mask: Tensor, repeats: int, dtype: torch.dtype) -> Tensor:
    """A mask [B or 1, 1, n, T], True = may attend, as numbers to add for the rows of `attend`: [B or 1, 1, repeats*n or 1, T];
    repeats: queries that share a key head."""
    numbers = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    return numbers if mask.shape[2] == 1 else numbers.repeat(1, 1, repeats, 1)


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """q [B,n,h,D]; keys, values [B,G,T,D]; mask to add, broadcastable to [B,1,h/G*n,T] -> [B,n,h*D].

    Key heads are never repeated in memory: the h/G queries that share one become rows of the same product."""
    batch, n, heads, width = q.shape
    q = q.transpose(1, 2).reshape(batch, keys.shape[1], -1, width)
    if mask is not None and batch > 1 and q.shape[2] <= PRODUCT_ROWS and q.device.type == "cpu":
        # torch's attention kernel has a small product for each row and head; these are two large ones
        scores = torch.add(mask, torch.matmul(q, keys.transpose(2, 3)), alpha=width**-0.5)
        out = torch.matmul(torch.softmax(scores, dim=-1), values)
    else:
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    return out.reshape(batch, heads, n, width).transpose(1, 2).reshape(batch, n, -1)


def attend_causally(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Each of n tokens attends to itself and those before. q [B,n,h,D]; keys, values [B,n,G,D] -> [B,n,h*D]."""
    n = q.shape[1]
    if n <= CAUSAL_BLOCK or q.device.type != "cpu":
        q, keys, values = q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)
    outputs = []
    for start in range(0, n, CAUSAL_BLOCK):
        end = min(start + CAUSAL_BLOCK, n)
        outputs.append(_causal_block(q[:, start:end], keys[:, :end], values[:, :end]))
    return torch.cat(outputs, dim=1)


def _causal_block(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The last n of T tokens. q [B,n,h,D]; keys, values [B,T,G,D] -> [B,n,h*D]. Two batched products, which on a CPU
    take half the time of torch's attention kernel."""
    batch, n, heads, width = q.shape
    groups = keys.shape[2]
    q = q.transpose(1, 2).reshape(batch * groups, -1, width)
    keys, values = keys.transpose(1, 2).flatten(0, 1), values.transpose(1, 2).flatten(0, 1)
    scores = torch.bmm(q, keys.transpose(1, 2)).view(batch, heads, n, -1)
    scores *= width**-0.5
    scores[..., -n:] += torch.full((n, n), float("-inf"), dtype=q.dtype).triu(1)
    weights = torch.softmax(scores, dim=-1).view(batch * groups, -1, keys.shape[1])
    return torch.bmm(weights, values).view(batch, heads, n, width).transpose(1, 2).flatten(2)


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
