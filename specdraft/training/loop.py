"""The training loop, on accelerate: steps, evaluation, best weights, logs, exact resume, time budgets, interruption.

A step's batches are planned for all processes and micro-batches together, so one process that accumulates twice and two
processes see the same global batch; every count that the loss is divided by is known from the masks before the step
starts, on every process, without communication. The position in the data is a function of the step alone.

**Resume** is exact (bit for bit on one process) where the schedule goes by steps and the hidden states are reproducible.
Under `max_minutes` the learning rate follows the clock: such a run goes on sensibly, but not to the same bits.

The loop knows the drafter, the target and the loss only through `Objective`. Letters: K steps of the unroll, W processes,
A micro-batches of a process in a step.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast, set_seed
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from specdraft.config import UserError, config_to_dict
from specdraft.data.chat import Example
from specdraft.data.source import HiddenStates, plan_batches
from specdraft.data.vocab import count_tokens
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.target import TargetModel
from specdraft.provenance import hash_tensors
from specdraft.training import checkpoint
from specdraft.training.metrics import Report, Window
from specdraft.training.objective import Objective, Rows, denominators, supervised_counts
from specdraft.training.optim import build_optimizers, schedule, set_learning_rate
from specdraft.training.plan import Clock, Pace, Plan, TrainConfig
from specdraft.training.processes import Interrupt, check_processes, choose_optimizer

DRAFTER = "drafter."  # the drafter's name in Objective's state
FREE = ("eval_every", "save_every", "log_every", "keep", "tracker", "processes", "resume")  # may change on resume


@dataclass
class TrainResult:
    """steps, epochs, tokens (prompt included), seconds: of the whole run, earlier parts included. best: step and figures of
    the best evaluation (those of `Report`); its weights are `checkpoint.best_weights(output)`. stopped_by: what ended the run."""

    steps: int
    epochs: float
    tokens: int
    seconds: float
    best: dict[str, Any]
    stopped_by: Literal["steps", "minutes"]


class Trainer:
    """One run. `run()` trains, and leaves the best weights in `drafter`, whole on every process."""

    def __init__(
        self,
        accelerator: Accelerator,
        drafter: Eagle3Drafter,
        target: TargetModel,
        states: HiddenStates,
        train: Sequence[Example],
        held_out: Sequence[Example],
        config: TrainConfig,
        output: Path,
        identity: dict[str, str],
    ):
        """states: gives hidden states of both sets of examples. identity: what must be the same for a run to be resumed, by
        name (hashes of the target, the vocabulary map ...); the examples and the configuration are added here.

        Raises:
            UserError: nothing to learn or to evaluate on; an optimiser that the parallel scheme cannot run.
        """
        check_processes(accelerator, config.processes)
        optim = choose_optimizer(accelerator, config.optim)
        self.accelerator, self.drafter, self.states = accelerator, drafter, states
        self.config, self.output = config, output
        self.train = supervised(train, config.objective.steps, "training data")
        self.held_out = supervised(held_out, config.objective.steps, "held-out data")
        self.world, self.rank = accelerator.num_processes, accelerator.process_index
        if len(self.held_out) < self.world:
            raise UserError(
                f"held-out data: got {len(self.held_out)} examples for {self.world} processes, allowed: one for each or more; give more "
                "prompts, or launch fewer processes"
            )
        self.plan = Plan([len(example.input_ids) for example in self.train], config, self.world)
        self.counts = supervised_counts([example.loss_mask for example in self.train], config.objective.steps)
        data = {"training data": _hash(self.train), "held-out data": _hash(self.held_out)}
        self.identity = {**identity, **data, "processes": str(self.world), **_settings(config)}
        head = list(drafter.lm_head.parameters())
        body = [parameter for name, parameter in drafter.named_parameters() if not name.startswith("lm_head.")]
        self.state_bytes = 12 * sum(parameter.numel() for parameter in head + body)  # weights and two moments, fp32
        _configure_deepspeed(accelerator, config)
        for parameter in drafter.parameters() if self.world > 1 else ():
            broadcast(
                parameter.data
            )  # factors of states that were rounded otherwise may differ, and shards must be of one drafter
        objective = Objective(drafter, target, config.objective, count_tokens(self.train, target.vocab_size))
        self.prefix = "" if objective.sampler is None else "sampled_"  # of what is logged of training steps
        self.model, *self.optimizers = accelerator.prepare(objective, *build_optimizers(body, head, optim))
        if isinstance(self.model, DistributedDataParallel):
            self.model.broadcast_buffers = False  # constants: rotary tables and vocabulary ids
        self.step, self.tokens, self.epochs = 0, 0, 0.0
        self.evaluated_at = self.saved_at = -1  # steps
        self.best: dict[str, Any] | None = None

    # --- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> TrainResult:
        """Train to the end of the plan or of the budget.

        Raises:
            SystemExit: after a checkpoint, with code 130 or 143, on SIGINT or SIGTERM.
            UserError: an output folder with another run in it; a loss that is not finite; a full disk.
        """
        set_seed(self.config.seed, device_specific=True)
        self.clock, self.pace = Clock(), None
        self._resume()
        self._start_logs()
        bar = tqdm(total=100, bar_format=BAR, disable=not self.accelerator.is_main_process, desc="training")
        try:
            with Interrupt() as interrupt, bar:
                stopped_by = self._steps(interrupt, bar)
        finally:
            for tracker in self.accelerator.trackers:
                tracker.finish()
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # then its hooks have nothing to do any more
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            self.model.destroy()  # takes its hooks off
        set_weights(self.drafter, checkpoint.best_weights(self.output), self.accelerator.device)
        return TrainResult(self.step, self.epochs, self.tokens, self.clock.elapsed(), self.best, stopped_by)

    def _steps(self, interrupt: Interrupt, bar: tqdm) -> Literal["steps", "minutes"]:
        config = self.config
        if self.step == 0 and config.eval_every:
            self._evaluate()
        self._agree(interrupt)
        bar.initial = bar.n = 100 * self._progress()
        for epochs, batches in self.plan.steps(self.step):
            stopped_by = self._finished()
            if stopped_by:
                break
            bar.update(100 * self._progress() - bar.n)
            set_learning_rate(self.optimizers, schedule(self._progress(), config.optim.warmup, config.optim.floor))
            with self.clock.stepping():
                self._train_step(batches)
                self.step, self.epochs = self.step + 1, epochs
                if self._due(config.log_every):
                    self._log(bar)
            if self._due(config.eval_every):
                self._evaluate()
            stop_signal = self._agree(interrupt)
            if self._due(config.save_every) or stop_signal:
                self._log(bar)  # which refuses weights that come of a broken loss, and leaves no step out of the logs
                self._save()
            if stop_signal:
                self.accelerator.print(f"stopped by signal {stop_signal} after step {self.step}; run again to go on")
                raise SystemExit(128 + stop_signal)
        self._log(bar)
        bar.update(100 - bar.n)
        if self.evaluated_at != self.step:
            self._evaluate()
        if self.saved_at != self.step:
            self._save()
        if stop_signal := self._agree(interrupt, is_last=True):
            self.accelerator.print(f"stopped by signal {stop_signal} at the end of training; run again to go on")
            raise SystemExit(128 + stop_signal)
        return stopped_by

    def _train_step(self, batches: list[list[int]]) -> None:
        """One optimiser step. batches: the W * A of this step; ours are A of them."""
        in_step = [i for batch in batches for i in batch]
        share = denominators(self.counts[in_step], self.config.objective.mean)
        mine = batches[self.rank * self.config.accumulation : (self.rank + 1) * self.config.accumulation]
        for number, batch in enumerate(mine, start=1):
            self.accelerator.sync_gradients = number == len(mine)
            with contextlib.nullcontext() if self.accelerator.sync_gradients else self.accelerator.no_sync(self.model):
                loss, sums = self._forward([self.train[i] for i in batch], share)
                self.accelerator.backward(loss * self.world)  # gradients are averaged over processes, the loss is a sum
            self.window.add(loss, sums)
        if self.config.optim.clip:
            self.grad_norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.optim.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.tokens += sum(self.plan.lengths[i] for i in in_step)

    def _forward(self, examples: list[Example], share: Tensor) -> tuple[Tensor, Tensor]:
        return forward(self.model, self.states, examples, share, self.config.objective.steps, self.accelerator.device)

    def _evaluate(self) -> None:
        """Simulated decoding of the held-out examples; the best weights so far are kept."""
        start = time.perf_counter()
        report = simulate(self.accelerator, self.model, self.states, self.held_out, self.config)
        self.evaluated_at = self.step
        self._write_log({"step": self.step, "epoch": round(self.epochs, 4), **report.as_dict("eval_")})
        if self.best is None or report.tau > self.best["tau"]:
            self.best = {"step": self.step, "epoch": self.epochs, **report.as_dict()}
            checkpoint.save_best(self.output, self.accelerator, self.model, DRAFTER, self.best)
        self.clock.evaluation_seconds = time.perf_counter() - start

    # --- time, schedule, agreement between processes ------------------------------------------------------------------

    def _finished(self) -> Literal["steps", "minutes"] | None:
        if self.plan.total_steps is not None and self.step >= self.plan.total_steps:
            return "steps"
        if self.config.max_minutes is not None and self.pace.elapsed + self.pace.step > self._training_seconds():
            return "minutes"
        return None

    def _progress(self) -> float:
        """Share of the run done at the middle of the coming step; where steps and minutes both bound it, of the nearer end."""
        by_steps = 0.0 if self.plan.total_steps is None else (self.step + 0.5) / self.plan.total_steps
        if self.config.max_minutes is None:
            return by_steps
        return max(by_steps, (self.pace.elapsed + self.pace.step / 2) / self._training_seconds())

    def _training_seconds(self) -> float:
        """The budget less the evaluation at its end."""
        return max(self.config.max_minutes * 60 - self.pace.evaluation, 1e-3)

    def _agree(self, interrupt: Interrupt, is_last: bool = False) -> int:
        """The signal that any process got (0 = none); and the slowest process's times become those of all. On an accelerator this
        waits for the device, so there it happens at the steps that log, and where `is_last`."""
        mine = (float(interrupt.signal), self.clock.elapsed(), self.clock.step_seconds(), self.clock.evaluation_seconds)
        if self.world > 1:
            waits = self.accelerator.device.type != "cpu"
            if waits and self.pace is not None and not is_last and not self._due(self.config.log_every):
                return 0
            mine = self.accelerator.reduce(torch.tensor(mine, device=self.accelerator.device), "max").tolist()
        self.pace = Pace(*mine[1:])
        return int(mine[0])

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    # --- disk and logs ------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "epochs": self.epochs,
            "seconds": [self.clock.elapsed(), self.pace.step, self.pace.evaluation],
            "evaluated_at": self.evaluated_at,
            "identity": self.identity,
        }
        checkpoint.save_state(self.output, self.accelerator, self.step, state, self.state_bytes)
        if self.accelerator.is_main_process:
            checkpoint.rotate(self.output, self.config.keep)
        self.accelerator.wait_for_everyone()
        self.saved_at = self.step

    def _resume(self) -> None:
        found = checkpoint.newest_state(self.output)
        if found is None:
            return
        folder, state = found
        if not self.config.resume:
            raise UserError(f"{self.output}: holds a run already; give another output folder, or leave train.resume on")
        for name in sorted(self.identity.keys() | state["identity"].keys()):
            was, now = state["identity"].get(name), self.identity.get(name)
            if was != now:
                fix = "give the old value, or another output folder"
                raise UserError(f"{folder}: was made with {name} = {was}, got {now}; {fix}")
        checkpoint.load_state(folder, self.accelerator)
        self.step, self.tokens, self.epochs = state["step"], state["tokens"], state["epochs"]
        self.evaluated_at, self.saved_at = state["evaluated_at"], state["step"]
        self.best = checkpoint.best_state(self.output)
        if self.best is None:  # its file was lost: evaluate again
            self.evaluated_at = -1
        self.clock.before, self.clock.first_guess, self.clock.evaluation_seconds = state["seconds"]
        self.accelerator.print(f"going on from {folder}, step {self.step}")

    def _start_logs(self) -> None:
        """metrics.jsonl keeps what was logged up to the step that we go on from."""
        self.window = Window(self.config.objective.steps, self.accelerator.device)
        self.grad_norm: Tensor | float = math.nan
        self.window_start = (self.step, self.tokens, self.clock.in_steps)
        if self.accelerator.log_with:
            flat = {key: value for key, value in _flatten(config_to_dict(self.config)).items() if value is not None}
            self.accelerator.init_trackers("specdraft", config=flat)
        self.log_path = self.output / "metrics.jsonl"
        if self.accelerator.is_main_process:
            self.output.mkdir(parents=True, exist_ok=True)
            lines = self.log_path.read_text().splitlines(keepends=True) if self.log_path.exists() else []
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self.step]
            self.log_path.write_text("".join(kept if self.step else []))

    def _log(self, bar: tqdm) -> None:
        """Report the steps since the last report, if there are any; the one place where training waits for the device.

        Raises UserError where the loss is not finite."""
        step, tokens, seconds = self.window_start
        if step == self.step:
            return
        objective, report = self.window.reduce(self.accelerator)
        self.window_start = (self.step, self.tokens, self.clock.now_in_steps())
        self.window = Window(self.config.objective.steps, self.accelerator.device)
        loss = objective / (self.step - step)
        rate = (self.tokens - tokens) / (self.window_start[2] - seconds)
        if not math.isfinite(loss):
            raise UserError(
                f"training: the loss is {loss} at step {self.step}; lower optim.lr, or look for broken data"
            )
        figures = {"loss": loss, "lr": self.optimizers[-1].param_groups[0]["lr"], "grad_norm": float(self.grad_norm)}
        pace = {"tokens_per_second": rate, "seconds": self.clock.elapsed()}
        self._write_log({"step": self.step, "epoch": self.epochs, **figures, **report.as_dict(self.prefix), **pace})
        best = "" if self.best is None else f", held-out tau {self.best['tau']:.2f}"
        tau = f"{self.prefix.replace('_', ' ')}tau {report.tau:.2f}"
        bar.set_postfix_str(f"step {self.step}, {rate:,.0f} tok/s, loss {loss:.3f}, {tau}{best}")

    def _write_log(self, record: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            with open(self.log_path, "a") as file:
                file.write(json.dumps(record) + "\n")
        values = _flatten(record)
        self.accelerator.log(values, step=values.pop("step"))


def forward(
    model: nn.Module,
    states: HiddenStates,
    examples: list[Example],
    share: Tensor,
    steps: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """What an `Objective`, wrapped or not, says of these examples. share [K]: what each step's loss is divided by."""
    batch = states.batch(examples).to(device)
    rows = Rows.from_masks([example.loss_mask for example in examples], steps).to(device)
    is_known = batch.loss_mask.any(1)[
        rows.sequence
    ]  # the source empties the mask of an example whose states are not finite
    rows = replace(rows, valid=rows.valid & is_known)
    return model(batch.taps, batch.last, batch.input_ids, rows, share.to(device, non_blocking=True))


@torch.no_grad()
def simulate(
    accelerator: Accelerator,
    model: nn.Module,
    states: HiddenStates,
    held_out: Sequence[Example],
    config: TrainConfig,
) -> Report:
    """Simulated decoding: an `Objective`, wrapped or not, on held-out examples that each have a supervised row, a share of them on
    every process. The model is in training mode afterwards."""
    model.eval()
    window = Window(config.objective.steps, accelerator.device)
    lengths = [len(example.input_ids) for example in held_out]
    ones = torch.ones(config.objective.steps)
    rank, world = accelerator.process_index, accelerator.num_processes
    for batch in plan_batches(lengths, config.tokens_per_batch, 0, 0, rank, world):
        examples = [held_out[i] for i in batch]
        window.add(*forward(model, states, examples, ones, config.objective.steps, accelerator.device))
    model.train()
    _, report = window.reduce(accelerator)
    return report


def set_weights(module: nn.Module, weights: dict[str, Tensor], device: torch.device | str) -> None:
    """New parameters for all of `weights`: in the place of FSDP2's shards, into which `load_state_dict` cannot copy."""
    for name, tensor in weights.items():
        owner, _, own_name = name.rpartition(".")
        setattr(module.get_submodule(owner), own_name, nn.Parameter(tensor.to(device)))


def supervised(examples: Sequence[Example], steps: int, what: str) -> list[Example]:
    """Those with at least one supervised row. Raises UserError where none is left."""
    kept = [example for example in examples if supervised_counts([example.loss_mask], steps)[0, 0]]
    if not kept:
        raise UserError(
            f"{what}: none of {len(examples)} examples has two assistant tokens in a row, so there is nothing to learn; "
            "check the loss masks (data_prep shows one rendered example)"
        )
    return kept


def _hash(examples: Sequence[Example]) -> str:
    return hash_tensors({str(i): torch.stack([e.input_ids, e.loss_mask.long()]) for i, e in enumerate(examples)})


def _settings(config: TrainConfig) -> dict[str, str]:
    """The settings that a resumed run must share with the interrupted one, by name."""
    flat = _flatten(config_to_dict(config))
    return {f"train.{key}": str(value) for key, value in flat.items() if key not in FREE}


def _configure_deepspeed(accelerator: Accelerator, config: TrainConfig) -> None:
    """DeepSpeed clips, divides and autocasts by itself, and wants a batch size; ours are counted in tokens, so it is told 1."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        settings |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
        settings["gradient_clipping"] = config.optim.clip
        settings["torch_autocast"] = {"enabled": config.mixed_precision == "bf16", "dtype": "bfloat16"}


def _flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries and lists -> {"a.b": ..., "a.0": ...}"""
    if not isinstance(values, dict | list):
        return {prefix: values}
    items = values.items() if isinstance(values, dict) else enumerate(values)
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


BAR = "{desc}: {percentage:3.0f}% |{bar}| {elapsed}<{remaining}{postfix}"
