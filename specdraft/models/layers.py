"""Pieces of a frozen model's forward pass, as fast as the device allows: products, also in INT8, and the RMS norm.

They know nothing of models, and have no gradient.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from specdraft.models import thin_products
from specdraft.models.thin_products import thin_linear
from specdraft.provenance import has_bf16_products


class FrozenLinear:
    """x [..,I] -> x @ weight.T + bias [..,O] in the dtype of x, for a weight that never changes. No gradient.

    On a CPU a packed copy of the weight, in oneDNN's own layout, is used: products of 1 to 8 rows then take about half
    the time, and those of hundreds of rows a fifth less. For bf16 weights and fp32 states, see `ThinLinear`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        self.product = _choose(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x)


class ThinLinear:
    """The same for bf16 weights, where a few rows of fp32 states are multiplied by thin_products.py. Prefills, large batches and
    bf16 states are multiplied in bf16 where the processor can, else by a copy in fp32; either is made when the first one comes."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight.contiguous(), bias

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32 and x.shape[:-1].numel() <= FEW_ROWS:
            return thin_linear(x, self.weight, self.bias)
        product, dtype = self._wide
        return product(x.to(dtype)).to(x.dtype)

    @functools.cached_property
    def _wide(self) -> tuple[Callable[[Tensor], Tensor], torch.dtype]:
        dtype = compute_dtype(self.weight)
        return _pack(self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)), dtype


class Int8Linear:
    """x [..,I] -> x @ weight.T [..,O] in fp32, for a weight that never changes, in INT8. No gradient; on a CPU only.

    torch's dynamic quantisation: row o of the weight is round(w_o / s_o) in -127..127 with s_o = max|w_o| / 127; x is rounded to
    128 levels when it comes, with one scale for all its rows, so a row's result depends a little on its company.
    """

    def __init__(self, weight: Tensor):
        assert weight.device.type == "cpu", weight.device
        weight = weight.detach().float()
        scales = weight.abs().amax(1).clamp_min(SMALLEST_SCALE) / 127
        # quantised tensors are deprecated, but the products that take them have no successor yet
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            zeros = torch.zeros(len(weight), dtype=torch.int64)
            rows = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
            self._packed = torch.ops.quantized.linear_prepack(rows, None)

    def __call__(self, x: Tensor) -> Tensor:
        # 128 levels, not 256: processors without VNNI add pairs of products in 16 bits, which would overflow
        return torch.ops.quantized.linear_dynamic(x.float(), self._packed, reduce_range=True)


def _choose(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    if is_thin(weight):
        return ThinLinear(weight, bias)
    if weight.device.type == "cpu" and can_be_packed(weight.dtype):
        return _pack(weight, bias)
    return lambda x: F.linear(x, weight, bias)


def _pack(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_ROWS)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..,I] -> x @ weight.T without a gradient, for a contiguous weight that may change."""
    return thin_linear(x, weight) if x.dtype == torch.float32 and is_thin(weight) else F.linear(x, weight)


def is_thin(weight: Tensor) -> bool:
    """Whether a few rows of fp32 states may be multiplied by it, in thin_products.py."""
    return step_dtype(weight) != weight.dtype


def step_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of states, keys and logits of a frozen model that has such weights, while it decodes one sequence."""
    is_bf16 = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return torch.float32 if is_bf16 and thin_products.library() is not None else weight.dtype


def compute_dtype(weight: Tensor) -> torch.dtype:
    """The same while it runs a batch or a text: its weights', where the processor has products in that dtype."""
    return weight.dtype if has_bf16_products(weight.device) else step_dtype(weight)


def can_be_packed(dtype: torch.dtype) -> bool:
    """Whether this CPU has oneDNN products of the dtype; older ones have none in bf16."""
    if dtype not in PACKED_DTYPES or not torch.backends.mkldnn.is_available():
        return False
    return dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


class FrozenRMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in the dtype of x, in fp32 inside."""

    def __init__(self, weight: Tensor, eps: float):
        self.scale, self.eps = weight.detach().to(step_dtype(weight)).contiguous(), eps
        self.is_doubled = weight.device.type == "cpu"
        self._weights: dict[torch.dtype, Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype not in self._weights:
            self._weights[x.dtype] = self.scale.to(x.dtype).repeat(2 if self.is_doubled else 1)
        weight = self._weights[x.dtype]
        if (
            self.is_doubled
        ):  # nine small kernels on a CPU, where layer_norm is one: (x, -x) has mean 0 and variance mean(x^2)
            doubled = torch.layer_norm(torch.cat((x, -x), dim=-1), weight.shape, weight, None, self.eps)
            return doubled[..., : x.shape[-1]]
        return F.rms_norm(x, weight.shape, weight, self.eps)


PACKED_DTYPES = (torch.bfloat16, torch.float32)
# of so many, a product with bf16 weights and fp32 states takes as long as the other one of ThinLinear
FEW_ROWS = 512 if has_bf16_products("cpu") else 32
PACKED_ROWS = 32  # the number of rows that the layout is chosen for; as good as any other for 1 to 512
SMALLEST_SCALE = 1e-30  # of a row of zeros
