"""A ring buffer of positions that the target has verified: what a drafter reads there, and what the target said next.

Positions of one text follow one another, so that a drafter can be unrolled over them as in training. It knows nothing of drafters or
losses.

Letters: C capacity, A taps, H width, V target vocabulary, L likeliest tokens that are kept of a law, B windows, W positions of the
longest window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

TOP = 64  # L
LEAST_TAIL = 1e-8  # fp32 cannot tell a smaller rest of a law from none


@dataclass
class Law:
    """ids: [n, L] int64, likeliest first.   log_p: [n, L] fp32.   log_tail: [n] fp32, log of the mass of all other tokens."""

    ids: Tensor
    log_p: Tensor
    log_tail: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> Law:
        """logits: [n, V]"""
        best, ids = logits.float().log_softmax(-1).topk(min(TOP, logits.shape[-1]))
        return cls(ids, best, (1 - best.exp().sum(-1)).clamp_min(LEAST_TAIL).log())


@dataclass
class Windows:
    """Positions that follow one another, padded on the right.   slots: [B, W] int64, where in the buffer they stand; padding
    repeats slot 0.   is_real: [B, W] bool."""

    slots: Tensor
    is_real: Tensor

    @classmethod
    def of(cls, runs: list[Tensor]) -> Windows:
        """runs: slots of each window."""
        real = [torch.ones_like(run, dtype=torch.bool) for run in runs]
        return cls(pad_sequence(runs, batch_first=True), pad_sequence(real, batch_first=True))


class Positions:
    """The last C positions. `fields`, all [C, ..]:

    taps: [C, A*H].   token: the one at the position.   text: serial number, -1 = an empty slot.   place: position in its text.
    has_law: whether the target was asked what follows (not so in a prompt).   ids, log_p, log_tail: that law, see Law.
    alpha: chance that what was drafted there is accepted, NaN = nothing was.   is_hit: whether the next token was live.
    round: number of the round that it came from.
    """

    def __init__(self, capacity: int, taps_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device):
        kept = min(TOP, vocab_size)
        self.capacity, self.written = capacity, 0
        self.fields = {
            "taps": torch.zeros(capacity, taps_size, dtype=dtype, device=device),
            "ids": torch.zeros(capacity, kept, dtype=torch.int32, device=device),
            "log_p": torch.zeros(capacity, kept, dtype=torch.float16, device=device),
            "log_tail": torch.zeros(capacity, device=device),
            "token": torch.zeros(capacity, dtype=torch.int32, device=device),
            "text": torch.full((capacity,), -1, dtype=torch.int32),
            "place": torch.zeros(capacity, dtype=torch.int32),
            "round": torch.zeros(capacity, dtype=torch.int32),
            "alpha": torch.full((capacity,), float("nan")),
            "is_hit": torch.zeros(capacity, dtype=torch.bool),
            "has_law": torch.zeros(capacity, dtype=torch.bool),
        }

    @property
    def bytes(self) -> int:
        return sum(field.nbytes for field in self.fields.values())

    def clear(self) -> None:
        self.written = 0
        self.fields["text"].fill_(-1)

    def add(self, text: int, place: int, tokens: list[int], taps: Tensor) -> Tensor:
        """Positions place.. of a text, without laws; the oldest ones give way. At most C.   taps: [n, A*H].   Returns: their slots."""
        count = len(tokens)
        assert count <= self.capacity, (count, self.capacity)
        slots = (self.written + torch.arange(count)) % self.capacity
        self.written += count
        self._set(
            slots, taps=taps, token=torch.tensor(tokens), text=text, alpha=float("nan"), is_hit=False, has_law=False
        )
        self._set(slots, place=place + torch.arange(count))
        return slots

    def add_verified(
        self,
        text: int,
        place: int,
        tokens: list[int],
        taps: Tensor,
        logits: Tensor,
        alpha: list[float],
        hits: list[bool],
        round: int,
    ) -> None:
        """The same with what followed. logits: [n, V]; alpha, hits: [n]."""
        slots, law = self.add(text, place, tokens, taps), Law.of(logits)
        self._set(slots, ids=law.ids, log_p=law.log_p, log_tail=law.log_tail, has_law=True, round=round)
        self._set(slots, alpha=torch.tensor(alpha), is_hit=torch.tensor(hits))

    def _set(self, slots: Tensor, **values: Tensor | float) -> None:
        for name, value in values.items():
            field = self.fields[name]
            field[slots.to(field.device)] = value.to(field) if isinstance(value, Tensor) else value

    def runs(self) -> list[Tensor]:
        """Slots of positions that follow one another, one tensor for every text."""
        slots = (self.fields["text"] >= 0).nonzero()[:, 0]
        text, place = self.fields["text"][slots].long(), self.fields["place"][slots].long()
        order = (text * (int(place.max()) + 2 if len(slots) else 1) + place).argsort()
        text, place = text[order], place[order]
        cuts = ((text[1:] != text[:-1]) | (place[1:] != place[:-1] + 1)).nonzero()[:, 0] + 1
        return [run for run in slots[order].tensor_split(cuts) if len(run)]

    def law(self, slots: Tensor) -> Law:
        """slots: [n] on the CPU."""
        ids, log_p, log_tail = (self.read(name, slots) for name in ("ids", "log_p", "log_tail"))
        return Law(ids.long(), log_p.float(), log_tail)

    def read(self, name: str, slots: Tensor) -> Tensor:
        """A field at slots of any shape, on the field's own device."""
        field = self.fields[name]
        return field[slots.to(field.device)]
