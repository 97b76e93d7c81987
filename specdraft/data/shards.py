"""Hidden states on disk: `extract` writes them, `Shards` reads them back as the same batches that `Online` makes.

A folder holds `index.json` (what the states depend on, counts, one entry per shard) and `shard-00000.safetensors`, ...:

    taps [N, A*H], last [N, H]     the unpadded rows of the shard's examples, one after the other
    metadata                       "shard": JSON {key, rows: [[example key, length], ...], bad: [example key, ...], checksum}

A state belongs to a sequence of token ids, and an example finds its rows by the hash of its ids: names, masks and
vocabulary maps live elsewhere and change without new states. Which example stands in which shard is a function of the
data, so every rank knows its files, an interrupted run goes on after the last whole file, and another number of ranks may
finish it. It knows nothing of training. A taps, H width, N rows of a shard.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from specdraft.config import UserError
from specdraft.data.chat import Account, Example, tokenizer_hash
from specdraft.data.source import Batch, FeatureTarget, States, collate, cut_batches, example_key, run_target
from specdraft.provenance import atomic_path, hash_json, hash_tensors, provenance, read_json, require_disk, write_json

FORMAT = "specdraft-states-1"
CONVENTION = "tap k = Hugging Face hidden_states[k] (0: embeddings); last = input of the final norm"
# What a reader must have too.
KEYS = ("target_hash", "tokenizer_hash", "tap_layers", "convention", "hidden_size", "dtype")
TIMED_TOKENS = 1024  # run before the work on a CPU, for the estimate


@dataclass
class ShardConfig:
    """shard_mb: size of a file in 1e6 bytes (in memory up to three times while it is written); 0 = a file for each example.
    tokens_per_batch: tokens, padding included, that run together on a GPU.
    max_bad: share (0..1) of the examples whose states may be NaN or infinite."""

    shard_mb: int = 500
    tokens_per_batch: int = 8192
    max_bad: float = 0.01

    def __post_init__(self) -> None:
        for key, least in (("shard_mb", 0), ("tokens_per_batch", 1)):
            if getattr(self, key) < least:
                raise UserError(f"shards.{key}: got {getattr(self, key)}, allowed: {least} or more")
        if not 0 <= self.max_bad <= 1:
            raise UserError(f"shards.max_bad: got {self.max_bad}, allowed: a share from 0 to 1")


@dataclass(frozen=True)
class Estimate:
    """What an extraction costs. `str()` is one line for the terminal."""

    examples: int
    tokens: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        rate = self.tokens / max(self.seconds, 1e-9)
        return (
            f"hidden states: {self.examples:,} examples, {self.tokens:,} tokens, {self.bytes / 1e9:.2f} GB, "
            f"about {self.seconds / 60:.1f} minutes at {rate:,.0f} tok/s"
        )


def states_key(target: FeatureTarget, examples: Sequence[Example], max_length: int) -> dict[str, Any]:
    """All that the states depend on, in words; its hash is the key of the folder and of every shard."""
    return {
        "format": FORMAT,
        "convention": CONVENTION,
        "target": target.name,
        "target_hash": target.hash,
        "tokenizer_hash": tokenizer_hash(target.tokenizer),
        "tap_layers": list(target.tap_layers),
        "hidden_size": target.hidden_size,
        "dtype": _dtype_name(target),
        "max_length": max_length,
        "data_hash": hash_json([example_key(example) for example in examples]),
    }


def extract(
    target: FeatureTarget,
    examples: Sequence[Example],
    folder: Path,
    max_length: int,
    config: ShardConfig,
    rank: int = 0,
    world: int = 1,
) -> Account:
    """Write this rank's shards of `examples` that are not there yet, and the index once all ranks' are. Examples of the
    same ids share their states. Returns what became of the different ones in this rank's shards.

    Raises:
        UserError: a folder made from something else; too little disk; ids outside the target's vocabulary; more than
            `max_bad` of the examples with states that are not finite.
    """
    examples = _distinct(examples, target)
    key = states_key(target, examples, max_length)
    plan = _plan_shards(examples, _bytes_per_token(target), config.shard_mb * 10**6)
    _begin(folder, key, plan)
    mine = [number for number in range(len(plan)) if number % world == rank]
    waiting = [number for number in mine if not _path(folder, number).exists()]
    estimate = _estimate(target, [example for number in waiting for example in plan[number]], config)
    print(estimate)
    require_disk(folder, estimate.bytes, "hidden states")
    account, allowed = Account(), config.max_bad * len(examples)
    with tqdm(total=estimate.tokens, desc="hidden states", unit="tok", unit_scale=True) as bar:
        for number in mine:
            if number in waiting:
                _write_shard(_path(folder, number), target, plan[number], hash_json(key), config, bar)
            header = _read_header(_path(folder, number), hash_json(key))
            account.kept += len(header["rows"])
            account.skipped["NaN or infinite states"] += len(header["bad"])
            if account.skipped.total() > allowed:
                raise UserError(
                    f"hidden states: {account.skipped.total()} examples have NaN or infinite states, allowed: "
                    f"{config.max_bad:.1%} of {len(examples)}; load the target in bfloat16 or float32"
                )
    account.skipped = +account.skipped
    if all(_path(folder, number).exists() for number in range(len(plan))):
        _finish(folder, key, len(plan))
    return account


class Shards:
    """Reads the states that `extract` wrote for this target.

    verify: check every file's checksum when it is first opened (about 1 s a GB).

    Raises:
        UserError: no or an unfinished index; states of another target, tokenizer or taps; a missing or corrupt file.
    """

    def __init__(self, folder: Path, target: FeatureTarget, verify: bool = True) -> None:
        self.folder, self.target, self.verify = Path(folder), target, verify
        self.index = read_index(folder)
        if not self.index["complete"]:
            raise UserError(
                f"hidden states {folder}: not all shards are there; run extract_hidden_states.py to the end"
            )
        wanted = states_key(target, [], 0)
        for name in KEYS:
            if self.index["key"][name] != wanted[name]:
                raise UserError(
                    f"hidden states {folder}: made with {name} = {self.index['key'][name]!r} "
                    f"(target {self.index['key']['target']}), got {wanted[name]!r}; give that target, or extract again"
                )
        self._files: dict[str, Any] = {}
        self._places: dict[str, tuple[str, int, int] | None] = {}
        self._key = hash_json(self.index["key"])
        for shard in self.index["shards"]:
            _read_header(self.folder / shard["file"], self._key)  # it is there, whole: not found out hours later
            self._places |= dict.fromkeys(shard["bad"])
            start = 0
            for key, length in shard["rows"]:
                self._places[key] = (shard["file"], start, start + length)
                start += length

    def batch(self, examples: Sequence[Example]) -> Batch:
        """States of `examples`, in their order, on the target's device; those whose states were not finite have zeros
        and an empty mask.

        Raises:
            UserError: an example that was not extracted: other data, tokenizer or max_length.
        """
        return collate(examples, [self._states(example) for example in examples], self.target)

    def require(self, examples: Sequence[Example]) -> None:
        """Raises UserError unless all `examples` were extracted, as `batch` would in the middle of the work."""
        for example in examples:
            self._place(example)

    def _place(self, example: Example) -> tuple[str, int, int] | None:
        """File, first and last row; None where the states were not finite."""
        key = example_key(example)
        if key not in self._places:
            raise UserError(
                f"hidden states {self.folder}: none for example {example.id!r} ({len(example.input_ids)} tokens); the data, "
                f"the tokenizer or max_length (here {self.index['key']['max_length']}) is not that of the extraction"
            )
        return self._places[key]

    def _states(self, example: Example) -> States | None:
        place = self._place(example)
        if place is None:
            return None
        name, start, end = place
        file = self._open(name)
        return States(file.get_slice("taps")[start:end], file.get_slice("last")[start:end])

    def _open(self, name: str) -> Any:
        if name not in self._files:
            path = self.folder / name
            header = _read_header(path, self._key)
            self._files[name] = file = safe_open(path, framework="pt")
            if self.verify and _checksum(file.get_tensor("taps"), file.get_tensor("last")) != header["checksum"]:
                raise UserError(f"hidden states {path}: checksum does not match; remove the file and extract again")
        return self._files[name]


def read_index(folder: Path) -> dict[str, Any]:
    """index.json of a folder of shards. Raises UserError where there is none that we can read."""
    path = Path(folder) / "index.json"
    if not path.exists():
        raise UserError(f"hidden states {folder}: no index.json; make it with data_prep/extract_hidden_states.py")
    index = read_json(path, "hidden states", "remove the folder and extract again")
    key = index.get("key") if isinstance(index, dict) else None
    if not isinstance(key, dict) or key.get("format") != FORMAT:
        raise UserError(f"hidden states {path}: not of the format {FORMAT}; extract again")
    if not _is_whole(index):
        raise UserError(f"hidden states {path}: has lost a part of itself; remove the folder and extract again")
    return index


def _is_whole(index: dict[str, Any]) -> bool:
    """Whether an index has what its readers read."""
    if not isinstance(index.get("complete"), bool) or not {*KEYS, "target", "max_length"} <= index["key"].keys():
        return False
    if not index["complete"]:
        return isinstance(index.get("planned_shards"), int)
    shards = index.get("shards")
    if not isinstance(shards, list) or not all(isinstance(shard, dict) for shard in shards):
        return False
    kinds = {"file": str, "rows": list, "bad": list}
    if not all(isinstance(shard.get(name), kind) for shard in shards for name, kind in kinds.items()):
        return False
    rows = [row for shard in shards for row in shard["rows"]]
    return all(isinstance(row, list) and [type(part) for part in row] == [str, int] for row in rows)


def _distinct(examples: Sequence[Example], target: FeatureTarget) -> list[Example]:
    """One example for every different sequence of ids."""
    if not examples:
        raise UserError("hidden states: got 0 examples, at least 1 is needed")
    for example in examples:
        if int(example.input_ids.max()) >= target.vocab_size:
            raise UserError(
                f"example {example.id!r}: got token id {int(example.input_ids.max())}, allowed: 0 to "
                f"{target.vocab_size - 1}; the data is not of the target {target.name}"
            )
    return list({example_key(example): example for example in examples}.values())


def _plan_shards(examples: Sequence[Example], bytes_per_token: int, shard_bytes: int) -> list[list[Example]]:
    plan: list[list[Example]] = [[]]
    used = 0
    for example in examples:
        size = len(example.input_ids) * bytes_per_token
        if plan[-1] and used + size > shard_bytes:
            plan.append([])
            used = 0
        plan[-1].append(example)
        used += size
    return plan


def _begin(folder: Path, key: dict[str, Any], plan: list[list[Example]]) -> None:
    """Write the first index, or check that the folder belongs to the same key."""
    if not (folder / "index.json").exists():
        write_json(folder / "index.json", {"complete": False, "key": key, "planned_shards": len(plan)})
        return
    index = read_index(folder)
    found = index["key"]
    for name in key:
        if found.get(name) != key[name]:
            raise UserError(
                f"hidden states {folder}: made with {name} = {found.get(name)!r}, now {key[name]!r}; give another folder, "
                "or remove this one"
            )
    if index["planned_shards"] != len(plan):
        raise UserError(f"hidden states {folder}: made with another shard_mb; give that one, or another folder")


def _estimate(target: FeatureTarget, examples: Sequence[Example], config: ShardConfig) -> Estimate:
    """Bytes from the lengths; seconds from running the first examples, twice: the first forward is slower."""
    tokens = sum(len(example.input_ids) for example in examples)
    limit = TIMED_TOKENS if target.device.type == "cpu" else config.tokens_per_batch
    sample, timed, seconds = [], 0, 0.0
    for example in examples:
        if sample and timed + len(example.input_ids) > limit:
            break
        sample.append(example)
        timed += len(example.input_ids)
    for part in (sample[:1], sample) if sample else ():
        start = time.perf_counter()
        run_target(target, part)
        seconds = time.perf_counter() - start
    return Estimate(len(examples), tokens, tokens * _bytes_per_token(target), seconds * tokens / max(timed, 1))


def _write_shard(
    path: Path, target: FeatureTarget, examples: list[Example], key_hash: str, config: ShardConfig, bar: Any
) -> None:
    states: dict[str, States | None] = {}
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].input_ids), reverse=True)
    for batch in cut_batches(order, [len(example.input_ids) for example in examples], config.tokens_per_batch):
        together = [examples[i] for i in batch]
        for example, result in zip(together, run_target(target, together), strict=True):
            # a copy: a view would keep the padded batch
            copy = None if result is None else States(result.taps.cpu().clone(), result.last.cpu().clone())
            states[example_key(example)] = copy
        bar.update(sum(len(example.input_ids) for example in together))
    good = {key: item for key, item in states.items() if item is not None}
    empty = [torch.empty(0, width, dtype=target.dtype) for width in _widths(target)]
    taps = torch.cat([empty[0], *(item.taps for item in good.values())])
    last = torch.cat([empty[1], *(item.last for item in good.values())])
    header = {
        "key": key_hash,
        "rows": [[key, len(item.last)] for key, item in good.items()],
        "bad": [key for key, item in states.items() if item is None],
        "checksum": _checksum(taps, last),
    }
    with atomic_path(path) as temporary:
        save_file({"taps": taps, "last": last}, temporary, metadata={"shard": json.dumps(header)})


def _finish(folder: Path, key: dict[str, Any], count: int) -> None:
    """The complete index. Whichever rank is last writes it; two that write it at once write the same."""
    headers = {
        _path(folder, number).name: _read_header(_path(folder, number), hash_json(key)) for number in range(count)
    }
    shards = [{"file": name} | {k: header[k] for k in ("checksum", "rows", "bad")} for name, header in headers.items()]
    counts = {
        "examples": sum(len(shard["rows"]) for shard in shards),
        "bad": sum(len(shard["bad"]) for shard in shards),
        "tokens": sum(length for shard in shards for _, length in shard["rows"]),
    }
    index = {"complete": True, "key": key, "counts": counts, "planned_shards": count, "shards": shards}
    write_json(folder / "index.json", index | {"provenance": provenance()})


def _read_header(path: Path, key_hash: str) -> dict[str, Any]:
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("shard", "{}"))
    except OSError:
        raise UserError(f"hidden states {path}: the file is missing; extract again") from None
    except (SafetensorError, ValueError) as error:
        raise UserError(f"hidden states {path}: corrupt ({error}); remove the file and extract again") from None
    if not isinstance(header, dict) or header.get("key") != key_hash:
        raise UserError(f"hidden states {path}: belongs to another extraction; remove the file and extract again")
    return header


def _path(folder: Path, number: int) -> Path:
    return Path(folder) / f"shard-{number:05d}.safetensors"


def _checksum(taps: torch.Tensor, last: torch.Tensor) -> str:
    return hash_tensors({"taps": taps, "last": last})


def _widths(target: FeatureTarget) -> tuple[int, int]:
    return len(target.tap_layers) * target.hidden_size, target.hidden_size


def _bytes_per_token(target: FeatureTarget) -> int:
    return sum(_widths(target)) * target.dtype.itemsize


def _dtype_name(target: FeatureTarget) -> str:
    return str(target.dtype).removeprefix("torch.")
