"""Measures the target drafting for itself on a sparse cache (SparseSpec-L): acceptance and speedup on long prompts, and how costs and
speedup grow with the context.

python eval/sparse_self.py                              # both parts; interrupted, the same command goes on
python eval/sparse_self.py --parts real --contexts 1024 2048
python eval/sparse_self.py --parts long --acceptance 0.9 0.85 0.8

`real`: a target on documents with facts to find, at T = 0: every budget with every fixed draft length and with the entropy
controller (by costs that are measured first), beside the target alone. `long`: a random model whose attention dominates, with
rounds that accept what the real target did at its longest context and the same budget; the efficiency formula's prediction
beside what was measured. Results lie in output/real.json and output/long.json; rows that were measured on a busy machine say so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from specdraft.config import UserError, config_to_dict, require_positive, require_seed, require_some, run_program
from specdraft.decoding import long_context
from specdraft.decoding.bench import documents
from specdraft.decoding.length_policies import EntropyController, Fixed
from specdraft.decoding.measure import BUSY, Contender, OthersCpu, measure_speedups
from specdraft.models.sparse_self import SparseSelfConfig, SparseSelfDrafter
from specdraft.models.target import TargetModel
from specdraft.provenance import hash_json, machine, read_json, require_writable, write_json

ADAPTIVE = "adaptive"
TABLES = {"real": long_context.real_table, "long": long_context.long_table}
KIND = 2  # of measurement: another one where what a row holds, or what it means, changes
OTHERS = {  # settings that a part's measurements do not depend on, beyond the contexts that it is asked for
    "real": ("parts", "output", "contexts", "long_contexts", "acceptance", "rounds", "random_model"),
    "long": ("parts", "output", "contexts", "long_contexts", "acceptance", "target", "prompts", "max_new_tokens"),
}


@dataclass
class SparseSelfEval:
    """contexts, long_contexts: tokens of a prompt.   budgets: shares of the positions that an index holds.   lengths: drafted tokens
    a round.   prompts: documents at every context, the three tasks in turn.   rounds: of every length, context and budget in the
    long part.   acceptance: alpha_1.. for the long part (the last one holds for all later positions); none = as measured by the
    real part, of the same budget, or of its middle one where the real part had not that one.   sparse: the rest of the drafter's
    settings.   threads: None = as torch has it."""

    parts: tuple[Literal["real", "long"], ...] = ("real", "long")
    target: str = "default"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: str = "cpu"
    threads: int | None = None
    output: Path = Path("runs/sparse_self")
    budgets: tuple[float, ...] = (0.05, 0.1, 0.2)
    lengths: tuple[int, ...] = (4, 8, 12, 16, 20)
    contexts: tuple[int, ...] = (1024, 2048, 4096, 7936)
    prompts: int = 3
    max_new_tokens: int = 128
    long_contexts: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536)
    rounds: int = 8
    acceptance: tuple[float, ...] = ()
    seed: int = 0
    sparse: SparseSelfConfig = field(default_factory=SparseSelfConfig)
    random_model: long_context.RandomModel = field(default_factory=long_context.RandomModel)


def main(config: SparseSelfEval) -> None:
    check(config)
    torch.set_num_threads(config.threads or torch.get_num_threads())
    if "real" in config.parts:
        target = TargetModel.load(config.target, dtype=getattr(torch, config.dtype), device=config.device)
        if (needed := max(config.contexts) + config.max_new_tokens) > target.max_positions:
            raise UserError(
                f"contexts, max_new_tokens: got {needed} positions for the longest, allowed: the {target.max_positions} of the target"
            )
        resumed(config, "real", target.hash, config.contexts, lambda context: real(target, context, config))
    if "long" in config.parts:
        alphas, room = acceptance(config), long_context.needed_positions(config.lengths, config.rounds)
        options = (getattr(torch, config.dtype), config.device, config.seed)
        target = long_context.random_target(config.random_model, max(config.long_contexts) + room, *options)
        resumed(config, "long", [target.hash, alphas], config.long_contexts, lambda c: long(target, c, alphas, config))


def check(config: SparseSelfEval) -> None:
    """What is wrong with any part is found before the first is measured. Raises UserError."""
    require_some({name: getattr(config, name) for name in ("parts", "budgets", "lengths", "contexts", "long_contexts")})
    counts = {name: getattr(config, name) for name in ("prompts", "max_new_tokens", "rounds", "threads")}
    require_positive({**counts, "contexts": min(config.contexts), "long_contexts": min(config.long_contexts)})
    require_seed(config.seed)
    each_budget(config)
    if not all(1 <= k <= config.sparse.longest for k in config.lengths):
        raise UserError(f"lengths: got {config.lengths}, allowed: from 1 to sparse.longest = {config.sparse.longest}")
    if not all(0 <= alpha <= 1 for alpha in config.acceptance):
        raise UserError(f"acceptance: got {config.acceptance}, allowed: shares from 0 to 1")
    for part in config.parts:
        read_rows(config, part)
    require_writable(config.output, "output")


def read_rows(config: SparseSelfEval, part: str) -> dict:
    """Key and rows of output/part.json; no rows where there is no file. Raises UserError for a file of another kind."""
    path, advice = config.output / f"{part}.json", "remove it, or choose another --output"
    return read_json(path, "output", advice, ("key", "rows")) if path.exists() else {"key": None, "rows": []}


def resumed(
    config: SparseSelfEval, part: str, identity, contexts: tuple[int, ...], measure: Callable[[int], list[dict]]
) -> None:
    """Measure the contexts that output/part.json does not hold yet; print all rows. UserError: it holds other measurements."""
    settings = {name: value for name, value in config_to_dict(config).items() if name not in OTHERS[part]}
    key = hash_json([KIND, settings, identity, machine()])
    path = config.output / f"{part}.json"
    found = read_rows(config, part)
    if found["rows"] and found["key"] != key:
        raise UserError(f"output: {path} holds measurements of other settings or machines; choose another --output")
    rows = found["rows"]
    for context in contexts:
        if not any(row["context"] == context for row in rows):
            others = OthersCpu()
            measured = measure(context)
            share = others.share()
            warning = f"others used {share:.0%} of the machine: measure again" if share > BUSY else ""
            rows += [{**row, "others_cpu_share": share, "warning": warning} for row in measured]
            write_json(path, {"key": key, "config": settings, "machine": machine(), "rows": rows})
    print(TABLES[part](rows))


def each_budget(config: SparseSelfEval) -> list[SparseSelfConfig]:
    return [replace(config.sparse, budget=budget) for budget in config.budgets]


def real(target: TargetModel, context: int, config: SparseSelfEval) -> list[dict]:
    """A row for every budget and draft length."""
    prompts = documents(target, config.prompts, context, config.seed)
    contenders, costs = {}, {}
    for settings in each_budget(config):
        budget, drafter = settings.budget, SparseSelfDrafter(target, settings)
        costs[budget] = long_context.costs_of_lengths(
            target, drafter, prompts, config.lengths, max_new_tokens=config.max_new_tokens, seed=config.seed
        )
        for k in config.lengths:
            contenders[budget, k] = Contender(drafter, Fixed(k))
        contenders[budget, ADAPTIVE] = Contender(drafter, EntropyController(costs[budget]))
    measured = measure_speedups(target, contenders, prompts, max_new_tokens=config.max_new_tokens, seed=config.seed)
    return [
        {"context": context, "budget": b, "length": k, "costs": asdict(costs[b]), **measured[b, k].to_dict()}
        for b, k in contenders
    ]


def acceptance(config: SparseSelfEval) -> list[list[float]]:
    """For each budget alpha_1.. of the longest fixed drafts, at the real part's longest context and the same budget; where it has none
    such, at its middle one."""
    if config.acceptance:
        return [list(config.acceptance)] * len(config.budgets)
    found = read_rows(config, "real")
    if not found["rows"]:
        raise UserError("acceptance: got none, and the real part has no rows; run it first, or give --acceptance")
    fixed = [row for row in found["rows"] if row["length"] != ADAPTIVE]
    budgets = sorted({row["budget"] for row in fixed})
    of_budget = {}
    for budget in budgets:
        rows = [row for row in fixed if row["budget"] == budget]
        alphas = max(rows, key=lambda row: (row["context"], row["length"]))["conditional_acceptance"]
        of_budget[budget] = [alpha for alpha in alphas if alpha is not None] or [0.0]
    return [of_budget.get(budget, of_budget[budgets[len(budgets) // 2]]) for budget in config.budgets]


def long(target: TargetModel, context: int, alphas: list[list[float]], config: SparseSelfEval) -> list[dict]:
    """A row for every budget."""
    rows = []
    for settings, own in zip(each_budget(config), alphas, strict=True):
        options = (context, config.lengths, own, config.rounds, config.seed)
        rows.append(asdict(long_context.prescribed_rounds(target, settings, *options)))
    return rows


if __name__ == "__main__":
    run_program(main, SparseSelfEval)
