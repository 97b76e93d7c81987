"""A stream of prompts whose domain changes: several ways to decode it, prompt by prompt in turning order, and their curves.

Outputs at T = 0 are the target's own for all of them, so that they differ in time alone. It knows nothing of how an observer learns.

A *visit* is a run of prompts of one domain. A *way* is a drafter with its policies, and an observer that changes it, or none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from specdraft.decoding.bench import Request
from specdraft.decoding.generate import GenerateOutput, autoregressive_generate, speculative_generate
from specdraft.decoding.measure import TARGET_ALONE, WARM_UP_TOKENS, Contender
from specdraft.decoding.trace import DecodeTrace, conditional_acceptance, tau
from specdraft.models.observer import Observer
from specdraft.models.target import TargetModel
from specdraft.provenance import atomic_path

CURVES = (
    ("tau", "tokens a round"),
    ("miss_rate", "committed tokens not live"),
    ("live", "live rows"),
    ("tokens_per_second", "tokens/s"),
)


@dataclass
class Way:
    """contender: None = the target alone.   counts: what of the observer is noted after every prompt (updates, rollbacks, seconds
    spent).   warm_up: what warms up in its place, so that a policy which keeps what it learns has learnt nothing when the stream
    begins; None = the contender itself."""

    contender: Contender | None
    observer: Observer | None = None
    counts: Callable[[], dict[str, float]] = dict
    warm_up: Contender | None = None


@dataclass(frozen=True)
class Visited:
    """A request of a visit, which are numbered from 0."""

    visit: int
    request: Request


def make_stream(domains: dict[str, Sequence[Request]], per_visit: int) -> list[Visited]:
    """`per_visit` requests of every domain in turn, again and again, until one of them has not so many left."""
    visits = min(len(requests) for requests in domains.values()) // per_visit
    stream: list[Visited] = []
    for again in range(visits):
        for place, requests in enumerate(domains.values()):
            of = range(again * per_visit, (again + 1) * per_visit)
            stream += [Visited(again * len(domains) + place, requests[i]) for i in of]
    return stream


def run_stream(
    target: TargetModel,
    ways: dict[str, Way],
    stream: Sequence[Visited],
    note: Callable[[dict[str, Any]], None],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> None:
    """The target alone and every way on every prompt; `note` gets a line for each (see `line_of`). Who goes first turns. Warm-up is
    without observers, on the first prompt."""
    ways = {TARGET_ALONE: Way(None), **ways}

    def run(of: Contender | None, number: int, count: int, observer: Observer | None) -> GenerateOutput:
        how = {"max_new_tokens": count, "temperature": temperature, "synchronize": target.device.type != "cpu"}
        how["generator"] = torch.Generator().manual_seed(seed + number)
        prompt = stream[number].request.input_ids
        if of is None:
            return autoregressive_generate(target, prompt, **how)
        policies = {"vocab_policy": of.vocab_policy, "length_policy": of.length_policy, "tree": of.tree}
        return speculative_generate(target, of.drafter, prompt, observer=observer, **policies, **how)

    for way in ways.values():
        run(way.warm_up or way.contender, 0, min(WARM_UP_TOKENS, max_new_tokens), None)
    names = list(ways)
    for number, visited in enumerate(tqdm(stream, desc="stream", unit="prompt")):
        turn, outputs = number % len(names), {}
        for name in names[turn:] + names[:turn]:
            outputs[name] = run(ways[name].contender, number, max_new_tokens, ways[name].observer)
        for name, output in outputs.items():
            is_same = output.tokens == outputs[TARGET_ALONE].tokens if temperature == 0 else None
            where = {"way": name, "number": number, "visit": visited.visit, "domain": visited.request.task}
            note(
                {
                    **where,
                    "prompt": visited.request.id,
                    **line_of(output.trace),
                    "is_same": is_same,
                    **ways[name].counts(),
                }
            )


def line_of(trace: DecodeTrace) -> dict[str, Any]:
    """tokens, seconds: prefills and learning included.   rounds, emitted: verify rounds and the tokens that they gave.   tau, alpha:
    see trace.py.   misses: tokens that could not have been drafted.   live: mean live rows, 0 = all."""
    rounds, drafting = trace.rounds, [r for r in trace.rounds if r.drafted]
    emitted = sum(r.emitted for r in rounds)
    misses = sum(not r.is_covered for r in rounds if r.emitted > r.accepted)
    alpha = [None if a != a else a for a in conditional_acceptance([trace])]
    return {
        "tokens": trace.tokens,
        "seconds": trace.seconds,
        "rounds": len(rounds),
        "emitted": emitted,
        "tau": tau([trace]) if rounds else 0.0,
        "alpha": alpha,
        "misses": misses,
        "live": sum(r.live for r in drafting) / max(1, len(drafting)),
    }


# --- what the lines say ---


def totals(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of some prompts of one way: tau, miss rate, live rows and tokens/s, over all their rounds, tokens and seconds (live rows: mean of
    the prompts)."""
    rounds, emitted = sum(line["rounds"] for line in lines), sum(line["emitted"] for line in lines)
    return {
        "tau": sum(line["tau"] * line["rounds"] for line in lines) / max(1, rounds),
        "miss_rate": sum(line["misses"] for line in lines) / max(1, emitted),
        "live": sum(line["live"] for line in lines) / len(lines),
        "tokens_per_second": sum(line["tokens"] for line in lines) / sum(line["seconds"] for line in lines),
    }


def of_way(lines: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["way"] == name]


def tokens_to_break_even(own: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> int | None:
    """Tokens of the stream after which `own` has taken no more time than `other` for the same prompts, up to every later prompt as
    well; None where it never gets there."""
    ahead, tokens, found = 0.0, 0, None
    for mine, theirs in zip(own, other, strict=True):
        ahead += theirs["seconds"] - mine["seconds"]
        tokens += mine["tokens"]
        if ahead < 0:
            found = None
        elif found is None:
            found = tokens
    return found


def summary(lines: Sequence[dict[str, Any]], reference: str) -> list[dict[str, Any]]:
    """A row for every way: totals of the stream, tokens/s over the reference's and over the target's alone, tokens to break even with
    the reference, the share of outputs that are the target's own, and what was last counted of the observer."""
    names = list(dict.fromkeys(line["way"] for line in lines))
    rates = {name: totals(of_way(lines, name))["tokens_per_second"] for name in names}
    rows = []
    for name in names:
        own = of_way(lines, name)
        row = {
            "way": name,
            **totals(own),
            "speedup": rates[name] / rates[TARGET_ALONE],
            "over_reference": None,
            "break_even": None,
        }
        if reference in names:
            row["over_reference"] = rates[name] / rates[reference]
            row["break_even"] = tokens_to_break_even(own, of_way(lines, reference))
        row["match_rate"] = None if own[0]["is_same"] is None else sum(line["is_same"] for line in own) / len(own)
        rows.append({**row, **{key: own[-1][key] for key in ("updates", "rollbacks", "spent") if key in own[-1]}})
    return rows


def table(rows: Sequence[dict[str, Any]], lines: Sequence[dict[str, Any]], reference: str) -> str:
    """Markdown: the summary, then tau and miss rate of every visit."""
    columns = ("tau", "miss_rate", "live", "tokens_per_second", "speedup", "over_reference", "break_even", "match_rate")
    counted = ("updates", "rollbacks", "spent")
    head = f"| way | {' | '.join(columns)} | {' | '.join(counted)} |".replace("over_reference", f"over {reference}")
    parts = [head, "|---" * (1 + len(columns) + len(counted)) + "|"]
    parts += [
        f"| {row['way']} | " + " | ".join(_cell(row.get(key)) for key in (*columns, *counted)) + " |" for row in rows
    ]
    visits = list(dict.fromkeys((line["visit"], line["domain"]) for line in lines))
    parts += ["", f"| tau, misses | {' | '.join(domain for _, domain in visits)} |", "|---" * (1 + len(visits)) + "|"]
    for row in rows:
        own = of_way(lines, row["way"])
        found = [totals([line for line in own if line["visit"] == visit]) for visit, _ in visits]
        parts.append(
            f"| {row['way']} | " + " | ".join(f"{one['tau']:.2f}, {one['miss_rate']:.1%}" for one in found) + " |"
        )
    return "\n".join(parts)


def memory_table(memory: dict[str, dict[str, int]]) -> str:
    """For the terminal: bytes of every way that learns, by part; and of its optimiser and buffer the share of full adaptation's."""
    lines = []
    for name, parts in memory.items():
        lines.append(f"memory of {name}, MB: " + ", ".join(f"{part} {size / 1e6:.1f}" for part, size in parts.items()))
    if "full" in memory:
        total = {name: parts["optimizer"] + parts["buffer"] for name, parts in memory.items()}
        shares = ", ".join(f"{name} {size / total['full']:.3f}" for name, size in total.items())
        lines.append(f"optimiser and buffer, share of full-parameter adaptation: {shares}")
    return "\n".join(lines)


def plot(path: Path, lines: Sequence[dict[str, Any]]) -> bool:
    """Every curve over the tokens of the stream, visits parted by dotted lines; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 9), layout="constrained")
    panels = figure.subplots(len(CURVES), 1, sharex=True)
    for name in dict.fromkeys(line["way"] for line in lines):
        own, tokens = of_way(lines, name), 0
        places, values = [], []
        for line in own:
            tokens += line["tokens"]
            places.append(tokens)
            values.append(totals([line]))
        for axes, (key, label) in zip(panels, CURVES, strict=True):
            axes.plot(places, [value[key] for value in values], lw=1, label=name)
            axes.set_ylabel(label)
    starts = [
        place for place, line, after in zip(places, own, own[1:], strict=False) if line["visit"] != after["visit"]
    ]
    for axes in panels:
        for start in starts:
            axes.axvline(start, color="grey", lw=0.8, ls=":")
    panels[0].legend(fontsize=7, ncols=4)
    panels[-1].set_xlabel("tokens of the stream")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=path.suffix.removeprefix("."))
    return True


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
