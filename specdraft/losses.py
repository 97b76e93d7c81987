"""What a drafter is trained for: losses of one row, weights of the K steps, what is measured, and the plain objective.

Every function is pure and carries its equation. The plain objective materialises all logits and lets autograd do the
rest: it is the reference that `fused.py` must equal, in values and gradients. This file knows nothing of models, of how
rows are chosen, or of how rows are averaged: the caller hands in each row's weight.

Letters: K steps, M rows of a step, N rows in all, V target vocabulary, S draft vocabulary, H width of the target, D width
of the projected state (H, or the rank). p is the target's law, q the drafter's, z the drafter's logits.

Under a trimmed vocabulary (S < V) the divergences (KL, JS) and CE use p renormalised on S, written p_S; TV, the LK losses
and everything that is measured use the true p, of which the S columns hold only a part (papers.md 8; fault 29).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from specdraft.config import UserError


@dataclass(frozen=True)
class LossConfig:
    """terms: weights of the row losses that are summed, names as in LOSSES; all are listed so that each has a flag, 0 = not used.
    temperature: both laws are softmax(logits / temperature), in the loss and in alpha. There is no factor temperature^2: for
        the gradients of Hinton's distillation put it into the weight of the term.
    teacher_top_k: forward KL towards the k likeliest tokens of p_S only, renormalised; 0 = all.
    lk_decay: eta of the hybrid LK loss.
    position_weights: how the K steps of a row weigh: `constant`, `geometric` (decay^k), `dpace` (dpace_a), `first_failure`.
    """

    terms: dict[str, float] = field(default_factory=lambda: {name: float(name == "forward_kl") for name in LOSSES})
    temperature: float = 1.0
    teacher_top_k: int = 0
    lk_decay: float = 3.0
    position_weights: Literal["constant", "geometric", "dpace", "first_failure"] = "geometric"
    decay: float = 0.8
    dpace_a: float = 0.5

    def __post_init__(self) -> None:
        unknown = [name for name in self.terms if name not in LOSSES]
        if unknown or not self.active_terms:
            raise UserError(f"loss.terms: got {unknown or 'no term with a weight'}, allowed: {', '.join(LOSSES)}")
        limits = {
            "temperature": (1e-3, 1e3),
            "decay": (0, 1),
            "dpace_a": (0, 1),
            "teacher_top_k": (0, 1 << 24),
            "lk_decay": (0, 1e3),
        }
        for name, (low, high) in limits.items():
            if not low <= vars(self)[name] <= high:
                raise UserError(f"loss.{name}: got {vars(self)[name]}, allowed: {low} to {high}")

    @property
    def active_terms(self) -> dict[str, float]:
        """The terms with a weight."""
        return {name: weight for name, weight in self.terms.items() if weight}


# --- Losses of a row. log_p [N, S]: log of the true p at the S draft columns; log_mass [N]: log sum_S p (0 when S = V);
# --- log_q [N, S]: log-softmax of the drafter; label [N]: the true token's draft column, or -1. All fp32 or fp64. -> [N]


def forward_kl(log_p: Tensor, log_q: Tensor, log_mass: Tensor, label: Tensor, config: LossConfig) -> Tensor:
    """KL(p_S || q) = sum_S p_S (log p_S - log q);  dKL/dz = q - p_S.

    With teacher_top_k = k, p_S is first cut to its k likeliest tokens (ties with the k-th are kept) and renormalised.
    """
    log_p = log_p - log_mass[:, None]
    if 0 < config.teacher_top_k < log_p.shape[1]:
        p = log_p.exp()
        kept = p >= p.topk(config.teacher_top_k).values[:, -1:]
        log_p = log_p.masked_fill(~kept, -torch.inf).log_softmax(-1)
        return torch.where(kept, log_p.exp() * (log_p - log_q), 0).sum(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor, log_mass: Tensor, label: Tensor, config: LossConfig) -> Tensor:
    """KL(q || p_S) = sum_S q (log q - log p_S);  d/dz = q (log q - log p_S - KL)."""
    return (log_q.exp() * (log_q - log_p + log_mass[:, None])).sum(-1)


def js(log_p: Tensor, log_q: Tensor, log_mass: Tensor, label: Tensor, config: LossConfig) -> Tensor:
    """JS = KL(p_S || m) / 2 + KL(q || m) / 2 with m = (p_S + q) / 2;  d/dz = q (log q/m - sum_S q log q/m) / 2."""
    log_p = log_p - log_mass[:, None]
    log_m = torch.logaddexp(log_p, log_q) - torch.log(log_p.new_tensor(2.0))
    return 0.5 * (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(-1)


def ce(log_p: Tensor, log_q: Tensor, log_mass: Tensor, label: Tensor, config: LossConfig) -> Tensor:
    """-log q[label];  d/dz = q - onehot(label).

    A label outside the draft vocabulary (-1) gives loss 0 and gradient 0: the drafter cannot say that token. The row still
    counts where rows are averaged, so that the scale of the loss does not depend on the vocabulary.
    """
    return -log_q.gather(1, label.clamp_min(0)[:, None])[:, 0].masked_fill(label < 0, 0)


def tv(log_p: Tensor, log_q: Tensor, log_mass: Tensor, label: Tensor, config: LossConfig) -> Tensor:
    """1 - alpha: the total variation, p's mass outside S included.  d/dz = q (s - E_q s) / 2 with s = sign(q - p)."""
    return 1 - acceptance(log_p, log_q)


def lk_alpha(log_p: Tensor, log_q: Tensor, log_mass: Tensor, label: Tensor, config: LossConfig) -> Tensor:
    """-log alpha (LK, arXiv 2602.23881);  d/dz = dTV/dz / alpha, bounded by 1. Equals CE where p is a point mass."""
    alpha = acceptance(log_p, log_q)
    return -alpha.clamp_min(torch.finfo(alpha.dtype).tiny).log()


def lk_hybrid(log_p: Tensor, log_q: Tensor, log_mass: Tensor, label: Tensor, config: LossConfig) -> Tensor:
    """lam KL + (1 - lam) TV with lam = exp(-eta alpha), detached (LK, arXiv 2602.23881): KL while alpha is low, then TV."""
    alpha = acceptance(log_p, log_q)
    lam = torch.exp(-config.lk_decay * alpha.detach())
    return lam * forward_kl(log_p, log_q, log_mass, label, config) + (1 - lam) * (1 - alpha)


def row_losses(log_p: Tensor, log_q: Tensor, log_mass: Tensor, label: Tensor, config: LossConfig) -> Tensor:
    """The weighted sum of the terms, [N]."""
    return sum(
        weight * LOSSES[name](log_p, log_q, log_mass, label, config) for name, weight in config.active_terms.items()
    )


# --- What is measured


def acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """alpha = sum_{v in S} min(p(v), q(v)) with the true p: the chance that a drafted token is accepted. [N, S] -> [N]"""
    return torch.minimum(log_p.exp(), log_q.exp()).sum(-1)


def hits(best_p: Tensor, logits: Tensor, target_ids: Tensor | None) -> Tensor:
    """Whether the drafter's argmax is the target's argmax over all of V; outside S = a miss. best_p [N] target ids -> [N] bool"""
    best_q = logits.argmax(-1)
    return best_p == (best_q if target_ids is None else target_ids[best_q])


# --- Weights of the K steps of a row; never differentiated. alpha [K, M], hit, valid [K, M] bool -> [K, M] fp32


def constant(alpha: Tensor, hit: Tensor, valid: Tensor, config: LossConfig) -> Tensor:
    """1."""
    return torch.ones_like(valid, dtype=torch.float32)


def geometric(alpha: Tensor, hit: Tensor, valid: Tensor, config: LossConfig) -> Tensor:
    """decay^k (EAGLE-3's loss)."""
    powers = config.decay ** torch.arange(len(valid), device=valid.device, dtype=torch.float32)
    return powers[:, None].expand(valid.shape)


def dpace(alpha: Tensor, hit: Tensor, valid: Tensor, config: LossConfig) -> Tensor:
    """D-PACE: sum_{m >= k} prod_{i <= m} ((1 - a) alpha_i + a), over the row's supervised steps m: what the tokens accepted
    from step k on would lose without it, smoothed by a. alpha_i, the chance that the drafted token is accepted, stands where the
    paper has the drafter's probability of the label: the same for a teacher that is certain of it."""
    chain = ((1 - config.dpace_a) * alpha.float() + config.dpace_a).mul(valid).cumprod(0)
    return chain.flip(0).cumsum(0).flip(0)


def first_failure(alpha: Tensor, hit: Tensor, valid: Tensor, config: LossConfig) -> Tensor:
    """Spec-AUF: 1 up to and including the first step that misses, 0 after it: nothing drafted there would be kept."""
    kept = hit.float().cumprod(0)
    return torch.cat([torch.ones_like(kept[:1]), kept[:-1]])


# --- The plain objective


@dataclass
class TeacherRows:
    """The target's side of the loss: logits of row j = soft_cap(logit_scale * last[j] @ head_weight.T).

    last: [J, H], normed, one row for each position, shared by the steps.   head_weight: [V, H]; leave padded rows out.
    index: [K, M] int64, the row of `last` that is the teacher of (k, m); anything where (k, m) is not supervised.
    target_ids: [S] int64, target ids of the draft columns; None = all of 0..V-1.
    soft_cap: c of c tanh(logits / c) (Gemma-2), or None.   logit_scale: a factor (Cohere, Granite).
    raised: [V], added to the tempered logits of both sides where columns stand for others (training/sampled.py); `hit` and the
    argmax are of the logits before.
    """

    last: Tensor
    head_weight: Tensor
    index: Tensor
    target_ids: Tensor | None = None
    logit_scale: float = 1.0
    soft_cap: float | None = None
    raised: Tensor | None = None

    @property
    def draft_raised(self) -> Tensor | None:
        """`raised` of the draft columns, [S]."""
        return self.raised if self.raised is None or self.target_ids is None else self.raised[self.target_ids]


@dataclass
class LossOutput:
    """loss: scalar, sum over supervised rows of row_weight * position weight * row loss; the only output with a gradient.
    row_loss, alpha, position_weight: [K, M] fp32 (fp64 for fp64 states).   hit: [K, M] bool. All 0 where not supervised."""

    loss: Tensor
    row_loss: Tensor
    alpha: Tensor
    hit: Tensor
    position_weight: Tensor


def plain_draft_loss(
    projected: Tensor,
    weight: Tensor,
    teacher: TeacherRows,
    valid: Tensor,
    row_weight: Tensor,
    labels: Tensor,
    config: LossConfig,
) -> LossOutput:
    """The objective, all logits materialised: the reference, and the fallback for tiny vocabularies.

    projected: [K, M, D] what the head's rows meet; weight: [S, D]; valid: [K, M] bool, the supervised rows; row_weight: [K, M], each row's
    share in the mean (without position weights); labels: [K, M] draft columns, -1 = outside S (used by `ce` only).
    Products are made in the dtype that F.linear would use (autocast's, if on), all else in fp32 (fp64 for fp64 states).
    """
    rows = valid.nonzero(as_tuple=True)
    log_p, log_mass, best_p = teacher_law(teacher, config.temperature, math_dtype(projected))
    at = teacher.index[rows]
    log_p = log_p[at]
    logits = product(projected[rows], weight).to(log_p.dtype)
    log_q = raise_logits(logits / config.temperature, teacher.draft_raised).log_softmax(-1)
    values = row_losses(log_p, log_q, log_mass[at], labels[rows], config)
    with torch.no_grad():
        alpha = scatter(acceptance(log_p, log_q), valid)
        hit = scatter(hits(best_p[at], logits, teacher.target_ids), valid)
        position = POSITION_WEIGHTS[config.position_weights](alpha, hit, valid, config) * valid
        coefficient = (row_weight * position)[rows].to(values.dtype)
    return LossOutput((values * coefficient).sum(), scatter(values.detach(), valid), alpha, hit, position)


@torch.no_grad()
def teacher_law(teacher: TeacherRows, temperature: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """log p at the S draft columns [J, S], log of its mass on S [J], and the argmax of p over V [J], for every row of `last`."""
    with torch.autocast(teacher.last.device.type, enabled=False):
        logits = teacher.last.to(teacher.head_weight.dtype) @ teacher.head_weight.T
    logits = cap_logits(logits.to(dtype), teacher.logit_scale, teacher.soft_cap)
    log_p = raise_logits(logits / temperature, teacher.raised).log_softmax(-1)
    best = logits.argmax(-1)
    if teacher.target_ids is None:
        return log_p, torch.zeros_like(log_p[:, 0]), best
    log_p = log_p[:, teacher.target_ids]
    return log_p, log_p.logsumexp(-1), best


def cap_logits(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    """cap * tanh(scale * logits / cap)."""
    logits = logits * scale if scale != 1.0 else logits
    return logits if cap is None else cap * torch.tanh(logits / cap)


def raise_logits(logits: Tensor, raised: Tensor | None) -> Tensor:
    return logits if raised is None else logits + raised


def product(states: Tensor, weight: Tensor) -> Tensor:
    """states [N, D] @ weight [S, D].T in the dtype of `product_dtype`."""
    dtype = product_dtype(states)
    return F.linear(states.to(dtype), weight.to(dtype))


def product_dtype(states: Tensor) -> torch.dtype:
    """The dtype that F.linear would multiply in: autocast's where it is on, else that of the states."""
    device = states.device.type
    autocast = torch.is_autocast_enabled(device) and states.dtype != torch.float64
    return torch.get_autocast_dtype(device) if autocast else states.dtype


def math_dtype(states: Tensor) -> torch.dtype:
    """Softmax and losses are in fp32 whatever the products are in (fault 24); fp64 for fp64 states."""
    return torch.float64 if states.dtype == torch.float64 else torch.float32


def scatter(values: Tensor, valid: Tensor) -> Tensor:
    """values [N] of the supervised rows, in row-major order -> [K, M], 0 elsewhere."""
    return torch.zeros(valid.shape, dtype=values.dtype, device=values.device).masked_scatter(valid, values)


LOSSES = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "js": js,
    "ce": ce,
    "tv": tv,
    "lk_alpha": lk_alpha,
    "lk_hybrid": lk_hybrid,
}

POSITION_WEIGHTS = {
    "constant": constant,
    "geometric": geometric,
    "dpace": dpace,
    "first_failure": first_failure,
}
