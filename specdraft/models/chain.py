"""Drafting a chain, token by token, with the EAGLE-3 layer: packed weights, keys and values, and the steps that extend them.

It knows nothing of training or of verification.

Letters: A taps, H width, h heads, k key/value heads, d head width, n rows, S columns of the draft law.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdraft.models.drafter import Choose, LiveRows, Proposal
from specdraft.models.eagle3_layer import Arithmetic, RMSNorm
from specdraft.models.heads import LowRankHead
from specdraft.models.layers import FrozenLinear, FrozenRMSNorm


class Chain:
    """One sequence. Row i holds the feature of position i and the token i+1; rows of drafted states stand behind the `length`
    rows of committed tokens and are overwritten by the next ones."""

    def __init__(self, weights: FrozenWeights, taps: Tensor, tokens: Tensor, capacity: int = 512):
        """taps [1, n, A*H] and tokens [1, n]: the rows to begin with."""
        self.weights = weights
        shape = (1, weights.config.num_key_value_heads, capacity, weights.config.head_dim)
        self.keys, self.values = taps.new_empty(shape), taps.new_empty(shape)
        self.length = 0
        self.append(taps, tokens)

    def append(self, taps: Tensor, tokens: Tensor) -> None:
        """Rows of committed tokens [1, n] with the target's features [1, n, A*H]; drafting starts from the last one."""
        x, residual = self.weights.layer_input(self.weights.fuse(taps), tokens)
        q = self._project(x, self.length)
        self.length += x.shape[1]
        self.q, self.residual = q[:, :, -1:], residual[:, -1:]

    def propose(self, budget: int, choose: Choose, live: LiveRows | None) -> Proposal:
        """See Drafter.propose."""
        weights, q, hidden = self.weights, self.q, self.residual
        ids = weights.head.target_ids() if live is None else live.ids
        tokens, laws, head_seconds = [], [], 0.0
        for step in range(budget):
            position = self.length - 1 + step
            if step:
                x, hidden = weights.layer_input(hidden, tokens[-1][None])
                q = self._project(x, position)
            keys, values = self.keys[:, :, : position + 1], self.values[:, :, : position + 1]
            hidden, normed = weights.finish(F.scaled_dot_product_attention(q, keys, values, enable_gqa=True), hidden)
            start = time.perf_counter()
            logits = weights.logits(normed[:, 0], live)
            head_seconds += time.perf_counter() - start
            column, law, is_last = choose(logits)
            tokens.append(column if ids is None else ids[column])
            laws.append(law)
            if is_last:
                break
        q = None if not laws or laws[0] is None else torch.stack(laws)
        return Proposal(torch.cat(tokens), list(range(-1, len(tokens) - 1)), q, ids, head_seconds)

    def _project(self, x: Tensor, start: int) -> Tensor:
        """Rows x [1, n, 2H] at positions start..start+n-1: stores their keys and values, returns their queries [1, h, n, d]."""
        config, end = self.weights.config, start + x.shape[1]
        while end > self.keys.shape[2]:
            self.keys = torch.cat([self.keys, torch.empty_like(self.keys)], dim=2)
            self.values = torch.cat([self.values, torch.empty_like(self.values)], dim=2)
        heads, turned = config.num_attention_heads, config.num_attention_heads + config.num_key_value_heads
        qkv = self.weights.qkv(x).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        qk = self._rotate(qkv[:, :turned], start)
        self.keys[:, :, start:end], self.values[:, :, start:end] = qk[:, heads:], qkv[:, turned:]
        return qk[:, :heads]

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        """Arithmetic.rotate for consecutive positions: x [1, heads, n, d]."""
        end = start + x.shape[2]
        turned = x.roll(x.shape[-1] // 2, dims=-1)
        return torch.addcmul(x * self.weights.cos[start:end], turned, self.weights.sin[start:end])


class FrozenWeights(Arithmetic):
    """A drafter's weights packed for decoding, those that read the same input as one product. `versions`: of the parameters
    they were made from."""

    def __init__(self, drafter: nn.Module, versions: list[tuple[int, int]]):
        self.config, self.embedding, self.versions = drafter.config, drafter.embedding, versions
        for name, module in drafter.named_children():
            if name != "lm_head":
                setattr(self, name, freeze(module))
        attention, mlp = drafter.midlayer.self_attn, drafter.midlayer.mlp
        self.qkv = join(attention["q_proj"], attention["k_proj"], attention["v_proj"])
        self.gate_up = join(mlp["gate_proj"], mlp["up_proj"])
        self.head = drafter.lm_head
        self.rows = FrozenLinear(self.head.weight)
        self.down = FrozenLinear(self.head.down) if isinstance(self.head, LowRankHead) else None
        dtype = drafter.fc.weight.dtype
        left, right = drafter.sin.chunk(2, dim=-1)
        self.cos, self.sin = drafter.cos.to(dtype), torch.cat([-left, right], dim=-1).to(dtype)

    def feed_forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.midlayer.mlp["down_proj"](F.silu(gate) * up)

    def logits(self, hidden: Tensor, live: LiveRows | None) -> Tensor:
        """[..., H] -> [..., S], or [..., n] over the live rows."""
        projected = hidden if self.down is None else self.down(hidden)
        return self.rows(projected) if live is None else live.logits(projected)


def join(*projections: nn.Linear) -> FrozenLinear:
    """Several projections of the same input as one: their outputs side by side."""
    return FrozenLinear(torch.cat([projection.weight.detach() for projection in projections]))


def freeze(module: nn.Module) -> Any:
    """The same tree, of packed products and norms, but for those that are joined."""
    if isinstance(module, nn.Linear):
        return FrozenLinear(module.weight, module.bias)
    if isinstance(module, RMSNorm):
        return FrozenRMSNorm(module.weight, module.eps)
    if isinstance(module, nn.ModuleList):
        return [freeze(child) for child in module]
    children = {name: freeze(child) for name, child in module.named_children() if name not in JOINED}
    return children if isinstance(module, nn.ModuleDict) else SimpleNamespace(**children)


JOINED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
