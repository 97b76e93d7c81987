"""How a draft branches: chains, EAGLE-2's dynamic trees, trees of sampled tokens; and where a tree's nodes stand.

A drafter runs nodes level by level and gives their logits; a shape says which tokens follow, which of them are to be run
next, and at the end which are proposed. It knows nothing of drafters, of the target, or of verification.

Letters: w nodes of a level that were run, S columns of the draft law, N drafted tokens, B rows, n = 1 + N tokens that the
target runs (the last committed one first).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specdraft.config import UserError
from specdraft.models.drafter import Ask, Proposal
from specdraft.models.thin_products import largest

# Nodes to run next: target ids [v], and for each the index of its parent among the w nodes that ran last (in numpy).
Level = tuple[Tensor, np.ndarray]


class Growth(Protocol):
    """The draft of one row on its way."""

    def grow(self, logits: Tensor) -> Level | None:
        """logits [w, S] of the nodes that ran last, at first [1, S] of the last committed token. None: nothing more to run."""

    def proposal(self) -> Proposal:
        """All that is proposed."""


class Shape(Protocol):
    """depth: levels that are drafted where nobody says how many.   width: nodes of a level that are run, at most; 1 = a chain."""

    depth: int
    width: int

    def begin(self, ask: Ask, ids: Tensor | None) -> Growth:
        """ask: with a budget of 1 or more.   ids: [S] target ids of the logits' columns; None = all of 0..V-1."""


class Chain:
    """One token after the other, each by the row's own sampling, until the budget is used up or the sampling ends it."""

    depth = 4
    width = 1

    def begin(self, ask: Ask, ids: Tensor | None) -> Growth:
        return _ChainGrowth(ask, ids)


class _ChainGrowth:
    root = np.zeros(1, dtype=np.int64)

    def __init__(self, ask: Ask, ids: Tensor | None):
        self.budget, self.choose, self.ids = ask.budget, ask.choose, ids
        self.tokens: list[Tensor] = []
        self.laws: list[Tensor | None] = []

    def grow(self, logits: Tensor) -> Level | None:
        column, law, is_last = self.choose(logits)
        self.tokens.append(column if self.ids is None else self.ids[column])
        self.laws.append(law)
        return None if is_last or len(self.tokens) == self.budget else (self.tokens[-1], self.root)

    def proposal(self) -> Proposal:
        q = None if self.laws[0] is None else self.laws
        return Proposal(torch.cat(self.tokens), list(range(-1, len(self.tokens) - 1)), q, self.ids)


@dataclass(frozen=True)
class TreeSize:
    """How large a tree may become: nodes in all, levels, and nodes of a level that are run. Raises UserError for a number below 1."""

    total_tokens: int = 60
    depth: int = 7
    top_k: int = 10

    def __post_init__(self) -> None:
        _check_positive(self)

    @property
    def width(self) -> int:
        return self.top_k


class Eagle2Tree(TreeSize):
    """EAGLE-2's dynamic tree (arXiv 2406.16858; docs/papers.md): on each level the `top_k` most likely tokens after each of
    the `top_k` best nodes, best by the product of the draft's probabilities along their path; after `depth` levels the best
    `total_tokens` of all these nodes are proposed.

    The children are deterministic, so at T > 0 a child is accepted with its probability under the target. (Pruning sampled
    children by their probability would bias the output: papers 9.4.)

    Raises:
        UserError: a number below 1.
    """

    def begin(self, ask: Ask, ids: Tensor | None) -> Growth:
        return _Eagle2Growth(self, min(ask.budget, self.depth), ids)


class _Eagle2Growth:
    """Every level's candidates go into one pool; a candidate's parent stands before it there, and is at least as likely. They are few:
    numpy handles them in a fraction of the time that torch needs, and a level waits for the device once.

    ids are read after the first product: until then live rows may still be gathered (LiveRows)."""

    def __init__(self, tree: Eagle2Tree, depth: int, ids: Tensor | None):
        self.tree, self.depth = tree, depth
        self.ids, self.ids_here = ids, None
        self.tokens: list[np.ndarray] = []  # of each level's candidates
        self.parents: list[np.ndarray] = []  # their places in the pool, -1 = the last committed token
        self.scores: list[np.ndarray] = []  # log-probabilities of their paths
        self.size = 0

    def grow(self, logits: Tensor) -> Level | None:
        width, self.device = min(self.tree.top_k, logits.shape[1]), logits.device
        best, columns = (found.numpy(force=True) for found in _log_law_top(logits, width))
        if not self.size:  # the last committed token
            self.ids_here = None if self.ids is None else self.ids.numpy(force=True)
            place, path = np.array([-1]), np.zeros(1, best.dtype)
        else:
            place, path = self.frontier, self.scores[-1][self.picked]
        scores = (path[:, None] + best).ravel()
        tokens = columns.ravel() if self.ids_here is None else self.ids_here[columns.ravel()]
        self.tokens.append(tokens)
        self.parents.append(place.repeat(width))
        self.scores.append(scores)
        if len(self.scores) == self.depth:
            return None
        self.picked = _largest_first(scores)[: self.tree.top_k]
        self.frontier = self.size + self.picked
        self.size += len(scores)
        return self._tensor(tokens[self.picked]), self.picked // width

    def proposal(self) -> Proposal:
        kept = np.sort(_largest_first(np.concatenate(self.scores))[: self.tree.total_tokens])
        parents = np.concatenate(self.parents)[kept]
        # every parent is kept too: it is at least as likely as its child and stands before it
        parents = np.where(parents < 0, parents, np.searchsorted(kept, parents))
        return Proposal(self._tensor(np.concatenate(self.tokens)[kept]), parents.tolist(), None, self.ids)

    def _tensor(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers).to(self.device)


class SampledTree(TreeSize):
    """A tree of tokens drawn from the draft law, siblings without replacement: at most `top_k` tokens a level, `total_tokens`
    in all, spread evenly over `depth` levels.

    How many children a node gets is settled before any of them is drawn: the places of a level go where the probability of
    the path times the law's largest, second largest, ... probability is largest. All that is drawn is proposed. So no token's
    presence depends on the token, and the output law is the target's (papers 9.2, 9.4). At T = 0 the children are the most
    likely tokens.

    Raises:
        UserError: a number below 1.
    """

    def begin(self, ask: Ask, ids: Tensor | None) -> Growth:
        return _SampledGrowth(self, ask, ids)


class _SampledGrowth:
    def __init__(self, tree: SampledTree, ask: Ask, ids: Tensor | None):
        self.tree, self.choose, self.ids = tree, ask.choose, ids
        self.depth = min(ask.budget, tree.depth)
        self.levels = 0
        self.tokens: list[Tensor] = []
        self.laws: list[Tensor | None] = []
        self.parents: list[int] = []
        self.nodes = [-1]  # those whose logits come next
        self.path: Tensor | None = None  # log-probabilities of their paths

    def grow(self, logits: Tensor) -> Level | None:
        log_law = _wide(logits).log_softmax(-1)
        counts = self._allot(log_law)
        before = len(self.parents)
        scores = []
        for i, count in enumerate(counts):
            for column in self._draw(logits[i : i + 1], count):
                scores.append(log_law[i, column] if self.path is None else self.path[i] + log_law[i, column])
            self.parents += [self.nodes[i]] * count
        self.levels += 1
        if self.levels == self.depth or len(self.parents) == self.tree.total_tokens:
            return None
        self.nodes, self.path = list(range(before, len(self.parents))), torch.cat(scores)
        of = [i for i, count in enumerate(counts) for _ in range(count)]
        return torch.cat(self.tokens[before:]), np.array(of)

    def _allot(self, log_law: Tensor) -> list[int]:
        """How many children each of the nodes gets, by their log-laws [w, S]."""
        largest = log_law.topk(min(self.tree.top_k, log_law.shape[1])).values
        scores = largest if self.path is None else self.path[:, None] + largest
        left = self.tree.total_tokens - len(self.parents)
        places = min(self.tree.top_k, -(-left // (self.tree.depth - self.levels)))
        of = _largest_first(scores.numpy(force=True).ravel())[:places] // scores.shape[1]
        return np.bincount(of, minlength=len(log_law)).tolist()

    def _draw(self, logits: Tensor, count: int) -> list[Tensor]:
        """Columns of so many siblings after the node with these logits [1, S]: each by the law without its elder siblings."""
        columns: list[Tensor] = []
        for _ in range(count):
            column, law, _ = self.choose(logits)
            columns.append(column)
            self.tokens.append(column if self.ids is None else self.ids[column])
            self.laws.append(law)
            logits = logits.index_fill(1, column, float("-inf"))
        return columns

    def proposal(self) -> Proposal:
        q = None if self.laws[0] is None else self.laws
        return Proposal(torch.cat(self.tokens), self.parents, q, self.ids)


def depths(parents: list[int]) -> list[int]:
    """Level of every node, 1 = a child of the last committed token."""
    levels: list[int] = []
    for parent in parents:
        levels.append(1 if parent < 0 else levels[parent] + 1)
    return levels


def is_chain(parents: list[int]) -> bool:
    return parents == list(range(-1, len(parents) - 1))


def place_trees(starts: list[int], parents: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the runs [last committed token, *nodes] stand, padded on the right to the longest one, and what each token of
    them may attend to: the committed tokens, its ancestors and itself.

    starts: tokens of each row in the cache.   Returns: rotary positions [B, n], start + level; mask [B, 1, n, longest start
    + n], True = may attend. Padding stands at the root's position and sees the root.
    """
    n = 1 + max(len(row) for row in parents)
    positions = np.repeat(np.array(starts)[:, None], n, axis=1)
    mask = np.zeros((len(starts), 1, n, max(starts) + n), dtype=bool)
    for b, (start, row) in enumerate(zip(starts, parents, strict=True)):
        mask[b, 0, :, : start + 1] = True
        tree = mask[b, 0, :, start : start + n]
        for i, parent in enumerate(row, 1):
            tree[i] |= tree[parent + 1]
            tree[i, i] = True
        positions[b, 1 : len(row) + 1] = [start + level for level in depths(row)]
    return torch.from_numpy(positions).to(device), torch.from_numpy(mask).to(device)


def _log_law_top(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest log-probabilities of every row [w, S], largest first, and their columns, [w, count] each."""
    values, columns, log_total = largest(_wide(logits), count)
    return values - log_total, columns


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _largest_first(scores: np.ndarray) -> np.ndarray:
    """Indices of scores [n] by size; of equal ones those that stand first."""
    return np.argsort(-scores, kind="stable")


def _check_positive(tree: TreeSize) -> None:
    for name, value in vars(tree).items():
        if value < 1:
            raise UserError(f"{type(tree).__name__}: got {name} {value}, allowed: 1 or more")
