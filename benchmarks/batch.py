"""Throughput of batches, with chains and with trees, against the batched target alone; and what a tree costs in Python.

python benchmarks/batch.py --drafter runs/slimspec/drafter              # a table
python benchmarks/batch.py --drafter runs/slimspec/drafter --json       # and one line of JSON

Throughput: every side decodes the same prompts, B at a time, in turning order; tokens per second are all new tokens over
all seconds, prefills included; without a trained drafter tau, and so the speedup, mean nothing. Python: medians of the parts
of a tree's round that are no forward pass (`select`: choosing the nodes from logits of the real size, top-k included;
`place`: positions and mask; `verify`; `keep`: moving the accepted path's keys and values), and whole rounds of a tiny
pair with as many layers, whose arithmetic costs next to nothing.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from specdraft.config import UserError, require_positive, require_some, run_program
from specdraft.data.chat import render_prompt
from specdraft.data.tasks import builtin_prompts, split_held_out
from specdraft.decoding.generate import GenerateOutput, speculative_generate, speculative_generate_batch
from specdraft.decoding.length_policies import Fixed
from specdraft.decoding.measure import BUSY, OthersCpu
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.trace import tau, tokens_per_second
from specdraft.decoding.verify import verify_greedy
from specdraft.models.checkpoint import load_drafter, read_taps
from specdraft.models.drafter import Ask, BatchDrafter, Proposal
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, new_drafter
from specdraft.models.target import TargetModel
from specdraft.models.tree import Eagle2Tree, Shape, depths, place_trees
from specdraft.provenance import provenance
from specdraft.testing import tiny_target


@dataclass
class BatchConfig:
    """drafter: a checkpoint folder; None = an untrained one.   batches: rows decoded together.   drafted: tokens of a chain.
    total_tokens, depth, top_k: of the tree.   prompts: texts on every side.   repeats: of each part of a round."""

    drafter: Path | None = None
    target: str = "default"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: str = "cpu"
    batches: tuple[int, ...] = (1, 4, 16)
    prompts: int = 16
    max_new_tokens: int = 64
    drafted: int = 4
    total_tokens: int = 60
    depth: int = 7
    top_k: int = 10
    repeats: int = 20
    json: bool = False


def main(config: BatchConfig) -> None:
    require_some({"batches": config.batches})
    names = ("max_new_tokens", "repeats")
    require_positive({name: getattr(config, name) for name in names} | {"batches": min(config.batches)})
    chosen = split_held_out(builtin_prompts())[1][: config.prompts]
    if len(chosen) < max(config.batches):
        raise UserError(
            f"prompts: got {config.prompts}, of which there are {len(chosen)}, allowed: at least the largest batch, {max(config.batches)}"
        )
    taps = None if config.drafter is None else read_taps(config.drafter)
    target = TargetModel.load(config.target, dtype=getattr(torch, config.dtype), device=config.device, tap_layers=taps)
    if config.drafter is None:
        torch.manual_seed(0)
        drafter = new_drafter(target, DrafterConfig(), HeadConfig("lowrank", init="svd")).to(target.dtype)
        drafter = drafter.to(target.device).eval().requires_grad_(False)
    else:
        drafter = load_drafter(config.drafter, target)
    tree = Eagle2Tree(config.total_tokens, config.depth, config.top_k)
    prompts = [render_prompt(target.tokenizer, [{"role": "user", "content": prompt.turns[0]}]) for prompt in chosen]
    others = OthersCpu()
    result = {"config": {**config.__dict__, "drafter": str(config.drafter)}, "provenance": provenance()}
    result["throughput"] = {rows: throughput(target, drafter, tree, prompts, rows, config) for rows in config.batches}
    result["python_ms"] = parts(target, tree, config.repeats) | tiny_rounds(target.num_layers, tree, config)
    result["others_cpu_share"] = round(others.share(), 3)
    result["warning"] = "the machine was busy" if result["others_cpu_share"] > BUSY else ""
    print_table(result)
    if config.json:
        print(json.dumps(result))


def throughput(
    target: TargetModel, drafter: BatchDrafter, tree: Shape, prompts: list[list[int]], rows: int, config: BatchConfig
) -> dict[str, dict]:
    """Tokens per second and tau of every side at `rows` rows a batch. One warm-up batch."""
    sync = target.device.type != "cpu"

    def decode(side: str, batch: list[list[int]]) -> list[GenerateOutput]:
        return speculative_generate_batch(
            target,
            None if side == "target alone" else drafter,
            batch,
            max_new_tokens=config.max_new_tokens,
            tree=tree if side == "tree" else None,
            length_policies=[Fixed(config.drafted) for _ in batch] if side == "chain" else None,
            synchronize=sync,
        )

    sides = ["target alone", "chain", "tree"]
    outputs: dict[str, list[GenerateOutput]] = {side: [] for side in sides}
    batches = [prompts[start : start + rows] for start in range(0, len(prompts) - rows + 1, rows)]
    for number, batch in enumerate([batches[0], *batches]):
        turn = number % len(sides)
        for side in sides[turn:] + sides[:turn]:
            made = decode(side, batch)
            if number:  # the first is warm-up
                outputs[side] += made
    traces = {side: [output.trace for output in made] for side, made in outputs.items()}
    rates = {side: tokens_per_second(own) for side, own in traces.items()}
    return {
        side: {"tokens_per_second": rate, "speedup": rate / rates["target alone"], "tau": tau(traces[side])}
        for side, rate in rates.items()
    }


@torch.inference_mode()
def parts(target: TargetModel, tree: Eagle2Tree, repeats: int) -> dict[str, float]:
    """Median milliseconds of what a tree's round does outside of forward passes, over random logits."""
    logits = torch.randn(tree.top_k, target.vocab_size, dtype=target.dtype, device=target.device)
    ids = torch.randint(target.vocab_size, (1, 64), device=target.device)
    cache = target.new_cache(1, 64 + tree.depth + 1)
    target.forward(ids, cache, want_taps=False, logits_for="none")
    start = cache.lengths[0]

    def select() -> Proposal:
        growth = tree.begin(Ask(tree.depth, Sampling().choose), None)
        level = growth.grow(logits[:1])
        while level is not None:
            level = growth.grow(logits[: len(level[0])])
        return growth.proposal()

    proposal = select()
    tokens, parents = proposal.tokens.tolist(), proposal.parents
    levels = depths(parents)
    path = [1 + levels.index(max(levels))]  # of the deepest node, as places in the pass
    while parents[path[0] - 1] >= 0:
        path.insert(0, parents[path[0] - 1] + 1)
    positions, mask = place_trees([start], [parents], target.device)
    best = [*tokens, tokens[0]]

    def keep() -> None:
        cache.keep([start], [[0, *path]])

    def run() -> None:
        nodes = torch.tensor([[tokens[0], *tokens]], device=target.device)
        cache.crop(start)
        target.forward(nodes, cache, positions=positions, mask=mask, want_taps=False)

    return {
        "select": _median_ms(target, select, repeats),
        "place": _median_ms(target, lambda: place_trees([start], [parents], target.device), repeats),
        "verify": _median_ms(target, lambda: verify_greedy(best, tokens, parents), repeats),
        "keep": _median_ms(target, keep, repeats, before=run),
    }


def tiny_rounds(layers: int, tree: Shape, config: BatchConfig) -> dict[str, float]:
    """Median milliseconds of whole rounds of a tiny pair, by side."""
    target = tiny_target(layers=layers)
    target.eos_token_ids = ()
    drafter = new_drafter(target, DrafterConfig(), HeadConfig("full", init="random")).eval().requires_grad_(False)
    medians = {}
    for side in ("target alone", "chain", "tree"):
        output = speculative_generate(
            target,
            None if side == "target alone" else drafter,
            list(range(3, 60)),
            max_new_tokens=config.max_new_tokens,
            tree=tree if side == "tree" else None,
            length_policy=Fixed(config.drafted) if side == "chain" else None,
        )
        seconds = [r.seconds for r in output.trace.rounds if r.drafted or side == "target alone"]
        medians[f"tiny round, {side}"] = 1e3 * statistics.median(seconds) if seconds else float("nan")
    return medians


def _median_ms(
    target: TargetModel, work: Callable[[], object], repeats: int, before: Callable[[], None] | None = None
) -> float:
    seconds = []
    for _ in range(repeats):
        if before is not None:
            before()
        if target.device.type != "cpu":
            torch.accelerator.synchronize(target.device)
        start = time.perf_counter()
        work()
        if target.device.type != "cpu":
            torch.accelerator.synchronize(target.device)
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


def print_table(result: dict) -> None:
    print(f"{'rows':<6}{'side':<16}{'tokens/s':>10}{'speedup':>10}{'tau':>8}")
    for rows, sides in result["throughput"].items():
        for side, row in sides.items():
            print(f"{rows:<6}{side:<16}{row['tokens_per_second']:>10.1f}{row['speedup']:>10.2f}{row['tau']:>8.2f}")
    print("milliseconds of a tree's round outside of forward passes, and rounds of a tiny pair:")
    for part, milliseconds in result["python_ms"].items():
        print(f"  {part:<28}{milliseconds:>8.2f}")
    if result["warning"]:
        print(f"warning: {result['warning']}")


if __name__ == "__main__":
    run_program(main, BatchConfig)
