"""Attention of a batch over a cache whose rows have different lengths, compiled: each row reads its own slots and no others.

By torch a batch is two products over all slots that the longest row has, behind a mask; where prompts differ in length that is twice the
work, and half the time of a step. It knows nothing of models.

Letters: B rows, n new tokens, h query heads, G key/value heads, D head width, T slots.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from specdraft.models import thin_products

FUNCTIONS = {torch.float32: "attend_rows_fp32", torch.bfloat16: "attend_rows_bf16"}


class _RowAttention(ctypes.Structure):
    _fields_ = [
        ("lengths", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("rows", "n", "heads", "kv_heads", "dim")),
        *((name, ctypes.c_long) for name in ("q_row", "q_token", "kv_row", "kv_head")),
    ]


def attend_rows(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """q [B,n,h,D]; keys, values [B,G,T,D], the new ones in them; lengths [B] int64, slots of each row before its new tokens; fp32 or
    bf16 -> [B,n,h*D]: token i of row b over the slots 0..lengths[b]+i. No gradient."""
    rows, n, heads, dim = q.shape
    assert q.stride()[2:] == keys.stride()[2:] == (dim, 1), (q.stride(), keys.stride())
    assert keys.stride() == values.stride(), (keys.stride(), values.stride())
    assert q.dtype == keys.dtype == values.dtype, (q.dtype, keys.dtype, values.dtype)
    y = q.new_empty(rows, n, heads * dim)
    lengths = lengths.contiguous()
    shape = _RowAttention(lengths.data_ptr(), rows, n, heads, keys.shape[1], dim, *q.stride()[:2], *keys.stride()[:2])
    function = getattr(thin_products.library(), FUNCTIONS[q.dtype])
    function(ctypes.addressof(shape), q.data_ptr(), keys.data_ptr(), values.data_ptr(), y.data_ptr())
    return y


def is_supported(x: Tensor) -> bool:
    """Whether `attend_rows` can be given queries and a cache that are like x."""
    return x.device.type == "cpu" and x.dtype in FUNCTIONS and thin_products.library() is not None
