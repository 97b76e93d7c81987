"""A new drafter that can copy: one key/value head which says again what followed the token last time, set in closed form.

Much of an answer repeats its prompt and itself. The layer reads a token beside the target's state one token before it, so a single head
can copy (an induction head, arXiv 2209.11895). Training finds one after a million tokens or so, all of a sudden; here it is there
before the first step (docs/log.md). With e the normed embedding, n the normed state g = fc(taps), and row j of tokens x[j+1]:

    query of row i = beta A^T e(x[i+1])     key of row j = C B^T n(g[j]), which tells x[j]     value of row j = P e(x[j+1])

A, B and C are the canonical directions and correlations of e(x[j]) and n(g[j]), in the pairs of the head's numbers that the rotary
embedding hardly turns; the output O writes into the state what raises the logit of the token that P read. A layer with one key/value head
does nothing else at first.

It knows nothing of training, nor of where states come from. Letters: N rows of text, H width, A taps, d head width, S draft vocabulary,
R width of what the draft head's rows read.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdraft.models.eagle3 import Eagle3Drafter

REACH = 128  # positions within which the pairs that are used turn by less than 1 radian
SPREAD = 3.0  # standard deviation of other tokens' scores; the same token's is sqrt(sum of C^2) times as large
BOOST = 30.0  # what a copied token's logit gains, where the keys tell their tokens perfectly (C = 1)
FIRST_TAP = 1.5  # length of the first tap's part of g over that of the rest: it knows best which token it is of
RIDGE = 0.02  # of a covariance's mean variance, added to each


@torch.no_grad()
def init_copying(drafter: Eagle3Drafter, taps: Tensor, tokens: Tensor) -> None:
    """Make the first key/value head of `drafter`, and the query heads that share it, copy. taps [N, A*H] of the target's `tokens` [N],
    some thousands of both, from any texts. A random map of the first tap is added to fc."""
    _hear_first_tap(drafter, taps)
    x, residual = drafter.layer_input(drafter.fuse(taps), tokens)
    embedded, state = x.chunk(2, dim=-1)
    counts = torch.bincount(tokens, minlength=len(drafter.embedding)).float()
    weights = counts[tokens].rsqrt()  # a rare token is to be known as well as a frequent one
    a, b, correlations = canonical(embedded, state, weights)
    dims = slow_dims(drafter)[: len(correlations)]
    told = correlations[: len(dims)].square()
    beta = SPREAD * (drafter.config.head_dim / told.sum().clamp_min(1e-6)) ** 0.5
    read, write = _value_map(drafter, counts)
    scale = BOOST * told.mean() * residual.norm(dim=-1).median() / residual.shape[-1] ** 0.5

    width, d = embedded.shape[1], drafter.config.head_dim
    attention = drafter.midlayer.self_attn
    query, key, value = (attention["q_proj"].weight.new_zeros(d, 2 * width) for _ in range(3))
    query[dims, :width] = beta * a[:, : len(dims)].T
    key[dims, width:] = (b * correlations)[:, : len(dims)].T
    value[: len(read), :width] = read
    attention["k_proj"].weight[:d], attention["v_proj"].weight[:d] = key, value
    group = drafter.config.num_attention_heads // drafter.config.num_key_value_heads
    for head in range(group):
        own = slice(head * d, (head + 1) * d)
        sharpness = (head + 1) / ((group + 1) / 2)  # on average 1; equal heads would learn the same
        attention["q_proj"].weight[own] = sharpness * query
        attention["o_proj"].weight[:, own] = 0
        attention["o_proj"].weight[:, own][:, : len(read)] = scale / group * write


def canonical(left: Tensor, right: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Canonical correlation analysis of left, right [N, H], rows weighted by weights [N] -> A, B [H, H], C [H] in falling order: the
    columns of left @ A and of right @ B have variance 1, and column i of one has correlation C_i with that of the other, and no other."""
    weights = weights / weights.sum()
    left, right = (part - weights @ part for part in (left, right))
    own_left, own_right = (_ridged(covariance(part, part, weights)) for part in (left, right))
    whiten_left, whiten_right = (torch.linalg.cholesky(own).inverse() for own in (own_left, own_right))
    u, s, v = torch.linalg.svd(whiten_left @ covariance(left, right, weights) @ whiten_right.T)
    return tuple(part.to(left) for part in (whiten_left.T @ u, whiten_right.T @ v.T, s))


def covariance(left: Tensor, right: Tensor, weights: Tensor) -> Tensor:
    """left^T diag(weights) right, multiplied in the rows' dtype; fp64 on the CPU, as is what is made of it."""
    return ((left * weights[:, None]).T @ right).cpu().double()


def slow_dims(drafter: Eagle3Drafter) -> Tensor:
    """The numbers of a head that the rotary embedding turns by less than 1 radian over REACH positions, slowest first; a pair at least."""
    half = drafter.config.head_dim // 2
    turn = torch.atan2(drafter.sin[1, :half], drafter.cos[1, :half]).abs()  # radians a position
    pairs = turn.argsort()[: max(1, int((turn * REACH < 1).sum()))]
    return torch.stack([pairs, pairs + half], dim=1).flatten()


def _hear_first_tap(drafter: Eagle3Drafter, taps: Tensor) -> None:
    """fc lets the first tap through, turned at random, FIRST_TAP times as long as what g was before."""
    inputs, width = drafter.fc_input(taps), drafter.config.hidden_size
    first, whole = inputs[:, :width].norm(dim=-1).median(), drafter.fc(inputs).norm(dim=-1).median()
    turned = nn.init.orthogonal_(torch.empty(width, width)).to(taps)
    drafter.fc.weight[:, :width] += FIRST_TAP * whole / first * turned


def _value_map(drafter: Eagle3Drafter, counts: Tensor) -> tuple[Tensor, Tensor]:
    """(P [r, H], O [H, r]), r = min(d, R): O P e(t), added to a state in units of its root mean square, raises token t's logit by about 1
    and the mean of the others' by 0. P reads the r principal components of the draft head's rows, made white: of all codes of tokens in r
    numbers those that take the smallest change of the state. Fitted over the tokens of counts [V] that the head has."""
    head, known = drafter.lm_head, counts > 0
    if head.vocab_map is None:
        rows, tokens = head.weight[known], known.nonzero()[:, 0]
    else:
        rows, tokens = head.weight[known[head.ids]], head.ids[known[head.ids]]
    weights = counts[tokens].sqrt() / counts[tokens].sqrt().sum()
    rows = rows - weights @ rows
    variances, directions = torch.linalg.eigh(_ridged(covariance(rows, rows, weights)))  # in rising order
    white = (directions / variances.sqrt())[:, -drafter.config.head_dim :]
    code = rows @ white.to(rows)
    embedded = drafter.midlayer.input_layernorm(drafter.embed(tokens).to(rows.dtype))
    own = _ridged(covariance(embedded, embedded, weights))
    read = torch.linalg.solve(own, covariance(embedded, code, weights)).T
    reads = head.project(torch.diag(drafter.norm.weight)).T.cpu().double()  # [R, H]: what the rows read of a state
    write = torch.linalg.pinv(reads, rtol=0.05) @ white / white.shape[1]
    return read.to(rows), write.to(rows)


def _ridged(matrix: Tensor) -> Tensor:
    return matrix + RIDGE * matrix.diagonal().mean().clamp_min(1e-12) * torch.eye(len(matrix), dtype=matrix.dtype)
