"""A part of the draft vocabulary that stands for the whole of it in one training step.

Every step's labels and the most frequent tokens are always in (their logits as they are). Of the N other columns n are drawn
without replacement, and their logits, the teacher's and the drafter's alike, are raised by log(N/n): then the sums of
exp(logit) over the sample, and over each side's own law, estimate those over all columns without bias. The cost of the loss
no longer depends on V, and rows that nobody says are still held down. Evaluation always uses the whole vocabulary.

Importance-sampled softmax (arXiv 1412.2007), on both sides of a distillation loss. This file knows nothing of models or losses.

Letters: S sampled columns, V draft vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ALWAYS = 7 / 8  # share of the sample that labels and frequent columns take; the rest is drawn


@dataclass(frozen=True)
class ColumnSample:
    """columns: [S] int64, of the draft vocabulary.   raised: [S] fp32, what is added to their logits (after a temperature).
    place: [V] int64, where in the sample each column stands, -1 = not in it."""

    columns: Tensor
    raised: Tensor
    place: Tensor

    @classmethod
    def draw(cls, by_frequency: Tensor, labels: Tensor, size: int) -> ColumnSample:
        """by_frequency: [V], all columns, the most frequent first.   labels: any shape, -1 = no column.   size: S; more where
        the labels alone need it. Draws from torch's generator of the CPU, so that a resumed run draws the same."""
        total = len(by_frequency)
        is_in = torch.zeros(total, dtype=torch.bool, device=by_frequency.device)
        is_in[labels[labels >= 0]] = True
        room = max(int(ALWAYS * size) - int(is_in.sum()), 0)
        is_in[by_frequency[~is_in[by_frequency]][:room]] = True
        always, others = is_in.nonzero()[:, 0], (~is_in).nonzero()[:, 0]
        count = min(max(size - len(always), size - int(ALWAYS * size)), len(others))
        drawn = others[torch.randperm(len(others))[:count].to(others.device)]
        columns = torch.cat([always, drawn])
        raised = torch.zeros(len(columns), device=columns.device)
        if count:
            raised[len(always) :] = math.log(len(others) / count)
        place = torch.full((total,), -1, device=columns.device)
        place[columns] = torch.arange(len(columns), device=columns.device)
        return cls(columns, raised, place)

    def labels(self, labels: Tensor) -> Tensor:
        """Columns of the vocabulary -> of the sample; -1 stays."""
        return torch.where(labels < 0, -1, self.place[labels])
