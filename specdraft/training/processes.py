"""Processes and signals: an Accelerator that is what the launcher was asked for, and stopping at a step's end.

accelerate owns devices and processes; here are the few combinations that it accepts and that silently train wrongly. This
file knows nothing of models or data.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from specdraft.config import UserError
from specdraft.provenance import has_bf16_products
from specdraft.training.optim import OptimConfig

# How long a collective may wait: one process measures the speedup, or answers its share longer than the others, while they
# wait at a barrier. torch's own limit of 10 minutes (NCCL) would end such a run after all the training.
WAIT = datetime.timedelta(hours=12)
FSDP_ON_CPU = (
    "launch: got FSDP on a CPU, where accelerate trains unsynchronised copies; use recipes/launch/cpu2.yaml, or GPUs"
)


def make_accelerator(mixed_precision: str, processes: int | None, tracker: str, output: Path) -> Accelerator:
    """The Accelerator of this process. `processes`: how many there must be (None = as many as were launched).

    Raises:
        UserError: fewer or more processes than asked for; FSDP2 on a CPU; a tracker that is not installed.
    """
    if tracker != "none" and importlib.util.find_spec(tracker) is None:
        raise UserError(f"train.tracker: {tracker} is not installed; pip install {tracker}, or give none")
    # Without a device accelerate sees no processes unless told `cpu`; DeepSpeed's own start needs it untold, and gloo named.
    no_device = not torch.accelerator.is_available()
    deepspeed = _flag("ACCELERATE_USE_DEEPSPEED")
    if no_device and _flag("ACCELERATE_USE_FSDP"):
        raise UserError(FSDP_ON_CPU)
    group = (
        InitProcessGroupKwargs("gloo", timeout=WAIT)
        if no_device and deepspeed
        else InitProcessGroupKwargs(timeout=WAIT)
    )
    handlers = [DistributedDataParallelKwargs(gradient_as_bucket_view=True), group]
    if no_device and not has_bf16_products("cpu"):
        mixed_precision = "no"
    accelerator = Accelerator(
        cpu=no_device and not deepspeed,
        mixed_precision="no"
        if deepspeed
        else mixed_precision,  # its bf16 mode has no fp32 weights: loop.py sets autocast
        log_with=None if tracker == "none" else tracker,
        project_dir=str(output),
        kwargs_handlers=handlers,
    )
    # Under ZeRO-3 accelerate has told transformers to shard every model that it loads; a target stays whole.
    if deepspeed:
        unset_hf_deepspeed_config()
    check_processes(accelerator, processes)
    return accelerator


def choose_optimizer(accelerator: Accelerator, config: OptimConfig) -> OptimConfig:
    """What `auto` means here. Raises UserError where the parallel scheme cannot run the optimiser."""
    is_sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    if config.name == "auto":
        return (
            replace(config, name="adamw", lr=config.head_lr or config.lr)
            if is_sharded
            else replace(config, name="muon")
        )
    if config.name == "muon" and is_sharded:
        raise UserError(
            f"optim.name: got muon under {accelerator.distributed_type.value}, which shards the matrices that muon must "
            "see whole; give adamw or auto, or launch with recipes/launch/ddp.yaml"
        )
    return config


def check_processes(accelerator: Accelerator, wanted: int | None) -> None:
    """Raises UserError where the processes that were started do not train together, or are not `wanted` many."""
    got, launched = accelerator.num_processes, int(os.environ.get("WORLD_SIZE", "1"))
    if got != launched:
        raise UserError(
            f"launch: {launched} processes were started but each trains alone; use a file of recipes/launch"
        )
    if accelerator.distributed_type == DistributedType.FSDP and accelerator.device.type == "cpu":
        raise UserError(FSDP_ON_CPU)
    if wanted is not None and got != wanted:
        raise UserError(
            f"train.processes: wanted {wanted}, got {got}; launch with torchrun --nproc-per-node {wanted}, or with a file of "
            "recipes/launch (accelerate's MULTI_CPU type starts one process, whatever num_processes says)"
        )


def _flag(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true", "yes")


class Interrupt:
    """Within the `with` block SIGINT and SIGTERM only set `signal`; the loop saves and stops at the next step's end.
    A second one of the same kind acts at once, as it would have without us."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signal = 0

    def __enter__(self) -> Interrupt:
        self._previous = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, self._previous[number])
