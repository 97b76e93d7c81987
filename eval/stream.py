"""Measures what adapting to a stream of prompts gives, whose domain changes: the vocabulary (EvoSpec, NanoSpec), the weights, or both.

python eval/stream.py --drafter runs/slimspec/drafter --policies.frequency runs/answers/SmolLM2-135M-Instruct-*/part-00000.jsonl
python eval/stream.py --drafter runs/slimspec/drafter --domains code law my_prompts.jsonl --ways frozen alignment --static all \
    --reference frozen

Every way decodes the same prompts in turn, beside the target alone: a few prompts of each domain, then of the next, `visits` times
over. output/lines.jsonl has a line for every way and prompt (tokens, seconds with learning in them, tau, acceptance by position,
misses, live rows, updates, rollbacks), output/summary.json the totals, tokens to break even and what learning takes in memory;
curves.svg the curves, where matplotlib is installed. What was learnt lies under output/sessions, also of a stream that was interrupted;
`--sessions` goes on from there, with another output: a stream is measured in one go.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from specdraft.config import UserError, config_to_dict, require_positive, require_seed, require_some, run_program
from specdraft.data.chat import render_prompt
from specdraft.data.tasks import DOMAINS, domain_prompts, read_prompts
from specdraft.decoding import stream
from specdraft.decoding.bench import Request
from specdraft.decoding.contenders import NEEDS_FREQUENCY, PolicyConfig, check_names, read_frequency, vocab_policy
from specdraft.decoding.evospec import EvoSpecConfig
from specdraft.decoding.length_policies import Fixed
from specdraft.decoding.measure import BUSY, Contender, OthersCpu
from specdraft.decoding.sampling import Sampling
from specdraft.models.checkpoint import load_drafter, read_taps
from specdraft.models.target import TargetModel
from specdraft.provenance import hash_file, provenance, require_writable, write_json
from specdraft.training.online import OnlineAlignment, OnlineConfig
from specdraft.training.sessions import load_session, save_session

STATIC = "static"  # the vocabulary of the ways that adapt weights alone: StreamConfig.static
WAYS = {  # name -> vocabulary, and how the weights learn (OnlineConfig.method; None = they do not)
    "frozen": ("all", None),
    "fr_spec": ("frequency", None),
    "nanospec": ("nanospec", None),
    "vocabulary": ("evospec", None),
    "alignment": (STATIC, "lora"),
    "both": ("evospec", "lora"),
    "full": (STATIC, "full"),
}


@dataclass
class StreamConfig:
    """domains: names of built-in ones (code, law, medicine) or JSONL files of prompts, named by file.   per_visit: prompts of a
    domain in a row.   visits: to every domain.   ways: see WAYS; `full` trains every weight of the drafter, the head's too.   static:
    vocabulary of `alignment` and `full`.   reference: the way that the others are compared with.   sessions: a folder that an earlier
    run wrote (output/sessions), to go on from; None = begin anew.   threads: None = as torch has it."""

    drafter: Path | None = None
    target: str = "default"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: str = "cpu"
    threads: int | None = None
    output: Path = Path("runs/stream")
    domains: tuple[str, ...] = DOMAINS
    per_visit: int = 10
    visits: int = 2
    ways: tuple[str, ...] = tuple(WAYS)
    static: Literal["frequency", "all"] = "frequency"
    reference: str = "fr_spec"
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    sessions: Path | None = None
    policies: PolicyConfig = field(default_factory=lambda: PolicyConfig(evospec=EvoSpecConfig(across_requests=True)))
    online: OnlineConfig = field(default_factory=lambda: OnlineConfig(across_requests=True, time_share=0.2))


def main(config: StreamConfig) -> None:
    check(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    options = {"dtype": getattr(torch, config.dtype), "device": config.device}
    target = TargetModel.load(config.target, tap_layers=read_taps(config.drafter), **options)
    visited = make_stream(config, target)
    ways, learners = make_ways(config, target)
    lines: list[dict[str, Any]] = []

    def note(line: dict[str, Any]) -> None:
        lines.append(line)
        stream.write_lines(config.output / "lines.jsonl", lines)

    others, sessions = OthersCpu(), config.output / "sessions"
    how = {"max_new_tokens": config.max_new_tokens, "temperature": config.temperature, "seed": config.seed}
    try:
        stream.run_stream(target, ways, visited, note, **how)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"go on from what was learnt with --sessions {sessions} and another --output") from None
    finally:
        for name, learner in learners.items():
            save_session(learner, sessions / name)
    write_results(config, target, lines, learners, others.share())


def check(config: StreamConfig) -> None:
    """All that can be said before a target is there."""
    if config.drafter is None:
        raise UserError("drafter: got none, needed; give a folder that a recipe wrote, such as runs/slimspec/drafter")
    read_taps(config.drafter)
    require_some({name: getattr(config, name) for name in ("ways", "domains")})
    require_positive({name: getattr(config, name) for name in ("threads", "per_visit", "visits", "max_new_tokens")})
    require_seed(config.seed)
    Sampling(config.temperature)
    if unknown := [name for name in config.ways if name not in WAYS]:
        raise UserError(f"ways: got {unknown[0]}, allowed: {', '.join(WAYS)}")
    if config.reference not in config.ways:
        raise UserError(f"reference: got {config.reference}, allowed: one of the ways: {', '.join(config.ways)}")
    labels = [label_of(name) for name in config.domains]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise UserError(
            f"domains: got two that are named {twice[0]}, allowed: different names; rename one of the files"
        )
    check_names(config.policies, list(vocabularies(config).values()), (), ())
    if (lines := config.output / "lines.jsonl").exists():
        raise UserError(f"output: {lines} holds the lines of an earlier stream; remove it, or choose another --output")
    require_writable(config.output, "output")


def label_of(domain: str) -> str:
    return domain if domain in DOMAINS else Path(domain).stem


def vocabularies(config: StreamConfig) -> dict[str, str]:
    """Way -> its vocabulary policy."""
    return {name: config.static if WAYS[name][0] == STATIC else WAYS[name][0] for name in config.ways}


def make_stream(config: StreamConfig, target: TargetModel) -> list[stream.Visited]:
    """Raises UserError where a domain has too few prompts that fit the target's context."""
    needed, domains = config.per_visit * config.visits, {}
    for name in config.domains:
        prompts = domain_prompts(name) if name in DOMAINS else read_prompts(name)
        requests, label = [], label_of(name)
        for prompt in prompts:
            ids = render_prompt(target.tokenizer, [{"role": "user", "content": prompt.turns[0]}])
            if len(ids) + config.max_new_tokens <= target.max_positions:
                requests.append(Request(prompt.id, label, ids))
        if len(requests) < needed:
            raise UserError(
                f"domain {name}: got {len(requests)} prompts that fit, needed: per_visit x visits = {needed}; ask for fewer, or give more"
            )
        domains[label] = requests[:needed]
    return stream.make_stream(domains, config.per_visit)


def make_ways(config: StreamConfig, target: TargetModel) -> tuple[dict[str, stream.Way], dict[str, OnlineAlignment]]:
    """Every way with policies of its own; those that learn have a drafter of their own, too."""
    policies, frequency = vocabularies(config), None
    if set(policies.values()) & set(NEEDS_FREQUENCY):
        frequency = read_frequency(config.policies.frequency, target, config.policies.evospec.core)
    shared = load_drafter(config.drafter, target)
    ways, learners = {}, {}
    for name, vocabulary in policies.items():
        drafter, method = shared, WAYS[name][1]
        if method is not None:
            drafter = load_drafter(config.drafter, target)
            online = replace(config.online, method=method, head=config.online.head or method == "full")
            learners[name] = OnlineAlignment(drafter, target.vocab_size, online)
            if config.sessions is not None:
                load_session(learners[name], config.sessions / name)
        of = (vocabulary, drafter.lm_head, target, config.policies, frequency)
        policy = vocab_policy(*of)
        contender = Contender(drafter, Fixed(config.policies.drafted), policy)
        warm_up = replace(contender, vocab_policy=vocab_policy(*of, like=policy))
        learner = learners.get(name)
        ways[name] = stream.Way(contender, learner, dict if learner is None else learner.counts, warm_up)
    return ways, learners


def write_results(
    config: StreamConfig,
    target: TargetModel,
    lines: list[dict[str, Any]],
    learners: dict[str, OnlineAlignment],
    others: float,
) -> None:
    rows = stream.summary(lines, config.reference)
    memory = {name: learner.memory() for name, learner in learners.items()}
    record = {"rows": rows, "memory_bytes": memory, "others_cpu_share": others, "config": config_to_dict(config)}
    record |= {"target_hash": target.hash, "drafter_hash": hash_file(config.drafter / "model.safetensors")}
    write_json(config.output / "summary.json", {**record, "provenance": provenance()})
    print(stream.table(rows, lines, config.reference))
    if memory:
        print(stream.memory_table(memory))
    if not stream.plot(config.output / "curves.svg", lines):
        print("No plot: pip install 'specdraft[vocab]' for matplotlib.")
    if others > BUSY:
        print(f"warning: other processes used {others:.0%} of the machine: measure again when it is idle")


if __name__ == "__main__":
    run_program(main, StreamConfig)
