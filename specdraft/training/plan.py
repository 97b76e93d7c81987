"""What a training run is, but for the weights: its limits, which examples each step takes, and how its time passes.

The position in the data is a function of the step alone. This file knows nothing of models or losses but their configurations.

Letters: W processes, A micro-batches of a process in a step.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from specdraft.config import UserError
from specdraft.data.source import plan_rounds
from specdraft.training.objective import ObjectiveConfig
from specdraft.training.optim import OptimConfig

MOST_SEED = 2**31  # numpy takes 32 bits, and every process adds its number


@dataclass
class TrainConfig:
    """The run ends with the first of `epochs`, `max_steps` (optimiser steps) and `max_minutes` that is given; at least one is.
    max_minutes: budget with evaluations and interruptions' first parts counted; the schedule then follows the share used.
    tokens_per_batch: of one micro-batch of one process, padding included; accumulation: micro-batches of a process in a step.
    eval_every, save_every: steps between (0 = only at the end). keep: training states kept on disk, beside the best weights.
    mixed_precision: `bf16` is `no` on a processor without products in bf16. processes: how many must take part; None = as
    many as were launched. resume: go on where the output folder's run stopped."""

    epochs: int | None = 10
    max_steps: int | None = None
    max_minutes: float | None = None
    tokens_per_batch: int = 2048
    accumulation: int = 1
    mixed_precision: Literal["bf16", "no"] = "bf16"
    seed: int = 0
    eval_every: int = 200
    save_every: int = 200
    log_every: int = 10
    keep: int = 2
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = "none"
    processes: int | None = None
    resume: bool = True
    optim: OptimConfig = field(default_factory=OptimConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)

    def __post_init__(self) -> None:
        limits = {"epochs": self.epochs, "max_steps": self.max_steps, "max_minutes": self.max_minutes}
        if all(limit is None for limit in limits.values()):
            raise UserError("train: got no limit; give one of train.epochs, train.max_steps, train.max_minutes")
        required = {key: getattr(self, key) for key in ("tokens_per_batch", "accumulation", "log_every", "keep")}
        for key, value in {**limits, **required}.items():
            if value is not None and not value > 0:
                raise UserError(f"train.{key}: got {value}, allowed: above 0")
        if not 0 <= self.seed < MOST_SEED:
            raise UserError(f"train.seed: got {self.seed}, allowed: 0 to {MOST_SEED - 1}")


class Plan:
    """Which examples each step takes: the same on every process, a function of the arguments only.

    total_steps: of the run, None where only a time budget bounds it.
    """

    def __init__(self, lengths: Sequence[int], config: TrainConfig, processes: int):
        self.lengths, self.config, self.parts = lengths, config, processes * config.accumulation
        if len(lengths) < self.parts:
            raise UserError(
                f"training data: got {len(lengths)} examples with something to learn, a step needs at least {self.parts} "
                "(processes x train.accumulation); give more data, or lower train.accumulation"
            )
        by_epochs = None if config.epochs is None else sum(len(self.epoch(epoch)) for epoch in range(config.epochs))
        self.total_steps = min((n for n in (by_epochs, config.max_steps) if n is not None), default=None)

    def epoch(self, epoch: int) -> list[list[list[int]]]:
        """Steps of one epoch; a step is W * A batches, those of process 0 first; a batch is positions in the data."""
        config = self.config
        return plan_rounds(self.lengths, config.tokens_per_batch, config.seed, epoch, self.parts)

    def steps(self, start: int) -> Iterator[tuple[float, list[list[int]]]]:
        """(epochs done when the step is, its batches) from step number `start` on, without an end of its own."""
        number = 0
        for epoch in itertools.count():
            steps = self.epoch(epoch)
            for index, step in enumerate(steps):
                if number >= start:
                    yield epoch + (index + 1) / len(steps), step
                number += 1


class Clock:
    """Seconds of this run on this process: before = of its parts before an interruption; steps and evaluations apart."""

    def __init__(self) -> None:
        self.before, self.started = 0.0, time.perf_counter()
        self.in_steps, self.steps = 0.0, 0
        self.step_started: float | None = None  # of the running one
        self.first_guess = 0.0  # of a step's seconds, before any
        self.evaluation_seconds = 0.0  # of the last evaluation

    def elapsed(self) -> float:
        return self.before + time.perf_counter() - self.started

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        self.step_started = time.perf_counter()
        yield
        self.in_steps, self.steps, self.step_started = self.now_in_steps(), self.steps + 1, None

    def now_in_steps(self) -> float:
        """Seconds in training steps so far, the running one included."""
        running = 0.0 if self.step_started is None else time.perf_counter() - self.step_started
        return self.in_steps + running

    def step_seconds(self) -> float:
        return self.in_steps / self.steps if self.steps else self.first_guess


@dataclass(frozen=True)
class Pace:
    """Seconds that all processes agree on: since the start, of a step, of an evaluation."""

    elapsed: float
    step: float
    evaluation: float
