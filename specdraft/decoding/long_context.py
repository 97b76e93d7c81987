"""What self-drafting costs and gains as the context grows: costs of a few draft lengths in real decodes, and rounds of which the
accepted share is prescribed, on a cache filled with random numbers (a random model has no acceptance of its own).

It knows nothing of files or prompts. Source: SparseSpec-L (arXiv 2607.27735); papers.md 5, papers (0.1).

Letters: k drafted tokens, C_AR seconds of a token of the target alone, C_d of a drafted token, C_v of a verification with all
that a round does besides drafting (choosing and gathering the next index, too), alpha_j conditional and P_j joint acceptance,
tau_k = 1 + sum_{j<=k} P_j.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from specdraft.config import UserError, require_positive
from specdraft.decoding.costs import CostTable
from specdraft.decoding.generate import autoregressive_generate, speculative_generate
from specdraft.decoding.length_policy import LengthPolicy
from specdraft.decoding.measure import MIN_ROUNDS
from specdraft.decoding.sampling import Sampling, greedy
from specdraft.decoding.trace import Round
from specdraft.models.cache import KVCache
from specdraft.models.drafter import Drafter
from specdraft.models.load import require_device, supported_dtype
from specdraft.models.sparse_self import SparseSelfConfig, SparseSelfDrafter
from specdraft.models.target import TargetModel
from specdraft.provenance import machine

MOST_PASSES = 5  # over the prompts, to measure costs
FIRST_TOKENS = 32  # run by the target before the rest of a cache is filled with random numbers


def costs_of_lengths(
    target: TargetModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    max_new_tokens: int,
    seed: int = 0,
) -> CostTable:
    """T_draft(k) and T_verify(k+1): medians over the rounds of real greedy decodes that drafted k tokens, for the given k and for 1, in
    random order; straight lines between them. k = 0 is the target alone, which nobody watches, so it is no end of such a line. For
    drafts too long to measure every length, and costs that are smooth in k. Prompts are decoded one after the other, several times if
    need be, until there are rounds enough.

    Raises:
        UserError: too few rounds of some length.
    """
    lengths = sorted({1, *lengths})
    policy, alone = _Shuffled(lengths, seed), []
    by_length: dict[int, list[Round]] = {k: [] for k in lengths}
    for prompt in itertools.chain.from_iterable(itertools.repeat(prompts, MOST_PASSES)):
        alone += autoregressive_generate(target, prompt, max_new_tokens=max_new_tokens).trace.rounds
        output = speculative_generate(target, drafter, prompt, max_new_tokens=max_new_tokens, length_policy=policy)
        for r in output.trace.rounds:
            by_length.get(r.drafted, []).append(r)  # the last rounds of a text may be shorter
        scarce = [k for k, of_length in by_length.items() if len(of_length) < MIN_ROUNDS]
        if not scarce:
            break
    else:
        raise UserError(
            f"costs: fewer than {MIN_ROUNDS} rounds that drafted {scarce} tokens; give more prompts, or a larger max_new_tokens"
        )

    def curve(name: str) -> list[float]:
        medians = [statistics.median(getattr(r, name) for r in of_length) for of_length in by_length.values()]
        start = statistics.median(getattr(r, name) for r in alone)
        return np.interp(range(max(by_length) + 1), [0, *by_length], [start, *medians]).tolist()

    return CostTable(
        draft=curve("draft_s"),
        verify=curve("verify_s"),
        sample=curve("sample_s"),
        alone=statistics.median(r.seconds for r in alone),
        target=target.name,
        dtype=target.precision,
        machine=machine(),
    )


@dataclass
class RandomModel:
    """A Llama of random weights, in which attention outweighs everything else early: few and narrow layers, many keys."""

    hidden: int = 512
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    vocab: int = 1024

    def __post_init__(self) -> None:
        require_positive({f"random_model.{name}": value for name, value in asdict(self).items()})
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            raise UserError(
                f"random_model: got hidden {self.hidden}, heads {self.heads}, kv_heads {self.kv_heads}, allowed: heads of one even width, "
                "as many of them for each key/value head"
            )


def random_target(shape: RandomModel, positions: int, dtype: torch.dtype, device: str, seed: int) -> TargetModel:
    require_device(device)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        max_position_embeddings=positions,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=supported_dtype(dtype, device, config.model_type)).to(
            device
        )
    return TargetModel.from_model(model, tap_layers=(0,))


@dataclass
class LongCosts:
    """One context and budget. alone_s: C_AR.   draft_s: C_d.   verify_s: C_v, the median over all lengths.   measured, predicted:
    speedup by draft length: of the rounds that were run, and tau_k C_AR / (k C_d + C_v).   rule_length: the first k after which one
    more token does not pay, P_{k+1} <= C_d / C_AR * speedup(k), by the prediction; the longest length where all pay."""

    context: int
    budget: float
    alone_s: float
    draft_s: float
    verify_s: float
    measured: dict[int, float]
    predicted: dict[int, float]
    rule_length: int


def needed_positions(lengths: Sequence[int], rounds: int) -> int:
    """Beyond the context, for `prescribed_rounds`: all that may be committed (a warm-up of each length commits one token), and
    one draft."""
    return len(lengths) + rounds * sum(k + 1 for k in lengths) + max(lengths) + 1


@torch.inference_mode()
def prescribed_rounds(
    target: TargetModel,
    config: SparseSelfConfig,
    context: int,
    lengths: Sequence[int],
    acceptance: Sequence[float],
    rounds: int,
    seed: int = 0,
) -> LongCosts:
    """Rounds of every length in turn with the target alone, over a cache of `context` random keys and values; each accepts what
    `acceptance` (alpha_1.., the last one for all later positions) says, evenly spread over its law, whatever was verified. The
    prediction is for the joint acceptance of these very rounds, a multiple of 1 / rounds at each position.

    Raises:
        UserError: a context that the target has no positions for.
    """
    drafter = SparseSelfDrafter(target, config)
    cache = target.new_cache(1, context + needed_positions(lengths, rounds))
    _fill(target, cache, context, seed)
    drafter.prefill(None, torch.zeros(1, context + 1, dtype=torch.int64, device=target.device))
    marks = (np.arange(rounds) + 0.5) / rounds
    exact = np.cumprod([acceptance[min(j, len(acceptance) - 1)] for j in range(max(lengths))])
    joint = (exact[:, None] > marks).mean(1)
    alone, by_length = [], {k: [] for k in lengths}
    for number in range(-1, rounds):  # the first of each is warm-up
        seconds = _alone(target, cache)
        for k in lengths:
            accepted = int((exact[:k] > marks[number]).sum()) if number >= 0 else 0
            done = _round(target, drafter, cache, k, accepted)
            if number >= 0:
                by_length[k].append(done)
        if number >= 0:
            alone.append(seconds)
    return _summarise(context, config.budget, alone, by_length, joint)


def _summarise(
    context: int, budget: float, alone: list[float], by_length: dict[int, list[Round]], joint: np.ndarray
) -> LongCosts:
    every = [r for of_length in by_length.values() for r in of_length]
    c_ar = statistics.median(alone)
    c_d = statistics.median((r.draft_s - r.commit_s) / r.drafted for r in every)
    c_v = statistics.median(r.verify_s + r.sample_s + r.commit_s for r in every)
    rates = {k: sum(r.emitted for r in some) / sum(r.seconds for r in some) for k, some in by_length.items()}
    speedups = [(1 + joint[:k].sum()) * c_ar / (k * c_d + c_v) for k in range(len(joint) + 1)]
    paying = (k for k in range(len(joint)) if not joint[k] > c_d / c_ar * speedups[k])
    return LongCosts(
        context=context,
        budget=budget,
        alone_s=c_ar,
        draft_s=c_d,
        verify_s=c_v,
        measured={k: rate * c_ar for k, rate in rates.items()},
        predicted={k: float(speedups[k]) for k in by_length},
        rule_length=next(paying, len(joint)),
    )


def _fill(target: TargetModel, cache: KVCache, context: int, seed: int) -> None:
    """A cache as after a prompt of `context` tokens, of random keys and values: their costs are those of real ones."""
    generator = torch.Generator(target.device).manual_seed(seed)
    target.forward(torch.zeros(1, FIRST_TOKENS, dtype=torch.int64, device=target.device), cache, logits_for="none")
    for stored in (*cache.keys, *cache.values):
        stored[:, :, :context].normal_(generator=generator)
    cache.lengths = [context]


def _alone(target: TargetModel, cache: KVCache) -> float:
    """Seconds of one token by the target, unwatched; it leaves nothing behind."""
    (length,) = cache.lengths
    watcher, target.watcher = target.watcher, None
    start = _now(target)
    step = target.forward(torch.zeros(1, 1, dtype=torch.int64, device=target.device), cache, want_taps=False)
    greedy(step.logits[0]).tolist()
    seconds = _now(target) - start
    target.watcher = watcher
    cache.crop(length)
    return seconds


def _round(target: TargetModel, drafter: SparseSelfDrafter, cache: KVCache, k: int, accepted: int) -> Round:
    """As in the decode loop: choosing and gathering the next index is what commit_s is."""
    (length,) = cache.lengths
    start = _now(target)
    proposal = drafter.propose(k, Sampling().choose)
    drafted = proposal.tokens.tolist()
    proposed = _now(target)
    run = torch.tensor([[0, *drafted]], device=target.device)
    step = target.forward(run, cache, want_taps=False)
    best = greedy(step.logits[0]).tolist()
    ran = _now(target)
    cache.crop(length + accepted + 1)
    cropped = _now(target)
    drafter.observe(torch.tensor([*drafted[:accepted], best[accepted]], device=target.device), None)
    commit_s = _now(target) - cropped
    seconds = (proposed - start + commit_s, proposal.head_seconds, ran - proposed, cropped - ran)
    return Round(k, accepted, accepted + 1, *seconds, commit_s=commit_s)


def _now(target: TargetModel) -> float:
    if target.device.type != "cpu":
        torch.accelerator.synchronize(target.device)
    return time.perf_counter()


class _Shuffled(LengthPolicy):
    """The given lengths in random order, all equally often."""

    def __init__(self, lengths: Sequence[int], seed: int):
        self.numbers, self.lengths, self.waiting = random.Random(seed), list(lengths), []

    def length(self) -> int:
        self.waiting = self.waiting or self.numbers.sample(self.lengths, len(self.lengths))
        return self.waiting.pop()


def real_table(rows: Sequence[dict[str, Any]]) -> str:
    """For the terminal: measurements of a target on real text, by context, budget and draft length."""
    head = (
        ("context", 8),
        ("budget", 8),
        ("length", 10),
        ("drafted", 9),
        ("accepted", 10),
        ("tau", 7),
        ("C_d/C_v", 9),
        ("speedup", 9),
    )
    lines = ["".join(f"{name:>{width}}" for name, width in head) + "  95 %"]
    for row in rows:
        drafted = row["mean_drafted"]
        share = sum(row["joint_acceptance"]) / drafted
        ratio = row["token_ms"] / (row["verify_ms"] + row["sample_ms"] + row["commit_ms"])
        lines.append(
            f"{row['context']:>8}{row['budget']:>8}{row['length']:>10}{drafted:>9.1f}{share:>10.1%}{row['tau']:>7.2f}{ratio:>9.3f}"
            f"{row['decode_speedup']:>9.2f}  whole {row['speedup_low']:.2f}-{row['speedup_high']:.2f} {row['warning']}"
        )
    return "\n".join(lines)


def long_table(rows: Sequence[dict[str, Any]]) -> str:
    """The same for prescribed rounds on a random model; speedups are measured (and predicted), by draft length k."""
    head = ("context", 8), ("budget", 8), ("C_AR ms", 9), ("C_d/C_AR", 10), ("C_d/C_v", 9), ("rule k", 8)
    lines = ["".join(f"{name:>{width}}" for name, width in head) + "  k: measured (predicted)"]
    for row in rows:
        pairs = zip(row["measured"].items(), row["predicted"].values(), strict=True)
        speedups = "  ".join(f"{k}: {measured:.2f} ({predicted:.2f})" for (k, measured), predicted in pairs)
        c_ar, c_d, c_v = (row[key] for key in ("alone_s", "draft_s", "verify_s"))
        ratios = f"{1e3 * c_ar:>9.1f}{c_d / c_ar:>10.3f}{c_d / c_v:>9.3f}"
        lines.append(
            f"{row['context']:>8}{row['budget']:>8}{ratios}{row['rule_length']:>8}  {speedups} {row['warning']}"
        )
    return "\n".join(lines)
