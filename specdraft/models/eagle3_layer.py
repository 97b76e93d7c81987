"""The equations and the weights of the EAGLE-3 layer: one decoder layer that reads three target states and its own last output.

    g = fc(taps);  x = [input_layernorm(e), hidden_norm(h)]  (width 2H);  out = h + attn(x);  out = out + mlp(norm(out))
    logits = head(norm(out));   the next step reads h = out, un-normed (flags change that: EAGLE-3.1)

Training (eagle3.py) and decoding (chain.py) share them. This file knows nothing of sequences, steps or heads.
Source: EAGLE-3 (arXiv 2503.01840); docs/papers.md.

Letters: B batch, N rows, H width, A taps, h heads, k key/value heads, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdraft.models.heads import HeadConfig


@dataclass
class Eagle3Config:
    """Shape and flags of a drafter. The widths, the rotary scheme and the positions are the target's unless changed."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    tap_layers: tuple[int, ...]
    rms_norm_eps: float = 1e-5
    norm_before_residual: bool = False  # the residual stream starts from the normed state
    norm_output: bool = False  # the next step reads the normed output
    fc_norm: bool = False  # one norm for each tap, before fc
    norm_before_fc: bool = False  # one norm over all taps, before fc
    head: HeadConfig = field(default_factory=HeadConfig)


class RMSNorm(nn.RMSNorm):
    """In the dtype of its input, with fp32 statistics: autocast rounds the weight of a linear layer, but not of a norm."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Layer(nn.Module):
    """The weights of the one decoder layer, under the names that EAGLE-3 checkpoints use."""

    def __init__(self, c: Eagle3Config):
        super().__init__()
        q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * c.hidden_size, q_size, bias=False),
                "k_proj": nn.Linear(2 * c.hidden_size, kv_size, bias=False),
                "v_proj": nn.Linear(2 * c.hidden_size, kv_size, bias=False),
                "o_proj": nn.Linear(q_size, c.hidden_size, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(c.hidden_size, c.intermediate_size, bias=False),
                "up_proj": nn.Linear(c.hidden_size, c.intermediate_size, bias=False),
                "down_proj": nn.Linear(c.intermediate_size, c.hidden_size, bias=False),
            }
        )


class Arithmetic:
    """The drafter's equations, over whatever holds its weights: trainable modules (Eagle3Drafter) or packed ones (FrozenWeights),
    under the same names."""

    config: Eagle3Config
    embedding: Tensor

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding)

    def fuse(self, taps: Tensor) -> Tensor:
        """taps [..., A*H] -> g [..., H]"""
        return self.fc(self.fc_input(taps))

    def fc_input(self, taps: Tensor) -> Tensor:
        """taps [..., A*H], normed where the flags say so"""
        if self.config.fc_norm:
            parts = taps.chunk(len(self.config.tap_layers), dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.config.norm_before_fc:
            taps = self.input_norm(taps)
        return taps

    def layer_input(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [..., H], tokens [...] -> (x [..., 2H], residual [..., H])"""
        normed = self.midlayer.hidden_norm(hidden)
        embedded = self.midlayer.input_layernorm(self.embed(tokens).to(hidden.dtype))
        residual = normed if self.config.norm_before_residual else hidden
        return torch.cat([embedded.to(normed.dtype), normed], dim=-1), residual

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, N, 2H], positions [B, N] -> [B, h, N, d], rotated"""
        q = self.midlayer.self_attn["q_proj"](x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        return self.rotate(q, positions)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, N, 2H], positions [B, N] -> keys (rotated) and values, [B, k, N, d] each"""
        k = self.midlayer.self_attn["k_proj"](x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        v = self.midlayer.self_attn["v_proj"](x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        return self.rotate(k, positions), v

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding. x [B, n, N, d], positions [B, N]"""
        cos, sin = self.cos[positions].unsqueeze(1).to(x.dtype), self.sin[positions].unsqueeze(1).to(x.dtype)
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-right, left], dim=-1) * sin

    def finish(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """attended [B, h, N, d], residual [B, N, H] -> (what the next step reads, what the head reads), [B, N, H] each"""
        layer = self.midlayer
        hidden = residual + layer.self_attn["o_proj"](attended.transpose(1, 2).flatten(2))
        hidden = hidden + self.feed_forward(layer.post_attention_layernorm(hidden))
        normed = self.norm(hidden)
        return (normed if self.config.norm_output else hidden), normed

    def feed_forward(self, x: Tensor) -> Tensor:
        """The gated MLP, [..., H] -> [..., H]"""
        mlp = self.midlayer.mlp
        return mlp["down_proj"](F.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))


def rotary_tables(config: Eagle3Config) -> tuple[Tensor, Tensor]:
    """cos, sin [max positions, d] fp32, by the target's own scheme (linear, YaRN, Llama-3 scaling ...)."""
    rope = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config.head_dim,  # one head: the real width need not be a multiple of it, which transformers wants
            num_attention_heads=1,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
        )
    )
    cos, sin = rope(torch.zeros(1), torch.arange(config.max_position_embeddings)[None])
    return cos[0], sin[0]
