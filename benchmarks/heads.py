"""Head times, cold, by rows and by rank, also in INT8, and what a round needs besides: what choosing a vocabulary by measurement rests on.

python benchmarks/heads.py                                   # a table
python benchmarks/heads.py --target gemma-3-270m --json      # and one line of JSON

`head_ms`: one product with one state right after a forward pass of the target, median. `relative` is tokens per second over those
of the full head, papers (1.1), at the same tau; `break_even` the share of the full head's tau that a head must keep to be worth it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch

from specdraft.config import run_program
from specdraft.decoding.costs import break_even, relative_throughput
from specdraft.decoding.head_times import measure_head_times
from specdraft.models.target import TargetModel
from specdraft.provenance import provenance


@dataclass
class HeadsConfig:
    """drafted: tokens a round.   repeats: of every product."""

    target: str = "default"
    dtype: str = "bfloat16"
    device: str = "cpu"
    drafted: int = 3
    repeats: int = 20
    json: bool = False


def main(config: HeadsConfig) -> None:
    target = TargetModel.load(config.target, dtype=getattr(torch, config.dtype), device=config.device)
    times = measure_head_times(target, config.drafted, config.repeats)
    heads = [(f"{k:,} rows", s) for k, s in zip(times.rows, times.row_seconds, strict=True)]
    heads += [(f"rank {r}", s) for r, s in zip(times.ranks, times.rank_seconds, strict=True)]
    if times.int8_full_seconds is not None:
        heads.append((f"{times.rows[-1]:,} rows, int8", times.int8_full_seconds))
        heads += [(f"rank {r}, int8", s) for r, s in zip(times.ranks, times.int8_rank_seconds, strict=True)]
    full = times.row_seconds[-1]
    rows = [
        {
            "head": name,
            "head_ms": 1e3 * seconds,
            "nu": seconds / full,
            "relative": relative_throughput(1.0, seconds / full, times.kappa),
            "break_even": break_even(seconds / full, times.kappa),
        }
        for name, seconds in heads
    ]
    print(
        f"{target.name}, {times.dtype}, {config.drafted} drafted: rest of a draft step {1e3 * times.body:.2f} ms, rest of the round "
        f"{1e3 * times.verify:.1f} ms, the target alone {1e3 * times.alone:.1f} ms, kappa {times.kappa:.2f}"
    )
    print(f"{'head':<20}{'head_ms':>10}{'nu':>8}{'relative':>10}{'break_even':>12}")
    for row in rows:
        print(
            f"{row['head']:<20}{row['head_ms']:>10.2f}{row['nu']:>8.2f}{row['relative']:>10.2f}{row['break_even']:>12.2f}"
        )
    if times.warning:
        print(f"warning: {times.warning}")
    if config.json:
        print(json.dumps({**asdict(times), "kappa": times.kappa, "heads": rows, "provenance": provenance()}))


if __name__ == "__main__":
    run_program(main, HeadsConfig)
