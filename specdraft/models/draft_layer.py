"""The EAGLE-3 layer over the rows of a drafting step, compiled: bf16 weights, fp32 states, on a processor with AVX2 or more.

draft_layer.cpp computes what `Arithmetic` does in torch (eagle3_layer.py; a test holds both equal) in a third of the time. One
sequence only: a batch's larger products are torch's. It knows nothing of caches, heads or sampling.

Letters: n rows, H width, h heads, k key/value heads, d head width, T slots.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from specdraft.models import thin_products
from specdraft.models.eagle3_layer import Eagle3Config
from specdraft.models.thin_products import Block, Sizes, require_rows


class _DraftLayer(ctypes.Structure):
    _fields_ = [
        ("size", Sizes),
        ("norm_before_residual", ctypes.c_long),
        ("embedding", ctypes.c_void_p),
        ("qkv", ctypes.c_void_p),
        ("block", Block),
        *((name, ctypes.c_void_p) for name in ("embedding_norm", "hidden_norm", "last_norm", "cos", "sin")),
    ]


class DraftLayer:
    """A drafter's layer, for weights that never change. No gradient."""

    def __init__(self, drafter: nn.Module, qkv: Tensor, gate_up: Tensor, cos: Tensor, sin: Tensor):
        """qkv [(h+2k)d, 2H], gate_up [2I, H]: projections joined; cos, sin [positions, .., d], the first half of sin negated."""
        self.config: Eagle3Config = drafter.config
        c, layer = self.config, drafter.midlayer
        self._library, self._tensors = thin_products.library(), []
        weight = lambda tensor: self._keep(tensor.detach().contiguous())  # noqa: E731
        number = lambda tensor: self._keep(tensor.detach().float().contiguous())  # noqa: E731
        out, down = weight(layer.self_attn["o_proj"].weight), weight(layer.mlp["down_proj"].weight)
        mlp_norm = number(layer.post_attention_layernorm.weight)
        self._layout = _DraftLayer(
            Sizes(
                c.hidden_size,
                c.intermediate_size,
                c.num_attention_heads,
                c.num_key_value_heads,
                c.head_dim,
                c.rms_norm_eps,
            ),
            c.norm_before_residual,
            weight(drafter.embedding),
            weight(qkv),
            Block(out, None, weight(gate_up), None, down, None, mlp_norm),
            *map(number, (layer.input_layernorm.weight, layer.hidden_norm.weight, drafter.norm.weight, cos, sin)),
        )
        self._at = ctypes.addressof(self._layout)

    def _keep(self, tensor: Tensor) -> int:
        """Keeps the tensor alive. Returns where it is."""
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def project(self, hidden: Tensor, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [1, n, H], tokens and positions [1, n] -> queries, keys and values [1, n, h+2k, d], the first two rotated;
        residual [1, n, H]."""
        c, n = self.config, tokens.shape[1]
        hidden, tokens, positions = hidden.float().contiguous(), tokens.contiguous(), positions.contiguous()
        qkv = hidden.new_empty(1, n, c.num_attention_heads + 2 * c.num_key_value_heads, c.head_dim)
        residual = torch.empty_like(hidden)
        inputs = (hidden.data_ptr(), tokens.data_ptr(), positions.data_ptr())
        self._library.draft_project(self._at, *inputs, n, qkv.data_ptr(), residual.data_ptr())
        return qkv, residual

    def finish(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """q [1, h, n, d]; keys, values [1, k, T, d]; mask [1, 1, n, T], True = may attend, None = causally; residual [1, n, H].
        Returns Arithmetic.finish's two."""
        q, residual = q.transpose(1, 2), residual.contiguous()
        require_rows(q, keys, values)
        sees = None if mask is None else mask.contiguous()
        hidden, normed = torch.empty_like(residual), torch.empty_like(residual)
        self._library.draft_finish(
            self._at,
            q.data_ptr(),
            q.stride(1),
            residual.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            keys.stride(1),
            keys.shape[2],
            None if sees is None else sees.data_ptr(),
            q.shape[1],
            hidden.data_ptr(),
            normed.data_ptr(),
        )
        return (normed if self.config.norm_output else hidden), normed


def is_supported(drafter: nn.Module) -> bool:
    """Whether DraftLayer can run this drafter here."""
    tensors = (drafter.embedding, *drafter.midlayer.parameters())
    is_bf16 = all(tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" for tensor in tensors)
    return is_bf16 and thin_products.library() is not None
