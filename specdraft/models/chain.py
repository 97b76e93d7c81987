"""Drafting with the EAGLE-3 layer, level by level: packed weights, keys and values, and the steps that extend them.

It knows nothing of training, of how a draft branches (tree.py), or of verification.

Letters: B sequences, A taps, H width, h heads, k key/value heads, d head width, n rows, w nodes of a level, S columns of the
draft law.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdraft.models import draft_layer
from specdraft.models.cache import Append, KVCache
from specdraft.models.draft_layer import DraftLayer
from specdraft.models.drafter import Ask, LiveRows, Proposal, head_clock, nothing
from specdraft.models.eagle3_layer import Arithmetic, RMSNorm
from specdraft.models.heads import LowRankHead
from specdraft.models.layers import FEW_ROWS, FrozenLinear, FrozenRMSNorm, Int8Linear, compute_dtype
from specdraft.models.lean import additive, attend
from specdraft.models.tree import Growth, Level, Shape


class Sequences:
    """B sequences. Row i of one holds the feature of position i and the token i+1; rows of drafted states stand behind those of
    committed tokens and are dropped after the draft."""

    def __init__(self, weights: FrozenWeights, batch_size: int, max_length: int):
        self.weights = weights
        self.cache = KVCache(batch_size, max_length, 1)

    def append(self, taps: Tensor, tokens: list[list[int]]) -> None:
        """Rows of committed tokens with the target's features [B, n, A*H], both padded on the right; drafting starts from the
        last one of each sequence."""
        counts = [len(row) for row in tokens]
        n = max(counts)
        ids = torch.tensor([row + [0] * (n - len(row)) for row in tokens], device=taps.device)
        taps = taps.to(self.weights.dtype if self.layer is None else torch.float32)
        q, _, _, residual = self._project(self.weights.fuse(taps), ids, self.cache.place(n, taps.device))
        self.cache.grow(counts)
        if min(counts) == n:
            self.q, self.residual = q[:, :, -1:], residual[:, -1:]
        else:
            rows, last = range(len(counts)), [count - 1 for count in counts]
            self.q, self.residual = q[rows, :, last][:, :, None], residual[rows, last][:, None]

    def select(self, rows: list[int]) -> None:
        """See BatchDrafter.select."""
        self.cache.select(rows)
        self.q, self.residual = self.q[rows], self.residual[rows]

    @property
    def device(self) -> torch.device:
        return self.residual.device

    @property
    def layer(self) -> DraftLayer | None:
        """The compiled layer, where it can run these sequences."""
        return self.weights.layer if self.cache.is_single else None

    def draft(self, asks: list[Ask], shape: Shape) -> list[Proposal]:
        """See BatchDrafter.draft."""
        committed = self.cache.lengths
        growths = [self._begin(ask, shape) if ask.budget > 0 else None for ask in asks]
        going = {b: 1 for b, growth in enumerate(growths) if growth is not None}  # nodes of each row that ran last
        nodes = None if shape.width == 1 else Nodes(self.cache, self.device)
        hidden, normed = self._finish(self.q, *self._committed(), self.residual)
        head_seconds, now = 0.0, head_clock(self.device)
        while True:
            start = now()
            logits = self._logits(normed, going, {b: asks[b].live for b in going})
            head_seconds += now() - start
            levels = {b: growths[b].grow(logits[b]) for b in going}
            levels = {b: level for b, level in levels.items() if level is not None}
            if not levels:
                break
            going = {b: len(tokens) for b, (tokens, _) in levels.items()}
            hidden, normed = self._run(levels, hidden, nodes)
        self.cache.crop(committed)
        proposals = [nothing() if growth is None else growth.proposal() for growth in growths]
        for proposal in proposals:
            proposal.head_seconds = head_seconds / len(asks)
        return proposals

    def _begin(self, ask: Ask, shape: Shape) -> Growth:
        return shape.begin(ask, self.weights.head.target_ids() if ask.live is None else ask.live.ids)

    def _run(self, levels: dict[int, Level], hidden: Tensor, nodes: Nodes | None) -> tuple[Tensor, Tensor]:
        """Run the next nodes of the rows in `levels`; hidden [B, w, H] of those that ran last. Returns Arithmetic.finish's two.
        Rows that do not go on, and shorter ones, are padded; nobody reads what comes of it."""
        tokens = _pad([levels[b][0] if b in levels else None for b in range(len(hidden))])
        positions = mask = None
        if nodes is not None:
            parents = np.zeros(tokens.shape, dtype=np.int64)
            for b, (_, of) in levels.items():
                parents[b, : len(of)] = of
            at = torch.from_numpy(parents).to(hidden.device)
            hidden = hidden.gather(1, at[:, :, None].expand(-1, -1, hidden.shape[2]))
            positions, mask = nodes.add(parents)
        place = self.cache.place(tokens.shape[1], hidden.device, positions, mask)
        q, keys, values, residual = self._project(hidden, tokens, place)
        self.cache.grow([tokens.shape[1]] * len(tokens))
        return self._finish(q, keys, values, place.mask, residual)

    def _logits(self, normed: Tensor, counts: dict[int, int], live: dict[int, LiveRows | None]) -> dict[int, Tensor]:
        """normed [B, w, H] -> logits [count, S] of every row b in `counts`: one product where all read the same rows of the head, and
        none depends on the others (in INT8 the states of a product share a scale)."""
        first = next(iter(live.values()))
        if len(normed) == 1 or self.weights.is_int8 or any(rows is not first for rows in live.values()):
            return {b: self.weights.logits(normed[b, :count], live[b]) for b, count in counts.items()}
        logits = self.weights.logits(normed.flatten(0, 1), first).unflatten(0, normed.shape[:2])
        return {b: logits[b, :count] for b, count in counts.items()}

    def _project(self, hidden: Tensor, tokens: Tensor, place: Append) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows of states hidden [B, n, H] beside tokens [B, n]: stores their keys and values. Returns their queries [B, h, n, d], the
        keys and values of all slots that they may attend to [B, k, T, d], and their residual [B, n, H]."""
        config = self.weights.config
        heads, turned = config.num_attention_heads, config.num_attention_heads + config.num_key_value_heads
        if self.layer is not None and place.n <= FEW_ROWS:
            positions = place.new_slots() if place.positions is None else place.positions
            qkv, residual = self.layer.project(hidden, tokens, positions)
            qk = qkv[:, :, :turned]
        else:
            x, residual = self.weights.layer_input(hidden, tokens)
            qkv = self.weights.qkv(x).unflatten(-1, (-1, config.head_dim))
            qk = self._rotate(qkv[:, :, :turned], place)
            if self.layer is not None:
                qkv, qk, residual = qkv.float(), qk.float(), residual.float()
        stored = self.cache.write(0, qk[:, :, heads:], qkv[:, :, turned:], place)
        return qk[:, :, :heads].transpose(1, 2), *stored, residual

    def _finish(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """q [B, h, n, d]; keys, values [B, k, T, d]; mask [B, 1, n, T], True = may attend; residual [B, n, H]. Returns
        Arithmetic.finish's two."""
        if self.layer is not None:
            return self.layer.finish(q, keys, values, mask, residual)
        return self.weights.finish(self._attend(q, keys, values, mask), residual)

    def _rotate(self, x: Tensor, place: Append) -> Tensor:
        """Arithmetic.rotate, x [B, n, heads, d]."""
        where = slice(place.start, place.end) if place.positions is None else place.positions
        turned = x.roll(x.shape[-1] // 2, dims=-1)
        return torch.addcmul(x * self.weights.cos[where], turned, self.weights.sin[where])

    def _committed(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values of the committed rows [B, k, T, d], and which of them each sequence has [B, 1, 1, T], None = all."""
        keys, values, lengths = self.cache.keys[0], self.cache.values[0], self.cache.lengths
        if self.cache.is_single:
            return keys[:, :, : lengths[0]], values[:, :, : lengths[0]], None
        slots = torch.arange(keys.shape[2], device=self.device)
        mask = slots < torch.tensor(lengths, device=self.device)[:, None]
        return keys, values, mask[:, None, None]

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """q [B, h, n, d]; keys, values [B, k, T, d]; mask [B, 1, n, T], True = may attend. Returns [B, h, n, d]."""
        if mask is None:
            return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        out = attend(q.transpose(1, 2), keys, values, additive(mask, q.shape[1] // keys.shape[1], q.dtype))
        return out.unflatten(-1, (-1, q.shape[-1])).transpose(1, 2)


class Nodes:
    """The nodes of a tree for every row that were run so far, level after level, in the slots behind the committed ones. Numpy does in
    a sixth of the time what takes torch a dozen operations on few numbers; a device gets the result."""

    def __init__(self, cache: KVCache, device: torch.device):
        self.starts, self.last_position, self.device = cache.lengths, cache.max_length - 1, device
        self.levels = 0
        self.sees: np.ndarray | None = None  # [B, w, nodes]: what those of the last level attend to

    def add(self, parents: np.ndarray) -> tuple[Tensor, Tensor]:
        """One more level. parents: [B, w] indices into the one before.   Returns: its positions [B, w] and mask
        [B, 1, w, longest row + nodes]: the committed rows, the ancestors, itself."""
        rows, width = parents.shape
        sees = np.broadcast_to(np.eye(width, dtype=bool), (rows, width, width))
        if self.sees is not None:
            sees = np.concatenate([self.sees[np.arange(rows)[:, None], parents], sees], axis=2)
        self.sees, count = sees, sees.shape[2]
        mask = np.zeros((rows, 1, width, max(self.starts) + count), dtype=bool)
        positions = np.empty((rows, width), dtype=np.int64)
        for b, start in enumerate(self.starts):
            mask[b, 0, :, :start] = True
            mask[b, 0, :, start : start + count] = sees[b]
            positions[b] = min(start + self.levels, self.last_position)
        self.levels += 1
        return torch.from_numpy(positions).to(self.device), torch.from_numpy(mask).to(self.device)


def _pad(rows: list[Tensor | None]) -> Tensor:
    """Rows of different lengths -> [B, longest], padded with 0; None = nothing but padding."""
    if len(rows) == 1:
        return rows[0][None]
    known = [row for row in rows if row is not None]
    padded = known[0].new_zeros(len(rows), max(len(row) for row in known))
    for b, row in enumerate(rows):
        if row is not None:
            padded[b, : len(row)] = row
    return padded


class FrozenWeights(Arithmetic):
    """A drafter's weights packed for decoding, those that read the same input as one product. `versions`: of the parameters
    they were made from, by name.   before: older ones, whose packed head is taken over where it has not changed."""

    def __init__(self, drafter: nn.Module, versions: dict[str, tuple[int, int]], before: FrozenWeights | None = None):
        self.config, self.embedding, self.versions = drafter.config, drafter.embedding, versions
        for name, module in drafter.named_children():
            if name != "lm_head":
                setattr(self, name, freeze(module))
        attention, mlp = drafter.midlayer.self_attn, drafter.midlayer.mlp
        qkv = join(attention["q_proj"], attention["k_proj"], attention["v_proj"])
        gate_up = join(mlp["gate_proj"], mlp["up_proj"])
        self.qkv, self.gate_up = FrozenLinear(qkv), FrozenLinear(gate_up)
        self.head, self.is_int8 = drafter.lm_head, drafter.head_dtype == "int8"
        head = "lm_head.weight"
        is_known = before is not None and before.versions[head] == versions[head]
        if is_known:
            self.rows = before.rows
        else:
            self.rows = Int8Linear(self.head.weight) if self.is_int8 else FrozenLinear(self.head.weight)
        self.down = FrozenLinear(self.head.down) if isinstance(self.head, LowRankHead) else None
        self.dtype = compute_dtype(drafter.fc.weight)
        left, right = drafter.sin.chunk(2, dim=-1)
        cos, sin = drafter.cos[:, None], torch.cat([-left, right], dim=-1)[:, None]
        self.cos, self.sin = cos.to(self.dtype), sin.to(self.dtype)
        self.layer = DraftLayer(drafter, qkv, gate_up, cos, sin) if draft_layer.is_supported(drafter) else None

    def feed_forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.midlayer.mlp["down_proj"](F.silu(gate) * up)

    def logits(self, hidden: Tensor, live: LiveRows | None) -> Tensor:
        """[..., H] -> [..., S], or [..., n] over the live rows."""
        projected = hidden if self.down is None else self.down(hidden)
        return self.rows(projected) if live is None else live.logits(projected)


def join(*projections: nn.Linear) -> Tensor:
    """The weight of several projections of the same input as one: their outputs side by side."""
    return torch.cat([projection.weight.detach() for projection in projections])


def freeze(module: nn.Module) -> Any:
    """The same tree, of packed products and norms, but for those that are joined."""
    if isinstance(module, nn.Linear):
        return FrozenLinear(module.weight, module.bias)
    if isinstance(module, RMSNorm):
        return FrozenRMSNorm(module.weight, module.eps)
    if isinstance(module, nn.ModuleList):
        return [freeze(child) for child in module]
    children = {name: freeze(child) for name, child in module.named_children() if name not in JOINED}
    return children if isinstance(module, nn.ModuleDict) else SimpleNamespace(**children)


JOINED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
