"""The seam at which a forward pass lets somebody else attend: what an attention function is given, for both paths of the target.

The lean path calls such a function itself; a Hugging Face model calls the one that this file registers with transformers'
`AttentionInterface`. It knows nothing of drafters, nor of what the functions do.

Letters: B rows, n new tokens, h query heads, G key/value heads, T slots, D head width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from specdraft.models.cache import Append, KVCache

NAME = "specdraft"


@dataclass(frozen=True)
class AttentionInputs:
    """layer: its number.   q [B,h,n,D], keys, values [B,G,T,D]: positions are in them already.   mask: to add,
    [B or 1, 1, n or more, T] (rows past n repeat the first ones), or None: nothing is hidden, or the pass is causal from
    its first slot.   scale: of q k.   soft_cap: c of c tanh(score / c), or None."""

    layer: int
    q: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None
    scale: float
    soft_cap: float | None = None


# What a layer attends with: inputs -> [B,n,h,D], or None: as it would have done.
Attention = Callable[[AttentionInputs], Tensor | None]


class Watcher(Protocol):
    """Asked before every forward pass over a cache."""

    def attention(self, cache: KVCache, append: Append) -> Attention | None:
        """What the pass attends with; None = nothing else than usual."""


def attend_with_weights(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Attention as plain products: out [B,n,h,D], and its weights [B,G,h/G,n,T], in the type of q."""
    q, keys, values = inputs.q, inputs.keys, inputs.values
    batch, heads, n, width = q.shape
    groups = keys.shape[1]
    scores = torch.matmul(q.reshape(batch, groups, -1, width), keys.transpose(2, 3)).mul_(inputs.scale)
    if inputs.soft_cap is not None:
        scores = scores.div_(inputs.soft_cap).tanh_().mul_(inputs.soft_cap)
    if inputs.mask is not None:
        scores.view(batch, groups, -1, n, scores.shape[-1]).add_(inputs.mask[:, :, None, :n])
    weights = torch.softmax(scores, dim=-1)
    out = torch.matmul(weights, values).reshape(batch, heads, n, -1).transpose(1, 2)
    return out, weights.view(batch, groups, -1, n, weights.shape[-1])


@contextmanager
def attention_of(config: PretrainedConfig, attention: Attention | None) -> Iterator[None]:
    """Inside the block the layers of the Hugging Face model with this config attend with `attention`."""
    if attention is None:
        yield
        return
    usual = config._attn_implementation
    token = _current.set((attention, usual))
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = usual
        _current.reset(token)


def _registered(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it. What else a family passes is for its usual attention alone; whether a family can do
    without is for the user of an attention function to check."""
    attention, usual = _current.get()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attention(AttentionInputs(module.layer_idx, query, key, value, attention_mask, scale, softcap))
    if out is None:
        eager = sys.modules[type(module).__module__].__dict__.get("eager_attention_forward")
        function = AttentionInterface().get_interface(usual, eager)
        options = others if softcap is None else {**others, "softcap": softcap}
        out = function(module, query, key, value, attention_mask, scaling=scaling, **options)[0]
    return out, None


_current: ContextVar[tuple[Attention, str]] = ContextVar(
    NAME
)  # transformers has no other way to tell the function more
AttentionInterface.register(NAME, _registered)
