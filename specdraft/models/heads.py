"""Draft heads: hidden states -> logits over the draft vocabulary.

Every head is a projection followed by one matrix of rows: z = project(h) @ weight.T. That is all that the fused loss and
the dynamic vocabularies need to know: a live vocabulary is a choice of rows, whatever the head.

Letters: H width, V target vocabulary, S draft vocabulary, R rank, D width of the projected state (H, or R).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdraft.config import UserError
from specdraft.data.vocab import VocabMap

# Of a head's rows while decoding: that of the weights, or INT8 on a CPU (layers.py: Int8Linear).
HeadDtype = Literal["own", "int8"]


@dataclass
class HeadConfig:
    """kind: `full` V rows; `trimmed` S rows named by a vocabulary map; `lowrank` V rows of two factors (SlimSpec).
    rank: R of a low-rank head; None = H/8.   init: where the weights start: `random`, the target's head (`svd`: its plain
    truncation; `whitened_svd`: the truncation that is best on real features). Full and trimmed heads copy rows unless `random`.
    vocab: a trimmed head's map (vocab.safetensors); vocab_size: or its size (None = 8,192), the map being counted from the answers."""

    kind: Literal["full", "trimmed", "lowrank"] = "lowrank"
    rank: int | None = None
    init: Literal["random", "svd", "whitened_svd"] = "whitened_svd"
    vocab: str | None = None
    vocab_size: int | None = None


class Head(nn.Module):
    """z = project(h) @ weight.T.   weight: [S, D].   vocab_map: rows -> target ids; None = row i is target id i."""

    weight: nn.Parameter
    vocab_map: VocabMap | None = None

    def project(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., D]"""
        return hidden

    def logits(self, hidden: Tensor, live: Tensor | None = None) -> Tensor:
        """[..., H] -> [..., S], or [..., len(live)] over the rows `live` [n] int64."""
        rows = self.weight if live is None else self.weight[live]
        return F.linear(self.project(hidden), rows)

    def target_ids(self) -> Tensor | None:
        """Target ids of the logits' columns; None = all of 0..V-1."""
        return None if self.vocab_map is None else self.ids


class FullHead(Head):
    """One row for every token of the target."""

    def __init__(self, hidden_size: int, vocab_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        nn.init.normal_(self.weight, std=0.02)

    @torch.no_grad()
    def init_from(self, target_rows: Tensor) -> None:
        """Copy the target's head [V, H]."""
        self.weight.copy_(target_rows)


class TrimmedHead(Head):
    """Rows for the tokens of a vocabulary map only. A token outside can never be drafted (FR-Spec, VocabTrim, EAGLE-3)."""

    def __init__(self, hidden_size: int, vocab_map: VocabMap):
        super().__init__()
        self.vocab_map = vocab_map
        self.register_buffer("ids", vocab_map.target_ids.clone(), persistent=False)
        self.weight = nn.Parameter(torch.empty(len(vocab_map.target_ids), hidden_size))
        nn.init.normal_(self.weight, std=0.02)

    @torch.no_grad()
    def init_from(self, target_rows: Tensor) -> None:
        """Gather the map's rows, in the map's order, from the target's head [V, H]."""
        self.weight.copy_(target_rows[self.ids.to(target_rows.device)])

    @classmethod
    def from_full(cls, head: Head, vocab_map: VocabMap) -> Head:
        """A trained head over all of V, cut to the rows of a map, in the map's order, without training (FR-Spec, VocabTrim). Of a
        low-rank head the rows of W_up are cut, so it stays one.

        Raises:
            UserError: a head that is trimmed already, or a map of another vocabulary.
        """
        if head.vocab_map is not None or len(head.weight) != vocab_map.vocab_size:
            kind = "a trimmed head" if head.vocab_map is not None else "a head"
            raise UserError(
                f"trimming: got {kind} of {len(head.weight)} rows and a map for {vocab_map.vocab_size} tokens, allowed: a head with one "
                "row for every token; give a drafter with a full or low-rank head, and a map made for its target"
            )
        if isinstance(head, LowRankHead):
            trimmed: Head = LowRankHead(head.down.shape[1], vocab_map.vocab_size, len(head.down), vocab_map)
            trimmed.down.data = head.down.detach().clone()
        else:
            trimmed = cls(head.weight.shape[1], vocab_map)
        trimmed.weight.data = head.weight.detach()[vocab_map.target_ids.to(head.weight.device)]
        return trimmed.to(head.weight.device).train(head.training).requires_grad_(head.weight.requires_grad)


class LowRankHead(Head):
    """SlimSpec (arXiv 2605.10453): z = W_up (W_down h), over the full vocabulary, no bias, nothing between.
    `weight` is W_up [V, R]; `down` is W_down [R, H]. With a map (`TrimmedHead.from_full`) W_up has its rows only, [S, R]."""

    def __init__(self, hidden_size: int, vocab_size: int, rank: int, vocab_map: VocabMap | None = None):
        super().__init__()
        if not 1 <= rank <= hidden_size:
            raise UserError(
                f"head.rank: got {rank}, allowed: 1 to the width {hidden_size}; H/8 = {hidden_size // 8} is the usual choice"
            )
        self.down = nn.Parameter(torch.randn(rank, hidden_size) * hidden_size**-0.5)
        rows = vocab_size if vocab_map is None else len(vocab_map)
        self.weight = nn.Parameter(torch.randn(rows, rank) * 0.1 * rank**-0.5)
        if vocab_map is not None:
            self.vocab_map = vocab_map
            self.register_buffer("ids", vocab_map.target_ids.clone(), persistent=False)

    def project(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.down)

    @torch.no_grad()
    def init_from(self, target_rows: Tensor, covariance: Tensor | None = None, frequency: Tensor | None = None) -> None:
        """The best rank-R stand-in for a head W [V, H], by default the plain truncation of its SVD. See `components`."""
        self.take(components(target_rows, covariance, frequency))

    @torch.no_grad()
    def take(self, parts: Components) -> None:
        """The first R components as W_down = c V_R^T C^-1/2 and W_up = W C^1/2 V_R / c. c makes the entries of both as large, so that a
        step of Adam, which is as large for every weight, changes one factor as much as the other."""
        rank = len(self.down)
        down, up = parts.down[:rank], parts.rows @ parts.up[:, :rank]
        c = (up.square().mean() / down.square().mean()) ** 0.25
        self.down.copy_(c * down)
        self.weight.copy_(up / c)

    @classmethod
    def from_dense(cls, head: Head, vocab_size: int, rank: int, parts: Components) -> LowRankHead:
        """A trained full or trimmed head in two factors; a trimmed one keeps its map. parts: the `components` of its rows.

        Raises:
            UserError: a head that is low-rank already; a rank whose factors hold no fewer weights than the head.
        """
        check_factoring(head, rank)
        factored = cls(head.weight.shape[1], vocab_size, rank, head.vocab_map).to(head.weight)
        factored.take(parts)
        return factored.train(head.training).requires_grad_(head.weight.requires_grad)


class Components(NamedTuple):
    """A dense head W [S, H] taken apart, fp64, H components in falling order of what they add to its logits.

    energy: [H], the squared singular values of D^1/2 W C^1/2.   down: [H, H] = V^T C^-1/2, one row a component.
    up: [H, H] = C^1/2 V, one column a component.   rows: [S, H], W less its mean row.   W = rows @ up @ down, but for that mean."""

    energy: Tensor
    down: Tensor
    up: Tensor
    rows: Tensor


@torch.no_grad()
def components(rows: Tensor, covariance: Tensor | None = None, frequency: Tensor | None = None) -> Components:
    """The components of a head W = `rows` [S, H]: the first R of them have the least expected error sum_v f_v (z_v - z'_v)^2 of the logits.

    With features of second moment C = E[h h^T] [H, H] and D = diag(f), that is the R-truncated SVD of D^1/2 W C^1/2 = U s V^T. Near
    the target's law KL is 1/2 Var_p(z - z'), so f = how often the target says each token [S] is the weight to choose; and since a
    constant added to all logits changes nothing, W is centred by its f-weighted mean row first. Without C and f this is the
    plain SVD of W. (papers 1, initialisations b and c; the weight is ours: docs/log.md.)
    """
    rows = rows.double()
    if covariance is None:
        root = inverse_root = torch.eye(rows.shape[1], dtype=torch.float64, device=rows.device)
    else:
        values, vectors = torch.linalg.eigh(covariance.double())
        values = values.clamp_min(values.max() * 1e-8)
        root = (vectors * values.sqrt()) @ vectors.T
        inverse_root = (vectors * values.rsqrt()) @ vectors.T
    weighted = rows
    if frequency is not None:
        share = (frequency.double() / frequency.double().sum())[:, None]
        rows = rows - (share * rows).sum(0)
        weighted = share * rows
    energy, vectors = torch.linalg.eigh(root @ (rows.T @ weighted) @ root)
    right = vectors.flip(-1)
    return Components(energy.flip(0).clamp_min(0), right.T @ inverse_root, root @ right, rows)


def energy_rank(energy: Tensor, share: float) -> int:
    """The smallest rank whose components hold `share` (0..1) of the energy [H]."""
    held = energy.cumsum(0) / energy.sum()
    return min(int((held < share).sum()) + 1, len(energy))


def largest_rank(head: Head) -> int:
    """The largest R with R (S + H) < S H: two factors that hold fewer weights than the dense head [S, H]."""
    rows, width = head.weight.shape
    return (rows * width - 1) // (rows + width)


def check_factoring(head: Head, rank: int) -> None:
    """Raises UserError for a head that is low-rank already, and for a rank whose factors hold no fewer weights than it."""
    rows, width = head.weight.shape
    if isinstance(head, LowRankHead):
        raise UserError(
            f"factoring a head: got one that is low-rank already (rank {width}), allowed: full and trimmed heads; train it further instead"
        )
    if not 1 <= rank <= largest_rank(head):
        raise UserError(
            f"rank: got {rank}, allowed: 1 to {largest_rank(head)}, where two factors are smaller than the head of {rows:,} x {width}; "
            f"H/8 = {max(1, width // 8)} is the usual choice"
        )


def head_rank(config: HeadConfig, hidden_size: int) -> int:
    """R of a low-rank head: the given one, or H/8. Raises UserError for a rank outside 1..H."""
    rank = max(1, hidden_size // 8) if config.rank is None else config.rank
    if not 1 <= rank <= hidden_size:
        raise UserError(
            f"head.rank: got {rank}, allowed: 1 to the width {hidden_size}; H/8 = {hidden_size // 8} is the usual choice"
        )
    return rank


def check_vocabulary(config: HeadConfig) -> None:
    """Raises UserError where a smaller vocabulary is asked of a head that has all of V, or two are asked at once (fault 19)."""
    given = {key: getattr(config, key) for key in ("vocab", "vocab_size") if getattr(config, key) is not None}
    for key, value in given.items():
        if config.kind != "trimmed":
            raise UserError(
                f"head.{key}: got {value} with head.kind {config.kind}, which has a row for every token of the target; "
                "choose --head.kind trimmed, or leave it out"
            )
    if len(given) == 2:
        raise UserError(
            f"head.vocab, head.vocab_size: got {config.vocab} and {config.vocab_size}, allowed: one of them"
        )


def build_head(config: HeadConfig, hidden_size: int, vocab_size: int, vocab_map: VocabMap | None = None) -> Head:
    """The head that `config` names; a trimmed one needs its map, a low-rank one may have one, a full one has none.

    Raises:
        UserError: a rank outside 1..H; a map for a full head (fault 19).
    """
    if config.kind == "trimmed":
        assert vocab_map is not None, "a trimmed head needs a vocabulary map"
        return TrimmedHead(hidden_size, vocab_map)
    if config.kind == "full":
        if vocab_map is not None:
            raise UserError(
                f"head: got a full head with a vocabulary map of {len(vocab_map)} tokens, allowed: no map; the checkpoint is corrupt"
            )
        return FullHead(hidden_size, vocab_size)
    return LowRankHead(hidden_size, vocab_size, head_rank(config, hidden_size), vocab_map)
