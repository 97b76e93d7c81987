"""What every training job starts with: prompts -> answers of the target -> its hidden states -> a Trainer over them.

Each step prints what it will take before it starts, and leaves its result on disk, so that the same command goes on where an
interrupted one stopped. It knows nothing of how the steps work, nor of what is trained.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from specdraft import summary
from specdraft.config import UserError, require_positive
from specdraft.data.chat import AnswerRow, Example, answers_to_examples, check_masks, read_answers
from specdraft.data.shards import Shards
from specdraft.data.source import HiddenStates, Online
from specdraft.data.tasks import Prompt, builtin_prompts, read_prompts, split_held_out
from specdraft.decoding.answers import (
    AnswerConfig,
    answer_prompts,
    answers_key,
    answers_to,
    estimate_answers,
    minutes_spent,
    prompts_hash,
    read_parts,
)
from specdraft.losses import LOSSES, LossConfig
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.target import TargetModel
from specdraft.provenance import hash_json, read_json, require_disk, write_json
from specdraft.training.loop import Trainer
from specdraft.training.objective import ObjectiveConfig, Rows, supervised_counts
from specdraft.training.optim import OptimConfig
from specdraft.training.plan import TrainConfig
from specdraft.training.processes import make_accelerator

FITTED_TOKENS = 16384  # at most, and
FITTED_EXAMPLES = 256  # about as many, for what is fitted before training
CHOSEN = "answers.json"  # in a run's folder: which answers it is trained on


def a_few_minutes() -> AnswerConfig:
    """Answers for half an hour. After five sampled tokens the target goes on as it does at T = 0: different answers to one prompt, and
    the text that is drafted for (docs/log.md)."""
    return AnswerConfig(max_new_tokens=192, temperature=1.0, greedy_after=5, max_minutes=12)


def half_an_hour() -> TrainConfig:
    """What fits into half an hour on two CPU cores, answers and measuring included (docs/log.md). Short drafts pay most there, so
    the first drafted token weighs most."""
    loss = LossConfig(terms={name: float(name == "lk_hybrid") for name in LOSSES}, decay=0.3)
    objective = ObjectiveConfig(steps=2, sampled_vocab=8192, loss=loss)
    optim = OptimConfig("auto", lr=2e-3, head_lr=1e-3)
    return TrainConfig(epochs=12, tokens_per_batch=2048, eval_every=0, save_every=300, objective=objective, optim=optim)


@dataclass
class JobConfig:
    """What every job has that trains on a target's own answers.   name: of the run; everything goes to output/name.   target:
    `default` (SmolLM2-135M-Instruct), a folder, a GGUF file or a Hub id.   revision: of a Hub id; None = its newest, which may change while
    the job runs.   prompts: `builtin`, or a JSONL file.   max_prompts: the first n of them; None = all.   answers_each: answers to a
    training prompt, each sampled from a stream of its own.   minutes: of answers and training together: training has what the answers
    leave; None = no such limit.   max_length: tokens of a training sequence.   states: None = run the target; a folder that
    data_prep/extract_hidden_states.py wrote = train on its answers to `prompts` and on its hidden states, answer nothing.   cache_gb:
    memory, and disk, for the target's hidden states: what fits is made once, with the answers.   threads: of a process on a CPU;
    None = all physical cores, divided by the processes of this machine."""

    name: str = "slimspec"
    output: Path = Path("runs")
    target: str = "default"
    revision: str | None = None
    prompts: str = "builtin"
    max_prompts: int | None = None
    answers_each: int = 2
    minutes: float | None = 24
    max_length: int = 1024
    states: Path | None = None
    cache_gb: float = 6.0
    threads: int | None = None
    answers: AnswerConfig = field(default_factory=a_few_minutes)
    train: TrainConfig = field(default_factory=half_an_hour)

    def __post_init__(self) -> None:
        require_positive({key: getattr(self, key) for key in ("max_prompts", "max_length", "threads", "answers_each")})
        if not self.target:
            raise UserError("target: got an empty name, allowed: default, a model folder, a GGUF file or a Hub id")
        if self.answers_each > 1 and self.answers.sampling.greedy:
            raise UserError(
                f"answers_each: got {self.answers_each} at answers.temperature 0, where all are equal; give a temperature, such as 0.7"
            )
        if self.minutes is not None and not (self.answers.max_minutes or math.inf) < self.minutes < math.inf:
            raise UserError(
                f"minutes: got {self.minutes:g} for answers and training together, allowed: None, or more than answers.max_minutes, which "
                f"is {self.answers.max_minutes}"
            )
        if not 0 <= self.cache_gb < math.inf:
            raise UserError(f"cache_gb: got {self.cache_gb}, allowed: 0 (no cache) or more")
        if Path(self.name).name != self.name or self.name in ("", "..", "answers"):
            raise UserError(
                f"name: got {self.name!r}, allowed: the name of a folder in {self.output}, not a path, not 'answers'"
            )


@dataclass
class Job:
    """What a job works with.   states: of the target for both sets of examples.   rows: all answers, by prompt id.   asked: hash of the
    prompts and of how they are answered.   minutes: that answers took, in all runs; answering: seconds of it in this one."""

    accelerator: Accelerator
    target: TargetModel
    states: HiddenStates
    rows: dict[str, AnswerRow]
    asked: str
    held_out_rows: list[AnswerRow]
    train: list[Example]
    held_out: list[Example]
    minutes: float
    answering: float


def start(config: JobConfig, tap_layers: tuple[int, ...] | None = None) -> tuple[Accelerator, TargetModel]:
    """This process's threads, seed and Accelerator, and the target on its device. tap_layers: None = the default ones."""
    train, folder = config.train, config.output / config.name
    accelerator = make_accelerator(train.mixed_precision, train.processes, train.tracker, folder)
    if accelerator.device.type == "cpu":
        torch.set_num_threads(config.threads or default_threads())
    set_seed(train.seed)
    options = {"device": str(accelerator.device), "tap_layers": tap_layers, "revision": config.revision}
    dtype = torch.bfloat16 if train.mixed_precision == "bf16" else torch.float32
    return accelerator, TargetModel.load(config.target, dtype=dtype, **options)


def default_threads() -> int:
    """`accelerate launch` sets OMP_NUM_THREADS=1 where nobody chose, which would halve the speed of two cores."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux: a container or `taskset` may leave fewer
        cores = min(cores, len(os.sched_getaffinity(0)))
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def prepare(accelerator: Accelerator, target: TargetModel, config: JobConfig, needed: int, count: int) -> Job:
    """Answers to the prompts of `config` as examples, and where their hidden states come from. needed, count: held-out prompts at least,
    and at most."""
    train_prompts, held_out_prompts = choose_prompts(config, needed, count)
    prompts = held_out_prompts + train_prompts
    asked = hash_json([answers_folder(target, config).name, prompts_hash(prompts)])
    states: HiddenStates
    minutes = answering = 0.0
    if config.states is None:
        states = Online(target, cache_bytes=int(config.cache_gb * 1e9))
        chosen = read_chosen(config, asked)
        answering = time.perf_counter()
        rows = answer(accelerator, target, states, prompts, config, chosen and chosen["ids"])
        answering = time.perf_counter() - answering
        minutes = chosen["minutes"] if chosen else minutes_spent(answers_folder(target, config), prompts)
    else:
        states = Shards(config.states, target)
        rows = stored_answers(target, config, train_prompts, held_out_prompts)
        accelerator.print(f"answers and hidden states: {len(rows)} of {config.states}")
    held_out_rows = in_order(rows, held_out_prompts)
    train, account = answers_to_examples(in_order(rows, train_prompts), config.max_length)
    held_out, _ = answers_to_examples(held_out_rows, config.max_length)
    accelerator.print(f"training answers: {account}")
    check_masks(train, target.tokenizer)
    if isinstance(states, Shards):
        states.require([*train, *held_out])
    return Job(accelerator, target, states, rows, asked, held_out_rows, train, held_out, minutes, answering)


def choose_prompts(config: JobConfig, needed: int, count: int) -> tuple[list[Prompt], list[Prompt]]:
    """(for training, held out): the held-out part of a given set of prompts is always the same; `count` of it are answered at most,
    `needed` at least."""
    prompts = builtin_prompts() if config.prompts == "builtin" else read_prompts(Path(config.prompts))
    train, held_out = split_held_out(prompts[: config.max_prompts])
    if not train or len(held_out) < needed:
        raise UserError(
            f"prompts: got {len(train)} for training and {len(held_out)} held out of {config.prompts}, allowed: at least 1 and {needed}; "
            "give more prompts"
        )
    numbers = range(
        2, config.answers_each + 1
    )  # one behind the other: so that the target reads a prompt once for all its answers
    each = [[prompt, *(replace(prompt, id=f"{prompt.id}#{n}") for n in numbers)] for prompt in train]
    return [prompt for same in each for prompt in same], held_out[:count]


def read_chosen(config: JobConfig, asked: str) -> dict[str, Any] | None:
    """Which answers training was begun with, by an earlier run of the command: `ids` of their prompts, and the `minutes` that they took.
    Other runs may have added more since. None where it was not begun. Raises UserError where it was begun on others."""
    path = config.output / config.name / CHOSEN
    if not path.exists():
        return None
    found = read_json(path, "answers", "remove it, and all answers are used", ("asked", "ids", "minutes"))
    if found["asked"] != asked:
        raise UserError(
            f"name: got {config.name}, whose training was begun with other prompts, or other settings of the answers; give the same ones, "
            f"another --name, or remove {path.parent}"
        )
    return found


def answer(
    accelerator: Accelerator,
    target: TargetModel,
    states: Online,
    prompts: Sequence[Prompt],
    config: JobConfig,
    chosen: Sequence[str] | None = None,
) -> dict[str, AnswerRow]:
    """The target's answers by prompt id, and its states on the way; first prompts first, as many as the time allows. Every process
    answers its share; what any earlier run answered is reused, and so are the states that this process kept. chosen: ids of the prompts
    whose answers are known and wanted, and no others."""
    folder = answers_folder(target, config)
    taps = "-".join(map(str, target.tap_layers))
    kept = folder / f"states-{taps}-{accelerator.process_index:05}"
    part = folder / f"part-{accelerator.process_index:05}.jsonl"
    known = read_parts(target, folder, prompts)
    accelerator.wait_for_everyone()  # what each process answers follows from what all of them have read
    missing = [prompt for prompt in prompts if prompt.id not in known]
    accelerator.print(f"answers: {len(prompts)} prompts, {len(known)} answered already ({folder})")
    if chosen is not None:
        if lost := set(chosen) - known.keys():
            raise UserError(
                f"answers {folder}: {len(lost)} are gone that training was begun with; bring them back, or give another --name"
            )
        known, missing = {id_: known[id_] for id_ in chosen}, []
        accelerator.print(f"answers: the {len(known)} that training was begun with")
    states.load(kept, (row.example() for row in known.values()))
    if missing:
        kept_bytes = states_room(target, states, missing, config)
        require_disk(
            folder, 20 * len(missing) * config.answers.max_new_tokens + kept_bytes, "answers and hidden states"
        )
        accelerator.print(estimate_answers(target, missing, config.answers, part, prompts))
        if kept_bytes:
            accelerator.print(
                f"hidden states: up to {kept_bytes / 1e9:.1f} GB more of memory, and of disk, are kept for training"
            )
    mine = missing[accelerator.process_index :: accelerator.num_processes]
    if mine:
        keep, held = states.remember if states.cache_bytes else None, states.used_bytes
        try:
            answer_prompts(target, mine, part, config.answers, keep, prompts)
        finally:  # also when interrupted: the answers so far are on disk, and their states belong to them
            if states.used_bytes > held:
                states.save(kept)
    accelerator.wait_for_everyone()
    return read_parts(target, folder, prompts) if missing else known


def states_room(target: TargetModel, states: Online, prompts: Sequence[Prompt], config: JobConfig) -> int:
    """Bytes that the hidden states kept with the answers to these prompts may take, at most."""
    per_token = (len(target.tap_layers) + 1) * target.hidden_size * target.dtype.itemsize
    return min(states.cache_bytes - states.used_bytes, len(prompts) * config.max_length * per_token)


def answers_folder(target: TargetModel, config: JobConfig) -> Path:
    key = hash_json(answers_key(target, config.answers))
    return config.output / "answers" / f"{Path(target.name).name}-{key}"


def stored_answers(
    target: TargetModel, config: JobConfig, train: Sequence[Prompt], held_out: Sequence[Prompt]
) -> dict[str, AnswerRow]:
    """Answers that lie beside stored states, by prompt id. Raises UserError where they are not those of the prompts."""
    path = config.states / "answers.jsonl"
    rows = answers_to(target, read_answers(path), [*train, *held_out])
    found = [sum(prompt.id in rows for prompt in part) for part in (train, held_out)]
    if not all(found):
        raise UserError(
            f"states {path}: got answers to {found[0]} of {len(train)} training and {found[1]} of {len(held_out)} held-out prompts of "
            f"{config.prompts}, allowed: at least 1 of each; give the prompts that the states were made from (--prompts)"
        )
    return rows


def in_order(rows: dict[str, AnswerRow], prompts: Sequence[Prompt]) -> list[AnswerRow]:
    """The answers to those of `prompts` that were answered."""
    return [rows[prompt.id] for prompt in prompts if prompt.id in rows]


def make_trainer(job: Job, drafter: Eagle3Drafter, config: JobConfig, identity: dict[str, str]) -> Trainer:
    """A Trainer of the drafter's parameters that require a gradient; prints what training will take. identity: see Trainer. From now on
    the run's answers are settled."""
    folder, accelerator, target = config.output / config.name / "training", job.accelerator, job.target
    train = training_limits(config, job.minutes)
    trainer = Trainer(accelerator, drafter, target, job.states, job.train, job.held_out, train, folder, identity)
    if accelerator.is_main_process and config.states is None:
        write_json(folder.with_name(CHOSEN), {"asked": job.asked, "minutes": job.minutes, "ids": list(job.rows)})
    held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    require_disk(folder, max(0, (train.keep + 2) * trainer.state_bytes - held), "training states")
    cache_gb = config.cache_gb if config.states is None else None
    accelerator.print(summary.training_estimate(target, drafter, job.train, train, cache_gb))
    return trainer


def training_limits(config: JobConfig, spent: float) -> TrainConfig:
    """Its training, within the minutes that are left when answers took `spent`."""
    train = config.train
    if config.minutes is None:
        return train
    left = config.minutes - min(
        spent, config.answers.max_minutes
    )  # another run may have spent more on the same answers
    return replace(train, max_minutes=left if train.max_minutes is None else min(left, train.max_minutes))


def spread(train: list[Example]) -> list[Example]:
    """Some of the examples, drawn from all of them: what stands together may be answers to one prompt, or on one topic."""
    return random.Random(0).sample(train, min(len(train), FITTED_EXAMPLES))


def head_features(states: HiddenStates, train: list[Example]) -> torch.Tensor:
    """Last states of the target [N, H] from which supervised tokens come: what a whitened head is fitted on. Examples whose states are not
    finite have an empty mask; training counts and reports them."""
    found, count = [], 0
    for example in spread(train):
        batch = states.batch([example])
        found.append(batch.last[:, :-1][batch.loss_mask[:, 1:]])
        count += len(found[-1])
        if count >= FITTED_TOKENS:
            break
    return torch.cat(found)


def read_text(states: HiddenStates, train: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps [N, A*H] and tokens [N] of some examples, prompts and all: what a copying head is fitted on."""
    taps, tokens, count = [], [], 0
    for example in spread(train):
        batch = states.batch([example])
        if not batch.loss_mask.any():  # its states are not finite
            continue
        taps.append(batch.taps[0].float())
        tokens.append(batch.input_ids[0])
        count += len(tokens[-1])
        if count >= FITTED_TOKENS:
            break
    if not tokens:
        raise UserError(
            f"hidden states: none of {len(train)} examples has finite ones; look for a broken target, or a dtype that overflows"
        )
    return torch.cat(taps), torch.cat(tokens)


@torch.no_grad()
def head_inputs(drafter: Eagle3Drafter, job: Job, steps: int) -> torch.Tensor:
    """What the drafter's head reads [N, H], normed, at the supervised rows of some training examples, all K steps of the unroll."""
    found, count = [], 0
    for example in spread(job.train):
        batch = job.states.batch([example])
        if not supervised_counts([batch.loss_mask[0].cpu()], steps)[0, 0]:
            continue
        rows = Rows.from_masks([batch.loss_mask[0].cpu()], steps).to(batch.taps.device)
        hidden = drafter.unroll(batch.taps, batch.input_ids, rows.index, steps)  # [K, 1, M, H]
        found.append(hidden.flatten(1, 2)[:, rows.slot][rows.valid].float())
        count += len(found[-1])
        if count >= FITTED_TOKENS:
            break
    return torch.cat(found)
