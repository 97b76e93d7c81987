"""A new drafter for every family of targets: the weights and norms of the last layer where the family has them."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from specdraft.config import UserError
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, eagle3_config, new_drafter
from specdraft.models.target import TargetModel
from specdraft.testing import FAMILIES, tiny_target


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_a_drafter(family):
    """Its norms scale as the target's own do, whether these store w or w - 1, or centre; and it drafts finite numbers."""
    target = tiny_target(family)
    torch.manual_seed(0)
    drafter = new_drafter(target, DrafterConfig(), HeadConfig("full"))
    source = target.model.get_decoder().layers[-1]
    x = torch.randn(5, target.hidden_size)
    x -= x.mean(-1, keepdim=True)
    torch.testing.assert_close(drafter.norm(x), target.norm(x), rtol=1e-3, atol=1e-4)
    if hasattr(source, "input_layernorm"):
        with torch.no_grad():
            own = source.input_layernorm(x)
        torch.testing.assert_close(drafter.midlayer.hidden_norm(x), own, rtol=1e-3, atol=1e-4)
    weight = source.self_attn.o_proj.weight
    assert torch.equal(drafter.midlayer.self_attn["o_proj"].weight, weight)
    taps = torch.randn(1, 6, 3 * target.hidden_size)
    hidden = drafter.unroll(taps, torch.arange(6)[None], torch.arange(4)[None], 2)
    assert hidden.isfinite().all()


def test_a_target_without_rotary_positions_is_refused():
    """Before any answer is made."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=8, n_head=4, n_positions=64)).eval()
    target = TargetModel.from_model(model)
    with pytest.raises(UserError, match="no rotary positions"):
        eagle3_config(target, DrafterConfig(), HeadConfig("full"))


def test_a_width_that_cannot_be_is_refused():
    with pytest.raises(UserError, match="intermediate_size: got -5"):
        DrafterConfig(intermediate_size=-5)
