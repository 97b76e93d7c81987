"""A part of the vocabulary that stands for the whole of it in one training step.

Every step's labels and the most frequent tokens are always in (their logits as they are). Of the N other columns n are drawn
without replacement, and their logits, the teacher's and the drafter's alike, are raised by log(N/n): then the sums of
exp(logit) over the sample, and over each side's own law, estimate those over all columns without bias. The cost of the loss
no longer depends on V, and rows that nobody says are still held down. Evaluation always uses the whole vocabulary.

Where the head is trimmed, its columns are sampled so, and the tokens outside its map too, for the teacher alone: its law, its argmax and
what acceptance loses outside the map stay those of the true vocabulary.

Importance-sampled softmax (arXiv 1412.2007), on both sides of a distillation loss. This file knows nothing of models or losses.

Letters: S sampled columns of the drafter's, V vocabulary, of the target or, in `ColumnSample`, of what is sampled from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

OUTSIDE = 1 / 8  # columns outside a trimmed head's map, for every one inside that is asked for
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


@dataclass(frozen=True)
class Sample:
    """columns: [S] int64, of the head's rows.   ids: target ids of the teacher's columns, those of `columns` first.   inside: [S] their
    places among `ids`; None = all of these are the head's.   raised: fp32, of the teacher's columns.   place: see ColumnSample."""

    columns: Tensor
    ids: Tensor
    inside: Tensor | None
    raised: Tensor
    place: Tensor

    def labels(self, labels: Tensor) -> Tensor:
        """Columns of the head -> of the sample; -1 stays."""
        return torch.where(labels < 0, -1, self.place[labels])


class Sampler:
    """Draws the columns of a step for a head over all of V, or over a map's tokens."""

    def __init__(self, counts: Tensor, draft_index: Tensor | None, size: int):
        """counts: [V], how often each target id is supervised.   draft_index: [V] the head's column of each target id, -1 = none; None =
        the id itself.   size: columns to draw, of those that the head has."""
        self.size, self.draft_index = size, draft_index
        ids = counts.argsort(descending=True, stable=True)
        if draft_index is None:
            self.by_frequency, self.target_ids = ids, None
            return
        columns = draft_index[ids]
        self.by_frequency, self.outside = columns[columns >= 0], ids[columns < 0]
        self.target_ids = torch.empty_like(self.by_frequency).scatter_(0, self.by_frequency, ids[columns >= 0])
        self.outside_place = torch.full_like(draft_index, -1)
        self.outside_place[self.outside] = torch.arange(len(self.outside), device=ids.device)

    def draw(self, tokens: Tensor) -> Sample:
        """tokens: target ids of the step's labels, any shape."""
        if self.draft_index is None:
            own = ColumnSample.draw(self.by_frequency, tokens, self.size)
            return Sample(own.columns, own.columns, None, own.raised, own.place)
        own = ColumnSample.draw(self.by_frequency, self.draft_index[tokens], self.size)
        others = torch.arange(len(self.outside), device=tokens.device)  # in falling order of frequency
        other = ColumnSample.draw(others, self.outside_place[tokens], int(OUTSIDE * self.size))
        ids = torch.cat([self.target_ids[own.columns], self.outside[other.columns]])
        inside = torch.arange(len(own.columns), device=tokens.device)
        return Sample(own.columns, ids, inside, torch.cat([own.raised, other.raised]), own.place)
