"""Tests as on a processor with other instructions: all that this one can run, AVX2 first, in whose code nothing is rounded."""

import torch

from specdraft.models import layers, thin_products
from specdraft.models.thin_products import AVX2, AVX512_BF16

CAN_RUN = [AVX2, AVX512_BF16][: [None, AVX2, AVX512_BF16].index(thin_products.instructions())]
NAMES = {AVX2: "AVX2", AVX512_BF16: "AVX512_BF16"}


def use(patch, instructions):
    """patch: a pytest.MonkeyPatch."""
    patch.setattr(thin_products, "library", lambda: thin_products.compile_for(instructions))
    patch.setattr(layers, "has_bf16_products", lambda device: instructions == AVX512_BF16)


def as_read(x, instructions):
    """x [..] as products read it."""
    return x.to(torch.bfloat16).float() if instructions == AVX512_BF16 else x.float()
