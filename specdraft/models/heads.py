"""Draft heads: hidden states -> logits over the draft vocabulary.

Every head is a projection followed by one matrix of rows: z = project(h) @ weight.T. That is all that the fused loss and
the dynamic vocabularies need to know: a live vocabulary is a choice of rows, whatever the head.

Letters: H width, V target vocabulary, S draft vocabulary, R rank, D width of the projected state (H, or R).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdraft.config import UserError
from specdraft.data.vocab import VocabMap


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

    def target_ids(self, live: Tensor | None = None) -> Tensor | None:
        """Target ids of the logits' columns; None = all of 0..V-1."""
        if self.vocab_map is None:
            return live
        return self.ids if live is None else self.ids[live]


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
        """The best rank-R stand-in for the target's head W [V, H]: the least expected error sum_v f_v (z_v - z'_v)^2 of the logits.

        With features of second moment C = E[h h^T] [H, H] and D = diag(f), that is the R-truncated SVD of D^1/2 W C^1/2; its right
        factor V_R gives W_down = c V_R^T C^-1/2 and W_up = W C^1/2 V_R / c; c makes the entries of both as large, so that a step of
        Adam, which is as large for every weight, changes one factor as much as the other. Near the
        target's law KL is 1/2 Var_p(z - z'), so f = how often the target says each token [V] is the weight to choose; and since a
        constant added to all logits changes nothing, W is centred by its f-weighted mean row first. Without C and f this is the
        plain SVD of W. (papers 1, initialisations b and c; the weight is ours: docs/log.md.)
        """
        rows = target_rows.double()
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
        gram = root @ (rows.T @ weighted) @ root
        right = torch.linalg.eigh(gram).eigenvectors[:, -len(self.down) :].flip(-1)
        down, up = right.T @ inverse_root, rows @ (root @ right)
        c = (up.square().mean() / down.square().mean()) ** 0.25
        self.down.copy_(c * down)
        self.weight.copy_(up / c)


HEADS = {"full": FullHead, "trimmed": TrimmedHead, "lowrank": LowRankHead}


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
