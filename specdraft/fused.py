"""The objective of `losses.py` in chunks of rows: the same values and gradients, for a part of the time and memory.

- The loop is over chunks of **teacher** rows. Each teacher row's product with the target's head and its softmax are made
  once and serve all the pairs (step, row) that point at it (row j is the label of step k's row j - k).
- Gradients are made in the forward pass, in closed form, while the logits are at hand: nothing of size [K, M, V] exists,
  and the backward pass only scales what is stored.
- The element-wise work, which is most of the time on a CPU, is compiled for one fixed shape per configuration.
- Only supervised rows, and only what is asked for: no gradient of a frozen head, none in evaluation.

Precision: products are made in the dtype that F.linear would use; as under autocast, the logits leave them in that dtype
and their gradient enters its two products in that dtype. All between is in fp32 (fault 24), and the head's gradient is
summed over blocks in fp32. Memory: the buffers of ChunkConfig.budget_mib, the two gradients, and a copy of the head in the
products' dtype if it has another; there is no limit on V (fault 25).

This file knows nothing of models, of how rows are chosen, or of processes.

Letters: K steps, M rows of a step, P supervised pairs (k, m); V target vocabulary, S draft vocabulary, H target width,
D projected width; C teacher rows of a chunk, N pairs of a block, L rows of one call of a kernel.
"""

from __future__ import annotations

import bisect
import functools
import importlib.util
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from specdraft.config import UserError
from specdraft.losses import (
    POSITION_WEIGHTS,
    LossConfig,
    LossOutput,
    TeacherRows,
    cap_logits,
    math_dtype,
    product_dtype,
    raise_logits,
)

logger = logging.getLogger(__name__)

TWO_PASSES = {"dpace", "first_failure"}  # position weights that need alpha or hit before any gradient can be made
COMPILE_FROM = 8192  # vocabulary from which `auto` compiles
TILE = 1 << 22  # elements of the head's gradient that are made at once


@dataclass(frozen=True)
class ChunkConfig:
    """How the fused loss is run; it does not change what is computed.

    budget_mib: memory for the buffers of a chunk. Larger blocks make better products, smaller ones stay in cache.
    max_rows: no chunk or block has more rows than this, whatever the budget.
    compile: `on`, `off`, or `auto`: if a compiler is there and the vocabulary is large enough to repay it (10-20 s the
        first time on a machine, then a second: PyTorch keeps it on disk).
    """

    budget_mib: int = 256
    max_rows: int = 4096
    compile: Literal["auto", "on", "off"] = "auto"

    def __post_init__(self) -> None:
        if self.budget_mib < 1 or self.max_rows < 1:
            raise UserError(f"chunk: got {self}, allowed: budget_mib and max_rows of 1 or more")


def fused_draft_loss(
    projected: Tensor,
    weight: Tensor,
    teacher: TeacherRows,
    valid: Tensor,
    row_weight: Tensor,
    labels: Tensor,
    config: LossConfig,
    chunk: ChunkConfig | None = None,
) -> LossOutput:
    """The objective; arguments and results as of `losses.plain_draft_loss`, which it equals.

    Gradients flow through `loss` to `projected` [K, M, D] and `weight` [S, D], once. Without a supervised row the loss is 0
    and so are its gradients, so a process without rows takes part in the backward pass like any other (fault 28).
    """
    run = functools.partial(
        _run, teacher=teacher, valid=valid, labels=labels, config=config, chunk=chunk or ChunkConfig()
    )
    alpha, hit = torch.zeros_like(valid, dtype=torch.float32), torch.zeros_like(valid)
    if config.position_weights in TWO_PASSES:
        first = run(projected, weight, alpha, (False, False))
        alpha, hit = first.alpha, first.hit
    position = POSITION_WEIGHTS[config.position_weights](alpha, hit, valid, config) * valid
    coefficient = (row_weight * position).to(math_dtype(projected))
    loss, row_loss, alpha, hit = _FusedLoss.apply(projected, weight, coefficient, run, torch.is_grad_enabled())
    return LossOutput(loss, row_loss, alpha, hit, position)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected: Tensor, weight: Tensor, coefficient: Tensor, run: Callable, enabled: bool):
        want_projected, want_weight = ctx.needs_input_grad[:2]
        result = run(projected, weight, coefficient, (enabled and want_projected, enabled and want_weight))
        ctx.gradients = (result.grad_projected, result.grad_weight)
        ctx.mark_non_differentiable(result.row_loss, result.alpha, result.hit)
        ctx.set_materialize_grads(False)
        return (result.row_loss * coefficient).sum(), result.row_loss, result.alpha, result.hit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: None):
        assert ctx.gradients is not None, "the fused loss keeps its gradients for one backward pass"
        gradients, ctx.gradients = ctx.gradients, None  # autograd may then take them over without a copy
        return *(None if gradient is None else gradient.mul_(grad_loss) for gradient in gradients), None, None, None


class _Result(NamedTuple):
    row_loss: Tensor  # [K, M]
    alpha: Tensor  # [K, M]
    hit: Tensor  # [K, M] bool
    grad_projected: Tensor | None  # [K, M, D] of sum(coefficient * row_loss)
    grad_weight: Tensor | None  # [S, D]


@torch.no_grad()
def _run(
    projected: Tensor,
    weight: Tensor,
    coefficient: Tensor,
    want: tuple[bool, bool],
    *,
    teacher: TeacherRows,
    valid: Tensor,
    labels: Tensor,
    config: LossConfig,
    chunk: ChunkConfig,
) -> _Result:
    """Row losses, alpha, hit, and those gradients of sum(coefficient * row_loss) that are wanted: (of projected, of weight)."""
    dtype = product_dtype(projected)
    with torch.autocast(projected.device.type, enabled=False):
        rows = weight.to(dtype)
        pairs = _sort_pairs(valid, teacher.index)
        spec = _spec(teacher, config, len(rows), math_dtype(projected), want)
        plan = _plan(teacher, rows, pairs, chunk, spec)
        target = _TargetSide(teacher, len(rows), len(pairs.rows), plan, spec)
        drafter = _DrafterSide(projected, rows, pairs, coefficient, labels, plan, spec, teacher.draft_raised)
        for start, stop in _chunks(pairs.ends, plan):
            law = target.law(start, pairs.rows[start:stop])
            for first in range(pairs.ends[start], pairs.ends[stop], plan.block):
                drafter.block(law, start, first, min(first + plan.block, pairs.ends[stop]))
        return drafter.result(projected, weight, target, valid.shape)


class _Pairs(NamedTuple):
    """The supervised pairs (k, m), sorted by their teacher row, so that a chunk's pairs are a range."""

    place: Tensor  # [P] k * M + m
    used: Tensor  # [P] the pair's teacher row, counted among the used ones
    rows: Tensor  # [J] the used rows of TeacherRows.last, ascending
    ends: list[int]  # [J + 1] the pairs of used row j are ends[j] .. ends[j + 1]


def _sort_pairs(valid: Tensor, index: Tensor) -> _Pairs:
    place = valid.flatten().nonzero()[:, 0]
    row, order = index.flatten()[place].sort(stable=True)
    rows, used, counts = torch.unique_consecutive(row, return_inverse=True, return_counts=True)
    return _Pairs(place[order], used, rows, [0, *counts.cumsum(0).tolist()])


class _Plan(NamedTuple):
    """Sizes. A compiled kernel sees one fixed shape: L rows, the last call's padded, and a law of C rows."""

    chunk: int  # C
    block: int  # N
    target_call: int  # L of the target's kernel
    drafter_call: int  # L of the drafter's
    compiled: bool
    strict: bool  # compiled, and no eager fallback


def _plan(teacher: TeacherRows, rows: Tensor, pairs: _Pairs, chunk: ChunkConfig, spec: _Spec) -> _Plan:
    """A third of the budget for a chunk of the target's side, two thirds for a block of the drafter's."""
    (vocab, _), (draft, width) = teacher.head_weight.shape, rows.shape
    strict = chunk.compile == "on"
    compiled = strict or (chunk.compile == "auto" and vocab >= COMPILE_FROM and _has_compiler(rows.device.type))
    third = (chunk.budget_mib << 20) // 3
    target_row = vocab * teacher.head_weight.element_size() + draft * spec.math.itemsize * (1 + spec.needs_log_p)
    drafter_row = draft * rows.element_size() * (2 if spec.want_states or spec.want_rows else 1)
    c, n = min(chunk.max_rows, third // target_row), min(chunk.max_rows, 2 * third // drafter_row)
    if not compiled:
        c, n = min(c, len(pairs.rows)), min(n, len(pairs.place))
    c, n = max(c, 1), max(n, 1)
    if rows.device.type != "cpu":
        return _Plan(c, n, c, n, compiled, strict)
    target_call, drafter_call = min(c, _call_rows(vocab, compiled)), min(n, _call_rows(draft, compiled))
    enough = (
        -(-4 * width // drafter_call) * drafter_call
    )  # pairs whose product is worth one addition to the head's gradient
    n = min(enough, n // drafter_call * drafter_call)
    return _Plan(c // target_call * target_call, n, target_call, drafter_call, compiled, strict)


def _chunks(ends: list[int], plan: _Plan) -> Iterator[tuple[int, int]]:
    """Ranges of used teacher rows, C at most, whose pairs nearly fill a whole number of the drafter's kernel calls."""
    start, last = 0, len(ends) - 1
    while start < last:
        stop = min(start + plan.chunk, last)
        calls = (ends[stop] - ends[start]) // plan.drafter_call
        if stop < last and calls:
            stop = max(start + 1, bisect.bisect_right(ends, ends[start] + calls * plan.drafter_call) - 1)
        yield start, stop
        start = stop


def _call_rows(width: int, compiled: bool) -> int:
    """Rows of one kernel call on a CPU: about 2^20 elements, so that what its passes share stays in the last-level cache.

    Compiled, more where that is still small: from width / 300 rows on the compiler runs all passes row by row (in
    torch/_inductor/codegen/cpp.py, check_outer_fusion_loop_level_attr), and then they share the second-level cache.
    """
    rows = max(1, (1 << 20) // width)
    if compiled and (width // 300 + 1) * width < 1 << 23:
        rows = max(rows, width // 300 + 1)
    return -(-rows // torch.get_num_threads()) * torch.get_num_threads()


def _has_compiler(device: str) -> bool:
    if device == "cpu":
        return shutil.which(os.environ.get("CXX", "g++")) is not None
    return importlib.util.find_spec("triton") is not None


class _Law(NamedTuple):
    """What the drafter's kernel reads of a chunk's teacher rows. p_S is the target's law renormalised on the draft vocabulary."""

    p: Tensor  # [C, S] p_S
    log_p: Tensor | None  # [C, S] log p_S, if a term needs it
    mass: Tensor  # [C, 1] of the true p on S
    floor: Tensor  # [C, 1] the smallest p_S that teacher_top_k keeps
    cut_scale: Tensor  # [C, 1] 1 / the mass of p_S that it keeps


class _TargetSide:
    """One product and one softmax for each teacher row."""

    def __init__(self, teacher: TeacherRows, draft: int, used: int, plan: _Plan, spec: _Spec):
        self.teacher, self.plan = teacher, plan
        weight = teacher.head_weight
        self.logits = weight.new_empty(plan.chunk, len(weight))
        self.p = weight.new_empty(plan.chunk, draft, dtype=spec.math)
        self.log_p = torch.empty_like(self.p) if spec.needs_log_p else None
        self.columns = torch.arange(len(weight), dtype=spec.math, device=weight.device)[None]
        self.kernel = _kernel(
            _target_kernel, spec._replace(want_states=False, want_rows=False), plan.compiled, plan.strict
        )
        self.sums = weight.new_empty(plan.chunk, len(_TargetSums._fields), dtype=spec.math)
        self.entropy, self.cut_entropy, self.best = (weight.new_empty(used, dtype=spec.math) for _ in range(3))

    def law(self, start: int, rows: Tensor) -> _Law:
        """rows [n <= C] of TeacherRows.last, the used rows from `start` on -> their law, in buffers that the next call overwrites."""
        n, step = len(rows), self.plan.target_call
        states = self.teacher.last[rows].to(self.logits.dtype)
        torch.mm(states, self.teacher.head_weight.T, out=self.logits[:n])
        for first in range(0, n, step):
            part = slice(first, first + step if self.plan.compiled else min(first + step, n))
            log_p = None if self.log_p is None else self.log_p[part]
            sums = self.kernel(
                self.logits[part], self.columns, self.teacher.target_ids, self.teacher.raised, self.p[part], log_p
            )
            self.sums[part] = torch.cat(sums, 1)
        sums = _TargetSums(*self.sums.split(1, 1))
        log_own, log_kept = sums.own_total.log(), sums.kept.log()
        used = slice(start, start + n)
        self.entropy[used] = (log_own - sums.cross)[:n, 0]
        self.cut_entropy[used] = (log_own + log_kept - sums.cut_cross / sums.kept)[:n, 0]
        self.best[used] = sums.best[:n, 0]
        mass = sums.own_total / sums.total * (sums.own_top - sums.top).exp()
        return _Law(self.p, self.log_p, mass, sums.floor, 1 / sums.kept)


class _DrafterSide:
    """The blocks of pairs: products, sums for the row losses, gradients."""

    def __init__(
        self,
        projected: Tensor,
        rows: Tensor,
        pairs: _Pairs,
        coefficient: Tensor,
        labels: Tensor,
        plan: _Plan,
        spec: _Spec,
        raised: Tensor | None,
    ):
        draft, width = rows.shape
        self.raised = raised
        self.rows, self.pairs, self.plan, self.spec = rows, pairs, plan, spec
        self.states = projected.reshape(-1, width)
        self.logits = rows.new_empty(plan.block, draft)
        self.columns = torch.arange(draft, dtype=spec.math, device=rows.device)[None]
        wanted = spec.want_states or spec.want_rows
        self.gradient = torch.empty_like(self.logits) if wanted else None
        same = spec._replace(want_states=wanted, want_rows=wanted)
        self.kernel = _kernel(_drafter_kernel, same, plan.compiled, plan.strict)
        self.grad_states = torch.zeros_like(self.states) if spec.want_states else None
        self.grad_rows = rows.new_zeros(draft, width, dtype=spec.math) if spec.want_rows else None
        pad = (0, plan.drafter_call)  # the last call of a block reads and writes beyond the block's pairs
        self.used, self.label, self.coefficient = (
            F.pad(x, pad) for x in (pairs.used, labels.flatten()[pairs.place], coefficient.flatten()[pairs.place])
        )
        self.sums = coefficient.new_zeros(len(self.used), 3 + len(spec.terms))

    def block(self, law: _Law, chunk_start: int, first: int, last: int) -> None:
        """The pairs first..last <= first + N, whose teacher rows are in `law`, the used row `chunk_start` first."""
        n, step = last - first, self.plan.drafter_call
        place = self.pairs.place[first:last]
        states = self.states[place].to(self.rows.dtype)
        torch.mm(states, self.rows.T, out=self.logits[:n])
        index = (self.used[first : last + step] - chunk_start).clamp(0, self.plan.chunk - 1)
        for start in range(0, n, step):
            part = slice(start, start + step if self.plan.compiled else min(start + step, n))
            at = slice(first + part.start, first + part.stop)
            out = None if self.gradient is None else self.gradient[part]
            pairs = (index[part], self.label[at], self.coefficient[at])
            sums = self.kernel(self.logits[part], law, *pairs, self.columns, self.raised, out)
            self.sums[at] = torch.cat(sums, 1)
        if self.grad_states is not None:
            self.grad_states[place] = _times_rows(self.gradient[:n], self.rows).to(self.grad_states.dtype)
        if self.grad_rows is not None:
            _add_outer(self.grad_rows, self.gradient[:n], states)

    def result(self, projected: Tensor, weight: Tensor, target: _TargetSide, shape: torch.Size) -> _Result:
        """Row losses, alpha and hit from the sums; everything back in the order of the pairs' places."""
        place, used = self.pairs.place, self.pairs.used
        total, alpha, best, *terms = self.sums[: len(place)].unbind(1)
        facts = _RowFacts(
            total.log(), alpha, target.entropy[used], target.cut_entropy[used], self.label[: len(place)], self.spec
        )
        row_loss = sum(
            w * CLOSED_FORMS[name].value(x, facts) for (name, w), x in zip(self.spec.terms, terms, strict=True)
        )
        best, target_ids = best.to(torch.int64), target.teacher.target_ids
        hit = (best if target_ids is None else target_ids[best]) == target.best[used].to(torch.int64)
        outputs = [torch.zeros(shape, dtype=x.dtype, device=x.device) for x in (row_loss, alpha, hit)]
        for output, values in zip(outputs, (row_loss, alpha, hit), strict=True):
            output.view(-1)[place] = values
        grad_projected = None if self.grad_states is None else self.grad_states.view_as(projected)
        grad_weight = None if self.grad_rows is None else self.grad_rows.to(weight.dtype)
        return _Result(*outputs, grad_projected, grad_weight)


def _times_rows(gradient: Tensor, rows: Tensor) -> Tensor:
    """gradient [N, S] @ rows [S, D]; the transposed product is the faster one on a CPU where D is not a multiple of 16."""
    return torch.mm(rows.T, gradient.T).T if rows.shape[1] % 16 else torch.mm(gradient, rows)


def _add_outer(total: Tensor, gradient: Tensor, states: Tensor) -> None:
    """total [S, D] += gradient [N, S].T @ states [N, D]; in tiles, so that a low-precision product is in cache when it is added."""
    if states.dtype == total.dtype:
        total.addmm_(gradient.T, states)
        return
    tile = max(1, TILE // states.shape[1])
    for start in range(0, len(total), tile):
        part = slice(start, start + tile)
        total[part] += torch.mm(gradient[:, part].T, states)


# --- Kernels: the element-wise work on L rows in plain PyTorch, compiled where that pays. They return sums over columns and
# --- leave what follows from the sums alone to the caller: the compiler then makes one loop over rows of all their passes.


class _Spec(NamedTuple):
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


def _spec(teacher: TeacherRows, config: LossConfig, draft: int, math: torch.dtype, want: tuple[bool, bool]) -> _Spec:
    return _Spec(
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
def _kernel(make: Callable[[_Spec], Callable], spec: _Spec, compiled: bool, strict: bool) -> Callable:
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


class _TargetSums(NamedTuple):
    """Each [L, 1]. z: logits / temperature over V; z_S: at the draft columns (the same if S = V)."""

    top: Tensor  # max z
    total: Tensor  # sum exp(z - top)
    best: Tensor  # argmax z
    own_top: Tensor  # max z_S
    own_total: Tensor  # sum exp(z_S - own_top)
    cross: Tensor  # sum p_S (z_S - own_top)
    floor: Tensor  # of _Law
    kept: Tensor  # mass of p_S that teacher_top_k keeps
    cut_cross: Tensor  # cross, over what it keeps


def _target_kernel(spec: _Spec) -> Callable:
    def kernel(
        logits: Tensor,
        columns: Tensor,
        target_ids: Tensor | None,
        raised: Tensor | None,
        out_p: Tensor,
        out_log_p: Tensor | None,
    ) -> _TargetSums:
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
        return _TargetSums(top, total, best, own_top, own_total, cross, floor, kept, cut_cross)

    return kernel


def _drafter_kernel(spec: _Spec) -> Callable:
    def kernel(
        logits: Tensor,
        law: _Law,
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
        law = _Law(*(x if x is None else x[index] for x in law))
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

    law: _Law  # one row for each of the L
    p_true: Tensor  # [L, S]
    q: Tensor  # [L, S]
    centred: Tensor  # [L, S] z - max z = log q + log total
    total: Tensor  # [L, 1]
    alpha: Tensor  # [L, 1]
    label: Tensor  # [L, 1]
    columns: Tensor  # [1, S]
    spec: _Spec


class _RowFacts(NamedTuple):
    """What the values read besides their own sum; each [P]."""

    log_total: Tensor
    alpha: Tensor
    entropy: Tensor  # of p_S
    cut_entropy: Tensor  # of what teacher_top_k leaves of it
    label: Tensor
    spec: _Spec


class _ClosedForm(NamedTuple):
    """rows: -> a sum over columns [L, 1] and the gradient with respect to logits / temperature [L, S];
    value: that sum, and facts -> the loss [P]."""

    rows: Callable[[_Rows], tuple[Tensor, Tensor]]
    value: Callable[[Tensor, _RowFacts], Tensor]
    needs_log_p: bool = False


def _sum(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def _forward_kl(r: _Rows) -> tuple[Tensor, Tensor]:
    """q - p_S (papers.md 8.1)"""
    p = torch.where(r.law.p >= r.law.floor, r.law.p, 0) * r.law.cut_scale if r.spec.top_k else r.law.p
    return _sum(p * r.centred), r.q - p


def _forward_kl_value(cross: Tensor, facts: _RowFacts) -> Tensor:
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


def _ce_value(centred: Tensor, facts: _RowFacts) -> Tensor:
    return (facts.log_total - centred).masked_fill(facts.label < 0, 0)


def _tv(r: _Rows) -> tuple[Tensor, Tensor]:
    """q (s - E_q s) / 2, s = sign(q - p) (papers.md 8.1)"""
    s = torch.sign(r.q - r.p_true)
    return r.alpha, 0.5 * r.q * (s - _sum(r.q * s))


def _lk_alpha(r: _Rows) -> tuple[Tensor, Tensor]:
    """dTV / alpha"""
    return r.alpha, _tv(r)[1] / r.alpha.clamp_min(torch.finfo(r.q.dtype).tiny)


def _lk_alpha_value(alpha: Tensor, facts: _RowFacts) -> Tensor:
    return -alpha.clamp_min(torch.finfo(alpha.dtype).tiny).log()


def _lk_hybrid(r: _Rows) -> tuple[Tensor, Tensor]:
    """lam dKL + (1 - lam) dTV, lam = exp(-eta alpha) held fixed"""
    lam = torch.exp(-r.spec.lk_decay * r.alpha)
    cross, grad_kl = _forward_kl(r)
    return cross, lam * grad_kl + (1 - lam) * _tv(r)[1]


def _lk_hybrid_value(cross: Tensor, facts: _RowFacts) -> Tensor:
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
