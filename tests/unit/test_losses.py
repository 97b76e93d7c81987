"""Losses of a row against their closed forms, step weights against tables made by hand, and the plain objective against loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specdraft.config import UserError, config_from_dict, config_to_dict
from specdraft.losses import (
    LOSSES,
    POSITION_WEIGHTS,
    LossConfig,
    TeacherRows,
    acceptance,
    hits,
    plain_draft_loss,
    row_losses,
    teacher_law,
)

V, N = 11, 5
CONFIG = LossConfig()
NO_LABEL = torch.full((N,), -1)


def laws(draft: int = V, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """True p at the first `draft` columns, log of its mass there, drafter's logits; fp64."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(N, V, generator=generator, dtype=torch.float64).mul(2).softmax(-1)[:, :draft]
    z = torch.randn(N, draft, generator=generator, dtype=torch.float64).mul(2).requires_grad_()
    return p, p.sum(-1).log(), z


def gradient(
    name: str, p: Tensor, log_mass: Tensor, z: Tensor, label: Tensor = NO_LABEL, config: LossConfig = CONFIG
) -> Tensor:
    values = LOSSES[name](p.log(), z.log_softmax(-1), log_mass, label, config)
    assert values.shape == (N,)
    return torch.autograd.grad(values.sum(), z)[0]


@pytest.mark.parametrize("draft", [V, 6])
def test_gradients_are_the_closed_forms(draft):
    p, log_mass, z = laws(draft)
    q, p_s = z.detach().softmax(-1), p / p.sum(-1, keepdim=True)
    s = torch.sign(q - p)
    of_tv = q * (s - (q * s).sum(-1, keepdim=True)) / 2
    of_kl = q - p_s
    alpha = torch.minimum(p, q).sum(-1, keepdim=True)
    lam = torch.exp(-3 * alpha)
    expected = {
        "forward_kl": of_kl,
        "tv": of_tv,
        "lk_alpha": of_tv / alpha,
        "lk_hybrid": lam * of_kl + (1 - lam) * of_tv,
    }
    for name, value in expected.items():
        torch.testing.assert_close(gradient(name, p, log_mass, z), value, msg=name)


def test_lk_alpha_is_cross_entropy_for_a_point_mass():
    _, _, z = laws()
    label = torch.tensor([3, 0, 10, 3, 7])
    log_p = torch.full((N, V), -torch.inf, dtype=torch.float64)
    log_p[range(N), label] = 0
    arguments = (log_p, z.log_softmax(-1), torch.zeros(N, dtype=torch.float64), label, CONFIG)
    torch.testing.assert_close(LOSSES["lk_alpha"](*arguments), LOSSES["ce"](*arguments))
    torch.testing.assert_close(
        gradient("lk_alpha", log_p.exp(), arguments[2], z), gradient("ce", log_p.exp(), arguments[2], z, label)
    )


def test_divergences_are_zero_only_where_the_laws_agree_on_the_draft_vocabulary():
    p, log_mass, z = laws(draft=6)
    for name in ("forward_kl", "reverse_kl", "js"):
        same = LOSSES[name](p.log(), p.log() - log_mass[:, None], log_mass, NO_LABEL, CONFIG)
        torch.testing.assert_close(same, torch.zeros_like(same), atol=1e-12, rtol=0)
        assert (LOSSES[name](p.log(), z.log_softmax(-1), log_mass, NO_LABEL, CONFIG) > 1e-3).all()
    far = LOSSES["js"](
        p.log(), (p.log() - log_mass[:, None] - 1e3 * p.log()).log_softmax(-1), log_mass, NO_LABEL, CONFIG
    )
    assert (far <= math.log(2) + 1e-12).all()


def test_tv_counts_the_mass_outside_the_draft_vocabulary():
    p, log_mass, z = laws(draft=6)
    q = z.softmax(-1)
    expected = 0.5 * ((p - q).abs().sum(-1) + 1 - p.sum(-1))
    torch.testing.assert_close(LOSSES["tv"](p.log(), q.log(), log_mass, NO_LABEL, CONFIG), expected)


def test_ce_skips_labels_outside_the_draft_vocabulary():
    p, log_mass, z = laws()
    label = torch.tensor([2, -1, 0, -1, 5])
    values = LOSSES["ce"](p.log(), z.log_softmax(-1), log_mass, label, CONFIG)
    assert values[1] == values[3] == 0
    torch.testing.assert_close(values[0], -z.log_softmax(-1)[0, 2])
    slope = gradient("ce", p, log_mass, z, label)
    assert not slope[1].any()
    assert slope[0, 2] < 0


def test_top_k_teacher_is_cut_and_renormalised():
    p, log_mass, z = laws()
    config = LossConfig(teacher_top_k=3)
    kept = p.topk(3).indices
    cut = torch.zeros_like(p).scatter(1, kept, p.gather(1, kept))
    cut = cut / cut.sum(-1, keepdim=True)
    expected = torch.where(cut > 0, cut * (cut.log() - z.log_softmax(-1)), 0).sum(-1)
    torch.testing.assert_close(LOSSES["forward_kl"](p.log(), z.log_softmax(-1), log_mass, NO_LABEL, config), expected)
    torch.testing.assert_close(gradient("forward_kl", p, log_mass, z, config=config), z.detach().softmax(-1) - cut)
    everything = LossConfig(teacher_top_k=V)
    torch.testing.assert_close(
        gradient("forward_kl", p, log_mass, z, config=everything), gradient("forward_kl", p, log_mass, z)
    )


def test_weighted_sum_leaves_out_terms_without_weight():
    p, log_mass, z = laws()
    arguments = (p.log(), z.log_softmax(-1), log_mass, torch.arange(N))
    config = LossConfig({"ce": 0.1, "tv": 0.9, "js": 0.0})
    assert list(config.active_terms) == ["ce", "tv"]
    expected = 0.1 * LOSSES["ce"](*arguments, config) + 0.9 * LOSSES["tv"](*arguments, config)
    torch.testing.assert_close(row_losses(*arguments, config), expected)


def test_acceptance_uses_the_true_teacher():
    """Faults 29 and 31: with p's mass outside the draft vocabulary left out, alpha is lower, and never above 1 (papers.md 9.3)."""
    p = torch.tensor([[0.35, 0.25, 0.10, 0.30]], dtype=torch.float64)
    q = torch.tensor([[5.0, 2.0, 2.0]], dtype=torch.float64) / 9
    alpha = acceptance(p[:, :3].log(), q.log())
    assert float(alpha) == pytest.approx(0.6722, abs=1e-4)
    assert alpha < acceptance((p[:, :3] / 0.7).log(), q.log()) <= 1
    p, _, z = laws()
    torch.testing.assert_close(acceptance(p.log(), p.log()), torch.ones(N, dtype=torch.float64))
    torch.testing.assert_close(acceptance(p.log(), z.log_softmax(-1)), 1 - 0.5 * (p - z.softmax(-1)).abs().sum(-1))


def test_an_argmax_outside_the_draft_vocabulary_is_a_miss():
    """Fault 29. Draft columns are the target's ids 4, 7, 2; the drafter's argmax is column 1 everywhere."""
    logits = torch.tensor([[0.0, 5.0, 1.0]]).expand(3, 3)
    assert hits(torch.tensor([7, 1, 4]), logits, torch.tensor([4, 7, 2])).tolist() == [True, False, False]
    assert hits(torch.tensor([7, 1, 4]), logits, None).tolist() == [False, True, False]


def weights(name: str, config: LossConfig) -> Tensor:
    """Two rows of three steps; the second row has two supervised steps."""
    alpha = torch.tensor([[0.5, 0.9], [0.2, 0.4], [1.0, 0.0]])
    hit = torch.tensor([[True, False], [False, True], [True, False]])
    valid = torch.tensor([[True, True], [True, True], [True, False]])
    alpha.requires_grad_()
    result = POSITION_WEIGHTS[name](alpha.detach(), hit, valid, config)
    assert result.dtype == torch.float32
    assert not result.requires_grad
    return result * valid


def test_position_weights():
    assert weights("constant", CONFIG).tolist() == [[1, 1], [1, 1], [1, 0]]
    torch.testing.assert_close(weights("geometric", LossConfig(decay=0.5))[:, 0], torch.tensor([1, 0.5, 0.25]))
    assert weights("first_failure", CONFIG).tolist() == [[1, 1], [1, 0], [0, 0]]
    # D-PACE, a = 0.5: factors (0.75, 0.6, 1) and (0.95, 0.7); products (0.75, 0.45, 0.45) and (0.95, 0.665)
    expected = torch.tensor([[0.75 + 0.45 + 0.45, 0.95 + 0.665], [0.45 + 0.45, 0.665], [0.45, 0]])
    torch.testing.assert_close(weights("dpace", LossConfig(dpace_a=0.5)), expected)


def test_plain_objective_is_the_sum_over_supervised_rows():
    """Fault 21: rows that are not supervised count nowhere, whatever their index says."""
    torch.manual_seed(0)
    steps, rows, hidden, positions = 2, 3, 4, 6
    projected, weight = torch.randn(steps, rows, hidden), torch.randn(V, hidden)
    index = torch.tensor([[0, 3, 5], [1, -7, 99]])
    valid = torch.tensor([[True, True, True], [True, False, False]])
    teacher = TeacherRows(torch.randn(positions, hidden), torch.randn(V, hidden), index, logit_scale=0.5, soft_cap=3.0)
    share = torch.rand(steps, rows)
    out = plain_draft_loss(projected, weight, teacher, valid, share, index, LossConfig(decay=0.8))
    total = 0.0
    for k, m in valid.nonzero().tolist():
        p = (3 * torch.tanh(0.5 * teacher.head_weight @ teacher.last[index[k, m]] / 3)).softmax(-1)
        q = (weight @ projected[k, m]).softmax(-1)
        kl = float((p * (p / q).log()).sum())
        total += 0.8**k * float(share[k, m]) * kl
        assert float(out.row_loss[k, m]) == pytest.approx(kl, rel=1e-4)
        assert float(out.alpha[k, m]) == pytest.approx(float(torch.minimum(p, q).sum()), rel=1e-4)
        assert bool(out.hit[k, m]) == bool(p.argmax() == q.argmax())
    assert float(out.loss) == pytest.approx(total, rel=1e-4)
    assert not out.alpha[~valid].any()
    assert not out.hit[~valid].any()


def test_temperature_tempers_both_laws():
    torch.manual_seed(0)
    states, head = torch.randn(1, N, 4), torch.randn(V, 4)
    teacher = TeacherRows(states[0], head, torch.arange(N)[None])
    valid, share, labels = torch.ones(1, N, dtype=torch.bool), torch.ones(1, N), torch.zeros(1, N, dtype=torch.int64)
    same = plain_draft_loss(states, head, teacher, valid, share, labels, LossConfig(temperature=2.0))
    torch.testing.assert_close(same.row_loss, torch.zeros(1, N))
    log_p, log_mass, best = teacher_law(teacher, 2.0, torch.float32)
    torch.testing.assert_close(log_p, (states[0] @ head.T / 2).log_softmax(-1))
    assert not log_mass.any()
    assert torch.equal(best, (states[0] @ head.T).argmax(-1))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"terms": {"kl": 1.0}}, "kl"),
        ({"terms": {"ce": 0.0}}, "no term"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"decay": 1.5}, "decay"),
        ({"teacher_top_k": -1}, "teacher_top_k"),
        ({"position_weights": "linear"}, "position_weights"),
    ],
)
def test_bad_configs_are_refused_in_one_line(values, words):
    with pytest.raises(UserError, match=words) as error:
        config_from_dict(LossConfig, values, "loss")
    assert "\n" not in str(error.value)


def test_config_survives_a_file():
    config = LossConfig({"ce": 0.5, "lk_hybrid": 1.0}, position_weights="dpace")
    assert config_from_dict(LossConfig, config_to_dict(config)) == config
