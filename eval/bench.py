"""Measures drafters x vocabulary policies x length policies x tasks x temperatures x batches, the target alone always among them.

python eval/bench.py --drafters runs/slimspec/drafter --prompts spec_bench.jsonl --output bench
python eval/bench.py --drafters runs/full/drafter runs/slimspec/drafter --vocab all nanospec --length fixed svip
python eval/bench.py --drafters sparse_self --length fixed entropy --prompts long.jsonl --policies.sparse.budget 0.1

Prompts are JSONL in our format, MT-bench's or Spec-Bench's; every turn of a conversation is a request. A cell is a task at a
temperature and batch size; the target alone and all contenders go through it batch by batch, in turning order, `repeats` times, with all
cells in between. What is measured lies under output/raw, so that the same command goes on where an interrupted one stopped;
output/results.jsonl has a line for every contender and cell, and one for all tasks together (docs/how-to-bench.md).
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from specdraft.config import UserError, config_to_dict, require_positive, require_seed, require_some, run_program
from specdraft.data.tasks import Prompt, builtin_prompts, read_prompts, split_held_out
from specdraft.decoding import bench
from specdraft.decoding.contenders import (
    CostConfig,
    Entry,
    Lineup,
    PolicyConfig,
    check_drafters,
    check_names,
    load_drafters,
    make_entries,
    taps_of,
)
from specdraft.decoding.measure import TARGET_ALONE
from specdraft.decoding.sampling import Sampling
from specdraft.models.heads import HeadDtype
from specdraft.models.target import TargetModel
from specdraft.provenance import hash_json, machine, read_json, require_writable, write_json


@dataclass
class BenchConfig:
    """drafters: checkpoint folders, and `sparse_self`: the target drafts for itself (policies.sparse; chains, batch 1).   target:
    as the recipes take it.   prompts: a JSONL file; `builtin` = held-out built-in prompts.   tasks: only these; none = all.   per_task:
    the first n prompts of each; None = all.   vocab, length: names of policies (VOCAB_POLICIES, LENGTH_POLICIES).   trees: `chain`,
    `eagle2`, `sampled` (trees take no length policy).   head_dtypes: every checkpoint with its head's rows as they are (`own`), or in INT8
    (`int8`: on a CPU, all rows live).   batches: requests decoded together.   cost_prompts, cost_tokens: prompts on which T_draft
    and T_verify are measured, once, and new tokens of each: held-out built-in ones, or generated documents where the requests are
    longer than those.   threads: None = as torch has it."""

    drafters: tuple[Path, ...] = ()
    target: str = "default"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: str = "cpu"
    threads: int | None = None
    output: Path = Path("bench")
    prompts: str = "builtin"
    tasks: tuple[str, ...] = ()
    per_task: int | None = None
    vocab: tuple[str, ...] = ("all",)
    length: tuple[str, ...] = ("fixed",)
    trees: tuple[str, ...] = ("chain",)
    head_dtypes: tuple[HeadDtype, ...] = ("own",)
    temperatures: tuple[float, ...] = (0.0,)
    batches: tuple[int, ...] = (1,)
    repeats: int = 3
    max_new_tokens: int = 128
    seed: int = 0
    cost_prompts: int = 8
    cost_tokens: int = 64
    policies: PolicyConfig = field(default_factory=PolicyConfig)


@dataclass
class Run:
    """left_out: turns that do not fit the target's context.   cells: contenders by (temperature, batch size)."""

    config: BenchConfig
    target: TargetModel
    requests: list[bench.Request]
    left_out: int
    cells: dict[tuple[float, int], dict[str, Entry]]

    def of_task(self, task: str) -> list[bench.Request]:
        return [request for request in self.requests if request.task == task]


def main(config: BenchConfig) -> None:
    check(config)
    torch.set_num_threads(config.threads or torch.get_num_threads())
    prompts = split_held_out(builtin_prompts())[1] if config.prompts == "builtin" else read_prompts(config.prompts)
    run = prepare(config, bench.choose_prompts(prompts, config.tasks, config.per_task))
    tasks = sorted({request.task for request in run.requests})
    for repeat, how, task in itertools.product(range(config.repeats), run.cells, tasks):
        run_cell(run, how, task, repeat)
        if repeat + 1 == config.repeats:
            write_results(run, how, tasks)
    print(bench.table(list(read_results(config.output).values())))


def check(config: BenchConfig) -> None:
    """All that can be said before a target is there. Raises UserError."""
    names = ("drafters", "vocab", "length", "trees", "head_dtypes", "temperatures", "batches")
    require_some({name: getattr(config, name) for name in names})
    names = ("threads", "per_task", "repeats", "max_new_tokens", "cost_prompts", "cost_tokens")
    require_positive({name: getattr(config, name) for name in names} | {"batches": min(config.batches)})
    require_seed(config.seed)
    for temperature in config.temperatures:
        Sampling(temperature)
    check_names(config.policies, config.vocab, config.length, config.trees)
    if "int8" in config.head_dtypes and set(config.vocab) != {"all"}:
        raise UserError(
            f"head_dtypes: got int8 with vocab {' '.join(config.vocab)}, allowed: all; live rows are packed in the weights' own dtype"
        )
    check_drafters(config.drafters, config.policies, config.trees, config.batches)
    if config.policies.evospec.across_requests:
        raise UserError(
            "policies.evospec.across_requests: got true, allowed: false, as contenders would learn from each other's requests; "
            "measure it with eval/stream.py"
        )
    read_results(config.output)
    require_writable(config.output, "output")


def prepare(config: BenchConfig, prompts: list[Prompt]) -> Run:
    """Target, drafters, requests and contenders, costs measured."""
    dtype, taps = getattr(torch, config.dtype), taps_of(config.drafters)
    target = TargetModel.load(config.target, dtype=dtype, device=config.device, tap_layers=taps)
    drafters, hashes = load_drafters(config.drafters, target, config.policies, config.head_dtypes)
    answers = config.output / f"answers-{hash_json([target.hash, config.max_new_tokens, str(target.dtype)])}.jsonl"
    requests, left_out = bench.make_requests(target, prompts, config.max_new_tokens, answers)
    print(f"{len(requests)} requests of {len(prompts)} prompts; {left_out} turns left out: too long for the target")
    given = bench.cost_prompts(target, requests, config.cost_prompts, config.cost_tokens)
    measuring = CostConfig(config.output / "costs", given, config.cost_tokens, config.seed)
    names = (config.vocab, config.length, config.trees)
    lineup = Lineup(target, drafters, hashes, *names, config.policies, measuring)
    cells = {how: make_entries(lineup, *how) for how in itertools.product(config.temperatures, config.batches)}
    for batch in sorted({how[1] for how, entries in cells.items() if not entries}):
        print(f"left out: batches of {batch}, in which no drafter can take part")
    return Run(config, target, requests, left_out, {how: entries for how, entries in cells.items() if entries})


def run_cell(run: Run, how: tuple[float, int], task: str, repeat: int) -> None:
    """One repeat of one cell, unless it lies there already."""
    path, (temperature, batch), requests = unit_path(run, how, task, repeat), how, run.of_task(task)
    if path.exists():
        return
    sides = {name: entry.side for name, entry in run.cells[how].items()}
    count = f"{len(requests)} requests, {len(sides)} contenders"
    print(f"repeat {repeat + 1}, T = {temperature}, B = {batch}, {task}: {count}")
    decoding = bench.Decoding(run.config.max_new_tokens, temperature, run.config.seed, batch)
    write_json(path, bench.run_repeat(run.target, sides, requests, decoding, turn=repeat))


def unit_path(run: Run, how: tuple[float, int], task: str, repeat: int) -> Path:
    """Named by all that the times and tokens in it depend on."""
    what = [entry.what for entry in run.cells[how].values()]
    inputs = [request.input_ids for request in run.of_task(task)]
    target = [run.target.hash, run.target.precision, str(run.target.device)]
    setting = [how, run.config.max_new_tokens, run.config.seed, *target, machine()]
    shown = re.sub(r"[^\w.-]+", "_", task)[:60]  # whoever wrote the prompts named it
    name = f"{shown}-T{how[0]}-B{how[1]}-{hash_json([what, inputs, setting])}-{repeat}.json"
    return run.config.output / "raw" / name


def write_results(run: Run, how: tuple[float, int], tasks: list[str]) -> None:
    """Lines of all cells that are whole, and of all tasks together; those of other configurations stay as they are."""
    path, lines = run.config.output / "results.jsonl", read_results(run.config.output)
    cells = {}
    for task in tasks:
        places = [unit_path(run, how, task, repeat) for repeat in range(run.config.repeats)]
        if all(place.exists() for place in places):
            cells[task] = [read_json(place, "output", "remove it, and it is measured again") for place in places]
    if len(cells) == len(tasks) > 1:
        cells[bench.ALL_TASKS] = bench.pooled([cells[task] for task in tasks])
    config = {**config_to_dict(run.config), "target_hash": run.target.hash, "left_out": run.left_out}
    for (task, repeats), (name, entry) in itertools.product(
        cells.items(), {TARGET_ALONE: None, **run.cells[how]}.items()
    ):
        what = {"drafter": None} if entry is None else entry.what
        cell = {"task": task, "temperature": how[0], "batch": how[1], "name": name, **what}
        found = bench.cell_numbers(repeats, name, entry and entry.costs, entry and entry.full_head)
        key = hash_json([cell, config, machine()])
        lines[key] = {"key": key, **cell, **found, "config": config}
    bench.write_lines(path, lines.values())


def read_results(output: Path) -> dict[str, dict[str, Any]]:
    """Lines by their key."""
    lines = bench.read_lines(
        output / "results.jsonl", ("key", "task", "temperature", "batch", "name", "others_cpu_share")
    )
    return {line["key"]: line for line in lines}


if __name__ == "__main__":
    run_program(main, BenchConfig)
