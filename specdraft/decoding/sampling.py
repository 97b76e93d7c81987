"""From logits to a next-token law, and from a law to a token: one processor for every token, drafted, verified or
bonus.

It knows nothing of models, trees or time. Randomness comes from the generator that is handed in and from nowhere else.
Letters: V vocabulary (or the S columns of a draft law).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdraft.config import UserError
from specdraft.models.drafter import Drawn


@dataclass(frozen=True)
class Sampling:
    """How a law is made from logits, in transformers' order: temperature, then top-k, then top-p.

    temperature: 0 = greedy, a point mass on the largest logit (the lowest id where several tie).
    top_k: keep the k largest logits (ties of the k-th stay); 0 = all.
    top_p: keep the smallest set of largest probabilities whose sum reaches top_p; 1 = all.

    Raises:
        UserError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature: got {self.temperature}, allowed: 0 (greedy) or above")
        if self.top_k < 0:
            raise UserError(f"top_k: got {self.top_k}, allowed: 0 (off) or above")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: got {self.top_p}, allowed: above 0, up to 1 (off)")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def law(self, logits: Tensor) -> Tensor:
        """[..., V] logits -> [..., V] probabilities, fp32 (fp64 for fp64 logits), whatever the type of the logits."""
        if self.greedy:
            return torch.zeros(logits.shape, dtype=_wide(logits), device=logits.device).scatter_(
                -1, greedy(logits)[..., None], 1.0
            )
        logits = logits.to(_wide(logits)) / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[..., -1:], float("-inf"))
        law = logits.softmax(-1)
        return law if self.top_p == 1 else _nucleus(law, self.top_p)

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Drawn:
        """The drafter's `Choose`: logits [1, S] -> (column [1] int64, the very law [S] that it was drawn from).

        Greedy gives no law (None): the draft is deterministic, a point mass, and no softmax is made.
        """
        if self.greedy:
            return Drawn(greedy(logits), None)
        law = self.law(logits)[0]
        return Drawn(draw(law, generator), law)


def greedy(logits: Tensor) -> Tensor:
    """[..., V] -> [...] int64, the first largest entry. On a CPU by numpy, which is eight times as fast over 49,152 entries."""
    if logits.device.type != "cpu":
        return logits.max(-1).indices
    return torch.as_tensor(logits.detach().to(_wide(logits)).numpy().argmax(-1))


def draw(law: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One sample from a law [V] -> [1] int64, by inverting its cumulative sum with one uniform number, in fp64.

    The law need not sum to 1 exactly; an entry that is 0 is never drawn. A CPU generator serves laws on any device, so
    that a seed means the same everywhere.
    """
    cumulative = law.cumsum(0, dtype=torch.float64)
    return torch.searchsorted(cumulative, uniform(generator) * cumulative[-1:], right=True)


def uniform(generator: torch.Generator | None = None) -> float:
    """One number in [0, 1), with 53 random bits."""
    device = "cpu" if generator is None else generator.device
    return float(torch.rand((), dtype=torch.float64, generator=generator, device=device))


def _nucleus(law: Tensor, top_p: float) -> Tensor:
    ordered, ids = law.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered  # mass in front of each entry: the first one is always kept
    ordered = ordered.masked_fill(before >= top_p, 0.0)
    kept = torch.zeros_like(law).scatter_(-1, ids, ordered)
    return kept / kept.sum(-1, keepdim=True)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
