"""The element-wise work of the fused loss on L rows, in plain PyTorch: two kernels, compiled where that pays, and the closed forms of the
gradients of `losses.LOSSES`.

Kernels return sums over columns and leave what follows from the sums alone to the caller: the compiler then makes one loop over rows of
all their passes. This file knows nothing of chunks, of products with a head, or of which rows are asked for.

Letters: L rows, P supervised pairs, V target vocabulary, S draft vocabulary; C teacher rows of a chunk.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdraft.losses import LossConfig, TeacherRows, cap_logits, raise_logits

logger = logging.getLogger(__name__)


class Law(NamedTuple):
    """What the drafter's kernel reads of a chunk's teacher rows. p_S is the target's law renormalised on the draft vocabulary."""

    p: Tensor  # [C, S] p_S
    log_p: Tensor | None  # [C, S] log p_S, if a term needs it
    mass: Tensor  # [C, 1] of the true p on S
    floor: Tensor  # [C, 1] the smallest p_S that teacher_top_k keeps
    cut_scale: Tensor  # [C, 1] 1 / the mass of p_S that it keeps


class Spec(NamedTuple):
    """What a kernel is specialised for; hashable, so that each is made and compiled once."""

    terms: tuple[tuple[str, float], ...]
    temperature: float
    top_k: int
    lk_decay: float
    logit_scale: float
    soft_cap: float | None
    trimmed: bool
    is_raised: bool
    math: torch.dtype
    want_states: bool
    want_rows: bool

    @property
    def needs_log_p(self) -> bool:
        return any(CLOSED_FORMS[name].needs_log_p for name, _ in self.terms)


def spec_of(teacher: TeacherRows, config: LossConfig, draft: int, math: torch.dtype, want: tuple[bool, bool]) -> Spec:
    return Spec(
        terms=tuple(config.active_terms.items()),
        temperature=config.temperature,
        top_k=config.teacher_top_k if config.teacher_top_k < draft else 0,
        lk_decay=config.lk_decay,
        logit_scale=teacher.logit_scale,
        soft_cap=teacher.soft_cap,
        trimmed=teacher.target_ids is not None,
        is_raised=teacher.raised is not None,
        math=math,
        want_states=want[0],
        want_rows=want[1],
    )


@functools.lru_cache(maxsize=64)
def kernel_of(make: Callable[[Spec], Callable], spec: Spec, compiled: bool, strict: bool) -> Callable:
    return _Compiled(make(spec), strict) if compiled else make(spec)


class _Compiled:
    """A compiled function; the eager one if the first call fails (a broken compiler, say), unless `strict`."""

    def __init__(self, eager: Callable, strict: bool):
        self.eager, self.strict, self.called = eager, strict, False
        self.function = torch.compile(eager, fullgraph=True, dynamic=False)

    def __call__(self, *args: Any) -> Any:
        if self.called:
            return self.function(*args)
        with warnings.catch_warnings():  # the compiler itself imports parts of PyTorch that warn
            warnings.simplefilter("ignore", DeprecationWarning)
            result = self.first_call(*args)
        self.called = True
        return result

    def first_call(self, *args: Any) -> Any:
        try:
            return self.function(*args)
        except Exception as error:
            if self.strict:
                raise
            reason = str(error).strip().split("\n")[0]
            logger.warning("the loss runs uncompiled, several times slower: %s", reason)
            self.function = self.eager
            return self.eager(*args)


class TargetSums(NamedTuple):
    """Each [L, 1]. z: logits / temperature over V; z_S: at the draft columns (the same if S = V)."""

    top: Tensor  # max z
    total: Tensor  # sum exp(z - top)
    best: Tensor  # argmax z
    own_top: Tensor  # max z_S
    own_total: Tensor  # sum exp(z_S - own_top)
    cross: Tensor  # sum p_S (z_S - own_top)
    floor: Tensor  # of Law
    kept: Tensor  # mass of p_S that teacher_top_k keeps
    cut_cross: Tensor  # cross, over what it keeps


def target_kernel(spec: Spec) -> Callable:
    def kernel(
        logits: Tensor,
        columns: Tensor,
        target_ids: Tensor | None,
        raised: Tensor | None,
        out_p: Tensor,
        out_log_p: Tensor | None,
    ) -> TargetSums:
        """logits [L, V]; columns [1, V] = 0..V-1; target_ids [S]; raised [V]. Writes p_S and log p_S to `out_*` [L, S]."""
        z = _temper(cap_logits(logits.to(spec.math), spec.logit_scale, spec.soft_cap), spec.temperature)
        best = _first(z == z.amax(-1, keepdim=True), columns)
        z = raise_logits(z, raised)
        top, e, total = _exp_total(z)
        own_top, own_total = top, total
        if spec.trimmed:
            z = z[:, target_ids]
            own_top, e, own_total = _exp_total(z)
        p, centred = e * (1 / own_total), z - own_top
        cross = (p * centred).sum(-1, keepdim=True)
        floor, kept, cut_cross = torch.zeros_like(cross), torch.ones_like(cross), cross
        if spec.top_k:
            floor = p.topk(spec.top_k).values[:, -1:]
            cut = torch.where(p >= floor, p, 0)
            kept, cut_cross = cut.sum(-1, keepdim=True), (cut * centred).sum(-1, keepdim=True)
        out_p.copy_(p)
        if out_log_p is not None:
            out_log_p.copy_(centred - own_total.log())
        return TargetSums(top, total, best, own_top, own_total, cross, floor, kept, cut_cross)

    return kernel


def drafter_kernel(spec: Spec) -> Callable:
    def kernel(
        logits: Tensor,
        law: Law,
        index: Tensor,
        label: Tensor,
        coefficient: Tensor,
        columns: Tensor,
        raised: Tensor | None,
        out: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """logits [L, S]; index [L] rows of the law; label, coefficient [L]; columns [1, S] = 0..S-1; raised [S].

        Returns total, alpha, argmax and the sum of each term, all [L, 1]; writes d(coefficient * row loss)/d(logits) to `out` [L, S].
        """
        z = _temper(logits.to(spec.math), spec.temperature)
        best = _first(z == z.amax(-1, keepdim=True), columns)
        z = raise_logits(z, raised)
        top, e, total = _exp_total(z)
        law = Law(*(x if x is None else x[index] for x in law))
        q, centred = e * (1 / total), z - top
        p_true = law.p * law.mass if spec.trimmed else law.p
        alpha = torch.minimum(p_true, q).sum(-1, keepdim=True)
        rows = _Rows(law, p_true, q, centred, total, alpha, label[:, None], columns, spec)
        sums, gradient = [total, alpha, best], None
        for name, weight in spec.terms:
            term_sum, term_gradient = CLOSED_FORMS[name].rows(rows)
            term_gradient = term_gradient if weight == 1.0 else weight * term_gradient
            gradient = term_gradient if gradient is None else gradient + term_gradient
            sums.append(term_sum)
        if out is not None:
            out.copy_(gradient * (coefficient[:, None] / spec.temperature))
        return tuple(sums)

    return kernel


def _temper(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits / temperature


def _exp_total(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    top = z.amax(-1, keepdim=True)
    e = (z - top).exp()
    return top, e, e.sum(-1, keepdim=True)


def _first(chosen: Tensor, columns: Tensor) -> Tensor:
    """The first chosen column of each row, [L, 1]: an argmax in a vectorised pass. Column numbers are exact in fp32 up to 2^24; a
    row without a choice (NaN logits) gives the last column."""
    return torch.where(chosen, columns, float(columns.shape[1] - 1)).amin(-1, keepdim=True)


# --- Closed forms of losses.LOSSES


class _Rows(NamedTuple):
    """What the closed forms read of L rows."""

    law: Law  # one row for each of the L
    p_true: Tensor  # [L, S]
    q: Tensor  # [L, S]
    centred: Tensor  # [L, S] z - max z = log q + log total
    total: Tensor  # [L, 1]
    alpha: Tensor  # [L, 1]
    label: Tensor  # [L, 1]
    columns: Tensor  # [1, S]
    spec: Spec


class RowFacts(NamedTuple):
    """What the values read besides their own sum; each [P]."""

    log_total: Tensor
    alpha: Tensor
    entropy: Tensor  # of p_S
    cut_entropy: Tensor  # of what teacher_top_k leaves of it
    label: Tensor
    spec: Spec


class _ClosedForm(NamedTuple):
    """rows: -> a sum over columns [L, 1] and the gradient with respect to logits / temperature [L, S];
    value: that sum, and facts -> the loss [P]."""

    rows: Callable[[_Rows], tuple[Tensor, Tensor]]
    value: Callable[[Tensor, RowFacts], Tensor]
    needs_log_p: bool = False


def _sum(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def _forward_kl(r: _Rows) -> tuple[Tensor, Tensor]:
    """q - p_S (papers.md 8.1)"""
    p = torch.where(r.law.p >= r.law.floor, r.law.p, 0) * r.law.cut_scale if r.spec.top_k else r.law.p
    return _sum(p * r.centred), r.q - p


def _forward_kl_value(cross: Tensor, facts: RowFacts) -> Tensor:
    return facts.log_total - cross - (facts.cut_entropy if facts.spec.top_k else facts.entropy)


def _reverse_kl(r: _Rows) -> tuple[Tensor, Tensor]:
    """q (log q - log p_S - KL)"""
    gap = r.centred - r.total.log() - r.law.log_p
    value = _sum(r.q * gap)
    return value, r.q * (gap - value)


def _js(r: _Rows) -> tuple[Tensor, Tensor]:
    """q (log q/m - sum q log q/m) / 2"""
    middle = (0.5 * (r.law.p + r.q)).clamp_min(torch.finfo(r.q.dtype).tiny).log()
    gap = r.centred - r.total.log() - middle
    mean = _sum(r.q * gap)
    return 0.5 * (_sum(r.law.p * (r.law.log_p - middle)) + mean), 0.5 * r.q * (gap - mean)


def _ce(r: _Rows) -> tuple[Tensor, Tensor]:
    """q - onehot(label); 0 for a label outside the draft vocabulary"""
    is_label = r.columns == r.label
    return _sum(torch.where(is_label, r.centred, 0)), torch.where(r.label < 0, 0, r.q - is_label.to(r.q.dtype))


def _ce_value(centred: Tensor, facts: RowFacts) -> Tensor:
    return (facts.log_total - centred).masked_fill(facts.label < 0, 0)


def _tv(r: _Rows) -> tuple[Tensor, Tensor]:
    """q (s - E_q s) / 2, s = sign(q - p) (papers.md 8.1)"""
    s = torch.sign(r.q - r.p_true)
    return r.alpha, 0.5 * r.q * (s - _sum(r.q * s))


def _lk_alpha(r: _Rows) -> tuple[Tensor, Tensor]:
    """dTV / alpha"""
    return r.alpha, _tv(r)[1] / r.alpha.clamp_min(torch.finfo(r.q.dtype).tiny)


def _lk_alpha_value(alpha: Tensor, facts: RowFacts) -> Tensor:
    return -alpha.clamp_min(torch.finfo(alpha.dtype).tiny).log()


def _lk_hybrid(r: _Rows) -> tuple[Tensor, Tensor]:
    """lam dKL + (1 - lam) dTV, lam = exp(-eta alpha) held fixed"""
    lam = torch.exp(-r.spec.lk_decay * r.alpha)
    cross, grad_kl = _forward_kl(r)
    return cross, lam * grad_kl + (1 - lam) * _tv(r)[1]


def _lk_hybrid_value(cross: Tensor, facts: RowFacts) -> Tensor:
    lam = torch.exp(-facts.spec.lk_decay * facts.alpha)
    return lam * _forward_kl_value(cross, facts) + (1 - lam) * (1 - facts.alpha)


CLOSED_FORMS = {
    "forward_kl": _ClosedForm(_forward_kl, _forward_kl_value),
    "reverse_kl": _ClosedForm(_reverse_kl, lambda value, facts: value, needs_log_p=True),
    "js": _ClosedForm(_js, lambda value, facts: value, needs_log_p=True),
    "ce": _ClosedForm(_ce, _ce_value),
    "tv": _ClosedForm(_tv, lambda alpha, facts: 1 - alpha),
    "lk_alpha": _ClosedForm(_lk_alpha, _lk_alpha_value),
    "lk_hybrid": _ClosedForm(_lk_hybrid, _lk_hybrid_value),
}
