"""To trim or to factor: every size of a vocabulary and the low-rank heads on the same axes, as a table, JSON and a plot.

Coverage is of held-out answers; costs are FLOPs, and measured times where there are any. It knows nothing of how sizes are
chosen, nor of files other than those it writes.

Letters: k rows, V target vocabulary, H width, R rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from specdraft.config import UserError, config_to_dict
from specdraft.data.chat import Example
from specdraft.data.source import example_key, run_target
from specdraft.data.token_counts import TokenCounts
from specdraft.data.vocab_size import OfSize, SizeConfig, coverage_curve, head_flops, latency_reduction
from specdraft.decoding.head_times import HeadTimes, timed_ranks, timed_sizes
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, eagle3_config, token_frequency
from specdraft.models.target import TargetModel
from specdraft.provenance import atomic_path, hash_json, provenance, write_json


@dataclass
class Point:
    """One head. rows: that it has; rank: None unless it is low-rank.   chosen_by: the choices (SizeConfig.choose) that take it.
    token_coverage, mass_coverage: shares (0..1) of held-out answer tokens, and of the target's probability there (T = 1; None: not
    computed), that it can draft; by_domain: token_coverage of each category.   head_mflop: for one token.   flops_saved: share R of
    a draft step's FLOPs.   head_ms: measured, cold.   relative, speedup: predicted tokens per second over the full head's (1.1)
    and over the target's alone (0.1), acceptance bounded by coverage; None: not measured."""

    rows: int
    rank: int | None
    chosen_by: list[str]
    token_coverage: float
    mass_coverage: float | None
    by_domain: dict[str, float]
    head_mflop: float
    flops_saved: float
    head_ms: float | None
    relative: float | None
    speedup: float | None

    @property
    def name(self) -> str:
        return f"{self.rows:,} rows" if self.rank is None else f"rank {self.rank}"


@dataclass
class Curves:
    """What a size gives. admission: ids in the order in which they enter (vocab.py).   buildable: sizes that a map can have: from the
    ids that are always in to all that are ranked.   held_out: counts that coverage is measured on.
    mass: [V] the target's mean law at held-out answer tokens, or None.   flops: R(k).   times: measured, or None."""

    admission: Tensor
    buildable: range
    held_out: TokenCounts
    mass: Tensor | None
    flops: OfSize
    times: HeadTimes | None


def frontier(curves: Curves, hidden_size: int, config: SizeConfig, chosen: dict[str, int]) -> list[Point]:
    """Trimmed heads of growing size (powers of two, and `chosen`: choice -> size), the full head last, then low-rank heads."""
    total = coverage_curve(curves.held_out.total, curves.admission)
    mass = None if curves.mass is None else coverage_curve(curves.mass, curves.admission)
    domains = {
        name: coverage_curve(counts, curves.admission)
        for name, counts in zip(curves.held_out.categories, curves.held_out.counts, strict=True)
        if counts.any()
    }
    real = len(curves.admission)
    full_flops = head_flops(hidden_size, real)

    def point(rows: int, rank: int | None) -> Point:
        flops = head_flops(hidden_size, rows, rank)
        cost = None
        if curves.times is not None:
            times = curves.times
            cost = times.seconds(rows) if rank is None else times.rank_seconds[times.ranks.index(rank)]
        predicted = {"relative": None, "speedup": None}
        if cost is not None:
            predicted = {
                key: float(getattr(times, key)(cost, total[rows], config.acceptance)) for key in ("relative", "speedup")
            }
        return Point(
            rows=rows,
            rank=rank,
            chosen_by=[] if rank else [name for name, size in chosen.items() if size == rows],
            token_coverage=float(total[rows]),
            mass_coverage=None if mass is None else float(mass[rows]),
            by_domain={name: float(curve[rows]) for name, curve in domains.items()},
            head_mflop=flops / 1e6,
            flops_saved=float(curves.flops(real * flops / full_flops)),
            head_ms=None if cost is None else 1e3 * float(cost),
            **predicted,
        )

    sizes = sorted({*(k for k in timed_sizes(real) if k in curves.buildable), *chosen.values(), real})
    return [point(k, None) for k in sizes] + [point(real, rank) for rank in timed_ranks(hidden_size)]


def probability_mass(target: TargetModel, examples: Sequence[Example], folder: Path) -> Tensor:
    """The target's law (T = 1) averaged over the positions that predict a supervised token: [V] fp32, sum 1. Kept in `folder` by the
    hash of target and examples, since it takes a forward pass over them."""
    masks = [example.loss_mask.nonzero().flatten().tolist() for example in examples]
    key = hash_json([target.hash, str(target.dtype), [example_key(example) for example in examples], masks])
    path = folder / f"mass-{key}.safetensors"
    with contextlib.suppress(FileNotFoundError, SafetensorError, KeyError):  # none yet, or not what is written here
        return load_file(path)["mass"]
    total, count = torch.zeros(target.vocab_size, dtype=torch.float64), 0
    for example in tqdm(examples, desc="probability mass", unit="answer"):
        states = run_target(target, [example])[0]
        rows = example.loss_mask[1:].nonzero().flatten().to(target.device)
        if states is None or not len(rows):
            continue
        total += len(rows) * token_frequency(target, states.last[rows]).double().cpu()
        count += len(rows)
    if not count:
        raise UserError("held-out answers: got no position to predict from; give answers of two tokens or more")
    mass = (total / count).float()
    with atomic_path(path) as temporary:
        save_file({"mass": mass}, temporary)
    return mass


def write_frontier(folder: Path, points: list[Point], curves: Curves, config: SizeConfig, target: TargetModel) -> str:
    """Writes frontier.md, frontier.json, and frontier.svg where matplotlib is installed; returns the table."""
    times = curves.times
    record = {
        "target": target.name,
        "target_hash": target.hash,
        "config": config_to_dict(config),
        "held_out": curves.held_out.account,
        "held_out_tokens": int(curves.held_out.total.sum()),
        "points": [asdict(point) for point in points],
        "head_times": None if times is None else asdict(times),
        "kappa": None if times is None else times.kappa,
        "provenance": provenance(),
    }
    page = f"# Vocabulary frontier of {target.name}\n\n{table(points)}\n\n{notes(curves, config)}\n"
    write_json(folder / "frontier.json", record)
    with atomic_path(folder / "frontier.md") as temporary:
        temporary.write_text(page)
    if not plot(folder / "frontier.svg", points, curves, config):
        page += "\nNo plot: pip install 'specdraft[vocab]' for matplotlib.\n"
    return page


def table(points: list[Point]) -> str:
    """Markdown; coverage by domain in a table of its own."""
    head = (
        "| head | chosen by | tokens covered | mass covered | MFLOP | FLOPs saved | head ms | tok/s over full head | speedup |\n"
        "|---|---|---|---|---|---|---|---|---|\n"
    )
    rows = [
        f"| {p.name} | {', '.join(p.chosen_by)} | {_share(p.token_coverage)} | {_share(p.mass_coverage)} | {p.head_mflop:.2f} | "
        f"{_share(p.flops_saved)} | {_number(p.head_ms)} | {_number(p.relative)} | {_number(p.speedup)} |"
        for p in points
    ]
    names = list(points[0].by_domain)
    domains = "| tokens covered | " + " | ".join(names) + " |\n|---|" + "---|" * len(names) + "\n"
    domain_rows = [
        f"| {p.name} | " + " | ".join(_share(p.by_domain[name]) for name in names) + " |"
        for p in points
        if p.rank is None
    ]
    return head + "\n".join(rows) + "\n\n" + domains + "\n".join(domain_rows)


def notes(curves: Curves, config: SizeConfig) -> str:
    """What the figures mean and where they are from."""
    acceptance = " / ".join(f"{alpha:g}" for alpha in config.acceptance)
    lines = [
        f"Coverage: of {int(curves.held_out.total.sum()):,} tokens ({curves.held_out.account}). FLOPs saved: of a full-head draft "
        "step, the head's share of it included.",
        f"Predicted with acceptance {acceptance} of a full head, times coverage for a trimmed one (a careful estimate: rare "
        "tokens are mostly lost anyway). A low-rank head has no such bound, but has to be trained (its tau in SlimSpec: 0.98 of the "
        "full head's at H/16, 0.99 at H/8).",
    ]
    times = curves.times
    if times is None:
        lines.append("Times were not measured.")
    else:
        lines.append(
            f"Times: {times.target}, {times.dtype}, {times.machine['processor']}, {times.machine['threads']} threads; "
            f"{times.drafted} drafted a round; rest of a draft step {1e3 * times.body:.2f} ms, rest of the round "
            f"{1e3 * times.verify:.1f} ms, the target alone {1e3 * times.alone:.1f} ms a token; kappa {times.kappa:.2f}."
        )
        lines += [f"**Warning:** {times.warning}"] if times.warning else []
    return "\n\n".join(lines)


def plot(path: Path, points: list[Point], curves: Curves, config: SizeConfig) -> bool:
    """Coverage and predicted speedup against what the head costs, trimmed heads as lines and low-rank ones as points; False where
    matplotlib is not installed. The file's ending says the format (.svg, .png)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    measured = curves.times is not None
    cost, unit = ("head_ms", "head, ms a token (cold)") if measured else ("head_mflop", "head, MFLOP a token")
    trimmed, lowrank = [p for p in points if p.rank is None], [p for p in points if p.rank is not None]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    series = [("token_coverage", "tokens"), ("mass_coverage", "probability mass")]
    right_series = (
        ("speedup", "predicted speedup over the target alone") if measured else ("flops_saved", "FLOPs saved")
    )
    for axes, names in ((left, series), (right, [right_series])):
        for key, label in names:
            if getattr(trimmed[0], key) is not None:
                axes.plot(
                    [getattr(p, cost) for p in trimmed], [getattr(p, key) for p in trimmed], "o-", ms=4, label=label
                )
        for p in lowrank:
            axes.plot([getattr(p, cost)], [getattr(p, names[0][0])], "s", color="black")
            axes.annotate(
                p.name, (getattr(p, cost), getattr(p, names[0][0])), xytext=(4, -10), textcoords="offset points"
            )
        for p in trimmed:
            if p.chosen_by:
                text = f"{p.rows:,}: {', '.join(p.chosen_by)}"
                axes.axvline(getattr(p, cost), color="grey", lw=0.8, ls=":")
                axes.annotate(
                    text, (getattr(p, cost), 0.02), xycoords=("data", "axes fraction"), rotation=90, fontsize=7
                )
        axes.set_xscale("log")
        axes.set_xlabel(unit)
    left.set_ylabel("held-out coverage")
    left.legend(loc="lower right")
    right.set_ylabel(right_series[1])
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=path.suffix.removeprefix("."))
    return True


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def flops_saved(target: TargetModel) -> OfSize:
    """Share of the FLOPs of a draft step that a vocabulary of a size saves, with this target's shape (see latency_reduction)."""
    shape = eagle3_config(target, DrafterConfig(), HeadConfig("full"))
    return latency_reduction(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
    )
