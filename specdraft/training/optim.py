"""Optimisers, parameter groups and the learning-rate schedule.

AdamW for everything, or Muon for the body's matrices and AdamW for the rest. The schedule is a pure function of the share
of the run that is done, so there is nothing to save and nothing to restart wrongly on resume. This file knows parameters
by shape and by whether they belong to the head; it knows nothing of losses, data or processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from specdraft.config import UserError


@dataclass
class OptimConfig:
    """lr: peak rate of the body; head_lr: of the head, None = lr. weight_decay: of matrices only, never of norms.
    warmup: share of the run over which the rate rises from zero; then a cosine down to `floor` x peak.
    clip: largest norm of the whole gradient (0 = no clipping). betas, eps: AdamW's; momentum: Muon's.
    Muon steps are scaled to the RMS of AdamW steps (arXiv 2502.16982), so lr and weight_decay mean the same for both.
    name `auto`: Muon, or AdamW at the head's rate where processes share matrices (FSDP, DeepSpeed), which Muon must see whole."""

    name: Literal["adamw", "muon", "auto"] = "adamw"
    lr: float = 1e-3
    head_lr: float | None = None
    weight_decay: float = 0.0
    warmup: float = 0.03
    floor: float = 0.0
    clip: float = 0.5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.95

    def __post_init__(self) -> None:
        positive = {"lr": self.lr, "eps": self.eps} | ({} if self.head_lr is None else {"head_lr": self.head_lr})
        for key, value in positive.items():
            if not value > 0:
                raise UserError(f"optim.{key}: got {value}, allowed: above 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optim.betas: got {self.betas}, allowed: two numbers from 0 to below 1")
        shares = {"warmup": self.warmup, "floor": self.floor, "momentum": self.momentum}
        for key, value in shares.items():
            if not 0 <= value <= 1:
                raise UserError(f"optim.{key}: got {value}, allowed: 0 to 1")
        if self.weight_decay < 0 or self.clip < 0:
            raise UserError(f"optim.weight_decay, optim.clip: got {self.weight_decay}, {self.clip}, allowed: 0 or more")


def build_optimizers(
    body: Iterable[nn.Parameter], head: Iterable[nn.Parameter], config: OptimConfig
) -> list[Optimizer]:
    """One optimiser, or two for Muon, over the trainable parameters of the body and of the head.

    The parameters are the fp32 master copies; autocast makes the low-precision ones on the fly. Each group carries its
    peak rate as `peak_lr`.
    """
    body = [parameter for parameter in body if parameter.requires_grad]
    head = [parameter for parameter in head if parameter.requires_grad]
    assert all(parameter.dtype == torch.float32 for parameter in body + head), "master weights are fp32"
    matrices = [parameter for parameter in body if parameter.ndim >= 2]
    vectors = [parameter for parameter in body if parameter.ndim < 2]
    head_lr = config.lr if config.head_lr is None else config.head_lr
    adamw_groups = [_group(vectors, config.lr, 0.0), _group(head, head_lr, config.weight_decay)]
    optimizers: list[Optimizer] = []
    if config.name == "muon" and matrices:
        groups = [_group(matrices, config.lr, config.weight_decay)]
        optimizers.append(torch.optim.Muon(groups, momentum=config.momentum, adjust_lr_fn="match_rms_adamw"))
    else:
        adamw_groups.insert(0, _group(matrices, config.lr, config.weight_decay))
    adamw_groups = [group for group in adamw_groups if group["params"]]
    optimizers.append(torch.optim.AdamW(adamw_groups, betas=config.betas, eps=config.eps, fused=True))
    return optimizers


def schedule(progress: float, warmup: float, floor: float) -> float:
    """Factor on the peak rate when `progress` (0..1) of the run is done: linear warm-up, cosine to `floor`."""
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return progress / warmup
    done = (progress - warmup) / (1 - warmup) if warmup < 1 else 0.0
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


def set_learning_rate(optimizers: Iterable[Optimizer], factor: float) -> None:
    """Every group's rate = its peak rate x `factor`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def _group(parameters: list[nn.Parameter], lr: float, weight_decay: float) -> dict:
    return {"params": parameters, "lr": lr, "peak_lr": lr, "weight_decay": weight_decay}
