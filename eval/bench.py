"""Measures drafters x vocabulary policies x length policies x tasks x temperatures x batches, the target alone always among them.

python eval/bench.py --drafters runs/slimspec/drafter --prompts spec_bench.jsonl --output bench
python eval/bench.py --drafters runs/full/drafter runs/slimspec/drafter --vocab all nanospec --length fixed svip

Prompts are JSONL in our format, MT-bench's or Spec-Bench's; every turn of a conversation is a request. A cell is a task at a
temperature and batch size; the target alone and all contenders go through it batch by batch, in turning order, `repeats` times, with all
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
from specdraft.decoding.contenders import CostConfig, Entry, PolicyConfig, check_names, make_entries
from specdraft.decoding.measure import BUSY, TARGET_ALONE
from specdraft.models.checkpoint import load_drafter, read_config
from specdraft.models.heads import HeadDtype
from specdraft.models.target import TargetModel
from specdraft.provenance import atomic_path, hash_file, hash_json, machine, provenance, write_json

ALL_TASKS = "all"


@dataclass
class BenchConfig:
    """drafters: checkpoint folders.   target: as the recipes take it.   prompts: a JSONL file; `builtin` = held-out built-in
    prompts.   tasks: only these; none = all.   per_task: the first n prompts of each; None = all.   vocab, length: names of
    policies (VOCAB_POLICIES, LENGTH_POLICIES).   trees: `chain`, `eagle2` (which takes no length policy).   head_dtypes: every
    drafter with its head's rows as they are (`own`), or in INT8 (`int8`: on a CPU, all rows live).   batches: requests decoded
    together.   cost_prompts, cost_tokens: held-out built-in prompts on which T_draft and T_verify are measured, once, and
    new tokens of each.   threads: None = as torch has it."""

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
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if not config.drafters or min(config.repeats, *config.batches) < 1:
        raise UserError(
            f"drafters, repeats, batches: got {len(config.drafters)}, {config.repeats}, {config.batches}, allowed: 1 or more of each"
        )
    check_names(config.policies, config.vocab, config.length, config.trees)
    if "int8" in config.head_dtypes and set(config.vocab) != {"all"}:
        raise UserError(
            f"head_dtypes: got int8 with vocab {' '.join(config.vocab)}, allowed: all; live rows are packed in the weights' own dtype"
        )
    for folder in config.drafters:
        read_config(folder)
    run = prepare(config, choose_prompts(config))
    tasks = sorted({request.task for request in run.requests})
    for repeat, how, task in itertools.product(range(config.repeats), run.cells, tasks):
        run_cell(run, how, task, repeat)
        if repeat + 1 == config.repeats:
            write_results(run, how, tasks)
    print_table(config.output / "results.jsonl")


def prepare(config: BenchConfig, prompts: list[Prompt]) -> Run:
    """Target, drafters, requests and contenders, costs measured."""
    target = TargetModel.load(config.target, dtype=getattr(torch, config.dtype), device=config.device)
    drafters, hashes = {}, {}
    for folder, dtype in itertools.product(config.drafters, config.head_dtypes):
        place = f"{folder}{'' if dtype == 'own' else f' {dtype}'}"
        drafters[place] = load_drafter(folder, target, head_dtype=dtype)
        hashes[place] = hash_file(folder / "model.safetensors")
    answers = config.output / f"answers-{hash_json([target.hash, config.max_new_tokens, str(target.dtype)])}.jsonl"
    requests, left_out = bench.make_requests(target, prompts, config.max_new_tokens, answers)
    print(
        f"{len(requests)} requests of {len(prompts)} prompts; {left_out} turns left out: too long for the target's context"
    )
    measuring = CostConfig(config.output / "costs", cost_prompts(config, target), config.cost_tokens, config.seed)
    names = (config.vocab, config.length, config.trees)
    cells = {
        how: make_entries(target, drafters, hashes, *names, config.policies, *how, measuring)
        for how in itertools.product(config.temperatures, config.batches)
    }
    return Run(config, target, requests, left_out, cells)


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


def run_cell(run: Run, how: tuple[float, int], task: str, repeat: int) -> None:
    """One repeat of one cell, unless it lies there already."""
    path, (temperature, batch), requests = unit_path(run, how, task, repeat), how, run.of_task(task)
    if path.exists():
        return
    sides = {name: entry.side for name, entry in run.cells[how].items()}
    print(
        f"repeat {repeat + 1}, T = {temperature}, B = {batch}, {task}: {len(requests)} requests, {len(sides)} contenders"
    )
    decoding = bench.Decoding(run.config.max_new_tokens, temperature, run.config.seed, batch)
    write_json(path, bench.run_repeat(run.target, sides, requests, decoding, turn=repeat))


def unit_path(run: Run, how: tuple[float, int], task: str, repeat: int) -> Path:
    """Named by all that the times and tokens in it depend on."""
    what = [entry.what for entry in run.cells[how].values()]
    inputs = [request.input_ids for request in run.of_task(task)]
    setting = [how, run.config.max_new_tokens, run.config.seed, run.target.hash, str(run.target.dtype), machine()]
    name = f"{task}-T{how[0]}-B{how[1]}-{hash_json([what, inputs, setting])}-{repeat}.json"
    return run.config.output / "raw" / name


def write_results(run: Run, how: tuple[float, int], tasks: list[str]) -> None:
    """Lines of all cells that are whole, and of all tasks together; those of other configurations stay as they are."""
    path = run.config.output / "results.jsonl"
    lines = {line["key"]: line for line in map(json.loads, path.read_text().splitlines())} if path.exists() else {}
    cells = {}
    for task in tasks:
        places = [unit_path(run, how, task, repeat) for repeat in range(run.config.repeats)]
        if all(place.exists() for place in places):
            cells[task] = [json.loads(place.read_text()) for place in places]
    if len(cells) == len(tasks) > 1:
        cells[ALL_TASKS] = bench.pooled([cells[task] for task in tasks])
    config = {**config_to_dict(run.config), "target_hash": run.target.hash, "left_out": run.left_out}
    for (task, repeats), (name, entry) in itertools.product(
        cells.items(), {TARGET_ALONE: None, **run.cells[how]}.items()
    ):
        what = {"drafter": None} if entry is None else entry.what
        cell = {"task": task, "temperature": how[0], "batch": how[1], "name": name, **what}
        costs = entry.costs if entry is not None and how[1] == 1 else None  # they are those of a batch of one
        found = bench.cell_numbers(repeats, name, costs, entry and entry.full_head)
        key = hash_json([cell, config, machine()])
        lines[key] = {"key": key, **cell, **found, "config": config, "provenance": provenance()}
    with atomic_path(path) as temporary:
        temporary.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines.values()))


def print_table(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    columns = ("speedup", "speedup_low", "speedup_high", "tau", "live_rows", "coverage_draft", "hindsight_distance")
    print(f"{'task':<16}{'T':>4}{'B':>4}  {'name':<52}" + "".join(f"{column[:12]:>13}" for column in columns))
    for line in lines:
        values = ("-" if line.get(column) is None else f"{line[column]:.2f}" for column in columns)
        row = f"{line['task'][:15]:<16}{line['temperature']:>4}{line['batch']:>4}  {line['name'][-52:]:<52}"
        print(row + "".join(f"{value:>13}" for value in values) + "  " + line.get("prediction_warning", ""))
    busy = max(line["others_cpu_share"] for line in lines)
    if busy > BUSY:
        print(f"warning: other processes used up to {busy:.0%} of the machine: measure again when it is idle")


if __name__ == "__main__":
    run_program(main, BenchConfig)
