"""What is measured while training: sums by step of the unroll, reduced over processes once, then divided once.

It knows nothing of how rows are made or trained; alpha and hit come from the loss and are of the true teacher, so a token
outside the draft vocabulary counts as a miss. Letters: K steps, N supervised rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

FIELDS = ("rows", "loss", "alpha", "hit", "joint", "outside")


@dataclass(frozen=True)
class Report:
    """Means over supervised rows, by step k = 0..K-1 (lists of K), and what follows from them.

    rows: how many.   loss: of a row, before weights.   alpha: sum_v min(p, q) over the whole target vocabulary.
    hit: the drafter's argmax is the target's.   joint: hits at all of steps 0..k, so an accepted prefix of k+1 at T = 0.
    outside: share of labels that the draft vocabulary lacks, at step 0.
    tau: tokens a verify round would give at T = 0 with K drafted, 1 + sum_k joint_k (papers 0 and 10).
    """

    rows: list[int]
    loss: list[float]
    alpha: list[float]
    hit: list[float]
    joint: list[float]
    outside: float
    tau: float

    def as_dict(self, prefix: str = "") -> dict[str, float | list[float]]:
        values = {"tau": self.tau, "alpha": self.alpha, "hit": self.hit, "joint": self.joint, "outside": self.outside}
        return {prefix + name: value for name, value in {**values, "row_loss": self.loss, "rows": self.rows}.items()}


def row_sums(valid: Tensor, loss: Tensor, alpha: Tensor, hit: Tensor, outside: Tensor) -> Tensor:
    """Sums over the supervised rows of a batch, in the order of FIELDS. All [K, N], valid, hit and outside bool -> [6, K] fp32.

    Steps are nested: a row that is valid at step k is valid at all before it, so its chain of hits is known.
    """
    joint = (hit & valid).cumprod(0)
    fields = torch.stack([valid.float(), loss.float(), alpha.float(), hit.float(), joint.float(), outside.float()])
    return fields.masked_fill(~valid, 0).sum(-1)


class Window:
    """Sums since the last report, on the device: no waiting for it in between."""

    def __init__(self, steps: int, device: torch.device):
        self.sums = torch.zeros(len(FIELDS), steps, device=device)
        self.loss = torch.zeros((), device=device)

    def add(self, loss: Tensor, sums: Tensor) -> None:
        """loss: a batch's part of the objective, scalar; sums: of `row_sums`."""
        self.loss += loss.detach()
        self.sums += sums.detach()

    def reduce(self, accelerator: Accelerator) -> tuple[float, Report]:
        """(objective summed over all processes, means over all processes' rows). Every process calls this, once a window."""
        mine = torch.cat([self.loss[None], self.sums.flatten()])
        total = accelerator.reduce(mine, "sum").cpu().double()
        return float(total[0]), make_report(total[1:].view_as(self.sums))


def make_report(sums: Tensor) -> Report:
    """sums [6, K] over everything -> means."""
    _, loss, alpha, hit, joint, outside = (sums / sums[0].clamp_min(1)).tolist()
    return Report([int(n) for n in sums[0]], loss, alpha, hit, joint, outside[0], 1 + sum(joint))
