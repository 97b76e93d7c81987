"""From a Batch to a loss: which rows are supervised, by which teacher rows, with which weights; and what is measured on the way.

The module `Objective` is what accelerate wraps: its forward pass unrolls the drafter, hands the packed rows to the loss
and returns sums that are reduced over processes once. It knows nothing of optimisers, epochs or files.

Letters: B batch, T tokens, H width, A taps, K steps, M supervised rows of the fullest sequence, N supervised rows of the
batch, D width of the projected state, S draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from specdraft.config import UserError
from specdraft.fused import ChunkConfig, fused_draft_loss
from specdraft.losses import LossConfig, TeacherRows
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.target import TargetModel
from specdraft.training.metrics import row_sums
from specdraft.training.sampled import Sampler


@dataclass
class ObjectiveConfig:
    """steps: K of the unroll. mean: each step's loss is averaged over supervised `rows`, or over `sequences` (each sequence
    weighs the same, whatever its length).
    sampled_vocab: columns of the draft vocabulary that stand for all in a training step (sampled.py); 0 = all. Where the head is
    trimmed, an eighth as many more stand for what is outside its map."""

    steps: int = 7
    sampled_vocab: int = 0
    mean: Literal["rows", "sequences"] = "rows"
    loss: LossConfig = field(default_factory=LossConfig)
    chunk: ChunkConfig = field(default_factory=ChunkConfig)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"objective.steps: got {self.steps}, allowed: 1 or more")
        if self.sampled_vocab and self.sampled_vocab < 1024:
            raise UserError(f"objective.sampled_vocab: got {self.sampled_vocab}, allowed: 0 (all), or 1024 or more")
        if self.sampled_vocab and self.loss.teacher_top_k:
            raise UserError(
                f"objective.loss.teacher_top_k: got {self.loss.teacher_top_k} with objective.sampled_vocab {self.sampled_vocab}, which "
                "draws other columns than the largest; set objective.sampled_vocab to 0"
            )


class Objective(nn.Module):
    """Loss = sum_k mean over supervised rows of step k of (position weight * row loss) (papers.md 8).

    The target is only referred to, so none of its weights is trained, wrapped or saved (fault 13).
    """

    def __init__(
        self, drafter: Eagle3Drafter, target: TargetModel, config: ObjectiveConfig, counts: Tensor | None = None
    ):
        """counts [V]: how often each target id is supervised in the training data; needed for `sampled_vocab`."""
        super().__init__()
        self.drafter, self.target, self.config = drafter, target, config
        vocab_map = drafter.lm_head.vocab_map
        self.draft_index = None if vocab_map is None else vocab_map.draft_index.to(target.device)
        self.sampler = None
        if 0 < config.sampled_vocab < target.vocab_size:
            self.sampler = Sampler(counts.to(target.device), self.draft_index, config.sampled_vocab)

    def forward(
        self, taps: Tensor, last: Tensor, input_ids: Tensor, rows: Rows, denominator: Tensor
    ) -> tuple[Tensor, Tensor]:
        """taps [B, T, A*H]; last [B, T, H] (un-normed); input_ids [B, T]; denominator [K], see `denominators`.

        Returns the batch's part of the loss (the parts of all batches of an optimiser step add up to it), and the sums
        [6, K] of metrics.FIELDS over its rows.
        """
        head = self.drafter.lm_head
        hidden = self.drafter.unroll(taps, input_ids, rows.index, self.config.steps)
        projected = head.project(hidden.flatten(1, 2).index_select(1, rows.slot))
        tokens = rows.shifted(input_ids.flatten()[rows.label_at])
        labels = tokens if self.draft_index is None else self.draft_index[tokens]
        share = row_shares(rows, denominator, self.config.mean)
        teacher, weight = self.teacher(last, rows), head.weight
        if self.training and self.sampler is not None:
            sample = self.sampler.draw(tokens)
            weight, labels = weight[sample.columns], sample.labels(labels)
            weights = teacher.head_weight[sample.ids]
            teacher = replace(teacher, head_weight=weights, target_ids=sample.inside, raised=sample.raised)
        config = self.config
        out = fused_draft_loss(projected, weight, teacher, rows.valid, share, labels, config.loss, config.chunk)
        return out.loss, row_sums(rows.valid, out.row_loss, out.alpha, out.hit, labels < 0)

    def teacher(self, last: Tensor, rows: Rows) -> TeacherRows:
        """The target's states where it is asked for its law: once for each row, N in all, for all steps."""
        target = self.target
        normed = target.norm(last.flatten(0, 1)[rows.teacher_at])
        index = rows.shifted(torch.arange(len(normed), device=normed.device))
        ids = self.drafter.lm_head.target_ids()
        return TeacherRows(normed, target.teacher_head, index, ids, target.logit_scale, target.soft_cap)


@dataclass(frozen=True)
class Rows:
    """The supervised rows of a batch, in the order (sequence, position). All int64 or bool, made on the CPU.

    Row i of a sequence has the target's feature of position i and reads the token x[i+1]; at step k it has read
    x[i+1..i+1+k] and predicts x[i+2+k], and its teacher is the target's law at position i+1+k (papers.md 8).
    **(i, k) is supervised iff x[i+1..i+2+k], all that it reads and its label, lie in one assistant span.**

    When decoding, x[i+1] is the last committed token and x[i+2..] are drafted. The first token of an answer comes from the
    target's own prefill, so it is read but never drafted; the first that is drafted is the answer's second, from the row
    whose feature is that of the prompt's last token. Example, K = 2, s = answer:

        position   0  1  2  3  4  5  6          rows  i = 2: reads x3 | labels x4 (k=0), x5 (k=1)
        span       .  .  .  s  s  s  .                i = 3: reads x4 | label  x5 (k=0); k=1 would need x6
        i = 1 would read x2, a prompt token: no; i = 4 would predict x6, which is no answer: no.

    Steps are nested ((i, k) implies (i, k-1)), the rows of a span are consecutive, and row n's teacher at step k is row
    n + k's at step 0: N teacher rows serve all steps.

    index: [B, M] state index i of each sequence's rows, padded with 0.   slot: [N] place of each row in the flat [B*M].
    sequence: [N] its b.   valid: [K, N] supervised at step k.   label_at, teacher_at: [N] flat [B*T] places of the label
    and of the teacher's position at step 0.
    """

    index: Tensor
    slot: Tensor
    sequence: Tensor
    valid: Tensor
    label_at: Tensor
    teacher_at: Tensor

    @classmethod
    def from_masks(cls, masks: Sequence[Tensor], steps: int) -> Rows:
        """masks: each [T_b] bool, True on assistant tokens; T = the longest. At least one row must be supervised."""
        mask = pad_sequence(list(masks), batch_first=True)
        depth = supervised_steps(mask, steps)
        sequence, position = depth.nonzero(as_tuple=True)
        counts = (depth > 0).sum(1)
        assert int(counts.sum()), "a batch without a supervised row"
        place = torch.arange(len(sequence)) - (counts.cumsum(0) - counts)[sequence]
        index = torch.zeros(len(masks), int(counts.max()), dtype=torch.int64)
        index[sequence, place] = position
        start = sequence * mask.shape[1] + position
        return cls(
            index=index,
            slot=sequence * index.shape[1] + place,
            sequence=sequence,
            valid=torch.arange(steps)[:, None] < depth[sequence, position],
            label_at=start + 2,
            teacher_at=start + 1,
        )

    def to(self, device: torch.device | str) -> Rows:
        return Rows(*(getattr(self, name).to(device, non_blocking=True) for name in self.__dataclass_fields__))

    def shifted(self, values: Tensor) -> Tensor:
        """values [N] of the rows at step 0 -> [K, N]: what each (step, row) is supervised with (wrapped where not valid)."""
        steps, count = self.valid.shape
        ahead = torch.arange(steps, device=values.device)[:, None] + torch.arange(count, device=values.device)
        return values[ahead % count]


def supervised_steps(mask: Tensor, steps: int) -> Tensor:
    """How many of the K steps are supervised at each state index, by the rule in `Rows`. mask [B, T] bool -> [B, T] int64."""
    place = torch.arange(mask.shape[1]).expand(mask.shape)
    gap = torch.where(mask, mask.shape[1], place)
    next_gap = gap.flip(1).cummin(1).values.flip(1)  # [B, T] the next position outside the span
    run = (next_gap - place).roll(-1, dims=1)  # [B, T] answer tokens in a row from position i+1 on
    run[:, -1] = 0
    return (run - 1).clamp(0, steps)


def supervised_counts(masks: Sequence[Tensor], steps: int) -> Tensor:
    """Supervised rows of each sequence at each step: [examples, K] int64, from the masks alone."""
    depths = [supervised_steps(mask[None], steps)[0] for mask in masks]
    return torch.stack([(depth[:, None] > torch.arange(steps)).sum(0) for depth in depths])


def denominators(counts: Tensor, mean: str) -> Tensor:
    """What the loss of each step of the unroll is divided by, from the counts [examples, K] of all sequences that all processes
    and micro-batches take in one optimiser step: rows, or sequences that have rows. Returns [K] fp32, at least 1."""
    totals = counts.sum(0) if mean == "rows" else (counts > 0).sum(0)
    return totals.clamp_min(1).float()


def row_shares(rows: Rows, denominator: Tensor, mean: str) -> Tensor:
    """Each row's share in the mean of its step, [K, N] fp32, 0 where not supervised: 1/rows; or 1/(sequences * its sequence's rows)."""
    shares = rows.valid / denominator[:, None]
    if mean == "sequences":
        sequences = rows.index.shape[0]
        counts = torch.zeros(len(rows.valid), sequences, device=shares.device)
        counts.index_add_(1, rows.sequence, rows.valid.float())
        shares = shares / counts[:, rows.sequence].clamp_min(1)
    return shares
