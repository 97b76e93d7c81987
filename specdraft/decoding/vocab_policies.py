"""Which rows of the draft head are live in a round. A policy changes the draft law q only, never the target's law p.

It knows nothing of heads beyond their vocabulary map (row -> target id). Letters: V target vocabulary, S rows of the
head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdraft.config import UserError
from specdraft.data.vocab import VocabMap


class VocabPolicy(Protocol):
    """Asked once a round, before anything is drafted."""

    def live(self) -> Tensor | None:
        """Live head rows [n] int64; None = all. The same tensor object as long as the rows do not change."""


class AllTokens:
    """Every row of the head."""

    def live(self) -> Tensor | None:
        return None


class FrequencyList:
    """The first `size` ids of a frequency list (FR-Spec, arXiv 2502.14856), fixed for all requests.

    ids: target ids, most frequent first.   vocab_map: the head's map, None for a head over all of 0..V-1; ids that a
    trimmed head has no row for are passed over and do not count.

    Raises:
        UserError: fewer than `size` usable ids, or one named twice.
    """

    def __init__(
        self, ids: Sequence[int], size: int, vocab_map: VocabMap | None = None, device: str | torch.device = "cpu"
    ):
        rows = torch.tensor(list(ids), dtype=torch.int64)
        if vocab_map is not None:
            rows = vocab_map.draft_index.cpu()[rows]
        rows = rows[rows >= 0][:size]
        if not 0 < size == len(rows):
            raise UserError(
                f"FrequencyList: got {len(rows)} ids that the head has rows for, asked for {size}; give a longer list "
                "or a smaller size"
            )
        if len(rows.unique()) != size:
            raise UserError("FrequencyList: an id stands twice in the list; give every id once, most frequent first")
        self._live = rows.to(device)

    def live(self) -> Tensor | None:
        return self._live


VOCAB_POLICIES = {"all": AllTokens, "frequency": FrequencyList}
