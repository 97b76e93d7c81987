"""Head rows in INT8: close to what they stand for, on a CPU only. That outputs stay lossless: tests/unit/decoding/test_lossless.py."""

import pytest
import torch

from specdraft.config import UserError
from specdraft.data.vocab import VocabMap
from specdraft.decoding.sampling import greedy
from specdraft.models.checkpoint import load_drafter, save_drafter
from specdraft.models.drafter import Ask, Drawn
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, new_drafter
from specdraft.models.layers import Int8Linear
from specdraft.models.tree import Chain
from specdraft.testing import TINY_VOCAB, tiny_target

KEPT = VocabMap(torch.arange(1, TINY_VOCAB, 2).flip(0), TINY_VOCAB)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 72), (5, 72), (2, 3, 576)], ids=str)
def test_a_product_is_close(dtype, shape):
    """Rows of sizes a thousand times apart keep their own precision; a row of zeros gives zeros."""
    weight = randn(301, shape[-1], seed=1) * torch.logspace(-3, 0, 301)[:, None]
    weight[7] = 0
    x, weight = randn(*shape).to(dtype), weight.to(dtype)
    found, expected = Int8Linear(weight)(x), x.float() @ weight.float().T
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert not found[..., 7].any()
    size = weight.float().norm(dim=1).clamp_min(1e-9)  # of a logit, with states of variance 1
    error = (found - expected) / size
    assert 1e-4 < float(error.square().mean().sqrt()) < 0.03


@pytest.mark.parametrize("kind", ["full", "trimmed", "lowrank"])
def test_decoding_with_it(kind, tmp_path):
    """A loaded drafter drafts from logits that are near those of its weights, and not the same."""
    target = tiny_target()
    torch.manual_seed(0)
    head = HeadConfig(kind, rank=8, init="svd")
    save_drafter(
        tmp_path / "d",
        new_drafter(target, DrafterConfig(), head, KEPT if kind == "trimmed" else None),
        target,
        "",
        {},
        torch.float32,
    )
    seen = {}
    prompt = torch.tensor([[5, 9, 70, 33, 8]])
    for dtype in ("own", "int8"):
        drafter = load_drafter(tmp_path / "d", target, head_dtype=dtype)
        drafter.begin(target.features(prompt[:, :-1], torch.tensor([4])).taps, prompt.tolist(), 32)

        def choose(logits, dtype=dtype):
            seen.setdefault(dtype, logits[0])
            return Drawn(greedy(logits), None)

        drafter.draft([Ask(2, choose)], Chain())
    difference = (seen["int8"] - seen["own"]).square().mean().sqrt() / seen["own"].std()
    assert 1e-5 < float(difference) < 0.05
    other = load_drafter(tmp_path / "d", target, head_dtype="int8").lm_head
    assert torch.equal(other.weight, load_drafter(tmp_path / "d", target).lm_head.weight), "weights stay as they are"


def test_elsewhere_than_on_a_cpu(tmp_path):
    target = tiny_target()
    save_drafter(tmp_path / "d", new_drafter(target, DrafterConfig(), HeadConfig("full", init="svd")), target, "", {})
    with pytest.raises(UserError, match="head_dtype: got int8 on meta, allowed: int8 on a CPU only"):
        load_drafter(tmp_path / "d", target, device="meta", head_dtype="int8")
