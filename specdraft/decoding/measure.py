"""Measurements of real decodes: the speedup over the target alone, and the costs of a round.

Both sides run in one process, prompt by prompt, in turning order, by the same loop and the same counting; warm-up is
left out. It knows nothing of files or of how drafters were trained.

Letters: k drafted tokens, K longest draft.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import psutil
import torch
from tqdm import tqdm

from specdraft.config import UserError
from specdraft.decoding.costs import CostTable
from specdraft.decoding.generate import GenerateOutput, autoregressive_generate, check_prompt, speculative_generate
from specdraft.decoding.length_policies import Fixed, LengthPolicy
from specdraft.decoding.numbers import ratio_interval, round_rate, without_nan
from specdraft.decoding.trace import (
    DecodeTrace,
    Round,
    conditional_acceptance,
    ends_in_loop,
    first_divergence,
    joint_acceptance,
    mean_request_tau,
    tau,
    tokens_per_second,
    top2_margin,
)
from specdraft.decoding.vocab_policies import FrequencyList, VocabPolicy
from specdraft.models.drafter import BatchDrafter, Drafter
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.target import TargetModel
from specdraft.models.tree import Eagle2Tree, Shape
from specdraft.provenance import machine

BUSY = 0.05  # share of all cores used by others above which times are not to be trusted
WARM_UP_TOKENS = 16
MIN_ROUNDS = 5  # for a median of the cost of one draft length
TARGET_ALONE = "target alone"


@dataclass
class Contender:
    """What is measured against the target alone. tree: how a draft branches; None = a chain."""

    drafter: Drafter | BatchDrafter
    length_policy: LengthPolicy | None = None
    vocab_policy: VocabPolicy | None = None
    tree: Shape | None = None

    def __str__(self) -> str:
        """One of `drafts`, as arguments of `speculative_generate`."""
        branching = f"length_policy={self.length_policy}" if self.tree is None else f"tree={self.tree}"
        if self.vocab_policy is None:
            return branching
        return f"{branching}, vocab_policy=FrequencyList.of(drafter)"


@dataclass
class Divergence:
    """Where a greedy output parts from the target's own: prompt number, index of the new token, and how far the
    target's two best logits are apart there, in its own dtype. Rounding explains small margins, and nothing explains
    large ones."""

    prompt: int
    index: int
    margin: float


@dataclass
class Speedup:
    """A measured speedup over the target alone. Milliseconds are medians over rounds (draft_ms includes head_ms, which is NaN off the
    CPU, and commit_ms, which comes after verification; token_ms is draft_ms without the latter, for each drafted token; rounds that drafted
    nothing are left out); rates are totals over totals, prefill included.

    speedup: ratio of tokens_per_second to target_tokens_per_second; low, high: 95 % bootstrap interval over prompts.
    decode_speedup: the same without the prefills.   looping_prompts: those whose output by the target alone ends in a loop
    (trace.ends_in_loop), which are easy to draft; tau_without_loops, speedup_without_loops: over the other prompts, NaN where
    there are none.   match_rate: share of prompts whose greedy output equals the
    target's own in this dtype; NaN at T > 0.   others_cpu_share: of all cores, while it ran (0..1).   warning: empty,
    or why not to trust it.
    """

    prompts: int
    max_new_tokens: int
    temperature: float
    speedup: float
    speedup_low: float
    speedup_high: float
    decode_speedup: float
    tau: float
    mean_request_tau: float
    looping_prompts: int
    tau_without_loops: float
    speedup_without_loops: float
    conditional_acceptance: list[float]
    joint_acceptance: list[float]
    tokens_per_second: float
    target_tokens_per_second: float
    tokens: int
    target_tokens: int
    mean_drafted: float
    draft_ms: float
    token_ms: float
    commit_ms: float
    head_ms: float
    verify_ms: float
    sample_ms: float
    target_ms: float
    match_rate: float
    divergences: list[Divergence]
    others_cpu_share: float
    warning: str
    dtype: str
    machine: dict

    @property
    def median_speedup(self) -> float:
        """tau * T_AR / (T_draft + T_verify) from the median times of a round (papers (0.1)): what a burst of somebody else's work
        in a short measurement does not change. 0 where nothing was drafted."""
        milliseconds = self.draft_ms + self.verify_ms + self.sample_ms
        return self.tau * self.target_ms / milliseconds if milliseconds else 0.0

    def to_dict(self) -> dict:
        """For JSON, which has no NaN: None stands for a number that there is not."""
        return without_nan(asdict(self))


def drafts(drafter: Eagle3Drafter, device: torch.device) -> dict[str, Contender]:
    """Chains of several lengths and EAGLE-2 trees of several sizes, to be tried on a few prompts: which of them pays most depends
    on the machine and on the drafter, and no formula knows both. Thin products take seven rows at once: a tree of six and the token
    before it. Where more verified tokens cost next to nothing, larger ones. All of them over every row of the head, and again over
    those of the drafter's frequent tokens (FR-Spec), if it knows them."""
    lengths, sizes = (1, 2, 3, 4, 5), ((6, 1, 6), (6, 2, 3), (6, 3, 3), (6, 4, 2), (8, 4, 3))
    if device.type != "cpu":
        lengths, sizes = (*lengths, 6, 8), (*sizes, (12, 4, 4), (24, 6, 6), (60, 7, 10))
    chains = {f"chain of {k}": Contender(drafter, Fixed(k)) for k in lengths}
    trees = {f"tree of {n}, {d} deep": Contender(drafter, tree=Eagle2Tree(n, d, w)) for n, d, w in sizes}
    found = chains | trees
    if drafter.frequent is None:
        return found
    policy, count = FrequencyList.of(drafter), len(drafter.frequent)
    return found | {
        f"{name}, from {count:,} tokens": replace(draft, vocab_policy=policy) for name, draft in found.items()
    }


def measure_speedups(
    target: TargetModel,
    contenders: dict[str, Contender],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> dict[str, Speedup]:
    """Every contender and the target alone on every prompt; who goes first turns from prompt to prompt, so that a drift
    of the machine meets all alike. At T > 0 prompt i is sampled with the seed `seed + i` on every side.

    Raises:
        UserError: no prompts, or one that the target cannot take.
    """
    if not prompts:
        raise UserError("speedup: got no prompts, needs at least one; give more held-out prompts")
    for prompt in prompts:
        check_prompt(prompt, target)

    def run(name: str, number: int, count: int) -> GenerateOutput:
        generator = torch.Generator().manual_seed(seed + number)
        prompt, sync = prompts[number], target.device.type != "cpu"
        if name == TARGET_ALONE:
            return autoregressive_generate(
                target, prompt, max_new_tokens=count, temperature=temperature, generator=generator, synchronize=sync
            )
        contender = contenders[name]
        return speculative_generate(
            target,
            contender.drafter,
            prompt,
            max_new_tokens=count,
            temperature=temperature,
            length_policy=contender.length_policy,
            vocab_policy=contender.vocab_policy,
            tree=contender.tree,
            generator=generator,
            synchronize=sync,
        )

    names = [TARGET_ALONE, *contenders]
    for name in names:
        run(name, 0, min(max_new_tokens, WARM_UP_TOKENS))
    outputs: dict[str, list[GenerateOutput]] = {name: [] for name in names}
    others = OthersCpu()
    for number in tqdm(range(len(prompts)), desc="speedup", unit="prompt"):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            outputs[name].append(run(name, number, max_new_tokens))
    share = others.share()
    alone = outputs.pop(TARGET_ALONE)
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "others_cpu_share": share}
    return {name: _summarise(target, prompts, own, alone, **settings) for name, own in outputs.items()}


def measure_costs(
    target: TargetModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_length: int,
    max_new_tokens: int = 64,
    vocab_policy: VocabPolicy | None = None,
    temperature: float = 0.0,
    seed: int = 0,
) -> tuple[CostTable, list[float]]:
    """T_draft(k) and T_verify(k+1) for k = 0..max_length, inside the decoder on real prompts: the draft length changes
    from round to round, so that a drift of the machine meets all lengths alike. The first prompt is warm-up and is run
    again.

    Returns: the table, and the conditional acceptance alpha_1.. seen on the way (as far as every position was tried):
    what `CostTable.best_length` needs.

    Raises:
        UserError: no prompts; too few rounds for some length.
    """
    if not prompts:
        raise UserError("costs: got no prompts, needs at least one; give more held-out prompts")
    sync = target.device.type != "cpu"
    alone: list[Round] = []
    traces: list[DecodeTrace] = []
    policy = _Shuffled(max_length, seed)
    for number, prompt in enumerate(tqdm([prompts[0], *prompts], desc="costs", unit="prompt")):
        generator = torch.Generator().manual_seed(seed + number)
        options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "synchronize": sync}
        own = autoregressive_generate(target, prompt, generator=generator, **options)
        drafted = speculative_generate(
            target, drafter, prompt, length_policy=policy, vocab_policy=vocab_policy, generator=generator, **options
        )
        if number:
            alone += own.trace.rounds
            traces.append(drafted.trace)
    by_length = [[r for t in traces for r in t.rounds if r.drafted == k] for k in range(max_length + 1)]
    scarce = [k for k, rounds in enumerate(by_length) if len(rounds) < MIN_ROUNDS]
    if scarce or not alone:
        raise UserError(
            f"costs: fewer than {MIN_ROUNDS} rounds that drafted {scarce} tokens; give more prompts, or a larger "
            "max_new_tokens"
        )
    # some vocabularies do much in one round of several: a mean has it, a median of each length has not
    commits = [r.commit_s for rounds in by_length for r in rounds]
    bursts = max(0.0, statistics.fmean(commits) - statistics.median(commits))
    table = CostTable(
        draft=[statistics.median(r.draft_s for r in rounds) + bursts for rounds in by_length],
        verify=[statistics.median(r.verify_s for r in rounds) for rounds in by_length],
        sample=[statistics.median(r.sample_s for r in rounds) for rounds in by_length],
        alone=statistics.median(r.seconds for r in alone),
        target=target.name,
        dtype=target.precision,
        machine=machine(),
    )
    acceptance = conditional_acceptance(traces)
    known = next((i for i, alpha in enumerate(acceptance) if alpha != alpha), len(acceptance))
    return table, acceptance[:known]


class OthersCpu:
    """How much of the machine other processes use from now on."""

    def __init__(self) -> None:
        self.process, self.cores = psutil.Process(), os.cpu_count() or 1
        self.start = self._now()

    def share(self) -> float:
        """Of all cores, since the beginning (0..1)."""
        seconds, idle, own = (now - then for now, then in zip(self._now(), self.start, strict=True))
        return min(1.0, max(0.0, 1 - (idle + own) / (seconds * self.cores)))

    def _now(self) -> tuple[float, float, float]:
        """Seconds: of the clock, of all cores without work, of this process on all cores."""
        times = psutil.cpu_times()._asdict()
        return time.perf_counter(), times["idle"] + times.get("iowait", 0.0), sum(self.process.cpu_times()[:2])


class _Shuffled(LengthPolicy):
    """Draft lengths 0..K in random order, all equally often."""

    def __init__(self, longest: int, seed: int):
        self.numbers, self.longest, self.waiting = random.Random(seed), longest, []

    def length(self) -> int:
        if not self.waiting:
            self.waiting = self.numbers.sample(range(self.longest + 1), self.longest + 1)
        return self.waiting.pop()


def _summarise(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    own: list[GenerateOutput],
    alone: list[GenerateOutput],
    *,
    max_new_tokens: int,
    temperature: float,
    others_cpu_share: float,
) -> Speedup:
    traces, baseline = [output.trace for output in own], [output.trace for output in alone]
    drafting = [r for trace in traces for r in trace.rounds if r.drafted]
    sides = (traces, baseline)
    low, high = ratio_interval(
        [np.array([t.tokens for t in side]) for side in sides], [np.array([t.seconds for t in side]) for side in sides]
    )
    free = [i for i, output in enumerate(alone) if not ends_in_loop(output.tokens)]
    free_traces, free_baseline = [traces[i] for i in free], [baseline[i] for i in free]
    divergences = find_divergences(target, prompts, own, alone) if temperature == 0 else []
    warning = ""
    if others_cpu_share > BUSY:
        warning = f"other processes used {others_cpu_share:.0%} of the machine: measure again when it is idle"
    return Speedup(
        prompts=len(prompts),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        speedup=tokens_per_second(traces) / tokens_per_second(baseline),
        speedup_low=low,
        speedup_high=high,
        decode_speedup=round_rate(traces) / round_rate(baseline),
        tau=tau(traces),
        mean_request_tau=mean_request_tau(traces),
        looping_prompts=len(prompts) - len(free),
        tau_without_loops=tau(free_traces),
        speedup_without_loops=tokens_per_second(free_traces) / tokens_per_second(free_baseline),
        conditional_acceptance=conditional_acceptance(traces),
        joint_acceptance=joint_acceptance(traces),
        tokens_per_second=tokens_per_second(traces),
        target_tokens_per_second=tokens_per_second(baseline),
        tokens=sum(trace.tokens for trace in traces),
        target_tokens=sum(trace.tokens for trace in baseline),
        mean_drafted=statistics.fmean(r.drafted for r in drafting) if drafting else 0.0,
        draft_ms=_median_ms([r.draft_s for r in drafting]),
        token_ms=_median_ms([(r.draft_s - r.commit_s) / r.drafted for r in drafting]),
        commit_ms=_median_ms([r.commit_s for r in drafting]),
        head_ms=_median_ms([r.head_s for r in drafting]),
        verify_ms=_median_ms([r.verify_s for r in drafting]),
        sample_ms=_median_ms([r.sample_s for r in drafting]),
        target_ms=_median_ms([r.seconds for trace in baseline for r in trace.rounds]),
        match_rate=1 - len(divergences) / len(prompts) if temperature == 0 else float("nan"),
        divergences=divergences,
        others_cpu_share=others_cpu_share,
        warning=warning,
        dtype=target.precision,
        machine=machine(),
    )


def find_divergences(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    own: Sequence[GenerateOutput],
    alone: Sequence[GenerateOutput],
) -> list[Divergence]:
    """The first divergence of every prompt that has one, with the target's top-2 margin there."""
    found = []
    for number, (prompt, output, truth) in enumerate(zip(prompts, own, alone, strict=True)):
        index = first_divergence(output.tokens, truth.tokens)
        if index is None:
            continue
        ids = torch.tensor([[*prompt, *truth.tokens[:index]]], device=target.device)
        step = target.forward(ids, target.new_cache(1, ids.shape[1]), want_taps=False, logits_for="last")
        found.append(Divergence(number, index, top2_margin(step.logits[0, -1])))
    return found


def _median_ms(seconds: list[float]) -> float:
    return 1e3 * statistics.median(seconds) if seconds else 0.0
