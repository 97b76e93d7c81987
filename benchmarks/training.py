"""Whole training steps on the default target's shapes: unroll, loss, backward pass, clipping and AdamW; the target's forward pass apart.

    python benchmarks/training.py --steps 4 7 --heads full trimmed lowrank --plain --json

H = 576, V = 49,152, B x T tokens, all of them supervised, random states; bf16 autocast, or fp32 where the processor has no bf16. Variants
of one K take turns in one process; medians and ranges. `fused` is the loss over all columns; `sampled` the same over a part of them, the
recipes' default; `plain` materialises all logits and computes the teacher once.

tokens_per_second: B * T / seconds of a step.   peak_gb: the most memory this process has held so far, in 1e9 bytes (so it only grows).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from unittest import mock

import torch

from specdraft.data.vocab import VocabMap
from specdraft.losses import plain_draft_loss
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, new_drafter
from specdraft.models.target import TargetModel
from specdraft.provenance import has_bf16_products, others_cpu_share, provenance
from specdraft.training.objective import Objective, ObjectiveConfig, Rows, denominators, supervised_counts
from specdraft.training.optim import OptimConfig, build_optimizers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 7], help="K")
    parser.add_argument(
        "--heads", nargs="+", default=["full", "trimmed", "lowrank"], choices=["full", "trimmed", "lowrank"]
    )
    parser.add_argument("--rank", type=int, help="R; default H/8")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="S of the trimmed head")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512, help="T")
    parser.add_argument("--plain", action="store_true", help="the plain loss too")
    parser.add_argument("--sampled-vocab", type=int, default=8192, help="columns of the sampled loss; 0 leaves it out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    target = TargetModel.load("default")
    report = {"others_cpu_share": round(others_cpu_share(), 2), "bf16": has_bf16_products("cpu")}
    print(f"{'K':>2} {'head':8} {'loss':7} {'tok/s':>8} {'s/step (range)':>22} {'peak GB':>8}")
    for steps in args.steps:
        variants = {}
        for kind in args.heads:
            step = Step(target, kind, steps, args)
            variants[kind, "fused"] = step
            if 0 < args.sampled_vocab < target.vocab_size:
                variants[kind, "sampled"] = Step(target, kind, steps, args, args.sampled_vocab)
            if args.plain:
                variants[kind, "plain"] = step.plain
        for (kind, loss), seconds in take_turns(variants, args.repeats).items():
            median = statistics.median(seconds)
            rate, peak = (
                args.batch * args.length / median,
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
            )
            print(
                f"{steps:2} {kind:8} {loss:7} {rate:8,.0f} {median:8.2f} ({min(seconds):.2f} to {max(seconds):.2f}) {peak:8.1f}"
            )
            report[f"K{steps}_{kind}_{loss}"] = {
                "tokens_per_second": rate,
                "seconds": median,
                "range": [min(seconds), max(seconds)],
            }
    if args.json:
        print(json.dumps({**report, **vars(args), **provenance()}))


class Step:
    """One optimiser step of one head."""

    def __init__(self, target: TargetModel, kind: str, steps: int, args: argparse.Namespace, sampled: int = 0):
        torch.manual_seed(0)
        vocab_map = (
            VocabMap(torch.randperm(target.vocab_size)[: args.draft_vocab], target.vocab_size)
            if kind == "trimmed"
            else None
        )
        head = HeadConfig(kind, rank=args.rank, init="random")
        drafter = new_drafter(target, DrafterConfig(body_init="random"), head, vocab_map)
        self.objective = Objective(
            drafter,
            target,
            ObjectiveConfig(steps=steps, sampled_vocab=sampled),
            torch.arange(target.vocab_size),
        )
        head_parameters = list(drafter.lm_head.parameters())
        body = [parameter for name, parameter in drafter.named_parameters() if not name.startswith("lm_head.")]
        self.optimizers = build_optimizers(body, head_parameters, OptimConfig())
        shape = (args.batch, args.length)
        masks = [torch.ones(args.length, dtype=torch.bool)] * args.batch
        self.inputs = (
            torch.randn(*shape, 3 * target.hidden_size, dtype=target.compute_dtype),
            torch.randn(*shape, target.hidden_size, dtype=target.compute_dtype),
            torch.randint(0, target.vocab_size, shape),
            Rows.from_masks(masks, steps),
            denominators(supervised_counts(masks, steps), "rows"),
        )

    def __call__(self) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_bf16_products("cpu")):
            loss, _ = self.objective(*self.inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.objective.parameters(), 0.5)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def plain(self) -> None:
        def loss(*arguments):
            return plain_draft_loss(*arguments[:-1])  # all but the chunk's configuration

        with mock.patch("specdraft.training.objective.fused_draft_loss", loss):
            self()


def take_turns(variants: dict, repeats: int) -> dict:
    """Seconds of each, warm-up left out."""
    seconds = {name: [] for name in variants}
    for number in range(repeats + 1):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
