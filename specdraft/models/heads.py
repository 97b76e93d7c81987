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
    vocab: a trimmed head's map (vocab.safetensors); vocab_size: or its size, the map being counted from the answers."""

    kind: Literal["full", "trimmed", "lowrank"] = "lowrank"
    rank: int | None = None
    init: Literal["random", "svd", "whitened_svd"] = "whitened_svd"
    vocab: str | None = None
    vocab_size: int = 8192


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


class LowRankHead(Head):
    """SlimSpec (arXiv 2605.10453): z = W_up (W_down h), over the full vocabulary, no bias, nothing between.
    `weight` is W_up [V, R]; `down` is W_down [R, H]."""

    def __init__(self, hidden_size: int, vocab_size: int, rank: int):
        super().__init__()
        if not 1 <= rank <= hidden_size:
            raise UserError(
                f"head.rank: got {rank}, allowed: 1 to the width {hidden_size}; H/8 = {hidden_size // 8} is the usual choice"
            )
        self.down = nn.Parameter(torch.randn(rank, hidden_size) * hidden_size**-0.5)
        self.weight = nn.Parameter(torch.randn(vocab_size, rank) * 0.1 * rank**-0.5)

    def project(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.down)

    @torch.no_grad()
    def init_from(self, target_rows: Tensor, covariance: Tensor | None = None, frequency: Tensor | None = None) -> None:
        """The best rank-R stand-in for the target's head W [V, H]: the least expected error sum_v f_v (z_v - z'_v)^2 of the logits.

        With features of second moment C = E[h h^T] [H, H] and D = diag(f), that is the R-truncated SVD of D^1/2 W C^1/2; its right
        factor V_R gives W_down = V_R^T C^-1/2 and W_up = W C^1/2 V_R, so that the projected features have unit variance. Near the
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
        self.down.copy_(right.T @ inverse_root)
        self.weight.copy_(rows @ (root @ right))


HEADS = {"full": FullHead, "trimmed": TrimmedHead, "lowrank": LowRankHead}


def head_rank(config: HeadConfig, hidden_size: int) -> int:
    """R of a low-rank head: the given one, or H/8. Raises UserError for a rank outside 1..H."""
    rank = max(1, hidden_size // 8) if config.rank is None else config.rank
    if not 1 <= rank <= hidden_size:
        raise UserError(
            f"head.rank: got {rank}, allowed: 1 to the width {hidden_size}; H/8 = {hidden_size // 8} is the usual choice"
        )
    return rank


def build_head(config: HeadConfig, hidden_size: int, vocab_size: int, vocab_map: VocabMap | None = None) -> Head:
    """The head that `config` names; a trimmed one needs its map. Raises UserError for a rank outside 1..H."""
    if config.kind == "trimmed":
        assert vocab_map is not None, "a trimmed head needs a vocabulary map"
        return TrimmedHead(hidden_size, vocab_map)
    if config.kind == "full":
        return FullHead(hidden_size, vocab_size)
    return LowRankHead(hidden_size, vocab_size, head_rank(config, hidden_size))
