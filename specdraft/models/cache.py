"""Keys and values of a target, for rows that may have different lengths.

It knows nothing of the model: only slots. A forward pass appends n slots to every row; `crop` drops the tail and `keep`
all but one path of a tree, so that rejected tokens leave nothing behind.

Letters: B rows, G key/value heads, T slots, D head width, n new tokens.
"""

from __future__ import annotations

import ctypes
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from specdraft.models import thin_products

BLOCK = 64


class KVCache:
    """Keys and values [B, G, T, D] of every layer. max_length: tokens a row may come to have.

    One row: T = max_length from the start, and a pass reads the slots in use. Several rows: T grows by blocks of 64, and
    a pass reads all T slots, since batched products are many times faster over memory without gaps. T exceeds max_length
    only where nodes of a tree or padding need more slots than there are positions.
    `lengths` counts the slots in use of each row, as Python integers: nothing here waits for a device. Other slots hold
    rubbish (finite numbers), which the masks of `Append` hide.
    """

    def __init__(self, batch_size: int, max_length: int, num_layers: int, dtype: torch.dtype | None = None):
        """dtype: of keys and values; None = that of the first ones."""
        self.batch_size, self.dtype = batch_size, dtype
        self.max_length = max_length
        self.is_single = batch_size == 1
        self.lengths = [0] * batch_size
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers

    def grow(self, counts: list[int]) -> None:
        """So many of the slots that were written last are in use now."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def crop(self, lengths: int | list[int]) -> None:
        """Keep the first `lengths` slots of the rows (one number for all rows, or one for each)."""
        lengths = [lengths] * self.batch_size if isinstance(lengths, int) else list(lengths)
        assert all(0 <= new <= old for new, old in zip(lengths, self.lengths, strict=True)), (lengths, self.lengths)
        self.lengths = lengths

    @torch.inference_mode()
    def keep(self, starts: list[int], paths: list[list[int]]) -> None:
        """Of row b keep the first starts[b] slots and, moved up behind them, the slots starts[b] + i for i in paths[b]
        (ascending). A path 0, 1, 2, ... has nothing to move."""
        moved = [
            (row, start + to, start + of)
            for row, (start, path) in enumerate(zip(starts, paths, strict=True))
            for to, of in enumerate(path)
            if to != of
        ]
        if moved:
            self._move(torch.tensor(moved))
        self.crop([start + len(path) for start, path in zip(starts, paths, strict=True)])

    def _move(self, moves: Tensor) -> None:
        """moves: [n, 3] row, slot, and the later slot that gives way to it, in the order of slots."""
        stored = [*self.keys, *self.values]
        first = stored[0]
        compiled = thin_products.library() if first.device.type == "cpu" else None
        if compiled is None or any(tensor.shape != first.shape for tensor in stored):
            rows, to, of = moves.to(first.device).unbind(1)
            for tensor in stored:
                tensor[rows, :, to] = tensor[rows, :, of]
            return
        assert first.is_contiguous(), first.stride()
        pointers = (ctypes.c_void_p * len(stored))(*(tensor.data_ptr() for tensor in stored))
        _, heads, slots, width = first.shape
        sizes = (len(stored), heads, slots, width * first.element_size())
        compiled.move_slots(pointers, *sizes, moves.data_ptr(), len(moves))

    @torch.inference_mode()
    def select(self, rows: list[int]) -> None:
        """Keep only these rows, in this order: drops finished ones from a batch. Where the rows that change their place come
        from behind all others, nothing else is copied."""
        moved = [(to, of) for to, of in enumerate(rows) if to != of]
        in_place = all(of >= len(rows) for _, of in moved)
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                if old is None:
                    continue
                if in_place:
                    for to, of in moved:
                        old[to] = old[of]
                store[layer] = old[: len(rows)] if in_place else old[rows]
        self.lengths = [self.lengths[row] for row in rows]
        self.batch_size = len(rows)

    @torch.inference_mode()
    def fill(self, rows: list[int], other: KVCache) -> None:
        """These rows become those of another cache of the same model; what was in them is lost."""
        width = max(other.lengths)
        slots = -(-width // BLOCK) * BLOCK
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for layer, new in enumerate(theirs):
                if mine[layer] is None or mine[layer].shape[2] < width:
                    like = new[:1].expand(self.batch_size, -1, -1, -1).transpose(1, 2)
                    mine[layer] = self._allocate(mine[layer], like, slots)
                mine[layer][rows, :, :width] = new[:, :, :width].to(mine[layer].dtype)
        lengths = dict(zip(rows, other.lengths, strict=True))
        self.lengths = [lengths.get(row, length) for row, length in enumerate(self.lengths)]

    def place(
        self, n: int, device: torch.device, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Append:
        """Where the next n tokens of every row go. By default their positions are their slots: then the longest row must
        not pass max_length."""
        end = max(self.lengths) + n
        width = end
        if not self.is_single:
            allocated = 0 if self.keys[0] is None else self.keys[0].shape[2]
            width = max(end, allocated, min(-(-end // BLOCK) * BLOCK, self.max_length))
        else:
            assert positions is not None or end <= self.max_length, (end, self.max_length)
        return Append(self.lengths, n, width, device, positions, mask, self.max_length - 1)

    def write(self, layer: int, keys: Tensor, values: Tensor, append: Append) -> tuple[Tensor, Tensor]:
        """Store [B, n, G, D] at the slots of `append`; returns the slots to attend to, [B, G, append.width, D]."""
        self._make_room(layer, keys, append)
        all_keys, all_values = self.keys[layer], self.values[layer]
        if append.slots is None:
            all_keys[:, :, append.start : append.end] = keys.transpose(1, 2)
            all_values[:, :, append.start : append.end] = values.transpose(1, 2)
        else:
            all_keys[append.rows, :, append.slots] = keys
            all_values[append.rows, :, append.slots] = values
        return all_keys[:, :, : append.width], all_values[:, :, : append.width]

    def reserve(self, like: Tensor, append: Append) -> tuple[list[Tensor], list[Tensor]]:
        """Room for what `append` adds, for who writes it himself. like [B, n, G, D]. Returns keys and values of every layer,
        [B, G, T, D] with T of append.width or more."""
        if self._lacks_room(0, append):
            for layer in range(len(self.keys)):
                self._make_room(layer, like, append)
        return self.keys, self.values

    def _lacks_room(self, layer: int, append: Append) -> bool:
        return self.keys[layer] is None or self.keys[layer].shape[2] < append.width

    def _make_room(self, layer: int, like: Tensor, append: Append) -> None:
        if self._lacks_room(layer, append):
            self.keys[layer] = self._allocate(self.keys[layer], like, append.width)
            self.values[layer] = self._allocate(self.values[layer], like, append.width)

    def _allocate(self, old: Tensor | None, like: Tensor, width: int) -> Tensor:
        slots = width
        if self.is_single:
            slots = self.max_length if width <= self.max_length else -(-width // BLOCK) * BLOCK
        new = like.new_zeros(len(like), like.shape[2], slots, like.shape[3], dtype=self.dtype)
        if old is not None:
            new[:, :, : old.shape[2]] = old
        return new


class Append:
    """Where n new tokens of every row go, and what each may attend to. Made once a forward pass, shared by its layers.

    lengths: slots in use by each row before.   start: first new slot of the shortest row; end: one past the last slot in use by any
    row; width: number of slots that attention reads, at least end.   before: `lengths` as a tensor [B].
    rows [B,1], slots [B,n]: index of the new slots where the rows have different lengths, else None: they are start..end.
    positions: rotary positions [B or 1, n] where they are not start..end, else None.
    mask: boolean, broadcastable to [B,1,n,width], made when it is asked for; None where nothing is hidden, or where the
    new tokens are the first ones and attend to each other causally (`is_causal`).
    last_position: the largest there is: padding on the right of a long row has no position of its own.
    """

    def __init__(
        self,
        lengths: list[int],
        n: int,
        width: int,
        device: torch.device,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        last_position: int | None = None,
    ):
        self.lengths, self.start, self.end, self.width = lengths, min(lengths), max(lengths) + n, width
        self.device = device
        self.rows = self.slots = None
        if self.start + n != self.end:
            self.slots = torch.tensor(lengths, device=device)[:, None] + torch.arange(n, device=device)
            self.rows = torch.arange(len(lengths), device=device)[:, None]
        self.positions = positions
        if positions is None and self.slots is not None:
            self.positions = self.slots.clamp_max(last_position)
        self.is_causal = mask is None and self.end == n
        self.n, self.given_mask = n, mask

    @cached_property
    def before(self) -> Tensor:
        return torch.tensor(self.lengths, device=self.device)

    @cached_property
    def mask(self) -> Tensor | None:
        if self.given_mask is not None:
            return F.pad(self.given_mask, (0, self.width - self.end))
        if self.is_causal or (self.n == 1 and self.slots is None and self.width == self.end):
            return None
        return self.causal_mask()

    def new_slots(self) -> Tensor:
        """Slot of every new token, [B or 1, n]."""
        return torch.arange(self.start, self.end, device=self.device)[None] if self.slots is None else self.slots

    def causal_mask(self) -> Tensor:
        """True where a new token may attend: its own slot and those before, [B or 1, 1, n, width]."""
        return self.new_slots()[:, None, :, None] >= torch.arange(self.width, device=self.device)

    def distance(self) -> Tensor:
        """How many positions each slot lies before each new token, [B or 1, 1, n, width]; negative for those after."""
        slots = self.new_slots()
        of_new, of_slots = slots, torch.arange(self.width, device=self.device)[None]
        if self.positions is not None:  # a committed token's position is its slot; a drafted one's need not be
            of_new = self.positions
            of_slots = of_slots.repeat(len(of_new), 1).scatter(1, slots.expand(len(of_new), -1), of_new)
        return of_new[:, None, :, None] - of_slots[:, None, None, :]
