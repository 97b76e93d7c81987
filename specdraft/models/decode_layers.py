"""The layers of a Llama-like target over the rows of a decoding step, compiled: bf16 weights, fp32 states.

decode_layers.cpp computes what `LeanModel.forward` does in torch (lean.py; a test holds both equal), in one call. It serves one row
of a cache and a few new tokens. It knows nothing of embeddings, of the final norm, or of heads.

Letters: n new tokens, H width, D head width, G key/value heads, T slots.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdraft.models import thin_products
from specdraft.models.cache import Append, KVCache
from specdraft.models.layers import FrozenLinear, ThinLinear
from specdraft.models.thin_products import Block, Sizes, require_rows

if TYPE_CHECKING:
    from specdraft.models.lean import Layer


class _DecodeLayer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "qkv_bias", "input_norm", "q_norm", "k_norm")),
        ("block", Block),
    ]


class DecodeLayers:
    """Layers whose weights never change. No gradient."""

    def __init__(self, layers: list[Layer], sizes: Sizes):
        """layers: their products are `ThinLinear`s."""
        self._library, self._layers, self._sizes = thin_products.library(), layers, sizes  # layers: kept alive
        self._layouts = (_DecodeLayer * len(layers))(*map(_layout, layers))

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, append: Append, taps: tuple[int, ...]
    ) -> tuple[list[Tensor], Tensor]:
        """hidden [1, n, H], fp32, overwritten; cos, sin [.., n, .., D], the first half of sin negated. Returns the inputs of the layers
        in `taps` and the output of the last, [1, n, H] each. Keys and values go where `append` says."""
        n, sizes, count = hidden.shape[1], self._sizes, len(self._layers)
        like = hidden.new_empty(1, n, sizes.kv_heads, sizes.head_dim)
        keys, values = cache.reserve(like, append)
        require_rows(like, keys[0], values[0])
        mask = None if append.given_mask is None else append.mask.expand(1, 1, n, append.width).contiguous()
        cos, sin = cos.contiguous(), sin.contiguous()
        tapped = {layer: torch.empty_like(hidden) for layer in taps}
        pointers = ctypes.c_void_p * count
        self._library.decode_layers(
            ctypes.addressof(sizes),
            ctypes.addressof(self._layouts),
            count,
            hidden.data_ptr(),
            pointers(*(tapped[layer].data_ptr() if layer in tapped else None for layer in range(count))),
            cos.data_ptr(),
            sin.data_ptr(),
            pointers(*(stored.data_ptr() for stored in keys)),
            pointers(*(stored.data_ptr() for stored in values)),
            keys[0].stride(1),
            append.start,
            None if mask is None else mask.data_ptr(),
            n,
        )
        return [tapped[layer] for layer in sorted(tapped)], hidden


def are_supported(layers: list[Layer]) -> bool:
    """Whether DecodeLayers can run them here."""
    products = [product for layer in layers for product in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    return thin_products.library() is not None and all(isinstance(p.product, ThinLinear) for p in products)


def _layout(layer: Layer) -> _DecodeLayer:
    norms = [None if norm is None else norm.scale.data_ptr() for norm in (layer.input_norm, layer.q_norm, layer.k_norm)]
    block = Block(*_at(layer.out), *_at(layer.gate_up), *_at(layer.down), layer.mlp_norm.scale.data_ptr())
    return _DecodeLayer(*_at(layer.qkv), *norms, block)


def _at(linear: FrozenLinear) -> tuple[int, int | None]:
    product = linear.product
    return product.weight.data_ptr(), None if product.bias is None else product.bias.data_ptr()
