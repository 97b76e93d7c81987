"""Preallocated keys and values of a target, for rows that may have different lengths.

It knows nothing of the model: only slots. A forward pass appends n slots to every row; `crop` drops the tail, so that
rejected tokens leave nothing behind.

Letters: B rows, G key/value heads, T slots, D head width, n new tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values [B, max_length, G, D] of every layer, allocated at the layer's first write.

    `lengths` counts the slots in use of each row, as Python integers: nothing here waits for a device. Slots past a row's
    length hold rubbish (finite numbers), which the masks of `Append` hide.
    """

    def __init__(self, batch_size: int, max_length: int, num_layers: int):
        self.batch_size = batch_size
        self.max_length = max_length
        self.lengths = [0] * batch_size
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers

    def crop(self, lengths: int | list[int]) -> None:
        """Keep the first `lengths` slots of the rows (one number for all rows, or one for each)."""
        lengths = [lengths] * self.batch_size if isinstance(lengths, int) else list(lengths)
        assert all(0 <= new <= old for new, old in zip(lengths, self.lengths, strict=True)), (lengths, self.lengths)
        self.lengths = lengths

    @torch.inference_mode()
    def select(self, rows: list[int]) -> None:
        """Keep only these rows, in this order: drops finished ones from a batch. Moves the slots in use."""
        used = max((self.lengths[row] for row in rows), default=0)
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                if old is not None:
                    store[layer] = old[: len(rows)]
                    store[layer][:, :used] = old[rows, :used]
        self.lengths = [self.lengths[row] for row in rows]
        self.batch_size = len(rows)

    def write(self, layer: int, keys: Tensor, values: Tensor, append: Append) -> tuple[Tensor, Tensor]:
        """Store [B, n, G, D] at the slots of `append`; returns views of all slots in use, [B, append.end, G, D]."""
        if self.keys[layer] is None:
            self.keys[layer] = keys.new_zeros(self.batch_size, self.max_length, *keys.shape[2:])
            self.values[layer] = values.new_zeros(self.batch_size, self.max_length, *values.shape[2:])
        all_keys, all_values = self.keys[layer], self.values[layer]
        all_keys[append.where] = keys
        all_values[append.where] = values
        return all_keys[:, : append.end], all_values[:, : append.end]


class Append:
    """Where n new tokens of every row go, and what each may attend to. Made once a forward pass, shared by its layers.

    start: first new slot of the shortest row; end: one past the last slot in use by any row.
    slots: [B,n] where the rows have different lengths, else None: then they are start..end.
    where: index of the new slots in a cache [B, T, ..].
    positions: rotary positions [B or 1, n] where they are not start..end, else None.
    mask: boolean, broadcastable to [B,1,n,end]; None where nothing is hidden, or a plain causal mask (`is_causal`) does.
    """

    def __init__(self, lengths: list[int], n: int, device: torch.device, positions: Tensor | None, mask: Tensor | None):
        self.start, self.end = min(lengths), max(lengths) + n
        self.device = device
        self.slots = None
        self.where = (slice(None), slice(self.start, self.end))
        if self.start + n != self.end:
            self.slots = torch.tensor(lengths, device=device)[:, None] + torch.arange(n, device=device)
            self.where = (torch.arange(len(lengths), device=device)[:, None], self.slots)
        self.positions = self.slots if positions is None else positions
        self.is_causal = mask is None and self.slots is None and self.start == 0 and n > 1
        self.mask = mask
        if mask is None and not self.is_causal and (n > 1 or self.slots is not None):
            self.mask = self.causal_mask()

    def new_slots(self) -> Tensor:
        """Slot of every new token, [B or 1, n]."""
        return torch.arange(self.start, self.end, device=self.device)[None] if self.slots is None else self.slots

    def causal_mask(self) -> Tensor:
        """True where a new token may attend: its own slot and those before, [B or 1, 1, n, end]."""
        return self.new_slots()[:, None, :, None] >= torch.arange(self.end, device=self.device)

    def distance(self) -> Tensor:
        """How many positions each slot lies before each new token, [B or 1, 1, n, end]; negative for those after it."""
        slots = self.new_slots()
        of_new, of_slots = slots, torch.arange(self.end, device=self.device)[None]
        if self.positions is not None:  # a committed token's position is its slot; a drafted one's need not be
            of_new = self.positions
            of_slots = of_slots.repeat(len(of_new), 1).scatter(1, slots.expand(len(of_new), -1), of_new)
        return of_new[:, None, :, None] - of_slots[:, None, None, :]
