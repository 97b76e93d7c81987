"""Decoding speed on the real target: our loop against `generate`, and a draft round with every head.

python benchmarks/decode.py              # a table
python benchmarks/decode.py --json       # and one line of JSON

`loop_over_generate`: tokens/s of the target alone in our loop over those of transformers' `generate`, greedy, same
prompts, in turn. Heads: untrained drafters (time does not depend on weights) in the decoder; `head_cold_ms` is one head
product right after a forward pass of the target, `head_step_ms` the same inside a draft step, `draft_step_ms` the whole
step. nu and kappa are those of papers (1.1): the head's time over the full head's, and the full head's over the rest of
its round; `break_even` is the share of the full head's tau that a head must keep to be worth it.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass

import torch

from specdraft.config import run_program
from specdraft.data.chat import render_prompt
from specdraft.data.tasks import builtin_prompts, split_held_out
from specdraft.data.vocab import VocabMap
from specdraft.decoding.costs import break_even
from specdraft.decoding.generate import autoregressive_generate
from specdraft.decoding.length_policies import Fixed
from specdraft.decoding.measure import BUSY, Contender, OthersCpu, measure_speedups
from specdraft.decoding.sampling import Sampling
from specdraft.models.drafter import Ask
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, new_drafter
from specdraft.models.target import TargetModel
from specdraft.models.tree import Chain
from specdraft.provenance import provenance


@dataclass
class DecodeConfig:
    """trimmed: rows of the trimmed head.   ranks: of the low-rank heads.   drafted: tokens a round.   repeats: cold head
    products."""

    target: str = "default"
    dtype: str = "bfloat16"
    device: str = "cpu"
    prompts: int = 6
    max_new_tokens: int = 96
    drafted: int = 4
    trimmed: int = 8192
    ranks: tuple[int, ...] = (72, 144)
    repeats: int = 20
    json: bool = False


def main(config: DecodeConfig) -> None:
    target = TargetModel.load(config.target, dtype=getattr(torch, config.dtype), device=config.device)
    prompts = choose_prompts(target, config.prompts)
    others = OthersCpu()
    result = {"config": config.__dict__, "provenance": provenance(), **against_generate(target, prompts, config)}
    result["heads"] = heads(target, prompts, config)
    result["others_cpu_share"] = round(others.share(), 3)
    result["warning"] = "the machine was busy" if result["others_cpu_share"] > BUSY else ""
    print_table(result)
    if config.json:
        print(json.dumps(result))


def choose_prompts(target: TargetModel, count: int) -> list[list[int]]:
    """The first held-out prompts' first turns, as token ids."""
    prompts = split_held_out(builtin_prompts())[1][:count]
    return [render_prompt(target.tokenizer, [{"role": "user", "content": prompt.turns[0]}]) for prompt in prompts]


def against_generate(target: TargetModel, prompts: list[list[int]], config: DecodeConfig) -> dict:
    """Tokens per second of both, every prompt on both sides, first side turning; one warm-up each."""

    def ours(prompt: list[int]) -> int:
        return len(autoregressive_generate(target, prompt, max_new_tokens=config.max_new_tokens).tokens)

    def theirs(prompt: list[int]) -> int:
        ids = torch.tensor([prompt], device=target.device)
        out = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=config.max_new_tokens,
            pad_token_id=target.eos_token_ids[0],
        )
        return out.shape[1] - len(prompt)

    sides = {"loop": ours, "generate": theirs}
    tokens, seconds = dict.fromkeys(sides, 0), dict.fromkeys(sides, 0.0)
    for number, prompt in enumerate([prompts[0], *prompts]):
        for name in sorted(sides, reverse=bool(number % 2)):
            start = time.perf_counter()
            count = sides[name](prompt)
            if number:  # the first is warm-up
                tokens[name] += count
                seconds[name] += time.perf_counter() - start
    rates = {name: tokens[name] / seconds[name] for name in sides}
    return {
        "loop_tokens_per_second": rates["loop"],
        "generate_tokens_per_second": rates["generate"],
        "loop_over_generate": rates["loop"] / rates["generate"],
    }


def heads(target: TargetModel, prompts: list[list[int]], config: DecodeConfig) -> dict[str, dict]:
    """One row per head, all measured in turn against one baseline."""
    torch.manual_seed(0)
    configs = {"full": HeadConfig("full"), f"trimmed {config.trimmed}": HeadConfig("trimmed")}
    configs |= {f"low rank {rank}": HeadConfig("lowrank", rank=rank, init="svd") for rank in config.ranks}
    vocab_map = VocabMap(torch.arange(config.trimmed), target.vocab_size)
    drafters = {
        name: new_drafter(target, DrafterConfig(), head, vocab_map if head.kind == "trimmed" else None)
        .to(target.dtype)
        .eval()
        .requires_grad_(False)
        for name, head in configs.items()
    }
    contenders = {name: Contender(drafter, Fixed(config.drafted)) for name, drafter in drafters.items()}
    speedups = measure_speedups(target, contenders, prompts, max_new_tokens=config.max_new_tokens)
    cold = {name: cold_head_ms(target, drafter, prompts[0], config.repeats) for name, drafter in drafters.items()}
    full = speedups["full"]
    kappa = full.head_ms / (full.draft_ms + full.verify_ms + full.sample_ms - full.head_ms)
    rows = {}
    for name, s in speedups.items():
        rows[name] = {
            "draft_step_ms": s.draft_ms / config.drafted,
            "draft_ms": s.draft_ms,
            "verify_ms": s.verify_ms,
            "sample_ms": s.sample_ms,
        }
        if target.device.type == "cpu":  # nobody waits for a GPU inside a draft step, so its heads have no times
            rows[name] |= {
                "head_step_ms": s.head_ms / config.drafted,
                "head_cold_ms": cold[name],
                "nu": s.head_ms / full.head_ms,
                "kappa": kappa,
                "break_even": break_even(s.head_ms / full.head_ms, kappa),
            }
    return rows


@torch.inference_mode()
def cold_head_ms(target: TargetModel, drafter: Eagle3Drafter, prompt: list[int], repeats: int) -> float:
    """Median time of the head product of a first draft step, right after the target's weights went through the cache."""
    cache = target.new_cache(1, len(prompt) + 1)
    token = torch.tensor([prompt[-1:]], device=target.device)
    step = target.forward(torch.tensor([prompt], device=target.device), cache, logits_for="none")
    drafter.begin(step.taps, [[*prompt, prompt[-1]]], len(prompt) + 2)
    seconds = []
    for _ in range(repeats):
        target.forward(token, cache)
        cache.crop(len(prompt))
        (proposal,) = drafter.draft([Ask(1, Sampling().choose)], Chain())
        seconds.append(proposal.head_seconds)
    return 1e3 * statistics.median(seconds)


def print_table(result: dict) -> None:
    print(
        f"target alone, greedy: {result['loop_tokens_per_second']:.1f} tok/s in our loop, "
        f"{result['generate_tokens_per_second']:.1f} in generate: {result['loop_over_generate']:.2f}x"
    )
    columns = list(result["heads"]["full"])
    print(f"{'head':<16}" + "".join(f"{name:>15}" for name in columns))
    for name, row in result["heads"].items():
        print(f"{name:<16}" + "".join(f"{row[column]:>15.2f}" for column in columns))
    if result["warning"]:
        print(f"warning: {result['warning']}")


if __name__ == "__main__":
    run_program(main, DecodeConfig)
