"""A whole training run on a tiny random target: a program for tests to start, stop and start again.

python tests/programs/tiny_training.py --output DIR --train.max-steps 12 --kill SIGKILL --kill-at 5 ...
"""

from __future__ import annotations

import os
import signal
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from specdraft.config import run_program
from specdraft.data.chat import Example
from specdraft.data.source import Online
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, new_drafter
from specdraft.testing import TINY_VOCAB, tiny_target
from specdraft.training.loop import Trainer
from specdraft.training.objective import ObjectiveConfig
from specdraft.training.plan import TrainConfig
from specdraft.training.processes import make_accelerator


def small_run() -> TrainConfig:
    return TrainConfig(
        max_steps=10,
        tokens_per_batch=128,
        mixed_precision="no",
        eval_every=4,
        save_every=3,
        log_every=1,
        objective=ObjectiveConfig(steps=3),
    )


@dataclass
class Config:
    """kill, kill_at: send this process that signal in the middle of that step (0 = never), if it is process kill_rank."""

    output: Path = Path("run")
    cache_bytes: int = 0
    kill: str = "SIGTERM"
    kill_at: int = 0
    kill_rank: int = 0
    train: TrainConfig = field(default_factory=small_run)


def tiny_examples(count: int, seed: int) -> list[Example]:
    """Random conversations of one or two turns, 12 to 60 tokens, of very different answer lengths."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        length = int(torch.randint(12, 60, (1,), generator=generator))
        start = int(torch.randint(2, length - 6, (1,), generator=generator))
        mask = torch.zeros(length, dtype=torch.bool)
        mask[start:] = True
        if length - start > 12:
            mask[start + 4 : start + 8] = False
        made.append(Example(str(number), torch.randint(3, TINY_VOCAB, (length,), generator=generator), mask))
    return made


def make_trainer(config: Config, accelerator: Accelerator) -> Trainer:
    target = tiny_target()
    torch.manual_seed(0)
    drafter = new_drafter(target, DrafterConfig(), HeadConfig(rank=8, init="svd"))
    states = Online(target, config.cache_bytes)
    train, held_out = tiny_examples(24, seed=1), tiny_examples(6, seed=2)
    identity = {"target": target.hash}
    trainer = Trainer(accelerator, drafter, target, states, train, held_out, config.train, config.output, identity)
    forward = trainer.model.forward

    def forward_or_die(*args):
        mine = trainer.rank == config.kill_rank
        if config.kill_at and mine and trainer.model.training and trainer.step == config.kill_at - 1:
            os.kill(os.getpid(), signal.Signals[config.kill])
        return forward(*args)

    trainer.model.forward = forward_or_die
    return trainer


def main(config: Config) -> None:
    train = config.train
    accelerator = make_accelerator(train.mixed_precision, train.processes, train.tracker, config.output)
    if accelerator.distributed_type != DistributedType.DEEPSPEED:  # whose own warnings are many
        warnings.simplefilter("error")
    trainer = make_trainer(config, accelerator)
    trainer.run()
    use(trainer.drafter)
    accelerator.end_training()


def use(drafter: Eagle3Drafter) -> None:
    """As the recipes do after training: whole plain parameters on every process, no hooks of a parallel scheme."""
    assert all(type(tensor) is torch.Tensor for tensor in drafter.state_dict().values())
    drafter.to(torch.bfloat16).eval()
    taps, ids = torch.zeros(1, 4, drafter.fc.in_features, dtype=torch.bfloat16), torch.ones(1, 4, dtype=torch.int64)
    with torch.no_grad():
        logits = drafter.lm_head.logits(drafter.unroll(taps, ids, ids[:, :1], 2))
    assert logits.isfinite().all()
    print(f"{len(drafter.state_dict())} parameters, usable")


if __name__ == "__main__":
    run_program(main, Config)
