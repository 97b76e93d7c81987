"""The target's forward pass for Llama-like models (Llama, Mistral, Qwen2, Qwen3), with nothing in it that a step does not need.

It shares the weights of the Hugging Face model (whose projections become views of the fused ones), and knows nothing of
tokenizers, files or other families: those take the path of generic.py. A test holds both equal.

Letters: B rows, n new tokens, T slots in use, H width, N query heads, G key/value heads, D head width, I MLP width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdraft.models.cache import Append, KVCache

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those whose table does not depend on the length of the text


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer: qkv [(N+2G)*D, H], o [H, N*D], gate_up [2*I, H], down [H, I]."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


def is_supported(model: nn.Module) -> bool:
    """Whether `LeanModel` computes the same as this Hugging Face model."""
    config = model.config
    if config.model_type not in MODEL_TYPES or config.hidden_act != "silu":
        return False
    layers = model.model.layers
    full = all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or ())
    windowed = config.model_type == "mistral" and config.sliding_window is not None
    plain = all(
        type(projection) is nn.Linear
        for layer in layers
        for projection in (*_qkv(layer), layer.self_attn.o_proj, *_gate_up(layer), layer.mlp.down_proj)
    )
    return full and not windowed and plain and config.rope_parameters["rope_type"] in ROPE_TYPES


class LeanModel:
    """Functional forward pass over fused weights, for batch 1 decoding and for ragged batches."""

    def __init__(self, model: nn.Module):
        assert is_supported(model), model.config.model_type
        config, trunk = model.config, model.model
        self.head_dim = trunk.layers[0].self_attn.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv = config.num_key_value_heads
        self.eps = config.rms_norm_eps
        self.embedding = trunk.embed_tokens.weight.detach()
        self.layers = [_fuse(layer) for layer in trunk.layers]
        self.final_norm = trunk.norm.weight.detach()
        positions = torch.arange(config.max_position_embeddings, device=self.embedding.device)[None]
        cos, sin = trunk.rotary_emb(self.embedding, positions)
        half = self.head_dim // 2
        self.cos, self.sin = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        return KVCache(batch_size, max_length, len(self.layers))

    def norm(self, last: Tensor) -> Tensor:
        return rms_norm(last, self.final_norm, self.eps)

    def forward(
        self, input_ids: Tensor, cache: KVCache | None, append: Append, taps: tuple[int, ...]
    ) -> tuple[list[Tensor], Tensor]:
        """[B,n] -> the inputs of the layers in `taps`, each [B,n,H], and the input of the final norm [B,n,H]."""
        hidden = F.embedding(input_ids, self.embedding)
        where = slice(append.start, append.end) if append.positions is None else append.positions
        cos, sin = self.cos[where].unsqueeze(-2), self.sin[where].unsqueeze(-2)
        tapped = []
        for index, layer in enumerate(self.layers):
            if index in taps:
                tapped.append(hidden)
            hidden = hidden + self._attention(hidden, index, layer, cache, append, cos, sin)
            x = rms_norm(hidden, layer.mlp_norm, self.eps)
            gate, up = F.linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
        return tapped, hidden

    def _attention(
        self, hidden: Tensor, index: int, layer: Layer, cache: KVCache | None, append: Append, cos: Tensor, sin: Tensor
    ) -> Tensor:
        batch, n, _ = hidden.shape
        heads, kv, width = self.num_heads, self.num_kv, self.head_dim
        x = rms_norm(hidden, layer.input_norm, self.eps)
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(batch, n, heads + 2 * kv, width)
        qk, v = qkv[:, :, : heads + kv], qkv[:, :, heads + kv :]
        if layer.q_norm is not None:
            q, k = (
                rms_norm(qk[:, :, :heads], layer.q_norm, self.eps),
                rms_norm(qk[:, :, heads:], layer.k_norm, self.eps),
            )
            qk = torch.cat((q, k), dim=2)
        half = width // 2
        qk = qk * cos + torch.cat((qk[..., half:], qk[..., :half]), dim=-1) * sin
        q, k = qk[:, :, :heads].transpose(1, 2), qk[:, :, heads:].transpose(1, 2)
        keys, values = k, v.transpose(1, 2)
        if cache is not None:
            keys, values = cache.write(index, keys, values, append)
        out = attend(q, keys, values, append.mask, append.is_causal)
        return F.linear(out.transpose(1, 2).reshape(batch, n, heads * width), layer.o, layer.o_bias)


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Grouped-query attention without copies of keys and values. q [B,N,n,D], keys and values [B,G,T,D] -> [B,N,n,D]."""
    batch, heads, n, width = q.shape
    groups = heads // keys.shape[1]
    if groups == 1 or is_causal:
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=is_causal, enable_gqa=groups > 1
        )
    q = q.reshape(batch, keys.shape[1], groups * n, width)  # the queries that share a key head are rows of one product
    if mask is not None and n > 1:
        mask = mask.repeat(1, 1, groups, 1)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask).view(batch, heads, n, width)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, in fp32 inside."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _qkv(layer: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    return layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj


def _gate_up(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    return layer.mlp.gate_proj, layer.mlp.up_proj


def _fuse(layer: nn.Module) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = _concatenate(_qkv(layer))
    gate_up, gate_up_bias = _concatenate(_gate_up(layer))
    has_norms = hasattr(attention, "q_norm")
    return Layer(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=qkv,
        qkv_bias=qkv_bias,
        q_norm=attention.q_norm.weight.detach() if has_norms else None,
        k_norm=attention.k_norm.weight.detach() if has_norms else None,
        o=attention.o_proj.weight.detach(),
        o_bias=_detach(attention.o_proj.bias),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=mlp.down_proj.weight.detach(),
        down_bias=_detach(mlp.down_proj.bias),
    )


def _concatenate(projections: tuple[nn.Module, ...]) -> tuple[Tensor, Tensor | None]:
    """One weight for several projections of the same input; the modules keep views of it, so that nothing is held twice."""
    weight = torch.cat([projection.weight.detach() for projection in projections])
    sizes = [projection.out_features for projection in projections]
    for projection, part in zip(projections, weight.split(sizes), strict=True):
        projection.weight = nn.Parameter(part, requires_grad=False)
    bias = None
    if projections[0].bias is not None:
        bias = torch.cat([projection.bias.detach() for projection in projections])
    return weight, bias


def _detach(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()
