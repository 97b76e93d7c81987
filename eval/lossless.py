"""Checks a real pair: does decoding with the drafter give the target's own tokens, and is the drafter of any use?

python eval/lossless.py                               # the newest drafter under runs/, in fp32 and bf16
python eval/lossless.py --drafter runs/slimspec/drafter --prompts my_prompts.jsonl
python eval/lossless.py --quick                       # under a minute

Every vocabulary policy, every length policy and every tree are run (with --every-pair all pairs of them), greedy. In fp32
the output must be the target's own on every prompt; in bf16 forwards of one and of several rows round differently, so outputs
may part where the target's two best logits nearly tie: every first divergence is printed with that margin. A break is a
divergence with a larger margin than rounding explains, or a drafter of which nothing is accepted: a useless drafter is lossless
too. Exit code 1 on a break, 2 on bad input. (That sampled outputs follow the target's law is shown by exact enumeration in the
tests.)
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specdraft.config import UserError, require_positive, require_some, run_program
from specdraft.data.chat import render_prompt
from specdraft.data.tasks import builtin_prompts, read_prompts, split_held_out
from specdraft.decoding.bench import Request
from specdraft.decoding.check import GreedyCheck, check_greedy, policies_to_check
from specdraft.models.checkpoint import load_drafter, read_taps
from specdraft.models.target import TargetModel

MARGINS = {"float32": 1e-3, "bfloat16": 1.0}  # logits: the largest top-2 margin that rounding explains
ENOUGH = 20  # first positions tried without one acceptance, to call a policy's side broken
QUICK_PROMPTS, QUICK_TOKENS = 2, 16


@dataclass
class LosslessConfig:
    """drafter: a checkpoint folder; None = the newest under runs/.   target: as the recipes take it.   prompts: a JSONL
    file; `builtin` = held-out built-in prompts.   count, max_new_tokens, drafted: prompts, new tokens each, tokens
    drafted a round at most.   every_pair: all vocabulary x length policies; else each with the plain one of the other kind.
    quick: 2 prompts of 16 tokens, and in all dtypes but the first only the plain pair.   json: one line of JSON at the end."""

    drafter: Path | None = None
    target: str = "default"
    prompts: str = "builtin"
    count: int = 10
    max_new_tokens: int = 64
    drafted: int = 4
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    every_pair: bool = False
    quick: bool = False
    json: bool = False


def main(config: LosslessConfig) -> None:
    require_some({"dtypes": config.dtypes})
    require_positive({name: getattr(config, name) for name in ("count", "max_new_tokens", "drafted")})
    folder = config.drafter or newest_drafter(Path("runs"))
    for dtype in config.dtypes:
        if dtype not in MARGINS:
            raise UserError(f"dtypes: got {dtype!r}, allowed: {', '.join(MARGINS)}")
    read_taps(folder)
    print(f"drafter {folder}, target {config.target}, T = 0, at most {config.drafted} tokens drafted a round")
    if importlib.util.find_spec("faiss") is None:
        print("evospec: not checked, as faiss is not installed; pip install 'specdraft[evospec]'")
    results: dict[str, dict[str, Any]] = {}
    breaks: list[str] = []
    for dtype in config.dtypes:
        found = check(folder, dtype, config)
        results[dtype] = {name: asdict(side) for name, side in found.items()}
        for name, side in found.items():
            breaks += report(dtype, name, side)
    print("\n".join(f"BREAK: {line}" for line in breaks) or "lossless: yes")
    if config.json:
        print(json.dumps({"drafter": str(folder), "breaks": breaks, "results": results}))
    sys.exit(1 if breaks else 0)


def newest_drafter(runs: Path) -> Path:
    found = sorted(runs.glob("*/drafter/config.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError(f"drafter: got none, and there is none under {runs}/; run make train, or give --drafter")
    return found[-1].parent


def check(folder: Path, dtype: str, config: LosslessConfig) -> dict[str, GreedyCheck]:
    target = TargetModel.load(config.target, dtype=getattr(torch, dtype), tap_layers=read_taps(folder))
    drafter = load_drafter(folder, target)
    source = split_held_out(builtin_prompts())[1] if config.prompts == "builtin" else read_prompts(config.prompts)
    requests = [
        Request(
            prompt.id, prompt.category, render_prompt(target.tokenizer, [{"role": "user", "content": prompt.turns[0]}])
        )
        for prompt in source[: QUICK_PROMPTS if config.quick else config.count]
    ]
    tokens = min(config.max_new_tokens, QUICK_TOKENS) if config.quick else config.max_new_tokens
    with_evospec = importlib.util.find_spec("faiss") is not None
    sides = policies_to_check(target, drafter, config.drafted, config.every_pair, with_evospec)
    if config.quick and dtype != config.dtypes[0]:
        sides = dict(list(sides.items())[:1])
    return check_greedy(target, sides, requests, tokens)


def report(dtype: str, name: str, side: GreedyCheck) -> list[str]:
    """Print what was seen; returns the breaks."""
    where = f"{dtype}, {name}"
    print(
        f"{where}: {side.match_rate:.0%} of {side.prompts} outputs equal; tau {side.tau:.2f}; first drafted token accepted "
        f"{side.accepted} of {side.tried} times"
    )
    breaks = []
    for d in side.divergences:
        line = f"{where}: {d['request']} parts at new token {d['index']}, top-2 margin {d['margin']:.2g}"
        print(f"  {line}")
        if d["margin"] > MARGINS[dtype]:
            breaks.append(f"{line}, more than the {MARGINS[dtype]} that rounding explains")
    if not side.accepted and (side.is_plain or side.tried >= ENOUGH):
        breaks.append(f"{where}: none of the first drafted tokens was accepted (tau {side.tau:.2f})")
    return breaks


if __name__ == "__main__":
    run_program(main, LosslessConfig)
