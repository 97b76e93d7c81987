"""The target drafts for itself: its own forward pass, one token at a time, over a small part of its keys and values.

Which part is chosen anew after every verification, for every layer and key/value head: the first positions, the last
ones, and those that the last committed queries attended to most. The verification pass itself gives those weights; no
other pass is run for them. The target's cache is read and never changed, so a position that was left out can come back.

It knows nothing of sampling, of how drafts are verified, or of how many tokens are worth drafting. Any target works: the
passes attend through attention.py. Source: SparseSpec-L (arXiv 2607.27735); papers.md 5.

Letters: T positions that the target has run, C of them in an index, G key/value heads, N query heads, n new tokens,
D head width, W queries that the importance is made of, H width, A taps, S live rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdraft.config import UserError
from specdraft.models.attention import Attention, AttentionInputs, attend_with_weights
from specdraft.models.cache import Append, KVCache
from specdraft.models.drafter import Choose, LiveRows, Proposal, head_clock
from specdraft.models.generic import HookedCache
from specdraft.models.heads import FullHead
from specdraft.models.target import TargetModel

CHECK_TOKENS = 8
CHECK_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class SparseSelfConfig:
    """budget: share of the positions that an index holds, sinks and recent ones included.   sinks: first positions,
    always in.   recent: last positions, always in; so is all that the last verification wrote.   queries: W, the last
    committed queries whose attention is counted.   longest: tokens that a round may draft; buffers are made for it.
    Where budget is less than sinks and recent ones, these are all there is.

    Raises:
        UserError: a value outside its range.
    """

    budget: float = 0.1
    sinks: int = 4
    recent: int = 64
    queries: int = 16
    longest: int = 20

    def __post_init__(self) -> None:
        if not 0 <= self.budget <= 1:
            raise UserError(f"budget: got {self.budget}, allowed: 0 to 1 (the share of positions to attend to)")
        for name, least in (("sinks", 0), ("recent", 0), ("queries", 1), ("longest", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name}: got {getattr(self, name)}, allowed: {least} or more")

    def size(self, positions: int, written: int = 0) -> int:
        """C for so many positions, of which the last verification wrote `written`."""
        floor = self.sinks + max(self.recent, written)
        return min(positions, max(math.ceil(self.budget * positions), floor))


class SparseSelfDrafter:
    """See Drafter: chains, one sequence at a time. It is not trained, and has no weights but the target's.

    lm_head: the target's head, for vocabulary policies.
    """

    def __init__(self, target: TargetModel, config: SparseSelfConfig | None = None):
        """Raises UserError: a target whose attention is not one of softmax, scale, soft cap and sliding window."""
        self.target = target
        self.config = SparseSelfConfig() if config is None else config
        self.sequence: Sequence | None = None
        with torch.device("meta"):
            self.lm_head = FullHead(target.hidden_size, target.vocab_size)
        self.lm_head.weight = nn.Parameter(target.head_weight, requires_grad=False)
        if target.watcher is None:
            _check(target, recorder := Recorder())
            target.watcher = recorder
        assert isinstance(target.watcher, Recorder), "somebody else watches this target's attention"
        target.watcher.queries = max(target.watcher.queries, self.config.queries)

    @torch.inference_mode()
    def prefill(self, taps: Tensor, input_ids: Tensor) -> None:
        """See Drafter.prefill. The target's last pass from an empty cache must be the one over this prompt."""
        self.sequence = Sequence(self.target, self.config, input_ids[:, -1:])
        assert self.sequence.length == input_ids.shape[1] - 1, (self.sequence.length, input_ids.shape)

    @torch.inference_mode()
    def propose(self, budget: int, choose: Choose, live: LiveRows | None = None) -> Proposal:
        """See Drafter.propose. A chain of at most `longest` tokens."""
        token = self.sequence.rewind()
        tokens, laws, head_seconds, now = [], [], 0.0, head_clock(self.target.device)
        while len(tokens) < min(budget, self.config.longest):
            last = self.sequence.draft(token)
            start = now()
            logits = self._logits(last[:, 0], live)
            head_seconds += now() - start
            column, law, is_last = choose(logits)
            tokens.append(column if live is None else live.ids[column])
            laws.append(law)
            token = tokens[-1][None]
            if is_last:
                break
        q = None if laws[0] is None else torch.stack(laws)
        ids = None if live is None else live.ids
        return Proposal(torch.cat(tokens), list(range(-1, len(laws) - 1)), q, ids, head_seconds)

    @torch.inference_mode()
    def observe(self, tokens: Tensor, taps: Tensor) -> None:
        """See Drafter.observe. Chooses the next round's positions."""
        self.sequence.commit(tokens)

    def _logits(self, last: Tensor, live: LiveRows | None) -> Tensor:
        """Input of the final norm [1,H] -> logits [1,V], or those of the live rows."""
        if live is None:
            return self.target.teacher_logits(last)
        return self.target.scale_logits(live.logits(self.target.norm(last)))


class Recorder:
    """Watches the passes of one target: keeps the queries of the last tokens of a prompt, and hands the passes that follow
    on the same cache to the sequence that has claimed it. All other passes go by untouched."""

    def __init__(self) -> None:
        self.queries = 1  # the most that a drafter has asked for
        self.cache: KVCache | None = None
        self.sequence: Sequence | None = None
        self.prompt: list[AttentionInputs] = []

    def attention(self, cache: KVCache, append: Append) -> Attention | None:
        """See Watcher.attention."""
        if append.start == 0:
            self.cache, self.sequence, self.prompt = cache, None, []
            return self._keep_queries if cache.is_single else None
        if cache is not self.cache or self.sequence is None:
            return None
        return self.sequence.attend_to_all

    def _keep_queries(self, inputs: AttentionInputs) -> None:
        queries = inputs.q[:, :, -self.queries :].clone()
        self.prompt.append(replace(inputs, q=queries, keys=None, values=None, mask=None))


class Sequence:
    """One text: the target's cache of it, what its last queries attended to, and the packed part of it to draft on."""

    def __init__(self, target: TargetModel, config: SparseSelfConfig, token: Tensor):
        """token [1,1]: committed, not yet run by the target."""
        recorder = target.watcher
        self.target, self.config, self.token = target, config, token
        self.dense: KVCache = recorder.cache
        self.windows = layer_windows(target)
        self.importance = Importance(self.dense, config)
        self.packed = Packed(self.dense, config)
        (self.length,) = self.dense.lengths
        self._count_prompt(recorder.prompt)
        recorder.sequence, recorder.prompt = self, []
        self._choose(written=0)

    def attend_to_all(self, inputs: AttentionInputs) -> Tensor:
        """The attention of a verification pass: as usual, and its weights are noted."""
        out, weights = attend_with_weights(inputs)
        self.importance.note(inputs.layer, weights[0])
        return out

    def commit(self, tokens: Tensor) -> None:
        """tokens [a+1]: the first a of them and the token before them were run in the last pass and stay in the cache."""
        self.token = tokens[None, -1:]
        self.importance.commit(len(tokens))
        self.length += len(tokens)
        self._choose(written=len(tokens))

    def rewind(self) -> Tensor:
        """Forget what was drafted; returns the token to draft from, [1,1]."""
        self.packed.rewind(self.length)
        return self.token

    def draft(self, token: Tensor) -> Tensor:
        """Run one token [1,1] on the packed part -> the input of the final norm [1,1,H]."""
        attention = self._attend_to_packed
        step = self.target.forward(token, self.packed, want_taps=False, logits_for="none", attention=attention)
        return step.last

    def _attend_to_packed(self, inputs: AttentionInputs) -> Tensor:
        """One query over the packed positions, all of which it may see but for those that have left a sliding window."""
        window, mask = self.windows[inputs.layer], None
        if window is not None:
            (position,) = self.packed.lengths  # of the query
            hidden = self.packed.positions[inputs.layer][: inputs.keys.shape[2]] <= position - window
            mask = _additive(hidden.T[None, :, None], inputs.q.dtype)
        if inputs.soft_cap is not None:
            return attend_with_weights(replace(inputs, mask=mask))[0]
        q = inputs.q.reshape(
            1, inputs.keys.shape[1], -1, inputs.q.shape[-1]
        )  # query heads of one key head: rows of a product
        out = F.scaled_dot_product_attention(q, inputs.keys, inputs.values, attn_mask=mask, scale=inputs.scale)
        return out.reshape(1, 1, inputs.q.shape[1], -1)

    def _choose(self, written: int) -> None:
        """Index and pack the positions of every layer for the next round."""
        tail = max(self.config.recent, written)
        count = self.config.size(self.length, written)
        for layer, window in enumerate(self.windows):
            first = 0 if window is None else max(0, self.length - window + 1)  # what the next token may see
            mass = self.importance.mass(layer, self.length)
            index = choose_positions(mass, count, self.config.sinks, tail, first)
            self.packed.fill(layer, index, self.length, self.dense.keys[layer], self.dense.values[layer])

    def _count_prompt(self, recorded: list[AttentionInputs]) -> None:
        """The weights of the prompt's last queries, from the queries and the keys of its own pass."""
        n = min(self.length, self.config.queries)
        slots = torch.arange(self.length, device=self.token.device)
        ahead = slots - slots[-n:, None]
        for inputs in recorded:
            layer, window = inputs.layer, self.windows[inputs.layer]
            hidden = ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)
            keys, values = (stored[layer][:, :, : self.length] for stored in (self.dense.keys, self.dense.values))
            mask = _additive(hidden[None, None], keys.dtype)
            again = replace(inputs, q=inputs.q[:, :, -n:], keys=keys, values=values, mask=mask)
            self.importance.note(layer, attend_with_weights(again)[1][0])
        self.importance.commit(n)


class Importance:
    """How much the last W committed queries attended to every position, in every layer and key/value head.

    A ring of rows of weights, [G, W + longest + 1, slots] a layer in the target's type: a pass notes its n rows behind the
    committed ones, and a commit keeps the first of them. (A rejected token's query asks nothing that the text asks.)
    """

    def __init__(self, dense: KVCache, config: SparseSelfConfig):
        self.queries, self.longest = config.queries, config.longest
        self.size = config.queries + config.longest + 1
        self.rows = [keys.new_zeros(keys.shape[1], self.size, keys.shape[2]) for keys in dense.keys]
        self.committed = 0

    def note(self, layer: int, weights: Tensor) -> None:
        """weights [G, N/G, n, T] of the next n queries; those of the query heads of one key/value head add up."""
        rows, (n, width) = self.rows[layer], weights.shape[2:]
        assert n <= max(self.queries, self.longest + 1), (n, self.queries, self.longest)
        for part, where in self._ring(self.committed, n):
            torch.sum(weights[:, :, part], dim=1, out=rows[:, where, :width])
            rows[:, where, width : width + self.longest + 1] = 0  # a rejected row once stood here, and saw further

    def commit(self, count: int) -> None:
        self.committed += count

    def mass(self, layer: int, positions: int) -> Tensor:
        """[G, positions], fp32 or wider"""
        start = max(0, self.committed - self.queries)
        rows = self.rows[layer]
        dtype = torch.promote_types(rows.dtype, torch.float32)
        ring = self._ring(start, self.committed - start)
        return sum(rows[:, where, :positions].sum(1, dtype=dtype) for _, where in ring)

    def _ring(self, start: int, count: int) -> Iterator[tuple[slice, slice]]:
        """Where `count` rows from number `start` on are: parts of them, and the places in the ring of each part."""
        done = 0
        while done < count:
            place = (start + done) % self.size
            part = min(count - done, self.size - place)
            yield slice(done, done + part), slice(place, place + part)
            done += part


class Packed(HookedCache):
    """The chosen keys and values of every layer side by side, and behind them those of the tokens that are being drafted.

    One buffer [2, slots, G, D] a layer, made once for a text. `lengths` is the position of the next token, as in a dense
    cache. positions[layer] [slots, G]: what stands in the slots.
    """

    def __init__(self, dense: KVCache, config: SparseSelfConfig):
        super().__init__(1, dense.max_length, len(dense.keys), dense.dtype)
        slots = config.size(dense.max_length, config.longest + 1) + config.longest
        self.buffers: list[Tensor] = []
        self.positions: list[Tensor] = []
        for keys, values in zip(dense.keys, dense.values, strict=True):
            if keys.shape != values.shape:
                raise UserError(
                    f"sparse self-drafting: got keys of width {keys.shape[3]} and values of width {values.shape[3]}, "
                    "allowed: the same; choose another target"
                )
            self.buffers.append(keys.new_empty(2, slots, keys.shape[1], keys.shape[3]))
            self.positions.append(torch.empty(slots, keys.shape[1], dtype=torch.int64, device=keys.device))
        self.chosen = [0] * len(dense.keys)
        self.start = 0

    def rewind(self, length: int) -> None:
        """Drafting starts (again) at this position."""
        self.start, self.lengths = length, [length]

    def fill(self, layer: int, index: Tensor, length: int, keys: Tensor, values: Tensor) -> None:
        """Gather the positions index [G, C] of a layer's dense keys and values [1, G, slots, D], of which `length` are in use.
        Nothing is allocated but the row numbers."""
        count = index.shape[1]
        self.chosen[layer] = count
        self.positions[layer][:count] = index.T
        behind = self.positions[layer][count:]  # where the drafted tokens will stand
        behind[:] = torch.arange(length, length + len(behind), device=behind.device)[:, None]
        rows = self.positions[layer][:count] + torch.arange(len(index), device=index.device) * keys.shape[2]
        for stored, buffer in zip((keys, values), self.buffers[layer], strict=True):
            assert stored.is_contiguous()
            torch.index_select(stored.flatten(0, 2), 0, rows.flatten(), out=buffer[:count].flatten(0, 1))

    def write(self, layer: int, keys: Tensor, values: Tensor, append: Append) -> tuple[Tensor, Tensor]:
        """Put [1, 1, G, D] of the token that is being drafted behind the others; returns all of them, [1, G, C + 1.., D]."""
        slot = self.chosen[layer] + append.start - self.start
        buffer = self.buffers[layer]
        buffer[0, slot], buffer[1, slot] = keys[0, 0], values[0, 0]
        return buffer[:1, : slot + 1].transpose(1, 2), buffer[1:, : slot + 1].transpose(1, 2)


def choose_positions(mass: Tensor, count: int, sinks: int, tail: int, first: int = 0) -> Tensor:
    """mass [G,T] -> the positions to attend to, [G, C], C = count or all there are: the first `sinks` ones, the last `tail`
    ones, and between them those of the largest mass. first: the lowest position that may be seen."""
    groups, length = mass.shape
    if count >= length - first:
        return torch.arange(first, length, device=mass.device).expand(groups, -1)
    low, high = max(first, sinks), length - tail
    best = mass[:, low:high].topk(count - (low - first) - tail, dim=1, sorted=False).indices + low
    ends = [torch.arange(*span, device=mass.device).expand(groups, -1) for span in ((first, low), (high, length))]
    return torch.cat([ends[0], best, ends[1]], dim=1)


def layer_windows(target: TargetModel) -> list[int | None]:
    """The sliding window of every layer, None where it sees everything: as generic.py makes its masks."""
    config = target.hf_config
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * target.num_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


@torch.inference_mode()
def _check(target: TargetModel, recorder: Recorder) -> None:
    """Once for a target, on random ids: a watched pass and a draft on all positions give the target's own logits.

    Raises:
        UserError: they do not.
    """
    refusal = (
        f"target {target.name}: a {target.hf_config.model_type} model cannot draft for itself on a part of its cache"
    )
    ids = torch.randint(target.vocab_size, (1, CHECK_TOKENS), generator=torch.Generator().manual_seed(0)).to(
        target.device
    )
    half = CHECK_TOKENS // 2
    own = target.forward(ids, target.new_cache(1, CHECK_TOKENS)).logits[0, half:].float()
    target.watcher = recorder
    try:
        cache = target.new_cache(1, CHECK_TOKENS)
        target.forward(ids[:, :half], cache)
        if [inputs.layer for inputs in recorder.prompt] != list(range(target.num_layers)):
            raise UserError(f"{refusal}: its layers do not attend through transformers' AttentionInterface")
        sequence = Sequence(target, SparseSelfConfig(budget=1.0), ids[:, half : half + 1])
        drafted = target.teacher_logits(sequence.draft(sequence.rewind())[0])
        verified = target.forward(ids[:, half:], cache).logits[0]
    except (RuntimeError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise UserError(f"{refusal} ({' '.join(str(error).split())[:160]}); choose another target") from error
    finally:
        target.watcher = None
    error = float((torch.cat([drafted, verified]).float() - torch.cat([own[:1], own])).abs().mean() / own.std())
    if not error < CHECK_TOLERANCE[target.dtype]:
        raise UserError(f"{refusal}: logits differ by {error:.2g} of their spread; choose another target")
