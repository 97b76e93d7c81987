"""What a benchmark is made of: requests (every turn of a conversation is one), one repeat of one cell, and the numbers that its
repeats make. A cell is a task at a temperature and a batch size; in it the target alone and all contenders answer the same
requests in turning order, so that a drift of the machine meets all alike.

Who the contenders are is in contenders.py. It knows nothing of how drafters were trained.
"""

from __future__ import annotations

import json
import resource
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdraft.config import UserError
from specdraft.data.chat import first_turn, render_prompt
from specdraft.data.long_prompts import SHORTEST, long_prompts
from specdraft.data.tasks import Prompt, builtin_prompts, split_held_out
from specdraft.decoding import measure, numbers
from specdraft.decoding.costs import CostTable
from specdraft.decoding.generate import GenerateOutput, autoregressive_generate, speculative_generate_batch
from specdraft.decoding.measure import BUSY, TARGET_ALONE, WARM_UP_TOKENS, Contender, OthersCpu
from specdraft.decoding.trace import DecodeTrace
from specdraft.models.target import TargetModel
from specdraft.models.tree import Shape
from specdraft.provenance import atomic_path, hash_json, provenance

ALL_TASKS = "all"  # together, in the results


@dataclass(frozen=True)
class Request:
    """One turn to answer.   id: prompt id and turn.   input_ids: the whole conversation so far, as the target is given it."""

    id: str
    task: str
    input_ids: list[int]


def choose_prompts(prompts: Sequence[Prompt], tasks: Sequence[str], per_task: int | None) -> list[Prompt]:
    """Task by task, those of `tasks` (none = all), the first `per_task` of each. Raises UserError for a task that is not there."""
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    if unknown := set(tasks) - set(known):
        raise UserError(f"tasks: got {', '.join(sorted(unknown))}, allowed: {', '.join(known)}")
    if ALL_TASKS in known:
        raise UserError(f"prompts: got a task named {ALL_TASKS!r}, which stands for all of them together; rename it")
    chosen = []
    for task in dict.fromkeys(tasks or known):
        chosen += [prompt for prompt in prompts if prompt.category == task][:per_task]
    return chosen


def make_requests(
    target: TargetModel, prompts: Sequence[Prompt], max_new_tokens: int, path: Path
) -> tuple[list[Request], int]:
    """All turns of all prompts, and how many do not fit the target's context and are left out.

    The answers to earlier turns are the target's own greedy ones, cut at max_new_tokens, whoever is measured: so all sides get
    the same prompts. They are kept in `path` (JSON lines, for this target and length), and made once.

    Raises:
        UserError: no turn fits; `path` holds something else.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        with open(path, "r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)  # a killed run may have left half a line
    known = {row["id"]: row["answers"] for row in read_lines(path, ("id", "answers"))}
    requests, left_out = [], 0
    for prompt in prompts:
        place = f"{prompt.id} {hash_json([prompt.system, *prompt.turns])}"  # other files may have the same ids
        answers = list(known.get(place, []))
        turns, missing = _turns(target, prompt, max_new_tokens, answers)
        requests += turns
        left_out += missing
        if len(answers) > len(known.get(place, [])):
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"id": place, "answers": answers}, ensure_ascii=False) + "\n")
    if not requests:
        raise UserError(
            f"max_new_tokens: got {max_new_tokens}, which leaves room for none of {left_out} turns in the {target.max_positions} positions "
            "of the target; lower it, or give shorter prompts"
        )
    return requests, left_out


def read_lines(path: Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of a JSONL file that a benchmark wrote, which all have `keys`; none where there is no file. Raises UserError for a file of
    another kind."""
    if not path.exists():
        return []
    try:
        rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    except (ValueError, RecursionError):
        rows = [None]
    if not all(isinstance(row, dict) and row.keys() >= set(keys) for row in rows):
        raise UserError(f"output: {path} is not what this program writes; remove it, or choose another --output")
    return rows


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def cost_prompts(target: TargetModel, requests: Sequence[Request], count: int, max_new_tokens: int) -> list[list[int]]:
    """Prompts to measure costs on that are no request, and leave room for an answer: held-out built-in ones; where the median request is
    longer than all of them, generated documents of its length, since costs grow with the context."""
    room = target.max_positions - max_new_tokens
    held_out = reversed(split_held_out(builtin_prompts())[1])
    short = [ids for ids in (_user_turn(target, prompt.turns[0]) for prompt in held_out) if len(ids) <= room]
    length = min(room, int(statistics.median(len(request.input_ids) for request in requests)))
    if length <= max([SHORTEST + len(_user_turn(target, "")), *map(len, short)]):
        return short[:count]
    return documents(target, count, length, seed=1)


def documents(target: TargetModel, count: int, length: int, seed: int) -> list[list[int]]:
    """Token ids of generated documents with a question (long_prompts.py), as long as whole paragraphs allow within `length` tokens."""

    def measure(text: str) -> int:
        return len(target.tokenizer(text, add_special_tokens=False)["input_ids"])

    made = long_prompts(count, length - len(_user_turn(target, "")), measure, seed)
    return [_user_turn(target, text.prompt.turns[0]) for text in made]


def _user_turn(target: TargetModel, text: str) -> list[int]:
    return render_prompt(target.tokenizer, [{"role": "user", "content": text}])


def _turns(target: TargetModel, prompt: Prompt, max_new_tokens: int, answers: list[str]) -> tuple[list[Request], int]:
    """Answers that are missing are added to `answers`."""
    messages = first_turn(target.tokenizer, prompt.system, prompt.turns[0])
    requests: list[Request] = []
    for turn, text in enumerate(prompt.turns):
        if turn:
            messages.append({"role": "user", "content": text})
        ids = render_prompt(target.tokenizer, messages)
        if len(ids) + max_new_tokens > target.max_positions:
            return requests, len(prompt.turns) - turn
        requests.append(Request(f"{prompt.id}#{turn + 1}", prompt.category, ids))
        if turn + 1 < len(prompt.turns):
            if turn == len(answers):
                tokens = autoregressive_generate(target, ids, max_new_tokens=max_new_tokens).tokens
                answers.append(target.tokenizer.decode(tokens, skip_special_tokens=True))
            messages.append({"role": "assistant", "content": answers[turn]})
    return requests, 0


# --- one repeat of one cell ---


@dataclass
class Side:
    """What is measured against the target alone.   rows: for every row of a batch, the same drafter with policies of its own.
    tree: how a draft branches; None = a chain."""

    rows: list[Contender]
    tree: Shape | None = None


@dataclass
class Decoding:
    """max_new_tokens: see speculative_generate.   seed: request i is sampled with seed + i, on every side and in every repeat:
    repeats are the same computation and differ in time alone.   batch: requests decoded together."""

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    batch: int = 1


def run_repeat(
    target: TargetModel, contenders: dict[str, Side], requests: Sequence[Request], how: Decoding, turn: int = 0
) -> dict[str, Any]:
    """All requests by the target alone and by every contender, after a warm-up of each; who goes first turns from batch to
    batch, beginning with place `turn`.

    Returns (for a JSON file): outputs {name: [{tokens, trace}]} for the target alone and the contenders, divergences {name: [..]}
    at T = 0, others_cpu_share, peak_memory_gb {name: ..} (on a CPU: of the process so far, the same for all), provenance [..].
    """
    sides = {TARGET_ALONE: None, **contenders}
    names = list(sides)
    batches = [list(requests[first : first + how.batch]) for first in range(0, len(requests), how.batch)]
    for name in names:
        short = Decoding(min(how.max_new_tokens, WARM_UP_TOKENS), how.temperature)
        _decode(target, sides[name], batches[0], 0, short)
    outputs: dict[str, list[GenerateOutput]] = {name: [] for name in names}
    peak = dict.fromkeys(names, 0.0)
    others = OthersCpu()
    for number, batch in enumerate(batches):
        first = (turn + number) % len(names)
        for name in names[first:] + names[:first]:
            _reset_peak(target)
            outputs[name] += _decode(target, sides[name], batch, number * how.batch, how)
            peak[name] = max(peak[name], _peak_gb(target))
    share = others.share()
    alone = outputs[TARGET_ALONE]
    divergences = {}
    if how.temperature == 0:
        divergences = {name: find_divergences(target, requests, outputs[name], alone) for name in contenders}
    return {
        "outputs": {
            name: [{"tokens": output.tokens, "trace": numbers.trace_to_row(output.trace)} for output in found]
            for name, found in outputs.items()
        },
        "divergences": divergences,
        "others_cpu_share": share,
        "peak_memory_gb": peak,
        "provenance": [provenance()],
    }


def find_divergences(
    target: TargetModel, requests: Sequence[Request], own: Sequence[GenerateOutput], alone: Sequence[GenerateOutput]
) -> list[dict[str, Any]]:
    """measure.find_divergences, by the requests' ids."""
    found = measure.find_divergences(target, [request.input_ids for request in requests], own, alone)
    return [{"request": requests[d.prompt].id, "index": d.index, "margin": d.margin} for d in found]


def _decode(
    target: TargetModel, side: Side | None, batch: list[Request], first: int, how: Decoding
) -> list[GenerateOutput]:
    """One batch. first: number of its first request."""
    rows = [] if side is None else side.rows[: len(batch)]
    return speculative_generate_batch(
        target,
        rows[0].drafter if rows else None,
        [request.input_ids for request in batch],
        max_new_tokens=how.max_new_tokens,
        temperature=how.temperature,
        tree=None if side is None else side.tree,
        vocab_policies=_given([row.vocab_policy for row in rows]),
        length_policies=_given([row.length_policy for row in rows]),
        generators=[torch.Generator().manual_seed(how.seed + first + row) for row in range(len(batch))],
        synchronize=target.device.type != "cpu",
    )


def _given(policies: list) -> list | None:
    return None if not policies or policies[0] is None else policies


def _reset_peak(target: TargetModel) -> None:
    if target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(target.device)


def _peak_gb(target: TargetModel) -> float:
    if target.device.type == "cuda":
        return torch.cuda.max_memory_allocated(target.device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


# --- the numbers of a cell ---


def traces_of(repeats: Sequence[dict[str, Any]], name: str) -> list[list[DecodeTrace]]:
    """[R][M] from what `run_repeat` gave."""
    return [[numbers.trace_from_row(row["trace"]) for row in repeat["outputs"][name]] for repeat in repeats]


def cell_numbers(
    repeats: Sequence[dict[str, Any]], name: str, costs: CostTable | None, full_head: str | None
) -> dict[str, Any]:
    """Every number of papers 10 for one contender, or for the target alone, over the repeats of a cell, and where they came from.

    costs: its cost table, for the hindsight; None = there is none.   full_head: the contender with the full head that nu, kappa and
    rho are taken against; None = there is none.
    """
    own, alone = traces_of(repeats, name), traces_of(repeats, TARGET_ALONE)
    found = {"requests": len(own[0]), "repeats": len(repeats), **numbers.speed(own, alone)}
    found |= numbers.acceptance(own) | numbers.times(own, alone) | numbers.hindsight(own, costs)
    if full_head is not None:
        found |= numbers.against_full_head(own, traces_of(repeats, full_head))
    if name in repeats[0]["divergences"]:
        divergences = repeats[0]["divergences"][name]
        found |= {"divergences": divergences, "match_rate": 1 - len(divergences) / len(own[0])}
    found["peak_memory_gb"] = max(repeat["peak_memory_gb"][name] for repeat in repeats)
    found["others_cpu_share"] = max(repeat["others_cpu_share"] for repeat in repeats)
    found["provenance"] = _different(one for repeat in repeats for one in repeat["provenance"])
    return numbers.without_nan(found)


def pooled(cells: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The repeats of several cells with the same contenders as those of one: repeat r of each, side by side."""
    return [_join(repeat) for repeat in zip(*cells, strict=True)]


def _join(repeat: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def joined(key: str) -> dict[str, list]:
        return {name: [row for cell in repeat for row in cell[key][name]] for name in repeat[0][key]}

    return {
        "outputs": joined("outputs"),
        "divergences": joined("divergences"),
        "others_cpu_share": max(cell["others_cpu_share"] for cell in repeat),
        "peak_memory_gb": {
            name: max(cell["peak_memory_gb"][name] for cell in repeat) for name in repeat[0]["peak_memory_gb"]
        },
        "provenance": [one for cell in repeat for one in cell["provenance"]],
    }


def _different(values: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each once, in the order of their coming."""
    return list({hash_json(value): value for value in values}.values())


COLUMNS = ("speedup", "speedup_low", "speedup_high", "tau", "live_rows", "coverage_draft", "hindsight_distance")


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Results for the terminal, a line each, with a warning below where the machine was not idle."""
    rows = [f"{'task':<16}{'T':>4}{'B':>4}  {'name':<52}" + "".join(f"{column[:12]:>13}" for column in COLUMNS)]
    for line in lines:
        values = ("-" if line.get(column) is None else f"{line[column]:.2f}" for column in COLUMNS)
        row = f"{line['task'][:15]:<16}{line['temperature']:>4}{line['batch']:>4}  {line['name'][-52:]:<52}"
        rows.append(row + "".join(f"{value:>13}" for value in values) + "  " + line.get("prediction_warning", ""))
    busy = max(line["others_cpu_share"] for line in lines)
    if busy > BUSY:
        rows.append(f"warning: other processes used up to {busy:.0%} of the machine: measure again when it is idle")
    return "\n".join(rows)
