"""The target answers prompts, many at a time: the text that a drafter should learn is the text that its target writes.

Prompts are batched by length. Rows that have ended leave the batch, so that the rest go faster. Every finished batch is
appended to answers.jsonl: an interrupted run goes on where it stopped. It knows nothing of drafters or training.

Letters: B rows of a batch, V target vocabulary.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor
from tqdm import tqdm

from specdraft.config import UserError
from specdraft.data.chat import AnswerRow, Example, follow_up, read_answers, render_prompt, tokenizer_hash
from specdraft.data.source import States
from specdraft.data.tasks import Prompt
from specdraft.decoding.sampling import Sampling, draw
from specdraft.models.target import Step, TargetModel
from specdraft.provenance import atomic_path, hash_json, sole_writer, write_json

Keep = Callable[[Example, States], None]
GROUP = 2  # batches of similar length are cut from so many batches' worth of prompts, where time is limited
COMPACT = 0.85  # rows leave a batch together, when this share of them is left: leaving copies keys and values


@dataclass
class AnswerConfig:
    """max_new_tokens: tokens an answer may have.  batch_size: rows decoded together.  temperature, top_k, top_p: as in
    `Sampling`; 0 = greedy.  seed: of the sampling; every prompt draws from its own stream, whatever the batch.
    max_minutes: of answering, earlier runs into the same file included: prompts that do not fit are left out; None = all."""

    max_new_tokens: int = 192
    batch_size: int = 96
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_minutes: float | None = None

    def __post_init__(self) -> None:
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise UserError(f"answers.max_minutes: got {self.max_minutes}, allowed: above 0, or none for no limit")
        for key in ("max_new_tokens", "batch_size"):
            if getattr(self, key) < 1:
                raise UserError(f"answers.{key}: got {getattr(self, key)}, allowed: 1 or more")
        _ = self.sampling  # checks its own

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)


@dataclass
class Conversation:
    """A prompt on its way: the tokens so far, and the spans of them that the target wrote."""

    prompt: Prompt
    input_ids: list[int]
    turn: int
    spans: list[list[int]]
    finished: list[bool]

    def row(self) -> AnswerRow:
        return AnswerRow(self.prompt.id, self.prompt.category, self.input_ids, self.spans, self.finished)


def answer_prompts(
    target: TargetModel, prompts: Sequence[Prompt], path: Path, config: AnswerConfig, keep: Keep | None = None
) -> list[AnswerRow]:
    """Write the target's answers to `prompts` into `path` (JSON lines), and return them in the order of the prompts.

    Rows that `path` holds already, from an earlier run with the same target and configuration, are kept. `keep` is given the
    target's states of every new row, which it has made on the way: training then need not run the target again.

    Raises:
        UserError: no prompts; a prompt that leaves no room for an answer; a file made with another target or configuration, or
            that another process is writing to.
    """
    if not prompts:
        raise UserError("prompts: got none, at least one is needed; see data_prep/make_prompts.py")
    with sole_writer(path):
        return _answer_missing(target, prompts, path, config, keep)


def _answer_missing(
    target: TargetModel, prompts: Sequence[Prompt], path: Path, config: AnswerConfig, keep: Keep | None
) -> list[AnswerRow]:
    rows = _resume(target, prompts, path, config)
    waiting = [_start(target, prompt, config) for prompt in prompts if prompt.id not in rows]
    budget = _Budget(path, config.max_minutes)
    with (
        open(path, "a", encoding="utf-8") as file,
        tqdm(total=len(prompts), initial=len(prompts) - len(waiting), desc="answers", unit="prompt") as bar,
    ):
        size = len(prompts) if config.max_minutes is None else GROUP * config.batch_size
        for group in (waiting[start : start + size] for start in range(0, len(waiting), size)):
            if not budget.has_room():
                break
            started = time.perf_counter()
            tokens = _answer_group(target, group, config, keep, rows, file, bar)
            budget.spend(time.perf_counter() - started)
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - started):.0f} tok/s")
    return [rows[prompt.id] for prompt in prompts if prompt.id in rows]


def _answer_group(
    target: TargetModel,
    waiting: list[Conversation],
    config: AnswerConfig,
    keep: Keep | None,
    rows: dict[str, AnswerRow],
    file: TextIO,
    bar: tqdm,
) -> int:
    """Answer all of `waiting`, longest first, so that the memory it takes is known at once. Adds to `rows` and `file`; returns tokens."""
    tokens = 0
    while waiting:
        waiting.sort(key=lambda conversation: len(conversation.input_ids))
        batch, waiting = waiting[-config.batch_size :], waiting[: -config.batch_size]
        for conversation, states in _answer_batch(target, batch, config, keep is not None):
            if conversation.finished[-1] and _next_turn(target, conversation, config):
                waiting.append(conversation)
                continue
            row = conversation.row()
            rows[row.id] = row
            file.write(row.to_json() + "\n")
            tokens += sum(end - start for start, end in row.spans)
            if keep is not None:
                keep(row.example(), states)
            bar.update()
        file.flush()
    return tokens


class _Budget:
    """Minutes of answering, over all runs that wrote into `path`: spent, and of the slowest group so far, which must still fit."""

    def __init__(self, path: Path, minutes: float | None):
        self.path, self.minutes = path.with_suffix(".minutes.json"), minutes
        self.spent, self.slowest = 0.0, 0.0
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):  # none yet, or not what `spend` wrote
            self.spent, self.slowest = map(float, json.loads(self.path.read_text()))

    def has_room(self) -> bool:
        return self.minutes is None or self.spent + self.slowest < self.minutes

    def spend(self, seconds: float) -> None:
        self.spent, self.slowest = self.spent + seconds / 60, max(self.slowest, seconds / 60)
        write_json(self.path, [self.spent, self.slowest])


@torch.inference_mode()
def _answer_batch(
    target: TargetModel, batch: list[Conversation], config: AnswerConfig, with_states: bool
) -> list[tuple[Conversation, States | None]]:
    """One turn of every conversation of the batch: prefill together, then one token a row and step."""
    lengths = [len(conversation.input_ids) for conversation in batch]
    cache = target.new_cache(len(batch), max(lengths) + config.max_new_tokens)
    ids = torch.zeros(len(batch), max(lengths), dtype=torch.int64)
    for b, conversation in enumerate(batch):
        ids[b, : lengths[b]] = torch.tensor(conversation.input_ids)
        conversation.spans.append([lengths[b], lengths[b]])
        conversation.finished.append(False)
    step = target.forward(ids.to(target.device), cache, counts=lengths, want_taps=with_states, logits_for="last")
    generators = [_generator(conversation, config) for conversation in batch]
    live = list(range(len(batch)))  # batch index of every row of the cache
    ran = [(step, live)]
    for count in range(1, config.max_new_tokens + 1):
        tokens = _sample(step.logits[:, 0], [generators[b] for b in live], config.sampling)
        for b, token in zip(live, tokens, strict=True):
            if not batch[b].finished[-1]:
                batch[b].input_ids.append(token)
                batch[b].finished[-1] = token in target.eos_token_ids
        keep = [row for row, b in enumerate(live) if not batch[b].finished[-1]]
        if not keep or count == config.max_new_tokens:
            break
        if len(keep) <= COMPACT * len(live):
            cache.select(keep)
            live, tokens = [live[row] for row in keep], [tokens[row] for row in keep]
        column = torch.tensor(tokens, device=target.device)[:, None]
        step = target.forward(column, cache, want_taps=with_states, logits_for="last")
        ran.append((step, live))
    for conversation in batch:
        conversation.spans[-1][1] = len(conversation.input_ids)
    states = _collect_states(batch, ran, target.dtype) if with_states else [None] * len(batch)
    return list(zip(batch, states, strict=True))


def _collect_states(batch: list[Conversation], ran: list[tuple[Step, list[int]]], dtype: torch.dtype) -> list[States]:
    """Every row's states from the forward passes, each with the batch indices of its rows: the prefill, then one token a
    row. The last token of a row was never run; its state is zero, and no row is trained that would read it."""
    places = [{b: row for row, b in enumerate(live)} for _, live in ran]
    found = []
    for b, conversation in enumerate(batch):
        start, end = conversation.spans[-1]
        parts = {}
        for name in ("taps", "last"):
            prefill = getattr(ran[0][0], name)[b, :start]
            steps = [getattr(ran[i][0], name)[places[i][b]] for i in range(1, end - start)]
            parts[name] = torch.cat([prefill, *steps, torch.zeros_like(prefill[:1])]).to(dtype)
        found.append(States(**parts))
    return found


def _sample(logits: Tensor, generators: list[torch.Generator | None], sampling: Sampling) -> list[int]:
    """logits [B, V] -> one token a row."""
    if sampling.greedy:
        return logits.max(-1).indices.tolist()
    laws = sampling.law(logits)
    return [int(draw(law, generator)) for law, generator in zip(laws, generators, strict=True)]


def _generator(conversation: Conversation, config: AnswerConfig) -> torch.Generator | None:
    if config.sampling.greedy:
        return None
    seed = int(hash_json([config.seed, conversation.prompt.id, conversation.turn]), 16) % 2**63
    return torch.Generator().manual_seed(seed)


def _start(target: TargetModel, prompt: Prompt, config: AnswerConfig) -> Conversation:
    ids = _prompt_ids(target, prompt)
    if max(ids, default=0) >= target.vocab_size:
        raise UserError(
            f"target {target.name}: its tokenizer gives the id {max(ids)}, allowed: below {target.vocab_size}, the rows of its "
            "embedding; put the model's own tokenizer there"
        )
    room = target.max_positions - config.max_new_tokens
    if len(ids) > room:
        raise UserError(
            f"prompt {prompt.id!r}: got {len(ids)} tokens, allowed: {room} (the target's {target.max_positions} positions less "
            f"{config.max_new_tokens} for the answer); shorten or remove it, or lower max_new_tokens"
        )
    return Conversation(prompt, ids, 0, [], [])


def _prompt_ids(target: TargetModel, prompt: Prompt) -> list[int]:
    messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    return render_prompt(target.tokenizer, [*messages, {"role": "user", "content": prompt.turns[0]}])


def _next_turn(target: TargetModel, conversation: Conversation, config: AnswerConfig) -> bool:
    """Add the prompt's next turn, if there is one and the context has room for it and its answer."""
    conversation.turn += 1
    if conversation.turn == len(conversation.prompt.turns):
        return False
    ids = follow_up(target.tokenizer, conversation.prompt.turns[conversation.turn])
    if len(conversation.input_ids) + len(ids) + config.max_new_tokens > target.max_positions:
        return False
    conversation.input_ids += ids
    return True


def read_parts(target: TargetModel, folder: Path, prompts: Sequence[Prompt]) -> dict[str, AnswerRow]:
    """Answers to `prompts` among the files part-*.jsonl of `folder`, by prompt id. An answer to another text that had the
    same id is left out."""
    rows = (row for path in sorted(folder.glob("part-*.jsonl")) for row in _complete_rows(path))
    return answers_to(target, rows, prompts)


def answers_to(target: TargetModel, rows: Iterable[AnswerRow], prompts: Sequence[Prompt]) -> dict[str, AnswerRow]:
    """Those of `rows` that answer exactly one of `prompts`, by prompt id."""
    wanted = {prompt.id: prompt for prompt in prompts}
    return {row.id: row for row in rows if row.id in wanted and _answers(target, row, wanted[row.id])}


def estimate_answers(target: TargetModel, prompts: Sequence[Prompt], config: AnswerConfig, path: Path) -> str:
    """One line: tokens, memory, disk, and the time that follows from a few timed steps at full batch size; or that the time for
    answers into `path` is spent already."""
    budget = _Budget(path, config.max_minutes)
    if not budget.has_room():
        return (
            f"answers: {budget.spent:.1f} of {config.max_minutes:g} minutes are spent, and no more fits: {len(prompts)} prompts are left "
            "out; raise max_minutes to answer them"
        )
    batch = min(config.batch_size, len(prompts))
    length = 64
    cache = target.new_cache(batch, length + 8)
    target.forward(
        torch.zeros(batch, length, dtype=torch.int64, device=target.device), cache, want_taps=False, logits_for="none"
    )
    column = torch.zeros(batch, 1, dtype=torch.int64, device=target.device)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        target.forward(column, cache, want_taps=False, logits_for="last").logits.flatten()[0].item()
        seconds.append(time.perf_counter() - start)
    tokens = len(prompts) * config.max_new_tokens
    minutes = tokens * min(seconds) / batch / 60
    limit = None if config.max_minutes is None else config.max_minutes - budget.spent
    within = (
        ""
        if limit is None or limit > minutes
        else f", of which {limit:.3g} are allowed: the prompts that do not fit are left out"
    )
    held = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values) if tensor is not None)
    memory = held / cache.max_length * (2 * length + config.max_new_tokens) / 1e9
    return (
        f"answers: at most {tokens:,} tokens, about {minutes:.1f} minutes{within}, {memory:.1f} GB of memory, "
        f"{tokens * 8 / 1e6:.0f} MB of disk (answers that end early cost less)"
    )


def answers_key(target: TargetModel, config: AnswerConfig) -> dict[str, object]:
    """What an answer depends on, its prompt apart."""
    settings = {name: value for name, value in asdict(config).items() if name not in ("batch_size", "max_minutes")}
    hashes = {"target_hash": target.hash, "tokenizer_hash": tokenizer_hash(target.tokenizer)}
    return {"target": target.name, **hashes, **settings}


def _resume(target: TargetModel, prompts: Sequence[Prompt], path: Path, config: AnswerConfig) -> dict[str, AnswerRow]:
    """Rows of an earlier run; writes the key file beside `path` on the first run, drops stale rows from the file."""
    key, key_path = answers_key(target, config), path.with_suffix(".key.json")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(key_path, key)
        path.touch()
        return {}
    found = {}
    with contextlib.suppress(FileNotFoundError, ValueError):  # then it differs
        found = dict(json.loads(key_path.read_text()))
    differing = [name for name in key if found.get(name) != key[name]]
    if differing:
        name = differing[0]
        raise UserError(
            f"{path}: was made with {name} = {found.get(name)!r}, now {key[name]!r}; give another file, or remove this one"
        )
    wanted = {prompt.id: prompt for prompt in prompts}
    rows = {row.id: row for row in _complete_rows(path)}
    kept = {id: row for id, row in rows.items() if id not in wanted or _answers(target, row, wanted[id])}
    if len(kept) < len(rows):
        with atomic_path(path) as temporary:
            temporary.write_text("".join(row.to_json() + "\n" for row in kept.values()), encoding="utf-8")
    return kept


def _answers(target: TargetModel, row: AnswerRow, prompt: Prompt) -> bool:
    """Whether `row` answers exactly this prompt: what stands before its first answer is the prompt, token by token."""
    return bool(row.spans) and row.input_ids[: row.spans[0][0]] == _prompt_ids(target, prompt)


def _complete_rows(path: Path) -> Iterator[AnswerRow]:
    """Rows whose line is whole; a line cut by a crash is removed from the file."""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        with open(path, "r+b") as file:
            file.truncate(end)
    if end:
        yield from read_answers(path)
