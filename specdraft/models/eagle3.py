"""The EAGLE-3 drafter: one model for training (`unroll`) and for decoding (`begin`, `draft`, `commit`, `select`).

Row i of a sequence: feature of position i, embedding of x[i+1], predicts x[i+2]. Keys and values of a row depend on its
inputs alone, never on attention, so rows that nobody asks for (prompts) cost two small products each.

`unroll` (here) and `draft` (chain.py) are the same arithmetic (eagle3_layer.py), by test. This file knows nothing of losses,
of sampling, or of how drafts are verified. Source: EAGLE-3 (arXiv 2503.01840); docs/papers.md.

Letters: B batch, T tokens, H width, A taps, K steps, M supervised rows, h heads, k key/value heads, d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdraft.data.vocab import VocabMap
from specdraft.models.chain import FrozenWeights, Sequences
from specdraft.models.drafter import Ask, Proposal
from specdraft.models.eagle3_layer import Arithmetic, Eagle3Config, Layer, RMSNorm, rotary_tables
from specdraft.models.heads import Head, HeadDtype, build_head
from specdraft.models.tree import Shape


class Eagle3Drafter(nn.Module, Arithmetic):
    """One model for training (`unroll`) and for decoding (a BatchDrafter, no gradient).

    The target's embedding is used, not owned: `bind` hands it over, and it is neither trained nor saved.
    head_dtype: of the head's rows while decoding, set before it begins; live rows (LiveRows) have that of the weights.
    frequent: tokens that the target says most often in the answers trained on, most frequent first, for who drafts from these alone
    (vocab_policies.FrequencyList); kept with the checkpoint, None = not known.
    """

    def __init__(self, config: Eagle3Config, vocab_map: VocabMap | None = None):
        super().__init__()
        if "rope_theta" not in config.rope_parameters:
            raise ValueError(f"rope_parameters: got {config.rope_parameters}, needed: the target's, with rope_theta")
        self.config = config
        taps_size = len(config.tap_layers) * config.hidden_size
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in config.tap_layers)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(taps_size, config.rms_norm_eps)
        self.fc = nn.Linear(taps_size, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head: Head = build_head(config.head, config.hidden_size, config.vocab_size, vocab_map)
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.head_dtype: HeadDtype = "own"
        self.frequent: VocabMap | None = None
        self._target: dict[str, Tensor] = {}  # a dict, so that nn.Module neither registers nor saves it
        self._frozen: FrozenWeights | None = None
        self._sequences: Sequences | None = None

    def bind(self, embedding: Tensor) -> Eagle3Drafter:
        """Use the target's embedding [V, H]."""
        self._target["embedding"] = embedding
        return self

    @property
    def embedding(self) -> Tensor:
        return self._target["embedding"]

    # --- training ----------------------------------------------------------------------------------------------------

    def unroll(self, taps: Tensor, input_ids: Tensor, rows: Tensor, steps: int) -> Tensor:
        """Training-time test: K steps from every asked row, fed its own outputs but the true tokens (papers.md 8).

        taps [B, T, A*H]; input_ids [B, T]; rows [B, M] state indices i. Step k of row i reads the token x[i+1+k] at rotary
        position i+k, and attends to the step-0 keys of rows 0..i and to its own keys of steps 1..k.
        Tokens past the end are clamped: such (row, step) pairs must not be supervised.

        Returns: [K, B, M, H], normed: what the head reads.
        """
        last = input_ids.shape[1] - 1
        positions = torch.arange(last + 1, device=rows.device).expand(input_ids.shape)
        x, residual = self.layer_input(self.fuse(taps), input_ids.roll(-1, dims=1))
        keys, values = self.keys_values(x, positions)
        x, hidden = take_rows(x, rows), take_rows(residual, rows)
        visible = positions[:, None, :] <= rows[:, :, None]  # [B, M, T]
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        outputs = []
        for step in range(steps):
            if step:
                x, hidden = self.layer_input(hidden, input_ids.gather(1, (rows + 1 + step).clamp_max(last)))
                key, value = self.keys_values(x, rows + step)
                own_keys.append(key)
                own_values.append(value)
            q = self.queries(x, rows + step)
            hidden, normed = self.finish(attend(q, keys, values, visible, own_keys, own_values), hidden)
            outputs.append(normed)
        return torch.stack(outputs)

    # --- decoding ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def begin(self, taps: Tensor, tokens: list[list[int]], max_length: int) -> None:
        """See BatchDrafter.begin. Rows 0..T-1 of every sequence, token i+1 beside feature i."""
        self.refresh()
        self._sequences = Sequences(self._frozen, len(tokens), max_length)
        self._sequences.append(taps, [row[1:] for row in tokens])

    @torch.inference_mode()
    def refresh(self) -> None:
        """Draft with the weights as they are now. Sequences on their way keep the keys that older ones made of their tokens."""
        versions = {name: (weight.data_ptr(), weight._version) for name, weight in self.named_parameters()}
        if self._frozen is None or self._frozen.versions != versions:
            self._frozen = FrozenWeights(self, versions, self._frozen)
            if self._sequences is not None:
                self._sequences.weights = self._frozen

    @torch.inference_mode()
    def draft(self, asks: list[Ask], shape: Shape) -> list[Proposal]:
        """See BatchDrafter.draft. From the last row of every sequence."""
        return self._sequences.draft(asks, shape)

    @torch.inference_mode()
    def commit(self, tokens: list[list[int]], taps: Tensor) -> None:
        """See BatchDrafter.commit. The rows made of drafted states have given way to rows made of the target's."""
        self._sequences.append(taps, tokens)

    @torch.inference_mode()
    def select(self, rows: list[int]) -> None:
        """See BatchDrafter.select."""
        self._sequences.select(rows)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [B, T, H], rows [B, M] -> [B, M, H]"""
    return x.gather(1, rows[:, :, None].expand(-1, -1, x.shape[-1]))


def attend(
    q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, own_keys: list[Tensor], own_values: list[Tensor]
) -> Tensor:
    """Softmax attention over the shared step-0 rows and each row's own later steps.

    q [B, h, M, d]; keys, values [B, k, T, d]; visible [B, M, T] bool; own_keys, own_values: [B, k, M, d] for each step.
    Returns [B, h, M, d].
    """
    groups = q.shape[1] // keys.shape[1]
    q = q.unflatten(1, (-1, groups))  # [B, k, g, M, d]
    scale = q.shape[-1] ** -0.5
    shared = torch.einsum("bkgmd,bktd->bkgmt", q, keys).float() * scale
    scores = [shared.masked_fill(~visible[:, None, None], float("-inf"))]
    scores += [torch.einsum("bkgmd,bkmd->bkgm", q, key).float().unsqueeze(-1) * scale for key in own_keys]
    weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1).to(values.dtype)
    shared, own = weights[..., : keys.shape[2]], weights[..., keys.shape[2] :]
    out = torch.einsum("bkgmt,bktd->bkgmd", shared, values)
    for step, value in enumerate(own_values):
        out = out + own[..., step : step + 1] * value[:, :, None]
    return out.flatten(1, 2)
