"""The EAGLE-3 drafter: one decoder layer that reads three of the target's hidden states and its own last output.

    g = fc(taps);  x = [input_layernorm(e), hidden_norm(h)]  (width 2H);  out = h + attn(x);  out = out + mlp(norm(out))
    logits = head(norm(out));   the next step reads h = out, un-normed (flags change that: EAGLE-3.1)

Row i of a sequence: feature of position i, embedding of x[i+1], predicts x[i+2]. Keys and values of a row depend on its
inputs alone, never on attention, so rows that nobody asks for (prompts) cost two small products each.

`unroll` (training, here) and `propose` (decoding, chain.py) are the same arithmetic, by test. This file knows nothing of losses, of
sampling, or of how drafts are verified. Source: EAGLE-3 (arXiv 2503.01840); papers.md 8.

Letters: B batch, T tokens, H width, A taps, K steps, M supervised rows, h heads, k key/value heads, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdraft.data.vocab import VocabMap
from specdraft.models.chain import Chain
from specdraft.models.drafter import Choose, Proposal
from specdraft.models.heads import Head, HeadConfig, LowRankHead, build_head
from specdraft.models.layers import FrozenLinear, FrozenRMSNorm


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
        if self.config.fc_norm:
            parts = taps.chunk(len(self.config.tap_layers), dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.config.norm_before_fc:
            taps = self.input_norm(taps)
        return self.fc(taps)

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
        x = layer.post_attention_layernorm(hidden)
        hidden = hidden + layer.mlp["down_proj"](F.silu(layer.mlp["gate_proj"](x)) * layer.mlp["up_proj"](x))
        normed = self.norm(hidden)
        return (normed if self.config.norm_output else hidden), normed


class Eagle3Drafter(nn.Module, Arithmetic):
    """One model for training (`unroll`) and for decoding (`prefill`, `propose`, `observe`; batch 1, no gradient).

    The target's embedding is used, not owned: `bind` hands it over, and it is neither trained nor saved.
    """

    def __init__(self, config: Eagle3Config, vocab_map: VocabMap | None = None):
        super().__init__()
        self.config = config
        taps_size = len(config.tap_layers) * config.hidden_size
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in config.tap_layers)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(taps_size, config.rms_norm_eps)
        self.fc = nn.Linear(taps_size, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head: Head = build_head(config.head, config.hidden_size, config.vocab_size, vocab_map)
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._target: dict[str, Tensor] = {}  # a dict, so that nn.Module neither registers nor saves it
        self._frozen: FrozenWeights | None = None
        self._chain: Chain | None = None

    def bind(self, embedding: Tensor) -> Eagle3Drafter:
        """Use the target's embedding [V, H]."""
        self._target["embedding"] = embedding
        return self

    @property
    def embedding(self) -> Tensor:
        return self._target["embedding"]

    # --- training ----------------------------------------------------------------------------------------------------

    def unroll(self, taps: Tensor, input_ids: Tensor, rows: Tensor, steps: int) -> Tensor:
        """Training-time test: K steps from every asked row, fed its own outputs but the true tokens (papers.md 8).

        taps [B, T, A*H]; input_ids [B, T]; rows [B, M] state indices i. Step k of row i reads the token x[i+1+k] at rotary
        position i+k, and attends to the step-0 keys of rows 0..i and to its own keys of steps 1..k.
        Tokens past the end are clamped: such (row, step) pairs must not be supervised.

        Returns: [K, B, M, H], normed: what the head reads.
        """
        last = input_ids.shape[1] - 1
        positions = torch.arange(last + 1, device=rows.device).expand(input_ids.shape)
        x, residual = self.layer_input(self.fuse(taps), input_ids.roll(-1, dims=1))
        keys, values = self.keys_values(x, positions)
        x, hidden = take_rows(x, rows), take_rows(residual, rows)
        visible = positions[:, None, :] <= rows[:, :, None]  # [B, M, T]
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        outputs = []
        for step in range(steps):
            if step:
                x, hidden = self.layer_input(hidden, input_ids.gather(1, (rows + 1 + step).clamp_max(last)))
                key, value = self.keys_values(x, rows + step)
                own_keys.append(key)
                own_values.append(value)
            q = self.queries(x, rows + step)
            hidden, normed = self.finish(attend(q, keys, values, visible, own_keys, own_values), hidden)
            outputs.append(normed)
        return torch.stack(outputs)

    # --- decoding ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, taps: Tensor, input_ids: Tensor) -> None:
        """See Drafter.prefill. Rows 0..T-1, token i+1 beside feature i."""
        versions = [(parameter.data_ptr(), parameter._version) for parameter in self.parameters()]
        if self._frozen is None or self._frozen.versions != versions:
            self._frozen = FrozenWeights(self, versions)
        self._chain = Chain(self._frozen, taps, input_ids[:, 1:])

    @torch.inference_mode()
    def propose(self, budget: int, choose: Choose, live: Tensor | None = None) -> Proposal:
        """See Drafter.propose. A chain of `budget` tokens from the last row."""
        return self._chain.propose(budget, choose, live)

    @torch.inference_mode()
    def observe(self, tokens: Tensor, taps: Tensor) -> None:
        """See Drafter.observe. The rows made of drafted states give way to rows made of the target's."""
        self._chain.append(taps, tokens[None])


class FrozenWeights(Arithmetic):
    """A drafter's weights packed for decoding. `versions`: of the parameters they were made from."""

    def __init__(self, drafter: Eagle3Drafter, versions: list[tuple[int, int]]):
        self.config, self.embedding, self.versions = drafter.config, drafter.embedding, versions
        for name, module in drafter.named_children():
            if name != "lm_head":
                setattr(self, name, freeze(module))
        self.head = drafter.lm_head
        self.rows = FrozenLinear(self.head.weight)
        self.down = FrozenLinear(self.head.down) if isinstance(self.head, LowRankHead) else None
        dtype = drafter.fc.weight.dtype
        left, right = drafter.sin.chunk(2, dim=-1)
        self.cos, self.sin = drafter.cos.to(dtype), torch.cat([-left, right], dim=-1).to(dtype)

    def logits(self, hidden: Tensor, live: Tensor | None) -> Tensor:
        """As Head.logits."""
        projected = hidden if self.down is None else self.down(hidden)
        return self.rows(projected) if live is None else F.linear(projected, self.head.weight[live])


def freeze(module: nn.Module) -> Any:
    """The same tree, of packed products and norms."""
    if isinstance(module, nn.Linear):
        return FrozenLinear(module.weight, module.bias)
    if isinstance(module, RMSNorm):
        return FrozenRMSNorm(module.weight, module.eps)
    if isinstance(module, nn.ModuleList):
        return [freeze(child) for child in module]
    children = {name: freeze(child) for name, child in module.named_children()}
    return children if isinstance(module, nn.ModuleDict) else SimpleNamespace(**children)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [B, T, H], rows [B, M] -> [B, M, H]"""
    return x.gather(1, rows[:, :, None].expand(-1, -1, x.shape[-1]))


def attend(
    q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, own_keys: list[Tensor], own_values: list[Tensor]
) -> Tensor:
    """Softmax attention over the shared step-0 rows and each row's own later steps.

    q [B, h, M, d]; keys, values [B, k, T, d]; visible [B, M, T] bool; own_keys, own_values: [B, k, M, d] for each step.
    Returns [B, h, M, d].
    """
    groups = q.shape[1] // keys.shape[1]
    q = q.unflatten(1, (-1, groups))  # [B, k, g, M, d]
    scale = q.shape[-1] ** -0.5
    shared = torch.einsum("bkgmd,bktd->bkgmt", q, keys).float() * scale
    scores = [shared.masked_fill(~visible[:, None, None], float("-inf"))]
    scores += [torch.einsum("bkgmd,bkmd->bkgm", q, key).float().unsqueeze(-1) * scale for key in own_keys]
    weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1).to(values.dtype)
    shared, own = weights[..., : keys.shape[2]], weights[..., keys.shape[2] :]
    out = torch.einsum("bkgmt,bktd->bkgmd", shared, values)
    for step, value in enumerate(own_values):
        out = out + own[..., step : step + 1] * value[:, :, None]
    return out.flatten(1, 2)


def rotary_tables(config: Eagle3Config) -> tuple[Tensor, Tensor]:
    """cos, sin [max positions, d] fp32, by the target's own scheme (linear, YaRN, Llama-3 scaling ...)."""
    rope = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
        )
    )
    cos, sin = rope(torch.zeros(1), torch.arange(config.max_position_embeddings)[None])
    return cos[0], sin[0]
