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
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from specdraft.config import UserError
from specdraft.fused_kernels import (
    CLOSED_FORMS,
    Law,
    RowFacts,
    Spec,
    TargetSums,
    drafter_kernel,
    kernel_of,
    spec_of,
    target_kernel,
)
from specdraft.losses import (
    POSITION_WEIGHTS,
    LossConfig,
    LossOutput,
    TeacherRows,
    math_dtype,
    product_dtype,
)

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
        spec = spec_of(teacher, config, len(rows), math_dtype(projected), want)
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


def _plan(teacher: TeacherRows, rows: Tensor, pairs: _Pairs, chunk: ChunkConfig, spec: Spec) -> _Plan:
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


class _TargetSide:
    """One product and one softmax for each teacher row."""

    def __init__(self, teacher: TeacherRows, draft: int, used: int, plan: _Plan, spec: Spec):
        self.teacher, self.plan = teacher, plan
        weight = teacher.head_weight
        self.logits = weight.new_empty(plan.chunk, len(weight))
        self.p = weight.new_empty(plan.chunk, draft, dtype=spec.math)
        self.log_p = torch.empty_like(self.p) if spec.needs_log_p else None
        self.columns = torch.arange(len(weight), dtype=spec.math, device=weight.device)[None]
        self.kernel = kernel_of(
            target_kernel, spec._replace(want_states=False, want_rows=False), plan.compiled, plan.strict
        )
        self.sums = weight.new_empty(plan.chunk, len(TargetSums._fields), dtype=spec.math)
        self.entropy, self.cut_entropy, self.best = (weight.new_empty(used, dtype=spec.math) for _ in range(3))

    def law(self, start: int, rows: Tensor) -> Law:
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
        sums = TargetSums(*self.sums.split(1, 1))
        log_own, log_kept = sums.own_total.log(), sums.kept.log()
        used = slice(start, start + n)
        self.entropy[used] = (log_own - sums.cross)[:n, 0]
        self.cut_entropy[used] = (log_own + log_kept - sums.cut_cross / sums.kept)[:n, 0]
        self.best[used] = sums.best[:n, 0]
        mass = sums.own_total / sums.total * (sums.own_top - sums.top).exp()
        return Law(self.p, self.log_p, mass, sums.floor, 1 / sums.kept)


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
        spec: Spec,
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
        self.kernel = kernel_of(drafter_kernel, same, plan.compiled, plan.strict)
        self.grad_states = torch.zeros_like(self.states) if spec.want_states else None
        self.grad_rows = rows.new_zeros(draft, width, dtype=spec.math) if spec.want_rows else None
        pad = (0, plan.drafter_call)  # the last call of a block reads and writes beyond the block's pairs
        self.used, self.label, self.coefficient = (
            F.pad(x, pad) for x in (pairs.used, labels.flatten()[pairs.place], coefficient.flatten()[pairs.place])
        )
        self.sums = coefficient.new_zeros(len(self.used), 3 + len(spec.terms))

    def block(self, law: Law, chunk_start: int, first: int, last: int) -> None:
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
        facts = RowFacts(
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
