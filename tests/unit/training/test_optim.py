import itertools
import math

import pytest
import torch
from torch import nn

from specdraft.config import UserError, config_from_dict
from specdraft.training.optim import OptimConfig, build_optimizers, schedule, set_learning_rate


def parameters() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    torch.manual_seed(0)
    body = [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.ones(4))]
    head = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(9, 3))]
    return body, head


def rates_and_decay(optimizers) -> dict[tuple, tuple[str, float, float]]:
    found = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found[tuple(parameter.shape)] = (type(optimizer).__name__, group["lr"], group["weight_decay"])
    return found


@pytest.mark.parametrize(("name", "matrices"), [("adamw", "AdamW"), ("muon", "Muon")])
def test_groups(name, matrices):
    """Each parameter once: matrices of the body by the named optimiser, head factors and norms by AdamW, norms undecayed."""
    config = OptimConfig(name=name, lr=1e-2, head_lr=1e-3, weight_decay=0.1)
    found = rates_and_decay(build_optimizers(*parameters(), config))
    assert found == {
        (6, 4): (matrices, 1e-2, 0.1),
        (4,): ("AdamW", 1e-2, 0.0),
        (3, 4): ("AdamW", 1e-3, 0.1),
        (9, 3): ("AdamW", 1e-3, 0.1),
    }


def test_frozen_parameters_are_left_out():
    body, head = parameters()
    head[1].requires_grad_(False)
    found = rates_and_decay(build_optimizers(body, head, OptimConfig()))
    assert (9, 3) not in found
    assert len(found) == 3


def test_muon_step_has_the_rms_of_adamw():
    """With match_rms_adamw a step's RMS is about 0.2 x lr for any shape, as AdamW's is: one lr serves both."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(64, 16))
    (muon, _) = build_optimizers([weight, nn.Parameter(torch.ones(4))], [], OptimConfig(name="muon", lr=1.0))
    weight.grad = torch.randn(64, 16)
    muon.step()
    assert float(weight.detach().square().mean().sqrt()) == pytest.approx(0.2, rel=0.25)


def test_schedule():
    assert schedule(0.0, 0.1, 0.0) == 0
    assert schedule(0.05, 0.1, 0.0) == pytest.approx(0.5)
    assert schedule(0.1, 0.1, 0.0) == 1
    assert schedule(0.55, 0.1, 0.2) == pytest.approx(0.6)
    assert schedule(1.0, 0.1, 0.2) == pytest.approx(0.2)
    assert schedule(7.0, 0.1, 0.2) == pytest.approx(0.2)  # a budget overrun does not raise the rate again
    assert schedule(0.0, 0.0, 0.0) == 1
    assert schedule(1.0, 1.0, 0.0) == 1


def test_schedule_is_continuous():
    values = [schedule(i / 1000, 0.03, 0.1) for i in range(1001)]
    assert max(abs(a - b) for a, b in itertools.pairwise(values)) < 0.04
    assert all(math.isfinite(value) for value in values)


def test_set_learning_rate_keeps_ratios():
    optimizers = build_optimizers(*parameters(), OptimConfig(name="muon", lr=1e-2, head_lr=1e-3))
    for factor in (0.5, 0.1, 1.0):
        set_learning_rate(optimizers, factor)
        rates = {rate for _, rate, _ in rates_and_decay(optimizers).values()}
        assert rates == {1e-2 * factor, 1e-3 * factor}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"lr": 0}, "optim.lr: got 0"),
        ({"head_lr": -1.0}, "optim.head_lr"),
        ({"warmup": 1.5}, "optim.warmup"),
        ({"clip": -1.0}, "clip"),
        ({"betas": [1.5, 0.9]}, "optim.betas: got"),
        ({"name": "sgd"}, "adamw"),
    ],
)
def test_bad_values(values, says):
    with pytest.raises(UserError, match=says):
        config_from_dict(OptimConfig, values)
