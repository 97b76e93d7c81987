"""Time and memory of the objective alone: teacher product, drafter product, loss and both gradients, on random rows.

    python benchmarks/objective.py --vocab 49152 --hidden 576 --rows 2048 --head lowrank --plain --teacher-k-times

Variants take turns in one process, so that a busy machine hurts them alike; medians and the range are printed, and with
--json one line of JSON at the end. It measures neither the drafter's layers nor the target's.

seconds: one forward and backward pass over `rows` teacher rows (positions), all K steps.   tokens_per_second: rows / seconds.
peak_gb: the most memory this process held until the fused loss had run (interpreter, compiler, weights and their gradients included;
1e9 bytes); on a GPU, the most that PyTorch had allocated.   limit_seconds: the same products at the speed of one large square product.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from specdraft.fused import ChunkConfig, fused_draft_loss
from specdraft.losses import LOSSES, POSITION_WEIGHTS, LossConfig, TeacherRows, plain_draft_loss
from specdraft.provenance import others_cpu_share, provenance

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(0)
    problem = Problem(args)
    variants: dict[str, Callable[[], None]] = {"fused": problem.fused}
    problem.fused()  # compiles
    problem.fused()
    report = {"peak_gb": round(peak_bytes(args.device) / 1e9, 3), "others_cpu_share": round(others_cpu_share(), 2)}
    if args.teacher_k_times:
        variants["fused, teacher K times"] = problem.fused_by_step
    if args.plain:
        problem.plan_plain(args.plain_rows)
        variants["plain"] = problem.plain
        if args.loss == "forward_kl" and args.position_weights == "geometric":
            variants["textbook KL"] = problem.textbook
    seconds = take_turns(variants, args.repeats, args.device)
    report |= summarise(seconds, problem)
    if args.json:
        settings = {**vars(args), **provenance()}
        print(json.dumps({**report, **settings}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49152, help="V")
    parser.add_argument("--hidden", type=int, default=576, help="H")
    parser.add_argument("--rows", type=int, default=2048, help="teacher rows: supervised positions of a batch")
    parser.add_argument("--steps", type=int, default=7, help="K")
    parser.add_argument("--span", type=int, default=128, help="length of an answer; its last rows lack later steps")
    parser.add_argument("--head", choices=("full", "lowrank", "trimmed"), default="lowrank")
    parser.add_argument("--rank", type=int, help="of a low-rank head; default H/8")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="of a trimmed head")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="bf16: autocast over fp32 weights")
    parser.add_argument("--loss", choices=LOSSES, default="forward_kl")
    parser.add_argument("--position-weights", choices=POSITION_WEIGHTS, default="geometric")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--budget-mib", type=int, default=ChunkConfig().budget_mib)
    parser.add_argument(
        "--plain", action="store_true", help="time the plain loss too, and a textbook KL without measures"
    )
    parser.add_argument(
        "--plain-rows", type=int, help="rows of its micro-batches; default: what fits into half of the free memory"
    )
    parser.add_argument(
        "--teacher-k-times", action="store_true", help="time a fused loss that makes teacher logits for each step"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


class Problem:
    """Random states and heads of the asked shapes, and the ways to run the objective on them."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.dtype = args, DTYPES[args.dtype]
        k, m, v, h = args.steps, args.rows, args.vocab, args.hidden
        draft = args.draft_vocab if args.head == "trimmed" else v
        width = (args.rank or h // 8) if args.head == "lowrank" else h
        make = {"device": args.device, "dtype": self.dtype}
        self.projected = torch.randn(k, m, width, **make).requires_grad_()
        self.weight = (torch.randn(draft, width, device=args.device) * 3 * width**-0.5).requires_grad_()
        ahead = torch.arange(k)[:, None] + torch.arange(m)
        self.valid = (torch.arange(m) % args.span + torch.arange(k)[:, None] < args.span) & (ahead < m)
        ids = torch.randperm(v)[:draft].to(args.device) if args.head == "trimmed" else None
        head = torch.randn(v, h, **make).mul_(3 * h**-0.5)
        self.teacher = TeacherRows(torch.randn(m, h, **make), head, (ahead % m).to(args.device), ids)
        self.row_weight = (self.valid / self.valid.sum(1, keepdim=True)).to(args.device)
        self.labels = torch.randint(-1, draft, (k, m), device=args.device)
        self.valid = self.valid.to(args.device)
        self.config = LossConfig({args.loss: 1.0}, position_weights=args.position_weights)
        self.chunk = ChunkConfig(budget_mib=args.budget_mib, compile=args.compile)
        self.plain_rows = m
        pairs = int(self.valid.sum())
        self.product_flop = 2 * m * v * h + 3 * 2 * pairs * draft * width

    def step(self, loss: Callable[[], Tensor]) -> None:
        self.projected.grad = self.weight.grad = None
        with torch.autocast(self.args.device, self.dtype, enabled=self.dtype != torch.float32):
            loss()

    def fused(self) -> None:
        everything = (slice(None), slice(None))
        self.step(lambda: self.backward(fused_draft_loss, everything, self.teacher.last, 0, self.chunk))

    def fused_by_step(self) -> None:
        def loss() -> None:
            for k in range(self.args.steps):
                self.backward(fused_draft_loss, (slice(k, k + 1), slice(None)), self.teacher.last, 0, self.chunk)

        self.step(loss)

    def plain(self) -> None:
        """In micro-batches of rows, each with the teacher rows that its steps need."""

        def loss() -> None:
            for start in range(0, self.args.rows, self.plain_rows):
                stop = start + self.plain_rows
                last = self.teacher.last[start : stop + self.args.steps - 1]
                self.backward(plain_draft_loss, (slice(None), slice(start, stop)), last, start)

        self.step(loss)

    def textbook(self) -> None:
        """Forward KL as one writes it first: target logits once, then step by step; nothing measured."""

        def loss() -> None:
            with torch.no_grad():
                log_p = (self.teacher.last @ self.teacher.head_weight.T).float().log_softmax(-1)
                if self.teacher.target_ids is not None:
                    log_p = log_p[:, self.teacher.target_ids].log_softmax(-1)
            for k, valid in enumerate(self.valid):
                log_q = F.linear(self.projected[k][valid], self.weight.to(self.dtype)).float().log_softmax(-1)
                target = log_p[self.teacher.index[k][valid]]
                row_loss = F.kl_div(log_q, target, log_target=True, reduction="none").sum(-1)
                (row_loss * self.row_weight[k][valid] * self.config.decay**k).sum().backward()

        self.step(loss)

    def backward(
        self, function: Callable, part: tuple[slice, slice], last: Tensor, offset: int, *rest: ChunkConfig
    ) -> None:
        teacher = self.teacher
        index = (teacher.index[part] - offset).clamp(0, len(last) - 1)
        side = TeacherRows(last, teacher.head_weight, index, teacher.target_ids)
        tensors = (self.valid[part], self.row_weight[part], self.labels[part])
        function(self.projected[part], self.weight, side, *tensors, self.config, *rest).loss.backward()

    def plan_plain(self, rows: int | None) -> None:
        """Micro-batches of the plain loss: about eight fp32 matrices [K, rows, S] live at once, and two of [rows, V]."""
        a_row = 4 * (8 * self.args.steps * len(self.weight) + 2 * self.args.vocab)
        free = torch.cuda.mem_get_info()[0] if self.args.device != "cpu" else psutil.virtual_memory().available
        self.plain_rows = min(self.args.rows, rows or max(1, int(free / 2 / a_row)))
        whole = a_row * self.args.rows / 1e9
        print(
            f"plain: all rows at once would need about {whole:.0f} GB, {free / 1e9:.0f} GB are free: {self.plain_rows} rows at a time"
        )


def take_turns(variants: dict[str, Callable[[], None]], repeats: int, device: str) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for name in list(variants)[1:]:
        variants[name]()  # warm-up; the first one is warm
    for _ in range(repeats):
        for name, variant in variants.items():
            synchronise(device)
            start = time.perf_counter()
            variant()
            synchronise(device)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def summarise(seconds: dict[str, list[float]], problem: Problem) -> dict[str, object]:
    args = problem.args
    print(f"{'':26}{'seconds':>9}{'range':>16}{'rows/s':>9}{'GFLOP/s':>9}{'ratio':>7}")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        median, span = medians[name], f"{min(values):.2f} - {max(values):.2f}"
        speed = problem.product_flop / median / 1e9
        print(f"{name:26}{median:9.2f}{span:>16}{args.rows / median:9.0f}{speed:9.0f}{median / medians['fused']:7.2f}")
    limit = problem.product_flop / square_product_speed(problem)
    print(f"{'products alone, at best':26}{limit:9.2f}{'':16}{args.rows / limit:9.0f}")
    report: dict[str, object] = {
        "seconds": round(medians["fused"], 3),
        "tokens_per_second": round(args.rows / medians["fused"], 1),
        "limit_seconds": round(limit, 3),
        "pairs": int(problem.valid.sum()),
        "runs": {name: [round(value, 3) for value in values] for name, values in seconds.items()},
    }
    if "plain" in medians:
        report["plain_micro_rows"] = problem.plain_rows
    for name in list(medians)[1:]:
        report[name.replace(",", "").replace(" ", "_").lower() + "_over_fused"] = round(
            medians[name] / medians["fused"], 2
        )
    return report


def square_product_speed(problem: Problem) -> float:
    """FLOP/s of a product of 2,048 x 2,048 matrices, the best of five."""
    a = torch.randn(2048, 2048, device=problem.args.device, dtype=problem.dtype)
    times = take_turns({"warm": lambda: torch.mm(a, a)}, 6, problem.args.device)["warm"]
    return 2 * 2048**3 / min(times[1:])


def synchronise(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def peak_bytes(device: str) -> int:
    if device != "cpu":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
