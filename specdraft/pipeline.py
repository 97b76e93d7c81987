"""The main job, step by step: prompts and answers (job.py) -> a drafter -> training -> measured speedup -> checkpoint.

recipes/train_slimspec.py and recipes/train_eagle3.py are this with different defaults. It knows nothing of how the steps work.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from specdraft import summary
from specdraft.config import UserError, config_to_dict, require_positive
from specdraft.data.chat import Example
from specdraft.data.source import Online
from specdraft.data.vocab import VocabMap, count_tokens, require_tokens, required_ids
from specdraft.decoding.generate import autoregressive_generate
from specdraft.decoding.length_policies import Fixed
from specdraft.decoding.measure import Contender, Speedup, drafts, measure_speedups
from specdraft.decoding.sampling import Sampling
from specdraft.job import JobConfig, head_features, make_trainer, prepare, read_text, start
from specdraft.models.checkpoint import load_drafter, save_drafter
from specdraft.models.copying import init_copying
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.heads import HeadConfig, check_vocabulary, head_rank
from specdraft.models.initialise import DrafterConfig, eagle3_config, new_drafter, warm_start
from specdraft.models.target import TargetModel
from specdraft.own_process import in_own_process
from specdraft.provenance import hash_file, sole_writer

TRIMMED_SIZE = 8192  # of a trimmed head, where nothing is said


class Measured(NamedTuple):
    """draft: the one that was chosen, by name, and as arguments of `speculative_generate`.   tried: all, on prompts of their own."""

    draft: str
    arguments: str
    tried: dict[str, Speedup]
    speedup: Speedup


@dataclass
class MeasureConfig:
    """prompts: held-out prompts decoded, at T = temperature, to at most max_new_tokens each, with and without the drafter.
    draft_length: tokens drafted a round, a chain; None = what is fastest of several chains and trees (measure.drafts) on
    trial_prompts other held-out prompts, decoded to trial_tokens.   frequent: how many of the tokens that stand most often in the
    training answers these may be drafted from instead of all; the list is saved with the drafter; None = always from all."""

    prompts: int = 40
    max_new_tokens: int = 160
    temperature: float = 0.0
    draft_length: int | None = None
    trial_prompts: int = 8
    trial_tokens: int = 64
    frequent: int | None = 8192

    def __post_init__(self) -> None:
        names = ("prompts", "max_new_tokens", "draft_length", "trial_prompts", "trial_tokens", "frequent")
        require_positive({f"measure.{name}": getattr(self, name) for name in names})
        Sampling(self.temperature)


@dataclass
class RunConfig(JobConfig):
    """warm_start: a drafter folder, of the same shape and vocabulary map, whose weights training starts from. The rest of the fields that
    are not groups: see JobConfig."""

    warm_start: Path | None = None
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)


def run(config: RunConfig) -> None:
    """Train a drafter and measure it. Raises UserError for anything wrong in `config` or in what it names."""
    started = time.perf_counter()
    folder = config.output / config.name
    accelerator, target = start(config, config.drafter.tap_layers)
    check_drafter(config, target)
    count = config.measure.prompts + config.measure.trial_prompts
    job = prepare(accelerator, target, config, 1 if config.measure.draft_length else 2, count)

    vocab_map = choose_vocabulary(target, job.train, config.head)
    features = head_features(job.states, job.train) if config.head.kind == "lowrank" else None
    drafter = new_drafter(target, config.drafter, config.head, vocab_map, features)
    if config.drafter.copying and config.warm_start is None:
        taps, tokens = read_text(job.states, job.train)
        accelerator.print(f"drafter: one of its heads starts as one that copies, fitted on {len(tokens):,} tokens")
        init_copying(drafter, taps, tokens)
    if config.warm_start is not None:
        warm_start(drafter, load_drafter(config.warm_start, target, torch.float32), f"warm_start {config.warm_start}")
    drafter.frequent = frequent_tokens(target, job.train, drafter, config.measure.frequent)
    trainer = make_trainer(job, drafter, config, identity_of(config, drafter, target))
    with sole_writer(folder) if accelerator.is_main_process else contextlib.nullcontext():
        training = time.perf_counter()
        trained = trainer.run()
        training = time.perf_counter() - training
        if isinstance(job.states, Online):
            if job.states.bad:
                accelerator.print(
                    f"training: {len(job.states.bad)} examples had NaN or infinite states and were left out"
                )
            job.states.forget()  # before anything is timed
        if accelerator.is_main_process:
            save(config, drafter, target, f"# EAGLE-3 drafter for {target.name}\n\nNot measured yet.\n")
            measured = measure(config, target, [row.input_ids[: row.spans[0][0]] for row in job.held_out_rows])
            # answers and training may have been made by several runs of the command, the rest by this one
            minutes = job.minutes + (trained.seconds + time.perf_counter() - started - job.answering - training) / 60
            found = summary.results(drafter, job.rows, trained, measured, minutes)
            save(config, drafter, target, summary.model_card(config_to_dict(config), target, found))
            print(summary.write(folder, config.name, target, found))
    accelerator.wait_for_everyone()
    accelerator.end_training()


def check_drafter(config: RunConfig, target: TargetModel) -> None:
    """What can be wrong with the drafter is found before hours of work. Raises UserError."""
    check_vocabulary(config.head)
    if config.head.kind == "lowrank":
        head_rank(config.head, target.hidden_size)
    if config.head.vocab is not None:
        vocab = VocabMap.load(Path(config.head.vocab))
        if vocab.vocab_size != target.vocab_size:
            raise UserError(
                f"head.vocab {config.head.vocab}: made for {vocab.vocab_size} tokens, the target has {target.vocab_size}; build it again"
            )
        require_tokens(vocab, target.eos_token_ids, f"head.vocab {config.head.vocab}")
    elif config.head.kind == "trimmed":
        # whether it can be made at all
        counted_map(target, torch.zeros(target.vocab_size, dtype=torch.int64), config.head.vocab_size or TRIMMED_SIZE)
    eagle3_config(target, config.drafter, config.head)
    if config.warm_start is not None:
        load_drafter(config.warm_start, target, torch.float32)


def identity_of(config: RunConfig, drafter: Eagle3Drafter, target: TargetModel) -> dict[str, str]:
    """What a run starts from, by name: only a run that started from the same is gone on with."""
    vocab_map, rank = drafter.lm_head.vocab_map, drafter.config.head.rank
    body = {f"drafter.{key}": str(value) for key, value in vars(config.drafter).items() if key != "copying"}
    if config.drafter.copying:  # as if it were not there otherwise: runs of before it can be resumed without it
        body["drafter.copying"] = "True"
    body["drafter.tap_layers"] = str(drafter.config.tap_layers)
    head = {"head": config.head.kind, "head.rank": str(rank), "head.init": config.head.init}
    start = "none" if config.warm_start is None else hash_file(config.warm_start / "model.safetensors")
    return {
        "target": target.hash,
        "vocabulary map": vocab_map.hash if vocab_map else "none",
        "warm start": start,
        **head,
        **body,
    }


def choose_vocabulary(target: TargetModel, train: list[Example], head: HeadConfig) -> VocabMap | None:
    """A trimmed head's map: the given one, or the most frequent tokens of the training answers."""
    if head.kind != "trimmed":
        return None
    if head.vocab is not None:
        return VocabMap.load(Path(head.vocab))
    return counted_map(target, count_tokens(train, target.vocab_size), head.vocab_size or TRIMMED_SIZE)


def counted_map(target: TargetModel, counts: torch.Tensor, size: int) -> VocabMap:
    """The required tokens and the most frequent others, by counts [V], `size` in all. Raises UserError where not all required ones fit."""
    always = required_ids(target.tokenizer, target.eos_token_ids, target.vocab_size)
    return VocabMap.from_counts(counts, size, always)


def frequent_tokens(
    target: TargetModel, train: list[Example], drafter: Eagle3Drafter, size: int | None
) -> VocabMap | None:
    """`size` tokens that stand most often in the training answers, or all required ones where these are more; None where the head has no
    more rows."""
    if size is None or drafter.lm_head.vocab_map is not None or size >= target.vocab_size:
        return None
    required = len(required_ids(target.tokenizer, target.eos_token_ids, target.vocab_size))
    return counted_map(target, count_tokens(train, target.vocab_size), max(size, required))


def save(config: RunConfig, drafter: Eagle3Drafter, target: TargetModel, card: str) -> None:
    """Write the checkpoint folder; what was written can be read."""
    place = config.output / config.name / "drafter"
    save_drafter(place, drafter, target, card, config_to_dict(config))
    load_drafter(place, target)


def measure(config: RunConfig, target: TargetModel, prompts: list[list[int]]) -> Measured:
    """The saved drafter's speedup over prompts (token ids). On a CPU in a process of its own; elsewhere in this one: two targets might
    not fit into an accelerator, and a heap's gaps cost nothing there."""
    place = config.output / config.name / "drafter"
    if target.device.type != "cpu":
        return measure_drafter(target, place, prompts, config.measure)
    loading = (config.target, config.revision, target.dtype, target.tap_layers, torch.get_num_threads())
    return in_own_process(load_and_measure, *loading, place, prompts, config.measure)


def load_and_measure(
    name: str,
    revision: str | None,
    dtype: torch.dtype,
    tap_layers: tuple[int, ...],
    threads: int,
    place: Path,
    prompts: list[list[int]],
    config: MeasureConfig,
) -> Measured:
    torch.set_num_threads(threads)
    target = TargetModel.load(name, dtype=dtype, device="cpu", tap_layers=tap_layers, revision=revision)
    return measure_drafter(target, place, prompts, config)


def measure_drafter(target: TargetModel, place: Path, prompts: list[list[int]], config: MeasureConfig) -> Measured:
    """Choose a draft on the last few prompts, and measure it on the others."""
    drafter = load_drafter(place, target)
    options = {"temperature": config.temperature}
    print(measuring_estimate(target, drafter, prompts, config))
    if config.draft_length is None:
        contenders = drafts(drafter, target.device)
        trial, prompts = prompts[-config.trial_prompts :], prompts[: -config.trial_prompts] or prompts
        tried = measure_speedups(target, contenders, trial, max_new_tokens=config.trial_tokens, **options)
        chosen = max(tried, key=lambda name: tried[name].median_speedup)
    else:
        chosen = f"chain of {config.draft_length}"
        contenders, tried = {chosen: Contender(drafter, Fixed(config.draft_length))}, {}
    found = measure_speedups(
        target,
        {chosen: contenders[chosen]},
        prompts[: config.prompts],
        max_new_tokens=config.max_new_tokens,
        **options,
    )
    return Measured(chosen, str(contenders[chosen]), tried, found[chosen])


def measuring_estimate(
    target: TargetModel, drafter: Eagle3Drafter, prompts: Sequence[Sequence[int]], config: MeasureConfig
) -> str:
    """One line: how many tokens are decoded at most, how long the target alone would take over them, and the memory of weights, those
    packed for decoding, and libraries. Nothing is written."""
    trace = autoregressive_generate(target, prompts[0], max_new_tokens=32).trace
    sides = 0 if config.draft_length is not None else 1 + len(drafts(drafter, target.device))
    trials = sides * min(config.trial_prompts, len(prompts)) * config.trial_tokens
    tokens = trials + 2 * min(config.prompts, len(prompts)) * config.max_new_tokens
    minutes = tokens * trace.seconds / trace.tokens / 60
    weights = sum(weight.nbytes for model in (target.model, drafter) for weight in model.parameters())
    memory = 2 * weights / 1e9 + 1
    return f"measuring: at most {tokens:,} tokens, about {minutes:.1f} minutes, {memory:.1f} GB of memory, no disk"
