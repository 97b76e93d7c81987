"""Checks a real pair: does decoding with the drafter give the target's own tokens, and is the drafter of any use?

python eval/lossless.py                               # the newest drafter under runs/, in fp32 and bf16
python eval/lossless.py --drafter runs/slimspec/drafter --prompts my_prompts.jsonl
python eval/lossless.py --quick                       # under a minute

In fp32 the greedy output must be the target's own on every prompt; in bf16 forwards of one and of several rows round
differently, so outputs may part where the target's two best logits nearly tie: every first divergence is printed with
that margin. A break is a divergence with a larger margin than rounding explains, or a drafter of which nothing is
accepted: a useless drafter is lossless too. Exit code 1 on a break, 2 on bad input.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from specdraft.config import UserError, run_program
from specdraft.data.chat import render_prompt
from specdraft.data.tasks import builtin_prompts, read_prompts, split_held_out
from specdraft.decoding.length_policies import Fixed
from specdraft.decoding.measure import Speedup, measure_speedup
from specdraft.models.checkpoint import load_drafter, read_config
from specdraft.models.target import TargetModel

MARGINS = {"float32": 1e-3, "bfloat16": 1.0}  # logits: the largest top-2 margin that rounding explains
QUICK_PROMPTS, QUICK_TOKENS = 4, 40


@dataclass
class LosslessConfig:
    """drafter: a checkpoint folder; None = the newest under runs/.   target: as the recipes take it.   prompts: a JSONL
    file; `builtin` = held-out built-in prompts.   count, max_new_tokens, drafted: prompts, new tokens each, tokens
    drafted a round. quick: 4 prompts of 40 tokens.   json: one line of JSON at the end."""

    drafter: Path | None = None
    target: str = "default"
    prompts: str = "builtin"
    count: int = 20
    max_new_tokens: int = 128
    drafted: int = 4
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    quick: bool = False
    json: bool = False


def main(config: LosslessConfig) -> None:
    folder = config.drafter or newest_drafter(Path("runs"))
    for dtype in config.dtypes:
        if dtype not in MARGINS:
            raise UserError(f"dtypes: got {dtype!r}, allowed: {', '.join(MARGINS)}")
    read_config(folder)
    print(f"drafter {folder}, target {config.target}, T = 0, {config.drafted} tokens drafted a round")
    results, breaks = {}, []
    for dtype in config.dtypes:
        result = check(folder, dtype, config)
        results[dtype] = result.to_dict()
        breaks += report(dtype, result)
    print("\n".join(f"BREAK: {line}" for line in breaks) or "lossless: yes")
    if config.json:
        print(json.dumps({"drafter": str(folder), "breaks": breaks, "results": results}))
    sys.exit(1 if breaks else 0)


def newest_drafter(runs: Path) -> Path:
    found = sorted(runs.glob("*/drafter/config.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError(f"drafter: got none, and there is none under {runs}/; run make train, or give --drafter")
    return found[-1].parent


def check(folder: Path, dtype: str, config: LosslessConfig) -> Speedup:
    target = TargetModel.load(config.target, dtype=getattr(torch, dtype))
    drafter = load_drafter(folder, target)
    source = split_held_out(builtin_prompts())[1] if config.prompts == "builtin" else read_prompts(config.prompts)
    prompts = [
        render_prompt(target.tokenizer, [{"role": "user", "content": prompt.turns[0]}])
        for prompt in source[: QUICK_PROMPTS if config.quick else config.count]
    ]
    tokens = min(config.max_new_tokens, QUICK_TOKENS) if config.quick else config.max_new_tokens
    return measure_speedup(target, drafter, prompts, max_new_tokens=tokens, length_policy=Fixed(config.drafted))


def report(dtype: str, result: Speedup) -> list[str]:
    """Print what was seen; returns the breaks."""
    acceptance = ", ".join(f"{alpha:.2f}" for alpha in result.conditional_acceptance)
    print(
        f"{dtype}: {result.match_rate:.0%} of {result.prompts} outputs equal; tau {result.tau:.2f}; "
        f"acceptance by position {acceptance}; {result.speedup:.2f}x (not a measurement: see the summary of a run)"
    )
    breaks = []
    for d in result.divergences:
        line = f"{dtype}: prompt {d.prompt} parts at new token {d.index}, top-2 margin {d.margin:.2g}"
        print(f"  {line}")
        if d.margin > MARGINS[dtype]:
            breaks.append(f"{line}, more than the {MARGINS[dtype]} that rounding explains")
    if not result.conditional_acceptance or not result.conditional_acceptance[0] > 0:
        breaks.append(f"{dtype}: none of the first drafted tokens was accepted (tau {result.tau:.2f})")
    return breaks


if __name__ == "__main__":
    run_program(main, LosslessConfig)
