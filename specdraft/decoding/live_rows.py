"""Head rows packed for a live vocabulary, so that a draft step is one dense product and never gathers: a fixed choice, and
a buffer whose rows change between rounds. They are what a vocabulary policy hands to the drafter (models/drafter.py: LiveRows).

It knows nothing of why a row is live. Where the head's weights have changed since the last product, all rows are read again.

Letters: S rows of the head, D width of a row (H, or the rank R), n live rows, C capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdraft.models.heads import Head
from specdraft.models.layers import FrozenLinear, linear


@dataclass
class Verified:
    """What a vocabulary policy is told of a round.

    drafted: [N] target ids, rejected ones too.   committed: what the round added to the text.   accepted: how many of those
    were drafted.   logits: [N+1, V], the target's, after the last committed token and after every drafted one.
    last: [N+1, H], the target's states at the same places (inputs of its final norm).   kept: [accepted+1] rows of `logits` and
    `last` that belong to the text: 0, and one more than each accepted node.
    """

    drafted: list[int]
    committed: list[int]
    accepted: int
    logits: Tensor
    last: Tensor
    kept: list[int]


class FixedRows:
    """Rows that never change, in the layout that is fastest on the device. See LiveRows."""

    def __init__(self, head: Head, rows: Sequence[int]):
        self._weight, self._picked = head.weight, torch.tensor(rows, device=head.weight.device)
        self.ids = all_target_ids(head)[self._picked]
        self._pack()

    def logits(self, projected: Tensor) -> Tensor:
        if self._version != self._weight._version:
            self._pack()
        return self._product(projected)

    def _pack(self) -> None:
        self._version = self._weight._version
        self._product = FrozenLinear(self._weight.detach()[self._picked])


class RowBuffer:
    """Up to C packed rows, in memory that is allocated once: C * (8 + D * bytes of a weight). See LiveRows.

    On a GPU rows are gathered on a stream of their own; the first product after it waits for an event there, so that the
    gather runs beside whatever the drafter does before its head. On a CPU the same happens at once.
    """

    def __init__(self, head: Head, capacity: int):
        weight = head.weight.detach()
        self.capacity, self.size = capacity, 0
        self._head, self._weight, self._all_ids = head, weight, all_target_ids(head)
        self._version = head.weight._version
        self._rows = weight.new_zeros(capacity, weight.shape[1])
        self._ids = self._all_ids.new_zeros(capacity)
        self._is_cuda = weight.device.type == "cuda"
        self._asked = torch.zeros(capacity, dtype=torch.int64, pin_memory=self._is_cuda)  # rows to gather, on the host
        self._host = self._asked.numpy()
        if self._is_cuda:
            self._stream, self._done = torch.cuda.Stream(weight.device), torch.cuda.Event()
            self._wanted = torch.zeros(capacity, dtype=torch.int64, device=weight.device)
            self._is_pending = False

    @property
    def ids(self) -> Tensor:
        return self._ids[: self.size]

    def logits(self, projected: Tensor) -> Tensor:
        self._wait()
        if self._version != self._head.weight._version:
            self._pack()
        return linear(projected, self._rows[: self.size])

    def write(self, start: int, rows: Sequence[int]) -> None:
        """Put head rows into slots start.., which are live from now on; slots before `start` must have been written. Without
        an allocation."""
        count = len(rows)
        end = start + count
        assert start <= self.size, (start, self.size)
        assert end <= self.capacity, (end, self.capacity)
        if self._is_cuda:
            self._done.synchronize()  # the host's list of rows may still be on its way
        self._host[:count] = rows
        self.size = max(self.size, end)
        if not self._is_cuda:
            self._gather(self._asked[:count], start, end)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._weight.device))  # products that read the old rows
        with torch.cuda.stream(self._stream):
            self._wanted[:count].copy_(self._asked[:count], non_blocking=True)
            self._gather(self._wanted[:count], start, end)
            self._done.record()
        self._is_pending = True

    def replace(self, slots: Sequence[int], rows: Sequence[int]) -> None:
        """Put head rows into scattered slots that are live already. For rare changes: it allocates what it moves."""
        if not slots:
            return
        self._wait()
        device = self._weight.device
        where, picked = torch.tensor(slots, device=device), torch.tensor(rows, device=device)
        self._rows.index_copy_(0, where, self._weight[picked])
        self._ids.index_copy_(0, where, self._all_ids[picked])

    def _pack(self) -> None:
        self._version = self._head.weight._version
        picked = rows_by_target_id(self._head)[self.ids.cpu()].to(self._weight.device)
        torch.index_select(self._weight, 0, picked, out=self._rows[: self.size])

    def clear(self) -> None:
        """No row is live."""
        self.size = 0

    def _gather(self, rows: Tensor, start: int, end: int) -> None:
        torch.index_select(self._weight, 0, rows, out=self._rows[start:end])
        torch.index_select(self._all_ids, 0, rows, out=self._ids[start:end])

    def _wait(self) -> None:
        if self._is_cuda and self._is_pending:
            torch.cuda.current_stream(self._weight.device).wait_event(self._done)
            self._is_pending = False


def all_target_ids(head: Head) -> Tensor:
    """[S] target ids of the head's rows, on its device."""
    ids = head.target_ids()
    return torch.arange(len(head.weight), device=head.weight.device) if ids is None else ids


def rows_by_target_id(head: Head) -> Tensor:
    """[V] rows on the CPU; -1 where the head has none."""
    return torch.arange(len(head.weight)) if head.vocab_map is None else head.vocab_map.draft_index
