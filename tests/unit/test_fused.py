"""The fused objective equals the plain one, in values and gradients, however it is cut; and does no more work than it says."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdraft import fused
from specdraft.config import UserError
from specdraft.fused import ChunkConfig, fused_draft_loss
from specdraft.losses import LOSSES, POSITION_WEIGHTS, LossConfig, TeacherRows, plain_draft_loss

EAGER = ChunkConfig(compile="off")
K, M, H, V, J = 3, 7, 8, 50, 11

Problem = tuple[Tensor, Tensor, TeacherRows, Tensor, Tensor, Tensor]


def problem(
    head: str, dtype: torch.dtype = torch.float32, vocab: int = V, rows: int = M, positions: int = J, seed: int = 0
) -> Problem:
    """Arguments of a loss, before the config. Teacher rows are shared by chance, and not all of them are used."""
    torch.manual_seed(seed)
    draft, width = (vocab * 2 // 5 if head == "trimmed" else vocab), (3 if head == "lowrank" else H)
    math = torch.float64 if dtype == torch.float64 else torch.float32
    valid = torch.rand(K, rows) < 0.7
    index = torch.randint(0, positions, (K, rows)).masked_fill(~valid, -1)
    ids = torch.randperm(vocab)[:draft] if head == "trimmed" else None
    teacher = TeacherRows(torch.randn(positions, H).to(dtype), torch.randn(vocab, H).to(dtype), index, ids, 0.7, 5.0)
    projected = torch.randn(K, rows, width).to(dtype).requires_grad_()
    weight = torch.randn(draft, width).to(dtype).requires_grad_()
    return projected, weight, teacher, valid, torch.rand(K, rows, dtype=math), torch.randint(-1, draft, (K, rows))


def outcome(loss, arguments: Problem, config: LossConfig, *rest: ChunkConfig) -> dict[str, Tensor]:
    out = loss(*arguments, config, *rest)
    slopes = torch.autograd.grad(out.loss * 1.5, arguments[:2])
    assert slopes[0].dtype == arguments[0].dtype
    assert slopes[1].dtype == arguments[1].dtype
    return {**vars(out), "grad_projected": slopes[0], "grad_weight": slopes[1]}


def assert_equal(arguments: Problem, config: LossConfig, chunk: ChunkConfig = EAGER, **tolerance: float) -> None:
    plain, quick = outcome(plain_draft_loss, arguments, config), outcome(fused_draft_loss, arguments, config, chunk)
    for name, value in plain.items():
        torch.testing.assert_close(quick[name], value, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("head", ["full", "trimmed", "lowrank"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("position", POSITION_WEIGHTS)
def test_equals_the_plain_loss(head, name, position):
    arguments = problem(head, torch.float64)
    for temperature, top_k in ((1.0, 0), (1.7, 5)):
        config = LossConfig({name: 1.0}, temperature, top_k, position_weights=position)
        assert_equal(arguments, config, ChunkConfig(max_rows=3, compile="off"), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("head", ["lowrank", "trimmed"])
@pytest.mark.parametrize(
    ("name", "temperature", "compile"),
    [*((name, t, "off") for name in LOSSES for t in (1.0, 1.7)), ("forward_kl", 1.0, "on")],
)
def test_equals_the_plain_loss_over_raised_columns(head, name, temperature, compile):
    """Columns that stand for others: both sides are raised after the temperature, the argmax is of the logits before."""
    arguments = problem(head, torch.float64)
    raised = torch.where(torch.rand(V) < 0.5, 2.5, 0.0).double()
    arguments = (*arguments[:2], replace(arguments[2], raised=raised), *arguments[3:])
    assert_equal(
        arguments, LossConfig({name: 1.0}, temperature), ChunkConfig(max_rows=3, compile=compile), rtol=1e-9, atol=1e-11
    )


@pytest.mark.parametrize("head", ["full", "trimmed", "lowrank"])
@pytest.mark.parametrize("name", LOSSES)
def test_equals_the_plain_loss_in_fp32(head, name):
    assert_equal(problem(head), LossConfig({name: 0.7, "ce": 0.3}), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("head", ["full", "trimmed", "lowrank"])
@pytest.mark.parametrize("name", LOSSES)
def test_equals_the_plain_loss_in_bf16(head, name):
    """fp32 weights and states under autocast: products in bf16, all else in fp32."""
    arguments, config = problem(head), LossConfig({name: 1.0})
    with torch.autocast("cpu", torch.bfloat16):
        plain, quick = outcome(plain_draft_loss, arguments, config), outcome(fused_draft_loss, arguments, config, EAGER)
    for key in ("loss", "row_loss", "alpha"):
        torch.testing.assert_close(quick[key], plain[key], rtol=1e-4, atol=1e-5)
    assert torch.equal(quick["hit"], plain["hit"])
    for key in ("grad_projected", "grad_weight"):
        assert (quick[key] - plain[key]).norm() < 0.02 * plain[key].norm(), key


def test_softmax_and_loss_are_in_fp32():
    """Fault 24: from bf16 logits on, a row's loss is as exact as in fp64."""
    projected, weight, teacher, valid, share, labels = problem("full", torch.bfloat16)
    out = fused_draft_loss(projected, weight, teacher, valid, share, labels, LossConfig(), EAGER)
    rows = valid.nonzero(as_tuple=True)
    logits = (projected[rows] @ weight.T).double()
    target = 5 * torch.tanh(0.7 * (teacher.last @ teacher.head_weight.T).double() / 5)
    p, q = target[teacher.index[rows]].softmax(-1), logits.softmax(-1)
    torch.testing.assert_close(out.row_loss[rows].double(), (p * (p / q).log()).sum(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.alpha[rows].double(), torch.minimum(p, q).sum(-1), rtol=1e-5, atol=1e-6)


def test_the_heads_gradient_is_summed_in_fp32():
    """Fault 24: four hundred equal contributions in bf16 would stop growing at some 256 times the first."""
    rows = 400
    _, weight, teacher, *_ = problem("full", torch.bfloat16)
    states = torch.randn(1, 1, H).bfloat16().expand(1, rows, H)
    teacher = replace(teacher, index=torch.zeros(1, rows, dtype=torch.int64))
    valid, labels = torch.ones(1, rows, dtype=torch.bool), torch.zeros(1, rows, dtype=torch.int64)
    shares = torch.ones(1, rows)

    def slope(chunk: ChunkConfig, count: int) -> Tensor:
        cut = replace(teacher, index=teacher.index[:, :count])
        arguments = (states[:, :count], weight, cut, valid[:, :count], shares[:, :count], labels[:, :count])
        return torch.autograd.grad(fused_draft_loss(*arguments, LossConfig(), chunk).loss, weight)[0].float()

    one_by_one = slope(ChunkConfig(max_rows=1, compile="off"), rows)
    torch.testing.assert_close(one_by_one, rows * slope(EAGER, 1), rtol=0.01, atol=0)


def test_a_drafter_that_agrees_hits_unless_the_argmax_is_outside_its_vocabulary():
    """Fault 29, with draft ids in no order."""
    _, _, teacher, valid, share, labels = problem("trimmed")
    teacher = replace(teacher, logit_scale=1.0, soft_cap=None)
    projected = teacher.last[teacher.index].requires_grad_()
    weight = teacher.head_weight[teacher.target_ids].requires_grad_()
    out = fused_draft_loss(projected, weight, teacher, valid, share, labels, LossConfig(), EAGER)
    best = (teacher.last @ teacher.head_weight.T).argmax(-1)
    inside = torch.isin(best, teacher.target_ids)[teacher.index]
    assert torch.equal(out.hit, inside & valid)
    assert out.hit.any()
    assert not out.hit[valid].all()


@pytest.mark.parametrize("max_rows", [1, 2, 5, 10, 11, 12, 1000])
def test_chunks_of_any_size(max_rows):
    assert_equal(problem("lowrank", torch.float64), LossConfig(), ChunkConfig(max_rows=max_rows, compile="off"))


def test_one_teacher_row_for_all_pairs():
    """More pairs at one teacher row than a block holds."""
    arguments = problem("full", torch.float64, positions=1)
    assert_equal(arguments, LossConfig(), ChunkConfig(max_rows=2, compile="off"))


@pytest.mark.parametrize("seed", range(3))
def test_odd_sizes(seed):
    assert_equal(
        problem("trimmed", torch.float64, vocab=37, rows=1, positions=2, seed=seed), LossConfig({"lk_hybrid": 1.0})
    )


def test_large_vocabulary():
    """Fault 25: no limit on V."""
    arguments = problem("lowrank", vocab=140_001, rows=2)
    assert_equal(arguments, LossConfig(), ChunkConfig(max_rows=2, compile="off"), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("position", POSITION_WEIGHTS)
def test_no_supervised_row(position):
    """Fault 28: a process without rows has a loss of 0 and gradients of 0, not None, and takes part in the backward pass."""
    projected, weight, teacher, valid, share, labels = problem("trimmed")
    nothing = torch.zeros_like(valid)
    config = LossConfig(position_weights=position)
    out = fused_draft_loss(projected * 1, weight * 1, teacher, nothing, share, labels, config, EAGER)
    out.loss.backward()
    assert out.loss == 0
    assert torch.equal(projected.grad, torch.zeros_like(projected))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_rows_that_are_not_supervised_do_not_matter():
    projected, weight, teacher, valid, share, labels = problem("full")
    reference = outcome(fused_draft_loss, (projected, weight, teacher, valid, share, labels), LossConfig(), EAGER)
    last = teacher.last.clone()
    last[sorted(set(range(J)) - set(teacher.index[valid].tolist()))] = torch.nan
    projected = projected.detach().masked_fill(~valid[..., None], torch.nan).requires_grad_()
    other = replace(teacher, last=last, index=teacher.index.masked_fill(~valid, 10**6))
    arguments = (projected, weight, other, valid, share.masked_fill(~valid, 7), labels)
    for name, value in outcome(fused_draft_loss, arguments, LossConfig(), EAGER).items():
        assert torch.equal(value, reference[name]), name


def test_ties_are_settled_as_argmax_does():
    """Coarse bf16 logits tie often; the first of the best columns is the drafter's choice, here as in torch.argmax."""
    projected, weight, teacher, valid, share, labels = problem("full", torch.float64)
    weight = weight.detach().round().requires_grad_()
    projected = projected.detach().round().requires_grad_()
    teacher = replace(teacher, last=teacher.last.round(), head_weight=teacher.head_weight.round())
    logits = projected @ weight.T
    assert ((logits == logits.amax(-1, keepdim=True)).sum(-1) > 1).any()
    assert_equal((projected, weight, teacher, valid, share, labels), LossConfig())


@pytest.mark.parametrize(("position", "passes"), [("geometric", 1), ("first_failure", 2)])
def test_each_teacher_row_is_multiplied_once(monkeypatch, position, passes):
    arguments = problem("lowrank")
    teacher, valid = arguments[2], arguments[3]
    rows, product = [], torch.mm

    def mm(a: Tensor, b: Tensor, **out: Tensor) -> Tensor:
        if b.data_ptr() == teacher.head_weight.data_ptr():
            rows.append(len(a))
        return product(a, b, **out)

    monkeypatch.setattr(torch, "mm", mm)
    fused_draft_loss(*arguments, LossConfig(position_weights=position), ChunkConfig(max_rows=4, compile="off"))
    used = len(set(teacher.index[valid].tolist()))
    assert used < int(valid.sum())
    assert sum(rows) == passes * used
    assert max(rows) <= 4


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_memory_is_bounded_by_the_chunk():
    """Fault 25: never [M, V], let alone [K, M, V]."""
    arguments = problem("full", vocab=3001, rows=400, positions=400)
    with Largest() as largest:
        fused_draft_loss(*arguments, LossConfig(), ChunkConfig(max_rows=16, compile="off")).loss.backward()
    assert largest.elements <= 16 * 3001 < 400 * 3001
    with Largest() as largest:
        fused_draft_loss(*arguments, LossConfig(), ChunkConfig(budget_mib=1, compile="off")).loss.backward()
    assert largest.elements * 4 <= 1 << 20


def test_a_frozen_part_gets_no_gradient_and_no_product():
    projected, weight, *rest = problem("full")
    with torch.no_grad():
        kept = weight * 1
    out = fused_draft_loss(projected, kept, *rest, LossConfig(), EAGER)
    out.loss.backward()
    assert kept.grad is None
    slope = projected.grad.clone()
    fused_draft_loss(projected.detach(), weight, *rest, LossConfig(), EAGER).loss.backward()
    assert weight.grad.any()
    torch.testing.assert_close(
        slope, outcome(plain_draft_loss, (projected, weight, *rest), LossConfig())["grad_projected"] / 1.5
    )


def test_evaluation_measures_without_gradients(monkeypatch):
    arguments = problem("trimmed")
    reference = fused_draft_loss(*arguments, LossConfig(), EAGER)
    monkeypatch.setattr(fused, "_add_outer", None)
    monkeypatch.setattr(fused, "_times_rows", None)
    with torch.no_grad():
        out = fused_draft_loss(*arguments, LossConfig(), EAGER)
    assert not out.loss.requires_grad
    for name, value in vars(reference).items():
        assert torch.equal(vars(out)[name], value.detach()), name


def test_gradients_accumulate_and_are_used_once():
    arguments = problem("full")
    once = outcome(fused_draft_loss, arguments, LossConfig(), EAGER)
    for _ in range(2):
        out = fused_draft_loss(*arguments, LossConfig(), EAGER)
        out.loss.backward()
    torch.testing.assert_close(arguments[1].grad, once["grad_weight"] / 1.5 * 2)
    assert not out.alpha.requires_grad
    assert not out.row_loss.requires_grad


@pytest.fixture
def fresh_kernels():
    """Compiled kernels of this test only, so that neither limit of PyTorch's on recompilations is met by many tests."""
    fused.kernel_of.cache_clear()
    torch._dynamo.reset()
    yield
    fused.kernel_of.cache_clear()
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_kernels")
@pytest.mark.parametrize(
    ("head", "config"),
    [
        ("lowrank", LossConfig()),
        ("trimmed", LossConfig(dict.fromkeys(LOSSES, 1.0), temperature=1.3, teacher_top_k=5)),
    ],
)
def test_compiled_equals_the_plain_loss(head, config):
    """Odd widths, padded last calls, and a second batch of another size with the same kernels."""
    chunk = ChunkConfig(max_rows=6, compile="on")
    for rows in (M, 4):
        assert_equal(problem(head, vocab=301, rows=rows), config, chunk, rtol=2e-4, atol=5e-5)
    kernels = fused.kernel_of.cache_info().currsize
    assert kernels == 2


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["off", "on"])
@pytest.mark.parametrize("head", ["full", "trimmed", "lowrank"])
def test_on_a_gpu(head, compile):
    """Its own plan of chunks, and Triton's kernels, against the plain loss."""
    projected, weight, teacher, *rest = problem(head, vocab=301)
    moved = {key: value.cuda() for key, value in vars(teacher).items() if isinstance(value, Tensor)}
    leaves = [tensor.detach().cuda().requires_grad_() for tensor in (projected, weight)]
    arguments = (*leaves, replace(teacher, **moved), *(tensor.cuda() for tensor in rest))
    config = LossConfig(dict.fromkeys(LOSSES, 1.0), temperature=1.3, teacher_top_k=5)
    assert_equal(arguments, config, ChunkConfig(max_rows=6, compile=compile), rtol=2e-4, atol=5e-5)


@pytest.mark.usefixtures("fresh_kernels")
def test_without_a_working_compiler_the_loss_runs_eagerly(monkeypatch, caplog):
    def broken(function, **options):
        def call(*args):
            raise RuntimeError("no compiler\nwith details")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(fused, "COMPILE_FROM", 1)
    arguments = problem("lowrank")
    with caplog.at_level(logging.WARNING, "specdraft.fused_kernels"):
        assert_equal(arguments, LossConfig(), ChunkConfig(compile="auto"), rtol=2e-4, atol=2e-5)
    assert "no compiler" in caplog.text
    assert "details" not in caplog.text
    with pytest.raises(RuntimeError, match="no compiler"):
        fused_draft_loss(*arguments, LossConfig(), ChunkConfig(compile="on"))


def test_automatic_compilation_is_for_large_vocabularies_and_present_compilers(monkeypatch):
    def plan(vocab: int, chunk: ChunkConfig) -> fused._Plan:
        _, weight, teacher, valid, _, _ = problem("lowrank", vocab=vocab)
        spec = fused.spec_of(teacher, LossConfig(), len(weight), torch.float32, (True, True))
        return fused._plan(teacher, weight, fused._sort_pairs(valid, teacher.index), chunk, spec)

    monkeypatch.setattr(shutil, "which", lambda name: "/bin/" + name)
    assert plan(fused.COMPILE_FROM, ChunkConfig()).compiled
    assert not plan(fused.COMPILE_FROM - 1, ChunkConfig()).compiled
    assert not plan(fused.COMPILE_FROM, EAGER).compiled
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert not plan(fused.COMPILE_FROM, ChunkConfig()).compiled


@pytest.mark.parametrize("width", [50, 8192, 49152, 151936, 262144])
@pytest.mark.parametrize("budget", [1, 64, 256])
def test_the_plan_keeps_to_its_budget(width, budget):
    teacher = TeacherRows(torch.empty(0, H), torch.empty(width, H, device="meta"), torch.empty(0))
    rows = torch.empty(width, 4 * H, dtype=torch.bfloat16, device="meta")
    pairs = fused._Pairs(torch.empty(10**5, device="meta"), torch.empty(0), torch.empty(10**4, device="meta"), [0])
    spec = fused.spec_of(teacher, LossConfig(), width, torch.float32, (True, True))
    for compile_ in ("on", "off"):
        plan = fused._plan(teacher, rows, pairs, ChunkConfig(budget, compile=compile_), spec)
        assert min(plan[:4]) >= 1
        assert plan.chunk % plan.target_call == 0
        assert plan.block % plan.drafter_call == 0
        size = plan.chunk * width * 8 + plan.block * width * 4
        assert size <= max(budget << 20, width * 12)


def test_bad_chunks_are_refused():
    with pytest.raises(UserError, match="budget_mib"):
        ChunkConfig(budget_mib=0)
