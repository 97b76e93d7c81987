"""Where hidden states come from: the seam `HiddenStates`, its `Batch`, and the source that runs the target (`Online`).

The other source, `Shards` (data/shards.py), reads the same batches from disk. Neither knows what is trained on them,
and the target is known only by its `features`. B batch, T tokens, H width, A number of taps.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdraft.config import UserError
from specdraft.data.chat import Example
from specdraft.provenance import atomic_path, hash_bytes, require_disk

SLAB_BYTES = 64 << 20  # above 32 MB glibc maps a block of its own
PART_BYTES = 10**9  # of a file of kept states
BUCKET_BATCHES = 32  # examples are sorted by length among so many batches' worth: little padding, yet random company


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences with the target's states. Padding: id 0, mask False, states 0.

    input_ids: [B, T] int64.  loss_mask: [B, T] bool.  lengths: [B] int64, real tokens.
    taps: [B, T, A*H], tapped states side by side, ascending by layer.
    last: [B, T, H], the input of the target's final norm (un-normed).
    """

    input_ids: Tensor
    loss_mask: Tensor
    lengths: Tensor
    taps: Tensor
    last: Tensor

    def to(self, device: torch.device | str) -> Batch:
        move = {"device": device, "non_blocking": True}
        return Batch(
            self.input_ids.to(**move),
            self.loss_mask.to(**move),
            self.lengths.to(**move),
            self.taps.to(**move),
            self.last.to(**move),
        )


@dataclass(frozen=True)
class States:
    """The target's states for one example, unpadded. taps: [T, A*H], last: [T, H]."""

    taps: Tensor
    last: Tensor

    @property
    def nbytes(self) -> int:
        return self.taps.nbytes + self.last.nbytes

    def is_finite(self) -> bool:
        return bool(self.taps.isfinite().all() & self.last.isfinite().all())


class HiddenStates(Protocol):
    """A source of hidden states. The same examples give the same Batch, whichever source it is."""

    def batch(self, examples: Sequence[Example]) -> Batch: ...


class TargetFeatures(Protocol):
    """[B, T, .] states as `TargetModel.features` returns them."""

    @property
    def taps(self) -> Tensor: ...

    @property
    def last(self) -> Tensor: ...


class FeatureTarget(Protocol):
    """What a source needs of a target (models/target.py has the real one)."""

    name: str
    hash: str
    hidden_size: int
    vocab_size: int
    tap_layers: tuple[int, ...]
    dtype: torch.dtype
    compute_dtype: torch.dtype
    device: torch.device
    tokenizer: Any

    def features(self, input_ids: Tensor, lengths: Tensor) -> TargetFeatures: ...


class Online:
    """Runs the target for every batch.

    An example whose states are not finite gets zeros and an empty mask, and is counted in `bad`.

    cache_bytes: keep that many bytes of states in RAM, unpadded and in the target's dtype, so that later epochs need no
        target forward for them. 0: no cache. What does not fit is computed again; nothing is evicted, since epochs
        sweep over everything and eviction would empty the cache before its first hit. The key is the hash of the
        token ids.
    max_bad: how many different examples may have states that are not finite.
    """

    def __init__(self, target: FeatureTarget, cache_bytes: int = 0, max_bad: int = 10) -> None:
        assert cache_bytes >= 0, cache_bytes
        self.target = target
        self.cache_bytes = cache_bytes
        self.used_bytes = 0
        self.bad: set[str] = set()
        self.max_bad = max_bad
        self._cache: dict[str, States] = {}
        self._slabs = Slabs()
        self._stored: set[str] = set()  # the keys of what lies on disk

    def batch(self, examples: Sequence[Example]) -> Batch:
        """States of `examples`, in their order, on the target's device.

        Raises:
            UserError: more than `max_bad` examples so far had states that are not finite.
        """
        assert examples, "an empty batch"
        keys = [example_key(example) for example in examples]
        missing = {key: example for key, example in zip(keys, examples, strict=True) if key not in self._cache}
        fresh = dict(zip(missing, run_target(self.target, list(missing.values())), strict=True))
        for key, states in fresh.items():
            if states is None:
                self.bad.add(key)
            else:
                self._remember(key, states)
        if len(self.bad) > self.max_bad:
            raise UserError(
                f"target states: {len(self.bad)} examples have NaN or infinite states, allowed: {self.max_bad}; "
                "load the target in bfloat16 or float32, and check its weights"
            )
        states = [fresh[key] if key in fresh else self._cache[key] for key in keys]
        return collate(examples, states, self.target)

    def remember(self, example: Example, states: States) -> None:
        """Use these states of `example`, made elsewhere, as far as they are finite and the cache has room."""
        if states.is_finite():
            self._remember(example_key(example), states)

    def forget(self) -> None:
        """Give the cache's memory back."""
        self._cache.clear()
        self._slabs = Slabs()
        self.used_bytes = 0

    def save(self, folder: Path) -> None:
        """Add to `folder` what the cache holds and no file there does, so that a later run need not run the target at all:
        safetensors files of PART_BYTES at most (or one example), each atomic, since nothing may double what fills the memory.

        Raises:
            UserError: too little disk.
        """
        fresh = {key: states for key, states in self._cache.items() if key not in self._stored}
        require_disk(folder, sum(states.nbytes for states in fresh.values()), "hidden states")
        folder.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(path.stem) for path in folder.glob("*.safetensors")), default=-1)
        while fresh:
            keys, nbytes = [], 0
            for key, states in fresh.items():
                nbytes += states.nbytes
                if keys and nbytes > PART_BYTES:
                    break
                keys.append(key)
            part = {key: fresh.pop(key) for key in keys}
            _save_states(folder / f"{number:05}.safetensors", part)
            self._stored.update(part)
            number += 1

    def load(self, folder: Path, examples: Iterable[Example]) -> None:
        """Take up what `save` wrote of these examples, for this target. Raises UserError for a file that cannot be read."""
        wanted = {example_key(example) for example in examples}
        for path in sorted(folder.glob("*.safetensors")):
            for key, states in _load_states(path):
                self._stored.add(key)
                if key in wanted:
                    self._remember(key, states)

    def _remember(self, key: str, states: States) -> None:
        if key not in self._cache and self.used_bytes + states.nbytes <= self.cache_bytes:
            self._cache[key] = States(self._slabs.copy(states.taps), self._slabs.copy(states.last))
            self.used_bytes += states.nbytes


class Slabs:
    """Copies of tensors in a few large blocks of memory. Thousands of tensors of all sizes, with what else is made between them, leave
    the C library's allocator as many gaps, which it searches at every allocation of a kilobyte or more: decoding in such a process is up
    to a fifth slower."""

    def __init__(self) -> None:
        self._rest: dict[torch.dtype, Tensor] = {}  # of the newest slab

    def copy(self, tensor: Tensor) -> Tensor:
        """The same values on the CPU."""
        count, rest = tensor.numel(), self._rest.get(tensor.dtype)
        if rest is None or len(rest) < count:
            rest = torch.empty(max(count, SLAB_BYTES // tensor.itemsize), dtype=tensor.dtype)
        self._rest[tensor.dtype] = rest[count:]
        return rest[:count].view(tensor.shape).copy_(tensor)


def _save_states(path: Path, part: dict[str, States]) -> None:
    lengths = {key: len(states.last) for key, states in part.items()}
    tensors = {name: torch.cat([getattr(states, name) for states in part.values()]) for name in ("taps", "last")}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"lengths": json.dumps(lengths)})


def _load_states(path: Path) -> Iterator[tuple[str, States]]:
    try:
        with safe_open(path, framework="pt") as file:
            lengths = json.loads(file.metadata()["lengths"])
            taps, last = file.get_tensor("taps"), file.get_tensor("last")
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"hidden states {path}: cannot be read ({error}); remove the file") from None
    parts = (tensor.split(list(lengths.values())) for tensor in (taps, last))
    for key, *states in zip(lengths, *parts, strict=True):
        yield key, States(*states)


def example_key(example: Example) -> str:
    """What the states of an example depend on, the target apart: its token ids. Not its mask, not its name."""
    return hash_bytes(example.input_ids.numpy().tobytes())


def run_target(target: FeatureTarget, examples: Sequence[Example]) -> list[States | None]:
    """States of every example, unpadded; None where they are not finite.

    On a CPU each example runs alone: its hundreds of rows fill the machine, nothing is spent on padding, and its states
    are the same bits whatever its company, so that neither a cache nor an interrupted run changes a result. Elsewhere
    all run together, padded on the right."""
    if target.device.type != "cpu":
        return run_padded(target, examples)
    return [states for example in examples for states in run_padded(target, [example])]


def run_padded(target: FeatureTarget, examples: Sequence[Example]) -> list[States | None]:
    """One forward of the target over right-padded examples."""
    input_ids, lengths = pad_ids(examples)
    features = target.features(input_ids.to(target.device), lengths.to(target.device))
    taps, last = features.taps.to(target.dtype), features.last.to(target.dtype)
    states = [States(taps[b, :n], last[b, :n]) for b, n in enumerate(lengths.tolist())]
    return [item if item.is_finite() else None for item in states]


def pad_ids(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """-> ids [B, T] padded right with 0, lengths [B]."""
    lengths = torch.tensor([len(example.input_ids) for example in examples])
    ids = torch.zeros(len(examples), int(lengths.max()), dtype=torch.int64)
    for b, example in enumerate(examples):
        ids[b, : lengths[b]] = example.input_ids
    return ids, lengths


def collate(examples: Sequence[Example], states: Sequence[States | None], target: FeatureTarget) -> Batch:
    """Pad examples and their unpadded states into one Batch on the target's device. None: no states, so no mask."""
    input_ids, lengths = pad_ids(examples)
    loss_mask = torch.zeros_like(input_ids, dtype=torch.bool)
    options = {"dtype": target.compute_dtype, "device": target.device}
    taps = torch.zeros(*input_ids.shape, len(target.tap_layers) * target.hidden_size, **options)
    last = torch.zeros(*input_ids.shape, target.hidden_size, **options)
    for b, (example, state) in enumerate(zip(examples, states, strict=True)):
        if state is not None:
            n = len(example.input_ids)
            assert len(state.taps) == len(state.last) == n, (example.id, len(state.taps), len(state.last), n)
            loss_mask[b, :n] = example.loss_mask
            taps[b, :n] = state.taps
            last[b, :n] = state.last
    device = target.device
    return Batch(input_ids.to(device), loss_mask.to(device), lengths.to(device), taps, last)


def plan_batches(
    lengths: Sequence[int], tokens_per_batch: int, seed: int, epoch: int, rank: int = 0, world: int = 1
) -> list[list[int]]:
    """One epoch's batches for one rank: its part of `plan_rounds`, which has the arguments and the errors."""
    assert 0 <= rank < world, (rank, world)
    return [together[rank] for together in plan_rounds(lengths, tokens_per_batch, seed, epoch, world)]


def plan_rounds(
    lengths: Sequence[int], tokens_per_batch: int, seed: int, epoch: int, world: int
) -> list[list[list[int]]]:
    """One epoch's batches, as lists of positions in `lengths`, in rounds: the `world` batches that the ranks take at one time.

    A batch has at most `tokens_per_batch` tokens, padding included; an example longer than that is a batch of its own. Over
    all ranks every example comes exactly once, no batch is empty, and every rank gets equally many batches, since a rank
    without one would hang the others. Batches that ranks take at the same time are of similar size. A function of its
    arguments only, whatever the process.

    The number of batches is made a multiple of `world` by splitting the largest; only where all hold one example are
    the smallest merged instead, past `tokens_per_batch`.

    Raises:
        UserError: fewer examples than ranks.
    """
    if len(lengths) < world:
        raise UserError(f"training data: got {len(lengths)} examples for {world} processes; each needs at least one")
    rng = random.Random(f"plan {seed} {epoch}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    batches: list[list[int]] = []
    for bucket in _buckets(order, lengths, BUCKET_BATCHES * tokens_per_batch):
        batches += cut_batches(sorted(bucket, key=lambda i: lengths[i], reverse=True), lengths, tokens_per_batch)
    _divide_evenly(batches, lengths, world)
    batches.sort(key=lambda batch: _cost(batch, lengths))
    rounds = [batches[start : start + world] for start in range(0, len(batches), world)]
    rng.shuffle(rounds)
    for together in rounds:
        rng.shuffle(together)
    return rounds


def _cost(batch: list[int], lengths: Sequence[int]) -> int:
    return len(batch) * max(lengths[i] for i in batch)


def _buckets(order: list[int], lengths: Sequence[int], limit: int) -> list[list[int]]:
    buckets, tokens = [[]], 0
    for i in order:
        if tokens + lengths[i] > limit:
            buckets.append([])
            tokens = 0
        buckets[-1].append(i)
        tokens += lengths[i]
    return buckets


def cut_batches(descending: list[int], lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Positions in falling order of length -> batches of at most `limit` tokens, padding included, in that order."""
    batches: list[list[int]] = []
    for i in descending:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= limit:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _divide_evenly(batches: list[list[int]], lengths: Sequence[int], world: int) -> None:
    """Change `batches` in place until `world` divides their number."""
    missing = -len(batches) % world
    if len(batches) + missing <= len(lengths):
        for _ in range(missing):
            batches.sort(key=lambda batch: (len(batch) > 1, _cost(batch, lengths)))
            largest = batches.pop()
            batches += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    else:
        for _ in range(len(batches) % world):
            batches.sort(key=lambda batch: _cost(batch, lengths), reverse=True)
            smallest = batches.pop()
            batches[-1] = batches[-1] + smallest
