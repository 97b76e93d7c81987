"""Measures drafters x vocabulary policies x length policies x tasks x temperatures, the target alone always among them.

python eval/bench.py --drafters runs/slimspec/drafter --prompts spec_bench.jsonl --output bench
python eval/bench.py --drafters runs/full/drafter runs/slimspec/drafter --vocab all nanospec --length fixed svip

Prompts are JSONL in our format, MT-bench's or Spec-Bench's; every turn of a conversation is a request. A cell is a task at a
temperature; the target alone and all contenders go through it request by request, in turning order, `repeats` times, with all
cells in between. What is measured lies under output/raw, so that the same command goes on where an interrupted one stopped;
output/results.jsonl has a line for every contender and cell, and one for all tasks together: the whole configuration and every
number (docs/how-to-bench.md).
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

from specdraft.config import UserError, config_to_dict, run_program
from specdraft.data.chat import render_prompt
from specdraft.data.tasks import Prompt, builtin_prompts, read_prompts, split_held_out
from specdraft.decoding import bench
from specdraft.decoding.contenders import CostConfig, Entry, PolicyConfig, make_entries
from specdraft.decoding.measure import BUSY, TARGET_ALONE
from specdraft.models.checkpoint import load_drafter, read_config
from specdraft.models.target import TargetModel
from specdraft.provenance import atomic_path, hash_file, hash_json, machine, provenance, write_json

ALL_TASKS = "all"


@dataclass
class BenchConfig:
    """drafters: checkpoint folders.   target: as the recipes take it.   prompts: a JSONL file; `builtin` = held-out built-in
    prompts.   tasks: only these; none = all.   per_task: the first n prompts of each; None = all.   vocab, length: names of
    policies (VOCAB_POLICIES, LENGTH_POLICIES).   cost_prompts, cost_tokens: held-out built-in prompts on which T_draft and
    T_verify are measured, once, and new tokens of each.   threads: None = as torch has it."""

    drafters: tuple[Path, ...] = ()
    target: str = "default"
    dtype: str = "bfloat16"
    device: str = "cpu"
    threads: int | None = None
    output: Path = Path("bench")
    prompts: str = "builtin"
    tasks: tuple[str, ...] = ()
    per_task: int | None = None
    vocab: tuple[str, ...] = ("all",)
    length: tuple[str, ...] = ("fixed",)
    temperatures: tuple[float, ...] = (0.0,)
    repeats: int = 3
    max_new_tokens: int = 128
    seed: int = 0
    cost_prompts: int = 8
    cost_tokens: int = 64
    policies: PolicyConfig = field(default_factory=PolicyConfig)


def main(config: BenchConfig) -> None:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if not config.drafters or config.repeats < 1:
        raise UserError(
            f"drafters, repeats: got {len(config.drafters)} drafters and {config.repeats} repeats, allowed: 1 or more of both"
        )
    for folder in config.drafters:
        read_config(folder)
    prompts = choose_prompts(config)
    target = TargetModel.load(config.target, dtype=getattr(torch, config.dtype), device=config.device)
    drafters = {str(folder): load_drafter(folder, target) for folder in config.drafters}
    key = hash_json([target.hash, config.max_new_tokens, str(target.dtype)])
    requests, left_out = bench.make_requests(
        target, prompts, config.max_new_tokens, config.output / f"answers-{key}.jsonl"
    )
    print(
        f"{len(requests)} requests of {len(prompts)} prompts; {left_out} turns left out: too long for the target's context"
    )
    hashes = {place: hash_file(Path(place) / "model.safetensors") for place in drafters}
    measuring = CostConfig(config.output / "costs", cost_prompts(config, target), config.cost_tokens, config.seed)
    entries = {
        temperature: make_entries(
            target, drafters, hashes, config.vocab, config.length, config.policies, temperature, measuring
        )
        for temperature in config.temperatures
    }
    tasks = sorted({request.task for request in requests})
    for repeat, temperature, task in itertools.product(range(config.repeats), config.temperatures, tasks):
        of_task = [request for request in requests if request.task == task]
        run_cell(config, target, entries[temperature], of_task, temperature, task, repeat)
        if repeat + 1 == config.repeats:
            write_results(config, target, entries[temperature], requests, temperature, tasks, left_out)
    print_table(config.output / "results.jsonl")


def choose_prompts(config: BenchConfig) -> list[Prompt]:
    prompts = split_held_out(builtin_prompts())[1] if config.prompts == "builtin" else read_prompts(config.prompts)
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    if unknown := set(config.tasks) - set(known):
        raise UserError(f"tasks: got {', '.join(sorted(unknown))}, allowed: {', '.join(known)}")
    chosen = []
    for task in config.tasks or known:
        chosen += [prompt for prompt in prompts if prompt.category == task][: config.per_task]
    return chosen


def cost_prompts(config: BenchConfig, target: TargetModel) -> list[list[int]]:
    """Held-out built-in prompts that leave room for an answer."""
    held_out = reversed(split_held_out(builtin_prompts())[1])
    ids = (render_prompt(target.tokenizer, [{"role": "user", "content": prompt.turns[0]}]) for prompt in held_out)
    room = target.max_positions - config.cost_tokens
    return list(itertools.islice((prompt for prompt in ids if len(prompt) <= room), config.cost_prompts))


def run_cell(
    config: BenchConfig,
    target: TargetModel,
    entries: dict[str, Entry],
    requests: list[bench.Request],
    temperature: float,
    task: str,
    repeat: int,
) -> None:
    """One repeat of one cell, unless it lies there already."""
    path = unit_path(config, target, entries, requests, temperature, task, repeat)
    if path.exists():
        return
    print(f"repeat {repeat + 1}, T = {temperature}, {task}: {len(requests)} requests, {len(entries)} contenders")
    how = bench.Decoding(config.max_new_tokens, temperature, config.seed)
    contenders = {name: entry.contender for name, entry in entries.items()}
    write_json(path, bench.run_repeat(target, contenders, requests, how, turn=repeat))


def unit_path(
    config: BenchConfig,
    target: TargetModel,
    entries: dict[str, Entry],
    requests: list[bench.Request],
    temperature: float,
    task: str,
    repeat: int,
) -> Path:
    """Named by all that the times and tokens in it depend on."""
    what = [entry.what for entry in entries.values()]
    inputs = [request.input_ids for request in requests]
    setting = [temperature, config.max_new_tokens, config.seed, target.hash, str(target.dtype), machine()]
    return config.output / "raw" / f"{task}-T{temperature}-{hash_json([what, inputs, setting])}-{repeat}.json"


def write_results(
    config: BenchConfig,
    target: TargetModel,
    entries: dict[str, Entry],
    requests: list[bench.Request],
    temperature: float,
    tasks: list[str],
    left_out: int,
) -> None:
    """Lines of all cells that are whole, and of all tasks together; those of other configurations stay as they are."""
    path = config.output / "results.jsonl"
    lines = {line["key"]: line for line in map(json.loads, path.read_text().splitlines())} if path.exists() else {}
    cells = {}
    for task in tasks:
        of_task = [request for request in requests if request.task == task]
        places = [unit_path(config, target, entries, of_task, temperature, task, r) for r in range(config.repeats)]
        if all(place.exists() for place in places):
            cells[task] = [json.loads(place.read_text()) for place in places]
    if len(cells) == len(tasks) > 1:
        cells[ALL_TASKS] = bench.pooled([cells[task] for task in tasks])
    run = {**config_to_dict(config), "target_hash": target.hash, "left_out": left_out}
    for task, repeats in cells.items():
        for name, entry in {TARGET_ALONE: None, **entries}.items():
            what = {"drafter": None} if entry is None else entry.what
            cell = {"task": task, "temperature": temperature, "batch": 1, "name": name, **what}
            found = bench.cell_numbers(repeats, name, entry and entry.costs, entry and entry.full_head)
            key = hash_json([cell, run, machine()])
            lines[key] = {"key": key, **cell, **found, "config": run, "provenance": provenance()}
    with atomic_path(path) as temporary:
        temporary.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines.values()))


def print_table(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    columns = ("speedup", "speedup_low", "speedup_high", "tau", "live_rows", "coverage_draft", "hindsight_distance")
    print(f"{'task':<16}{'T':>4}  {'name':<52}" + "".join(f"{column[:12]:>13}" for column in columns))
    for line in lines:
        values = ("-" if line.get(column) is None else f"{line[column]:.2f}" for column in columns)
        row = f"{line['task'][:15]:<16}{line['temperature']:>4}  {line['name'][-52:]:<52}"
        print(row + "".join(f"{value:>13}" for value in values) + "  " + line.get("prediction_warning", ""))
    busy = max(line["others_cpu_share"] for line in lines)
    if busy > BUSY:
        print(f"warning: other processes used up to {busy:.0%} of the machine: measure again when it is idle")


if __name__ == "__main__":
    run_program(main, BenchConfig)
