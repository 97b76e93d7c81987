"""How long a draft head takes on this machine, by its rows or its rank, and what the rest of a round takes: the measured
side of choosing a vocabulary.

A head product is timed cold, right after the target's weights went through the caches, as in a round: a hot loop flatters
small heads several times. The rest of the round comes from real decoding. It knows nothing of how vocabularies are chosen.

Letters: k rows, V target vocabulary, R rank, H width, K tokens drafted in a round.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from specdraft.config import UserError
from specdraft.data.chat import render_prompt
from specdraft.data.tasks import builtin_prompts
from specdraft.data.vocab import VocabMap
from specdraft.data.vocab_size import OfSize, Sizes, Values, tau_of
from specdraft.decoding.costs import relative_throughput
from specdraft.decoding.generate import autoregressive_generate, speculative_generate
from specdraft.decoding.length_policies import Fixed
from specdraft.decoding.measure import BUSY, OthersCpu
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, new_drafter
from specdraft.models.layers import FrozenLinear, Int8Linear
from specdraft.models.target import TargetModel
from specdraft.provenance import hash_json, machine, write_json

SMALLEST = 256  # rows of the smallest head that is timed
CONTEXT = 32  # tokens before the head is timed
Product = Callable[[Tensor], Callable[[Tensor], Tensor]]  # weight [O, I] -> x [.., I] -> x @ weight.T


@dataclass
class HeadTimes:
    """Median seconds. rows, row_seconds: one product of a head of so many rows, rows ascending up to V; ranks, rank_seconds: of a
    low-rank head over V rows.   body: the rest of a draft step.   verify: the rest of a round of `drafted` tokens.   alone: a round of the
    target with no drafter.   warning: empty, or why not to trust it.   target, dtype, machine: what it holds for.
    int8_full_seconds, int8_rank_seconds: of the V rows and of each rank in INT8; none but on a CPU."""

    rows: list[int]
    row_seconds: list[float]
    ranks: list[int]
    rank_seconds: list[float]
    body: float
    verify: float
    alone: float
    drafted: int
    target: str
    dtype: str
    machine: dict
    others_cpu_share: float
    warning: str
    int8_full_seconds: float | None = None
    int8_rank_seconds: list[float] = field(default_factory=list)

    def seconds(self, k: Sizes) -> Values:
        """Of a head of k rows: straight lines between the sizes that were timed."""
        return np.interp(k, self.rows, self.row_seconds)

    @property
    def kappa(self) -> float:
        """The full head's time over everything else in its round (papers 1)."""
        return self.drafted * self.row_seconds[-1] / (self.drafted * self.body + self.verify)

    def reduction(self, k: Sizes) -> Values:
        """R(k) of the paper's utility in seconds: the share of a full-head draft step that a head of k rows saves."""
        full = self.body + self.row_seconds[-1]
        return 1 - (self.body + self.seconds(k)) / full

    def relative(self, seconds: Values, coverage: Values, acceptance: tuple[float, ...]) -> Values:
        """Tokens per second over those of the full head, papers (1.1), of a head that takes `seconds` and whose acceptance is
        bounded by `coverage` (`tau_of`)."""
        rho_tau = tau_of(acceptance, coverage) / tau_of(acceptance, np.ones(()))
        return relative_throughput(rho_tau, seconds / self.row_seconds[-1], self.kappa)

    def speedup(self, seconds: Values, coverage: Values, acceptance: tuple[float, ...]) -> Values:
        """Over the target alone, papers (0.1), with K drafted tokens a round."""
        return tau_of(acceptance, coverage) * self.alone / (self.drafted * (self.body + seconds) + self.verify)

    def throughput(self, coverage: Values, acceptance: tuple[float, ...]) -> OfSize:
        """`relative` as a function of the size. coverage: for k = 0..V (vocab_size.py: coverage_curve)."""
        return lambda k: self.relative(self.seconds(k), coverage[k], acceptance)


def cached_head_times(target: TargetModel, folder: Path, drafted: int, repeats: int = 20) -> HeadTimes:
    """The times of this target, dtype, device, machine and thread count, from `folder` where an idle machine gave them before."""
    here = machine()
    place = [str(target.device), here["processor"], here["threads"], here["gpus"]]
    settings = [target.hash, target.precision, *place, drafted, repeats]
    path = folder / f"head-times-{hash_json(settings)}.json"
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):  # none yet, or not what is written here
        found = HeadTimes(**json.loads(path.read_text()))
        if not found.warning:
            return found
    times = measure_head_times(target, drafted, repeats)
    write_json(path, asdict(times))
    return times


def measure_head_times(target: TargetModel, drafted: int, repeats: int = 20) -> HeadTimes:
    """Time heads of 256, 512, .., V rows and of rank H/16, H/8, H/4, on a CPU the last four in INT8 too, in random order and in
    turn, and real rounds."""
    others = OthersCpu()
    real, ranks = target.vocab_size, timed_ranks(target.hidden_size)
    rows = timed_sizes(real)
    heads = {("rows", k): row_head(target, k) for k in rows} | {("rank", r): rank_head(target, r, real) for r in ranks}
    if target.device.type == "cpu":
        heads |= {("int8 rows", real): row_head(target, real, Int8Linear)}
        heads |= {("int8 rank", r): rank_head(target, r, real, Int8Linear) for r in ranks}
    seconds = cold_seconds(target, heads, repeats)
    body, verify, alone = round_seconds(target, drafted, seconds)
    share = round(others.share(), 3)
    busy = f"other processes used {share:.0%} of the machine: measure again when it is idle"
    return HeadTimes(
        rows=rows,
        row_seconds=[seconds["rows", k] for k in rows],
        ranks=ranks,
        rank_seconds=[seconds["rank", r] for r in ranks],
        body=body,
        verify=verify,
        alone=alone,
        drafted=drafted,
        target=target.name,
        dtype=target.precision,
        machine=machine(),
        others_cpu_share=share,
        warning=busy if share > BUSY else "",
        int8_full_seconds=seconds.get(("int8 rows", real)),
        int8_rank_seconds=[seconds["int8 rank", r] for r in ranks if ("int8 rank", r) in seconds],
    )


def timed_sizes(vocab_size: int) -> list[int]:
    """256, 512, .. below V, and V."""
    sizes = [SMALLEST << i for i in range(32) if SMALLEST << i < vocab_size]
    return [*sizes, vocab_size]


def timed_ranks(hidden_size: int) -> list[int]:
    """H/16, H/8, H/4."""
    return sorted({max(1, hidden_size // part) for part in (16, 8, 4)})


def row_head(target: TargetModel, rows: int, product: Product = FrozenLinear) -> Callable[[Tensor], Tensor]:
    """The product of a state [1, H] with `rows` rows."""
    return product(target.head_weight[:rows])


def rank_head(target: TargetModel, rank: int, rows: int, product: Product = FrozenLinear) -> Callable[[Tensor], Tensor]:
    """The two of a low-rank head. product: of its rows, as in FrozenWeights."""
    down, up = FrozenLinear(target.head_weight[:rank]), product(target.head_weight[:rows, :rank].contiguous())
    return lambda hidden: up(down(hidden))


def rank_throughput(
    target: TargetModel, rows: int, tau: float, taus: dict[int, float], drafted: int, repeats: int = 20
) -> dict[int, float]:
    """Predicted tokens per second over those of a dense head of `rows` rows, papers (1.1), by rank, from times measured now.

    tau: of the dense head, with `drafted` tokens a round; taus: of low-rank heads over the same rows, by rank."""
    smallest = timed_sizes(target.vocab_size)[0]
    heads = {("rows", k): row_head(target, k) for k in {smallest, rows}}
    heads |= {("rank", r): rank_head(target, r, rows) for r in taus}
    seconds = cold_seconds(target, heads, repeats)
    body, verify, _ = round_seconds(target, drafted, seconds)
    dense = seconds["rows", rows]
    kappa = drafted * dense / (drafted * body + verify)
    return {r: relative_throughput(taus[r] / tau, seconds["rank", r] / dense, kappa) for r in taus}


@torch.inference_mode()
def cold_seconds(target: TargetModel, heads: dict[tuple[str, int], Callable], repeats: int) -> dict:
    """Median seconds of each head's product with one state, right after a forward pass of the target."""
    cache = target.new_cache(1, CONTEXT + 1)
    ids = torch.arange(CONTEXT + 1, device=target.device)[None] % target.vocab_size
    target.forward(ids[:, :CONTEXT], cache, logits_for="none")
    hidden = torch.randn(1, target.hidden_size).to(target.device, target.step_dtype)
    wait = torch.accelerator.synchronize if target.device.type != "cpu" else lambda: None
    found: dict[tuple[str, int], list[float]] = {name: [] for name in heads}
    shuffle = random.Random(0)
    for number in tqdm(range(repeats + 1), desc="head times", unit="turn"):
        for name in shuffle.sample(list(heads), len(heads)):
            target.forward(ids[:, CONTEXT:], cache)
            cache.crop(CONTEXT)
            wait()
            start = time.perf_counter()
            heads[name](hidden)
            wait()
            if number:  # the first is warm-up
                found[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in found.items()}


def round_seconds(target: TargetModel, drafted: int, seconds: dict) -> tuple[float, float, float]:
    """(rest of a draft step, rest of a round, a round of the target alone), from decoding with an untrained drafter: times
    do not depend on weights."""
    rows = timed_sizes(target.vocab_size)[0]
    first = VocabMap(torch.arange(rows), target.vocab_size)
    drafter = new_drafter(target, DrafterConfig(), HeadConfig("trimmed"), first).to(target.dtype)
    drafter.eval().requires_grad_(False)
    options = {"max_new_tokens": 24, "synchronize": target.device.type != "cpu"}
    rounds, alone = [], []
    for number, prompt in enumerate(builtin_prompts()[:4]):
        ids = render_prompt(target.tokenizer, [{"role": "user", "content": prompt.turns[0]}])
        ids = ids[: target.max_positions // 2]
        own = autoregressive_generate(target, ids, **options)
        out = speculative_generate(target, drafter, ids, length_policy=Fixed(drafted), **options)
        if number:  # the first is warm-up
            alone += own.trace.rounds
            rounds += [r for r in out.trace.rounds if r.drafted == drafted]
    if not rounds:
        raise UserError(
            f"acceptance: got {drafted} positions, but no round of the target's answers drafts as many; give fewer"
        )
    own_head = seconds["rows", rows] if options["synchronize"] else None  # nobody waits for a GPU inside a draft step
    body = statistics.median(r.draft_s - (drafted * own_head if own_head else r.head_s) for r in rounds) / drafted
    verify = statistics.median(r.verify_s + r.sample_s for r in rounds)
    return max(body, 1e-9), verify, statistics.median(r.seconds for r in alone)
