"""Preallocated keys and values of a target, for rows that may have different lengths.

It knows nothing of the model: only slots. A forward pass appends n slots to every row; `crop` drops the tail, so that
rejected tokens leave nothing behind.

Letters: B rows, G key/value heads, T slots, D head width, n new tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values [B, G, max_length, D] per layer, allocated at the layer's first write; `lengths` are slots in use.

    Lengths are Python integers: nothing here waits for a device. Slots at and after a row's length hold rubbish, which the
    masks of `Append` hide.
    """

    def __init__(self, batch_size: int, max_length: int, num_layers: int):
        self.batch_size = batch_size
        self.max_length = max_length
        self.lengths = [0] * batch_size
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers

    def crop(self, lengths: int | list[int]) -> None:
        """Keep the first `lengths` slots of the rows (one number for all rows, or one per row)."""
        lengths = [lengths] * self.batch_size if isinstance(lengths, int) else list(lengths)
        assert len(lengths) == self.batch_size, (len(lengths), self.batch_size)
        assert all(0 <= new <= old for new, old in zip(lengths, self.lengths, strict=True)), (lengths, self.lengths)
        self.lengths = lengths

    def select(self, rows: list[int]) -> None:
        """Keep only these rows, in this order: drop finished ones from a batch. Copies keys and values."""
        index = None
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                if old is not None:
                    index = torch.tensor(rows, device=old.device) if index is None else index
                    store[layer] = old[index]
        self.lengths = [self.lengths[row] for row in rows]
        self.batch_size = len(rows)

    def write(self, layer: int, keys: Tensor, values: Tensor, append: Append) -> tuple[Tensor, Tensor]:
        """Store [B, G, n, D] at the slots of `append`; returns views of all slots in use, [B, G, append.end, D]."""
        if self.keys[layer] is None:
            self.keys[layer] = keys.new_empty(*keys.shape[:2], self.max_length, keys.shape[3])
            self.values[layer] = values.new_empty(*values.shape[:2], self.max_length, values.shape[3])
        all_keys, all_values = self.keys[layer], self.values[layer]
        if append.slots is None:
            all_keys[:, :, append.start : append.end] = keys
            all_values[:, :, append.start : append.end] = values
        else:
            all_keys[append.rows, :, append.slots] = keys.transpose(1, 2)
            all_values[append.rows, :, append.slots] = values.transpose(1, 2)
        return all_keys[:, :, : append.end], all_values[:, :, : append.end]


class Append:
    """Where n new tokens of every row go, and what each may attend to. Made once per forward pass, shared by the layers.

    start: first new slot when all rows have the same length; end: one past the last slot in use by any row.
    rows [B,1], slots [B,n]: index of the new slots of rows with different lengths, else None.
    positions: rotary positions [B or 1, n] where they are not start..end, else None.
    mask: boolean, broadcastable to [B,1,n,end]; None where `is_causal`, or one new token and equal lengths, need none.
    """

    def __init__(self, lengths: list[int], n: int, device: torch.device, positions: Tensor | None, mask: Tensor | None):
        self.start, self.end = min(lengths), max(lengths) + n
        self.device = device
        self.rows = self.slots = None
        if self.start + n != self.end:
            self.slots = torch.tensor(lengths, device=device)[:, None] + torch.arange(n, device=device)
            self.rows = torch.arange(len(lengths), device=device)[:, None]
        self.positions = self.slots if positions is None else positions
        self.is_causal = mask is None and self.slots is None and self.start == 0 and n > 1
        self.mask = mask
        if mask is None and not self.is_causal and (n > 1 or self.slots is not None):
            self.mask = self.new_slots()[:, None, :, None] >= torch.arange(self.end, device=device)

    def new_slots(self) -> Tensor:
        """Slot of every new token, [B or 1, n]."""
        return torch.arange(self.start, self.end, device=self.device)[None] if self.slots is None else self.slots
