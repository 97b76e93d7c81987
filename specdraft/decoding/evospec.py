"""EvoSpec's vocabulary (arXiv 2605.27390; the specification is ours, papers 3, 1-4): a core of frequent tokens that never changes,
and a tail whose slots go to the rarer tokens that text and target point at now. The size of the live set is constant.

What points at a token: how often it was said or wanted lately and what the last tokens go with (statistical index), how near its
row of the target's head is to the target's last state (semantic index), and how often it was missed. The drafter's weights are
adapted elsewhere, by an observer of the same rounds (models/observer.py).

Letters: V target vocabulary, H width, U candidates for the tail (all usable ids that are not in the core), M partners of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdraft.config import UserError, require_positive
from specdraft.decoding.live_rows import RowBuffer, Verified, rows_by_target_id
from specdraft.models.drafter import LiveRows
from specdraft.models.heads import Head

WINDOW = 32  # tokens over which two occur together, and how many last ones are looked at
SEMANTIC_TOP = 256


@dataclass(frozen=True)
class EvoSpecConfig:
    """core, tail: sizes.   beta: weight of the semantic against the statistical score.   mu: weight of misses.   top: the target's
    best tokens counted at each verified node.   decay: a round, of counts and misses; a token, of older context.   refresh_every:
    rounds.   residency: rounds that a token stays at least.   miss_threshold: share of committed tokens that were a candidate but not
    live, averaged with rate miss_rate, above which the tail is refreshed at once.   across_requests: keep what was learnt when a
    request begins; a sampled output then depends on the requests before it, and not on its seed alone."""

    core: int = 8192
    tail: int = 1024
    beta: float = 0.5
    mu: float = 1.0
    top: int = 3
    decay: float = 0.99
    refresh_every: int = 4
    residency: int = 8
    miss_threshold: float = 0.2
    miss_rate: float = 0.1
    across_requests: bool = False

    def __post_init__(self) -> None:
        require_positive({f"evospec.{name}": getattr(self, name) for name in ("top", "refresh_every")})
        for name in ("beta", "decay", "miss_threshold", "miss_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"evospec.{name}: got {getattr(self, name)}, allowed: 0 to 1")
        if self.residency < 0 or not 0 <= self.mu < math.inf:
            raise UserError(f"evospec.residency, evospec.mu: got {self.residency} and {self.mu}, allowed: 0 or more")


class EvoSpecVocabulary:
    """See the file. Score of a candidate v (papers 3.4), z = standardised over the candidates:

        s(v) = beta z(s_sem) + (1 - beta) z(s_stat) + mu m_v
        s_stat(v) = log(1 + c_v) + sum over the last tokens u of 0.99^age(u) PPMI(u, v);   s_sem(v) = cos(query, row_v)

    Args:
        ids: target ids, most frequent first: the core is the first of them, the tail starts with those that follow. A token
            that must never be missing (end ids, specials) belongs to the front.
        target_rows: [V, H] the target's head.   norm: the target's final norm, [1, H] -> [1, H]: the query is a normed state.
        pairs: what goes with what, from `count_pairs`; None = no such evidence.
        semantic: that of another one with the same head, ids and sizes, to share; None = a new one.

    Raises:
        UserError: too few usable ids for core and tail; faiss is not installed.
    """

    is_per_request = True

    def __init__(
        self,
        head: Head,
        ids: Sequence[int],
        target_rows: Tensor,
        norm: Callable[[Tensor], Tensor],
        config: EvoSpecConfig | None = None,
        pairs: Pairs | None = None,
        semantic: SemanticIndex | None = None,
    ):
        self.config = config = config or EvoSpecConfig()
        self._rows = rows_by_target_id(head)
        usable = [token for token in dict.fromkeys(ids) if self._rows[token] >= 0]
        if min(config.core, config.tail) < 1 or len(usable) < config.core + config.tail:
            raise UserError(
                f"EvoSpecVocabulary: got {len(usable)} usable ids, asked for a core of {config.core} and a tail of {config.tail}; "
                "give a longer frequency list or smaller sizes, 1 or more"
            )
        self._core, self._first_tail = usable[: config.core], usable[config.core : config.core + config.tail]
        is_candidate = self._rows >= 0
        is_candidate[self._core] = False
        self._candidates = is_candidate.nonzero()[:, 0]  # [U] target ids
        self._index_of = torch.full_like(self._rows, -1)  # [V] -> place among the candidates
        self._index_of[self._candidates] = torch.arange(len(self._candidates))
        self._norm = norm
        self.semantic = semantic or SemanticIndex(target_rows[self._candidates.to(target_rows.device)])
        self._pairs = pairs
        self._buffer = RowBuffer(head, config.core + config.tail)
        self._buffer.write(0, self._rows[self._core + self._first_tail].tolist())
        self._members = torch.tensor(self._first_tail)  # [tail] target ids, by slot
        self._forget()

    def begin(self, prompt: list[int], last: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
        """The prompt counts as text: its tokens are the first evidence, and the tail is refreshed by it."""
        if not self.config.across_requests:
            self._put(torch.arange(len(self._members)), torch.tensor(self._first_tail))
            self._forget()
        self._recent = prompt[-WINDOW:]
        self._count(prompt)
        self._refresh(last[-1])

    def live(self) -> LiveRows | None:
        return self._buffer

    def covers(self, token: int) -> bool:
        return token in self._live

    def observe(self, seen: Verified) -> None:
        config = self.config
        missed = [token for token in seen.committed if token not in self._live and self._index_of[token] >= 0]
        self.miss_rate += config.miss_rate * (len(missed) / len(seen.committed) - self.miss_rate)
        self._round += 1
        self._counts *= config.decay
        self._misses *= config.decay
        wanted = seen.logits.topk(min(config.top, seen.logits.shape[-1])).indices.flatten().tolist()
        self._count([*seen.committed, *wanted])
        places = self._places(missed)
        self._misses.index_add_(0, places, torch.ones(len(places)))
        self._recent = (self._recent + seen.committed)[-WINDOW:]
        if self._round % config.refresh_every == 0 or self.miss_rate > config.miss_threshold:
            self._refresh(seen.last[seen.kept[-1]])

    def _forget(self) -> None:
        self._counts = torch.zeros(len(self._candidates))
        self._misses = torch.zeros(len(self._candidates))
        self._admitted = torch.full((len(self._members),), -self.config.residency)  # round, by slot
        self._live = {*self._core, *self._members.tolist()}
        self._recent: list[int] = []
        self._round = 0
        self.miss_rate = 0.0

    def _count(self, ids: list[int]) -> None:
        """c_v + 1 for every different id."""
        self._counts[self._places(set(ids))] += 1

    def _places(self, ids: Iterable[int]) -> Tensor:
        """Places among the candidates; ids of the core and ids without a row are left out."""
        places = self._index_of[torch.tensor(list(ids), dtype=torch.int64)]
        return places[places >= 0]

    def scores(self, last: Tensor) -> Tensor:
        """[H] the target's last state -> [U] s(v)."""
        config = self.config
        semantic = torch.zeros(len(self._candidates))
        places, cosines = self.semantic.search(self._norm(last[None])[0], SEMANTIC_TOP)
        semantic[places] = cosines
        statistical = self._counts.log1p()
        if self._pairs is not None:
            partners, weights = self._pairs.of(self._recent, config.decay)
            places = self._index_of[partners]
            is_known = places >= 0
            statistical.index_add_(0, places[is_known], weights[is_known])
        score = config.beta * standardise(semantic) + (1 - config.beta) * standardise(statistical)
        return score + config.mu * self._misses

    def _refresh(self, last: Tensor) -> None:
        """The best candidates outside take the slots of the worst members that have stayed long enough."""
        score = self.scores(last)
        members = self._index_of[self._members]
        free = (self._round - self._admitted >= self.config.residency).nonzero()[:, 0]
        worst = free[score[members[free]].argsort(stable=True)]
        outside = score.index_fill(0, members, float("-inf"))
        count = min(len(worst), SEMANTIC_TOP, len(score) - len(members))
        best = outside.topk(count)
        gains = best.values > score[members[worst[:count]]]  # falling against rising: true up to a point, then false
        count = int(gains.sum())
        self._put(worst[:count], self._candidates[best.indices[:count]])

    def _put(self, slots: Tensor, ids: Tensor) -> None:
        """Give tail slots to other target ids."""
        changed = self._members[slots] != ids
        slots, ids = slots[changed], ids[changed]
        self._live -= set(self._members[slots].tolist())
        self._live |= set(ids.tolist())
        self._members[slots] = ids
        self._admitted[slots] = self._round
        self._buffer.replace((slots + len(self._core)).tolist(), self._rows[ids].tolist())


class SemanticIndex:
    """Cosine search over rows [U, H] through an inverted file (faiss): about an eighth of the rows are looked at."""

    def __init__(self, rows: Tensor):
        try:
            import faiss
        except ImportError:
            raise UserError("EvoSpecVocabulary: faiss is not installed; pip install 'specdraft[evospec]'") from None
        units = torch.nn.functional.normalize(rows.detach().float(), dim=-1).cpu().numpy()
        lists = max(1, min(math.isqrt(len(units)), len(units) // 39))  # faiss wants 39 rows a list
        self._coarse = faiss.IndexFlatIP(units.shape[1])
        self._index = faiss.IndexIVFFlat(self._coarse, units.shape[1], lists, faiss.METRIC_INNER_PRODUCT)
        self._index.nprobe = lists // 8 + 1
        self._index.train(units)
        self._index.add(units)

    def search(self, query: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """[H] -> (places, cosines) of the nearest rows, at most `count`, nearest first."""
        unit = torch.nn.functional.normalize(query.float(), dim=-1).cpu().numpy()
        cosines, places = (torch.from_numpy(found[0]) for found in self._index.search(unit[None], count))
        is_found = places >= 0
        return places[is_found], cosines[is_found]


@dataclass(frozen=True)
class Pairs:
    """Which tail tokens come within the next 32 tokens of a token more often than chance: positive pointwise mutual information.

    starts: [V+1]: the partners of u are partners[starts[u] : starts[u+1]], at most M of them; ppmi: as long as `partners`, nats."""

    starts: Tensor
    partners: Tensor
    ppmi: Tensor

    def of(self, recent: list[int], decay: float) -> tuple[Tensor, Tensor]:
        """The partners of the last tokens (repeats included), and decay^age * PPMI of each; age 0 = the last token."""
        spans = [slice(int(self.starts[u]), int(self.starts[u + 1])) for u in recent]
        ages = range(len(recent) - 1, -1, -1)
        partners = [self.partners[span] for span in spans]
        weights = [self.ppmi[span] * decay**age for span, age in zip(spans, ages, strict=True)]
        return torch.cat([*partners, self.partners[:0]]), torch.cat([*weights, self.ppmi[:0]])


def count_pairs(texts: Iterable[Sequence[int]], vocab_size: int, tail: Iterable[int], most: int = 32) -> Pairs:
    """PPMI(u, v) = max(0, log(n_uv n / (n_u n_v))) over the ordered pairs (u, v) of a text with v at most 32 tokens after u; for
    v in `tail`, the `most` best of every u."""
    is_tail = torch.zeros(vocab_size, dtype=torch.bool)
    is_tail[list(tail)] = True
    first, second = torch.zeros(2, vocab_size, dtype=torch.float64)
    codes = []
    for text in texts:
        ids = torch.tensor(list(text), dtype=torch.int64)
        for distance in range(1, min(WINDOW, len(ids) - 1) + 1):
            u, v = ids[:-distance], ids[distance:]
            first += torch.bincount(u, minlength=vocab_size)
            second += torch.bincount(v, minlength=vocab_size)
            codes.append((u * vocab_size + v)[is_tail[v]])
    found, counts = torch.cat([*codes, torch.empty(0, dtype=torch.int64)]).unique(return_counts=True)
    u, v = found // vocab_size, found % vocab_size
    ppmi = (counts * first.sum() / (first[u] * second[v])).log().float()
    u, v, ppmi = u[ppmi > 0], v[ppmi > 0], ppmi[ppmi > 0]
    order = ppmi.argsort(descending=True, stable=True)
    order = order[u[order].argsort(stable=True)]  # by u, then by falling PPMI
    u, v, ppmi = u[order], v[order], ppmi[order]
    starts = torch.searchsorted(u, torch.arange(vocab_size + 1))
    is_kept = torch.arange(len(u)) - starts[u] < most
    u, v, ppmi = u[is_kept], v[is_kept], ppmi[is_kept]
    return Pairs(torch.searchsorted(u, torch.arange(vocab_size + 1)), v, ppmi)


def standardise(score: Tensor) -> Tensor:
    """(s - mean) / standard deviation; all 0 where every score is the same."""
    spread = score.std(correction=0)
    return (score - score.mean()) / spread if spread > 0 else torch.zeros_like(score)
