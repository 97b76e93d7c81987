"""Slots that move up when only a path of a tree is kept: compiled and in torch."""

import pytest
import torch

from specdraft.models import thin_products
from specdraft.models.cache import KVCache


def _filled(dtype: torch.dtype, heads: tuple[int, ...]) -> KVCache:
    """Three rows of 9 slots in use; heads: of each layer."""
    cache = KVCache(3, 16, len(heads), dtype)
    generator = torch.Generator().manual_seed(0)
    for layer, count in enumerate(heads):
        append = cache.place(9, torch.device("cpu"))
        keys, values = torch.randn(2, 3, 9, count, 4, generator=generator)
        cache.write(layer, keys, values, append)
    cache.grow([9, 9, 9])
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(2, 2, 2), (2, 1)])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_kept_path_moves_up_behind_the_committed_slots_in_every_layer(dtype, heads, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(thin_products, "library", lambda: None)
    cache, before = _filled(dtype, heads), _filled(dtype, heads)
    starts, paths = [4, 5, 3], [[0, 2, 4], [0, 1], [1, 3, 4, 5]]
    cache.keep(starts, paths)
    assert cache.lengths == [7, 7, 7]
    for stores, old in ((cache.keys, before.keys), (cache.values, before.values)):
        for stored, former in zip(stores, old, strict=True):
            for row, (start, path) in enumerate(zip(starts, paths, strict=True)):
                slots = [*range(start), *(start + place for place in path)]
                assert torch.equal(stored[row, :, : len(slots)], former[row][:, slots])
