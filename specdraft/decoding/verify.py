"""The verifier: which drafted tokens stand, and which token follows them, so that the output law is the target's.

One rule for chains, trees, sampled and deterministic drafts. It knows nothing of models, caches, policies or time; the
laws come in through the same logits processor that samples every other token (sampling.py).

A drafted tree hangs from the last committed token (node -1); node i has a parent of smaller index; siblings stand in
the order in which they were drawn. Letters: N nodes, V vocabulary, S columns of the draft laws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdraft.decoding.sampling import draw, uniform


@dataclass(frozen=True)
class Verdict:
    """path: accepted nodes from the root down (for a chain 0..a-1).   token: the target's own next token after them:
    the correction at the first rejection, or the bonus token where a whole branch was accepted."""

    path: list[int]
    token: int


def verify(
    law_of: Callable[[int], Tensor],
    tokens: list[int],
    parents: list[int],
    q: Sequence[Tensor] | None = None,
    ids: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Verdict:
    """Walk down the tree: accept a child x with probability min(1, p(x)/q(x)), else p <- norm(max(0, p - q)) over the
    full vocabulary and try its next sibling; where no child is accepted the next token is drawn from what is left of p.

    The tokens committed follow the target's law for any draft (papers 9.1, 9.2), provided that row i of `q` is the law
    that node i was really drawn from, given the siblings before it. So the three kinds of siblings are one rule:
      independent:          the same q for all;
      without replacement:  q of a later sibling has its elder siblings at 0 and is normalised again;
      deterministic:        q = None, point masses: x is accepted with probability p(x), a rejected x leaves p(x) = 0. That is
                            the law of drawing from p and looking for a child that matches, which is how it is done.

    Args:
        law_of: row -> target law [V]: row 0 after the last committed token, row i+1 after node i. Asked for only where the walk comes
            by, so that laws of rejected branches are never made.
        tokens, parents: of the N nodes, as target ids and node indices (-1 = the last committed token).
        q: N draft laws [S], or None.   ids: [S] target ids of q's columns; None = all of 0..V-1.
    """
    if q is None:
        return _match(lambda row: int(draw(law_of(row), generator)), tokens, parents)
    node, path, law = -1, [], law_of(0)
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent != node:
            continue
        drawn_from = spread(q[i], ids, law)
        if uniform(generator) * float(drawn_from[token]) < float(law[token]):
            node, law = i, law_of(i + 1)
            path.append(i)
        else:
            law = _residual(law, drawn_from)
    return Verdict(path, int(draw(law, generator)))


def verify_greedy(best: list[int], tokens: list[int], parents: list[int]) -> Verdict:
    """`verify` for T = 0, where every target law is a point mass on `best[i]` ([N+1], the argmax of row i): a child is
    accepted iff it is the argmax, whatever law it was drawn from, and the residual stays the point mass."""
    return _match(best.__getitem__, tokens, parents)


def _match(next_of: Callable[[int], int], tokens: list[int], parents: list[int]) -> Verdict:
    """Deterministic children: the target's own next token, `next_of(row)`, is taken, and drafting has paid where it is a child."""
    node, path, own = -1, [], next_of(0)
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == node and token == own:
            node, own = i, next_of(i + 1)
            path.append(i)
    return Verdict(path, own)


def _residual(law: Tensor, drawn_from: Tensor) -> Tensor:
    """norm(max(0, p - q)). It is empty only where p = q up to rounding; then p itself is the limit."""
    left = (law - drawn_from).clamp_(min=0)
    total = left.sum()
    return left / total if total > 0 else law


def spread(q: Tensor, ids: Tensor | None, like: Tensor) -> Tensor:
    """A draft law [S] as a law over the full vocabulary [V]: 0 outside the ids it was made on."""
    return q.to(like.dtype) if ids is None else torch.zeros_like(like).index_copy_(0, ids, q.to(like.dtype))
