"""The compiled layer computes what `Arithmetic` does; without it, drafting goes on in torch."""

import pytest
import torch
import torch.nn.functional as F
from processors import CAN_RUN, NAMES, use

from specdraft.decoding.sampling import Sampling
from specdraft.models import draft_layer, thin_products
from specdraft.models.chain import FrozenWeights
from specdraft.models.draft_layer import DraftLayer
from specdraft.models.drafter import Ask
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.eagle3_layer import Eagle3Config
from specdraft.models.heads import HeadConfig
from specdraft.models.thin_products import AVX2
from specdraft.models.tree import Chain, Eagle2Tree

VOCAB, POSITIONS = 90, 200
SHAPES = [(32, 64, 4, 2, 8), (24, 40, 3, 1, 10), (50, 7, 2, 2, 6)]  # H, I, h, k, d: of some, rows fill no register
FLAGS = [{}, {"norm_before_residual": True}, {"norm_output": True}]


def make_drafter(shape=SHAPES[0], head=None, dtype=torch.bfloat16, **flags):
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = Eagle3Config(
        *shape, VOCAB, POSITIONS, rope, (0, 1, 2), head=head or HeadConfig("lowrank", rank=5), **flags
    )
    drafter = Eagle3Drafter(config)
    for name, parameter in drafter.named_parameters():
        scale = 0.1 if "norm" in name else parameter.shape[-1] ** -0.5
        parameter.data = ("norm" in name) + torch.randn_like(parameter) * scale
    return drafter.to(torch.bfloat16).to(dtype).eval().bind(torch.randn(VOCAB, shape[0]).bfloat16().to(dtype))


@pytest.fixture(params=CAN_RUN, ids=NAMES.get, autouse=True)
def tolerance(request, monkeypatch):
    """Of what the compiled layer computes, with every set of instructions."""
    use(monkeypatch, request.param)
    return 1e-4 if request.param == AVX2 else 0.1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 9])
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_equal_to_the_equations(shape, flags, rows, masked, tolerance):
    layer, exact = (
        FrozenWeights(make_drafter(shape, **flags), {}).layer,
        make_drafter(shape, dtype=torch.float32, **flags),
    )
    assert isinstance(layer, DraftLayer)
    hidden, tokens = torch.randn(1, rows, shape[0]), torch.randint(VOCAB, (1, rows))
    positions = torch.randint(POSITIONS, (1, rows))
    qkv, residual = layer.project(hidden, tokens, positions)
    x, expected = exact.layer_input(hidden, tokens)
    close(residual, expected, tolerance / 5)
    heads, kv_heads = shape[2:4]
    q, keys, values = exact.queries(x, positions), *exact.keys_values(x, positions)
    close(qkv.transpose(1, 2), torch.cat([q, keys, values], dim=1), tolerance / 5)

    slots = 30  # of 40: a cache has room behind
    keys, values = torch.randn(2, 1, kv_heads, 40, shape[4])
    mask = torch.rand(1, 1, rows, slots) < 0.4
    mask[..., 3] = True
    if not masked:
        mask = torch.arange(slots) <= slots - rows + torch.arange(rows)[:, None]
    attended = F.scaled_dot_product_attention(
        q, keys[:, :, :slots], values[:, :, :slots], attn_mask=mask, enable_gqa=True
    )
    stored = keys[:, :, :slots], values[:, :, :slots], mask if masked else None
    found = layer.finish(qkv[:, :, :heads].transpose(1, 2), *stored, residual)
    for mine, theirs in zip(found, exact.finish(attended, residual), strict=True):
        close(mine, theirs, tolerance / 5)


@pytest.mark.parametrize("shape", [Chain(), Eagle2Tree(12, 4, 3)], ids=lambda shape: type(shape).__name__)
@pytest.mark.parametrize("head", [HeadConfig("full"), HeadConfig("lowrank", rank=5)], ids=lambda head: head.kind)
@torch.no_grad()
def test_drafts_are_those_of_torch(shape, head, tolerance):
    """Prefills longer and shorter than what the layer takes, rounds with rejections, one row or two."""
    compiled, exact = make_drafter(head=head), make_drafter(head=head, dtype=torch.float32)
    for length in (5, 50):
        text = torch.randint(VOCAB, (length,)).tolist()
        taps = torch.randn(1, length + 3, 3 * 32).bfloat16()
        seen = {}
        for drafter in (compiled, exact):
            drafter.begin(taps[:, : length - 1].to(drafter.fc.weight.dtype), [text], 100)
            seen[drafter] = [logits_of(drafter, shape)]
            drafter.commit([[1, 2, 3]], taps[:, length - 1 : length + 2].to(drafter.fc.weight.dtype))
            seen[drafter].append(logits_of(drafter, shape))
        assert compiled._sequences.layer is not None
        assert exact._sequences.layer is None
        for mine, theirs in zip(seen[compiled], seen[exact], strict=True):
            close(mine, theirs, tolerance)


def logits_of(drafter, shape):
    """Of every step of a draft whose tokens are the same for both."""
    seen = []

    class Noted:
        depth, width = shape.depth, shape.width

        def begin(self, ask, ids):
            growth = shape.begin(ask, ids)

            class Growth:
                proposal = growth.proposal

                def grow(self, logits):
                    seen.append(logits.float())
                    return growth.grow(torch.arange(VOCAB).flip(0).expand_as(logits) * 0.1)

            return Growth()

    drafter.draft([Ask(3, Sampling().choose)], Noted())
    return torch.cat(seen)


def test_batches_fp32_and_processors_without_it_draft_in_torch(monkeypatch):
    drafter = make_drafter()
    drafter.begin(torch.randn(2, 4, 96).bfloat16(), [[1, 2, 3, 4, 5], [1, 2, 3]], 20)
    assert drafter._sequences.layer is None
    assert not draft_layer.is_supported(make_drafter(dtype=torch.float32))
    monkeypatch.setattr(thin_products, "library", lambda: None)
    drafter = make_drafter()
    drafter.begin(torch.randn(1, 4, 96).bfloat16(), [[1, 2, 3, 4, 5]], 20)
    assert drafter._sequences.layer is None
    (proposal,) = drafter.draft([Ask(3, Sampling().choose)], Chain())
    assert len(proposal.tokens) == 3


def test_new_weights_are_seen():
    drafter = make_drafter()
    drafter.begin(torch.randn(1, 4, 96).bfloat16(), [[1, 2, 3, 4, 5]], 20)
    before = drafter._sequences.layer
    with torch.no_grad():
        drafter.midlayer.mlp["down_proj"].weight.mul_(2)
    drafter.refresh()
    assert drafter._sequences.layer is not before


def close(mine, theirs, tolerance):
    torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)
