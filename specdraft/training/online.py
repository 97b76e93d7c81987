"""EvoSpec's online alignment (arXiv 2605.27390; the specification is ours, papers 3, 5-7): the drafter goes on learning from what the
target says while it decodes, and falls back to its frozen weights where that does not pay.

    loss = mean of 0.8^k l(p_A, q_A) over rows i and steps k  +  mu/2 ||W - W_0||_F^2          l = LK hybrid, or KL
    A = the live rows; p_A = the target's 64 likeliest tokens that are live, and one column for all others

An observer of the decoder (models/observer.py): weights change only between rounds, so the output law is the target's whatever is
learnt. It knows nothing of decoding; what is trained is in adapters.py, what is remembered in positions.py.

Letters: B windows, W positions of the longest, K steps, N supervised rows, n live rows, L kept tokens of a law, A taps, H width.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from specdraft.config import UserError
from specdraft.losses import LossConfig, row_losses
from specdraft.models.drafter import LiveRows
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.observer import Begun, Observed
from specdraft.provenance import hash_tensors
from specdraft.training.adapters import Full, Lora, Trained
from specdraft.training.optim import OptimConfig, build_optimizers
from specdraft.training.positions import Law, Positions, Windows

NEVER = -1e4  # log of a probability that is 0, without the NaN of 0 * inf
LEAST_REST = 1e-6  # of a law, for all tokens that have no column of their own
DECAY = 0.8  # weight of step k: DECAY^k, as in training (losses.geometric)
BYTES_TRAINED = 16  # of a trained weight: itself, its gradient, two moments of AdamW


@dataclass
class OnlineConfig:
    """method: adapters on the body's products, or all of the body's weights.   rank, scale: r and s of the adapters.   head: train the
    head too (with adapters: a low-rank one only).   steps: K.   proximal: mu.   every: rounds between two steps of AdamW.   windows,
    window: B, and positions of each.   capacity: positions remembered.   context: positions of a prompt among them.

    competence, curriculum: c0, and updates T after which nothing is left out: c(t) = min(1, sqrt(t (1 - c0^2) / T + c0^2)); trained
    on is what is easier than the c(t)-quantile of the difficulty 1 - alpha.   guard_rounds, guard_share: see OnlineAlignment.

    memory_mb: of trained weights, gradients, optimiser and buffer, in 1e6 bytes; the buffer gets what the rest leaves; None = no
    limit.   time_share: of all time that may go into learning; a step waits until it fits; None = no limit.   across_requests: keep
    what was learnt when a request begins; an output at T > 0 then depends on the requests before it, and not on its seed alone."""

    method: Literal["lora", "full"] = "lora"
    rank: int = 8
    scale: float = 2.0
    head: bool = False
    loss: Literal["lk_hybrid", "forward_kl"] = "lk_hybrid"
    steps: int = 3
    proximal: float = 1e-3
    lr: float = 1e-4
    clip: float = 0.5
    every: int = 32
    windows: int = 4
    window: int = 64
    capacity: int = 4096
    context: int = 64
    competence: float = 0.3
    curriculum: int = 50
    guard_rounds: int = 64
    guard_share: float = 0.97
    memory_mb: float | None = None
    time_share: float | None = None
    across_requests: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rank", "steps", "every", "windows", "curriculum", "guard_rounds"):
            if getattr(self, name) < 1:
                raise UserError(f"online.{name}: got {getattr(self, name)}, allowed: 1 or more")
        if not 0 <= self.context <= self.capacity or not self.steps + 2 <= self.window <= self.capacity:
            raise UserError(
                f"online.context, online.window: got {self.context} and {self.window}, allowed: up to capacity = {self.capacity}, and a "
                f"window of steps + 2 = {self.steps + 2} or more"
            )
        if not 0 < self.competence <= 1 or not 0 <= self.guard_share <= 1:
            raise UserError(
                f"online.competence, online.guard_share: got {self.competence} and {self.guard_share}, allowed: above 0 up to 1, 0 to 1"
            )
        if self.lr <= 0 or self.proximal < 0 or (self.time_share is not None and not 0 < self.time_share < 1):
            raise UserError(
                f"online.lr, proximal, time_share: got {self.lr}, {self.proximal}, {self.time_share}, allowed: above 0, 0 or more, between "
                "0 and 1"
            )


class OnlineAlignment:
    """An Observer that trains `drafter`: hand it to speculative_generate with that same drafter.

    The guard: decoding is lossless, so the frozen drafter would have met the same text. Before a step, positions that came since the
    last one (nothing was trained on them yet; of more than a step draws, the newest) are drafted again, K deep, by both weights;
    where over the last guard_rounds the accepted length (mean of greedy and sampled drafts) of the adapted ones is under guard_share of
    the frozen ones', the drafter gets its frozen weights back, bit for bit.

    vocab_size: V of the target.   Raises UserError: see Lora; a memory budget in which no window fits.
    """

    def __init__(self, drafter: Eagle3Drafter, vocab_size: int, config: OnlineConfig | None = None):
        self.drafter, self.config = drafter, config or OnlineConfig()
        config = self.config
        with torch.inference_mode(False):
            self.trained: Trained = (
                Full(drafter, config.head)
                if config.method == "full"
                else Lora(drafter, config.head, config.rank, config.scale, config.seed)
            )
            self.positions = self._positions(vocab_size)
        self._row_of = None if drafter.lm_head.vocab_map is None else drafter.lm_head.vocab_map.draft_index
        self.drafter_hash = hash_tensors(drafter.state_dict())
        self._loss = LossConfig(terms={config.loss: 1.0})
        self.rollbacks = self.texts = 0
        self.elapsed = self.spent = 0.0  # seconds of decoding, and of learning
        self._is_changed = False  # whether the drafter's weights are others than those it came with
        self.restart()

    def _positions(self, vocab_size: int) -> Positions:
        config, weight = self.config, self.drafter.fc.weight
        shape = (weight.shape[1], vocab_size, weight.dtype, weight.device)
        if config.memory_mb is None:
            return Positions(config.capacity, *shape)
        trained = BYTES_TRAINED * sum(weight.numel() for weight in self.trained.named.values())
        each = Positions(1, *shape).bytes
        room = int(config.memory_mb * 1e6 - trained) // each
        least = max(config.window, config.context)
        if room < least:
            raise UserError(
                f"online.memory_mb: got {config.memory_mb:g}, needed: {(trained + least * each) / 1e6:.1f} or more "
                f"({trained / 1e6:.1f} for {config.method}, the rest for {least} positions); give more, or a smaller rank"
            )
        return Positions(min(config.capacity, room), *shape)

    def restart(self) -> None:
        """Forget everything: frozen weights, an empty buffer. Counts of texts, rollbacks and seconds go on."""
        self._forget_weights()
        self.give()
        self.positions.clear()
        self.rounds = self.waiting = 0  # all of them; those since the last step
        self.judged = 0  # positions of rounds up to this one have been seen by the guard
        self.generator = torch.Generator().manual_seed(self.config.seed)
        self._ends: dict[int, tuple[int, int]] = {}  # row -> its text, and the place that comes next

    def _forget_weights(self) -> None:
        self.trained.reset()
        (self.optimizer,) = build_optimizers(self.trained.named.values(), [], OptimConfig(lr=self.config.lr))
        self.guard: deque[tuple[int, float, float]] = deque()  # rounds; accepted tokens, adapted and frozen
        self.updates = 0

    # --- what the decoder tells --------------------------------------------------------------------------------------

    def begin(self, texts: list[Begun]) -> None:
        """See Observer. Of a prompt its last positions are kept, for the first rows of the answer to attend to."""
        with torch.inference_mode(False):
            if not self.config.across_requests:
                self.restart()
            self._ends.clear()
            for text in texts:
                end = len(text.tokens)
                start = max(0, end - self.config.context)
                self.positions.add(self.texts, start, text.tokens[start:], text.taps[start:])
                self._ends[text.row] = (self.texts, end)
                self.texts += 1
        self._clock = time.perf_counter()

    def observe(self, rounds: list[Observed]) -> None:
        """See Observer. Every few rounds: judge, then a step of AdamW, then new weights for the drafter."""
        start = time.perf_counter()
        self.elapsed += start - self._clock
        self.rounds += 1
        self.waiting += 1
        with torch.inference_mode(False):
            for seen in rounds:
                text, place = self._ends[seen.row]
                self.positions.add_verified(
                    text, place, seen.tokens, seen.taps, seen.logits, seen.alpha, seen.hits, self.rounds
                )
                self._ends[seen.row] = (text, place + len(seen.tokens))
            if self.waiting >= self.config.every and self._has_time():
                self.adapt(rounds[0].live)
        self._clock = time.perf_counter()
        self.spent += self._clock - start

    def _has_time(self) -> bool:
        share = self.config.time_share
        return share is None or self.spent <= share * (self.elapsed + self.spent)

    # --- learning ----------------------------------------------------------------------------------------------------

    def adapt(self, live: LiveRows | None) -> None:
        """One step. live: rows of the head in the last round of the first text, which are trained on."""
        since, self.waiting = self.waiting, 0
        rows = self._head_rows(live)
        is_good = self.updates == 0 or self._judge(since, rows)
        self.judged = self.rounds
        if not is_good:
            self.rollbacks += 1
            self._forget_weights()
            self.give()
        elif self._step(rows):
            self.give()

    @torch.no_grad()
    def give(self) -> None:
        """The drafter drafts with what was learnt from now on."""
        if self.updates == 0 and not self._is_changed:
            return
        for name, weight in self.trained.weights():
            self.drafter.get_parameter(name).copy_(weight)
        self._is_changed = self.updates > 0
        self.drafter.refresh()

    def _head_rows(self, live: LiveRows | None) -> Tensor | None:
        """[n] rows of the head that are live; None = all."""
        if live is None:
            return None
        ids = live.ids.clone()  # a buffer of the decoder's, which changes
        return ids if self._row_of is None else self._row_of[ids.cpu()].to(ids.device)

    def _step(self, rows: Tensor | None) -> bool:
        """Whether there was anything to train on, and the gradient was finite."""
        windows = self._draw()
        if windows is None:
            return False
        valid = self._valid(windows, self._is_chosen())
        if not valid.any():
            return False
        with torch.enable_grad():
            log_p, log_q, _ = self._laws(self.trained.module, windows, valid, rows)
            label = torch.full_like(log_p[:, 0], -1, dtype=torch.int64)
            values = row_losses(log_p, log_q, log_p.logsumexp(-1), label, self._loss)
            weight = DECAY ** valid.nonzero()[:, 0].to(values)
            loss = (weight * values).sum() / weight.sum() + self.config.proximal / 2 * self.trained.distance()
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
        norm = clip_grad_norm_(self.trained.named.values(), self.config.clip)
        if not norm.isfinite():
            return False
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        return True

    def _draw(self) -> Windows | None:
        """`windows` stretches of `window` positions, each from a text drawn by its length; None where no text is long enough."""
        runs = [run for run in self.positions.runs() if len(run) >= self.config.steps + 2]
        if not runs:
            return None
        lengths = torch.tensor([len(run) for run in runs])
        picks = torch.multinomial(lengths.float(), self.config.windows, replacement=True, generator=self.generator)
        chosen = []
        for pick in picks.tolist():
            most = max(1, int(lengths[pick]) - self.config.window + 1)
            start = int(torch.randint(most, (1,), generator=self.generator))
            chosen.append(runs[pick][start : start + self.config.window])
        return Windows.of(chosen)

    def _is_chosen(self) -> Tensor:
        """[C] bool: positions whose law is trained on, by the curriculum. Where nothing was drafted, or the next token was not live,
        the difficulty says nothing of the weights, and the position is taken."""
        config, fields = self.config, self.positions.fields
        c0 = config.competence
        share = min(1.0, math.sqrt(self.updates * (1 - c0**2) / config.curriculum + c0**2))
        difficulty = (1 - fields["alpha"]).masked_fill(~fields["is_hit"], float("nan"))
        known = difficulty[(fields["text"] >= 0) & fields["has_law"] & ~difficulty.isnan()]
        if share == 1 or not len(known):
            return fields["has_law"]
        return fields["has_law"] & ~(difficulty > known.quantile(share))

    def _valid(self, windows: Windows, is_wanted: Tensor) -> Tensor:
        """[K, B, W] bool: row i is supervised at step k where the law after position i+1+k is wanted ([C] bool), and those after
        i+1..i+1+k are all known: a draft that starts there has read nothing but the answer (objective.Rows)."""
        has_law = self.positions.fields["has_law"]
        width, ahead = windows.slots.shape[1], torch.zeros(len(windows.slots), self.config.steps, dtype=torch.bool)

        def shifted(field: Tensor) -> Tensor:
            padded = torch.cat([field[windows.slots] & windows.is_real, ahead], dim=1)
            return torch.stack([padded[:, 1 + k : 1 + k + width] for k in range(self.config.steps)])

        return shifted(is_wanted) & (shifted(has_law).cumprod(0) > 0)

    def _laws(
        self, module: Eagle3Drafter, windows: Windows, valid: Tensor, rows: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of every supervised row: log p and log q [N, L+1] over the target's likeliest tokens and the rest (its last column), NEVER
        where a token is not live; and whether the drafter's best token is the target's [N] bool."""
        weight = module.fc.weight
        taps = self.positions.read("taps", windows.slots).to(weight.dtype)
        tokens = self.positions.read("token", windows.slots).long()
        index = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        hidden = module.unroll(taps, tokens, index, self.config.steps)
        logits = module.lm_head.logits(hidden[valid.to(hidden.device)], rows)
        step, window, row = valid.nonzero(as_tuple=True)
        law = self.positions.law(windows.slots[window, row + 1 + step])
        columns = self._columns(law, rows, logits.shape[1])
        is_live = columns >= 0
        own = logits.log_softmax(-1).gather(1, columns.clamp_min(0)).masked_fill(~is_live, NEVER)
        rest = torch.log1p(-own.exp().sum(-1).clamp_max(1 - LEAST_REST))
        log_q = torch.cat([own, rest[:, None]], dim=1)
        log_p = torch.cat([law.log_p.masked_fill(~is_live, NEVER), law.log_tail[:, None]], dim=1)
        return log_p, log_q, logits.argmax(-1) == columns[:, 0]

    def _columns(self, law: Law, rows: Tensor | None, count: int) -> Tensor:
        """[N, L]: which of the `count` live columns each kept token is; -1 = none."""
        row = law.ids if self._row_of is None else self._row_of.to(law.ids.device)[law.ids]
        if rows is None:
            return row
        column = torch.full((len(self.drafter.lm_head.weight) + 1,), -1, device=rows.device)  # the last one for row -1
        column[rows] = torch.arange(count, device=rows.device)
        return column[row]

    # --- the guard ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _judge(self, since: int, rows: Tensor | None) -> bool:
        """Whether the weights are to be kept, by the positions of the last `since` rounds and those before."""
        is_fresh = self._fresh()
        runs = [run for run in self.positions.runs() if is_fresh[run].any()]
        if not runs:
            return True
        firsts = [int(is_fresh[run].nonzero()[0]) for run in runs]
        windows = Windows.of([run[max(0, i - self.config.context) :] for run, i in zip(runs, firsts, strict=True)])
        valid = self._valid(windows, is_fresh)
        adapted = self._accepted(self.trained.module, windows, valid, rows)
        with self.trained.frozen() as module:
            frozen = self._accepted(module, windows, valid, rows)
        self.guard.append((since, adapted, frozen))
        while sum(rounds for rounds, _, _ in self.guard) - self.guard[0][0] >= self.config.guard_rounds:
            self.guard.popleft()
        if sum(rounds for rounds, _, _ in self.guard) < self.config.guard_rounds:
            return True
        adapted, frozen = (sum(entry[i] for entry in self.guard) for i in (1, 2))
        return adapted >= self.config.guard_share * frozen

    def _fresh(self) -> Tensor:
        """[C] bool: positions that came since the last step, the newest windows * window of them: more would not fit in memory where
        a step waited long."""
        fields, positions = self.positions.fields, self.positions
        slots = (fields["has_law"] & (fields["text"] >= 0) & (fields["round"] > self.judged)).nonzero()[:, 0]
        age = (positions.written - 1 - slots) % positions.capacity
        is_fresh = torch.zeros_like(fields["has_law"])
        is_fresh[slots[age.argsort()[: self.config.windows * self.config.window]]] = True
        return is_fresh

    def _accepted(self, module: Eagle3Drafter, windows: Windows, valid: Tensor, rows: Tensor | None) -> float:
        """Tokens accepted of drafts from every row, K deep: sum of prod_{j<=k} a_j, the mean of greedy drafts (a = hit) and of sampled ones
        (a = sum of min(p, q) over the kept tokens). Hits alone tell nothing apart from frozen weights that hit nothing."""
        log_p, log_q, is_hit = self._laws(module, windows, valid, rows)
        overlap = torch.minimum(log_p, log_q)[:, :-1].exp().sum(-1)
        chances = torch.zeros(2, *valid.shape)
        chances[:, valid] = torch.stack([is_hit.float(), overlap]).cpu()
        return float(chances.cumprod(1).sum()) / 2

    # --- what it takes ----------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, float]:
        """Steps since the weights were last the frozen ones, times they were given back, and seconds of learning."""
        return {"updates": self.updates, "rollbacks": self.rollbacks, "spent": self.spent}

    def memory(self) -> dict[str, int]:
        """Bytes: `optimizer` (its two moments, whether there was a step yet or not), `buffer`, `trained` (weights; their gradients, as
        much again, live for a step only)."""
        trained = sum(weight.nbytes for weight in self.trained.named.values())
        return {"optimizer": 2 * trained, "buffer": self.positions.bytes, "trained": trained}
