"""The target answers prompts, many at a time: the text that a drafter should learn is the text that its target writes.

Prompts are batched by length, and one that is answered several times is run once; a row whose answer has ended takes the next
prompt. Every answer is appended to answers.jsonl: an interrupted run goes on where it stopped. It knows nothing of drafters or
training.

Letters: B rows of a batch, V target vocabulary.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from specdraft.config import UserError
from specdraft.data.chat import AnswerRow, Example, first_turn, follow_up, read_answers, render_prompt, tokenizer_hash
from specdraft.data.source import States
from specdraft.data.tasks import Prompt
from specdraft.decoding.sampling import Sampling, draw, greedy
from specdraft.models.target import TargetModel
from specdraft.provenance import atomic_path, hash_json, sole_writer, write_json

Keep = Callable[[Example, States], None]
WINDOW = 2  # so many batches' worth of prompts are put in order of length, where time is limited
PADDING = 0.1  # share of the tokens that are prefilled together
FEW_TOKENS = 128  # on a CPU; padding that makes so few is let be
COMPACT = 0.85  # places are filled again, or given up, when this share of them is left


@dataclass
class AnswerConfig:
    """max_new_tokens: tokens an answer may have.  batch_size: rows decoded together.  temperature, top_k, top_p: as in
    `Sampling`; 0 = greedy.  greedy_after: so many tokens of an answer are sampled, the rest is greedy: other text than the
    greedy answer, of the same kind; None = all are sampled.  seed: of the sampling; every prompt draws from its own stream,
    whatever the batch.  max_minutes: of answering, earlier runs on the same prompts included: those that do not fit are left
    out; None = all."""

    max_new_tokens: int = 192
    batch_size: int = 96
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    greedy_after: int | None = None
    seed: int = 0
    max_minutes: float | None = None

    def __post_init__(self) -> None:
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise UserError(f"answers.max_minutes: got {self.max_minutes}, allowed: above 0, or None for no limit")
        for key in ("max_new_tokens", "batch_size", "greedy_after"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
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

    def length(self) -> int:
        return len(self.input_ids)

    def row(self) -> AnswerRow:
        return AnswerRow(self.prompt.id, self.prompt.category, self.input_ids, self.spans, self.finished)


def answer_prompts(
    target: TargetModel,
    prompts: Sequence[Prompt],
    path: Path,
    config: AnswerConfig,
    keep: Keep | None = None,
    of: Sequence[Prompt] | None = None,
) -> list[AnswerRow]:
    """Write the target's answers to `prompts` into `path` (JSON lines), and return them in the order of the prompts.

    Rows that `path` holds already, from an earlier run with the same target and configuration, are kept. `keep` is given the
    target's states of every new row, which it has made on the way: training then need not run the target again.
    of: all prompts that max_minutes is for, where `prompts` are a part of them.

    Raises:
        UserError: no prompts; a prompt that leaves no room for an answer; a file made with another target or configuration, or
            that another process is writing to.
    """
    if not prompts:
        raise UserError("prompts: got none, at least one is needed; see data_prep/make_prompts.py")
    with sole_writer(path):
        return _answer_missing(target, prompts, path, config, keep, _Budget(path, of or prompts, config.max_minutes))


def _answer_missing(
    target: TargetModel,
    prompts: Sequence[Prompt],
    path: Path,
    config: AnswerConfig,
    keep: Keep | None,
    budget: _Budget,
) -> list[AnswerRow]:
    rows = _resume(target, prompts, path, config)
    waiting = _arranged([_start(target, prompt, config) for prompt in prompts if prompt.id not in rows], config)
    begun: list[Conversation] = []  # those whose next turn waits, shortest first
    batch = _Batch(target, config, min(config.batch_size, len(waiting)), keep is not None)
    tokens = 0
    with (
        budget,
        open(path, "a", encoding="utf-8") as file,
        tqdm(total=len(prompts), initial=len(prompts) - len(waiting), desc="answers", unit="prompt") as bar,
    ):
        while True:
            if waiting and not budget.allows(len(waiting[0].prompt.turns) * config.max_new_tokens):
                waiting.clear()
                budget.is_used_up = True
            places = len(batch.free())
            if (begun or waiting) and places >= max(1, (1 - COMPACT) * len(batch.places)):
                ended = batch.admit(_take(begun, places) or _take(waiting, places))
            elif batch.live():
                with budget.stepping():
                    ended = batch.step()
            else:
                break
            for conversation, states in ended:
                if conversation.finished[-1] and _next_turn(target, conversation, config):
                    insort(begun, conversation, key=Conversation.length)
                    continue
                row = conversation.row()
                rows[row.id] = row
                file.write(row.to_json() + "\n")
                file.flush()
                budget.save()
                tokens += sum(end - start for start, end in row.spans)
                if keep is not None:
                    keep(row.example(), states)
                bar.set_postfix_str(f"{tokens / budget.seconds():.0f} tok/s", refresh=False)
                bar.update()
            if not (begun or waiting):
                batch.compact()
    return [rows[prompt.id] for prompt in prompts if prompt.id in rows]


def _arranged(waiting: list[Conversation], config: AnswerConfig) -> list[Conversation]:
    """Shortest first, so that rows that are decoded together read few empty slots; where time is limited only among those that would
    come next anyway, so that it runs out on prompts of all lengths."""
    window = len(waiting) if config.max_minutes is None else WINDOW * config.batch_size
    parts = (waiting[start : start + window] for start in range(0, len(waiting), max(window, 1)))
    return [conversation for part in parts for conversation in sorted(part, key=Conversation.length)]


def _take(waiting: list[Conversation], count: int) -> list[Conversation]:
    taken = waiting[:count]
    del waiting[:count]
    return taken


class _Budget:
    """Minutes of answering these prompts, over all runs that wrote into `path`: a new prompt is begun while its answer can still be
    finished. Other prompts whose answers are in the same file have minutes of their own.

    step: seconds of a step of the batch, a running mean; 0 = none was made yet.   is_used_up: a prompt was left for want of time. Then all
    of it counts as spent: another run answers nothing more, and what is trained on the answers keeps its own minutes."""

    def __init__(self, path: Path, prompts: Sequence[Prompt], minutes: float | None):
        self.path, self.minutes = path.with_suffix(f".{prompts_hash(prompts)}.budget.json"), minutes
        self.spent, self.step, self.is_used_up = 0.0, 0.0, False
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):  # none yet, or not what was written here
            self.spent, self.step = map(float, json.loads(self.path.read_text()))
        self.started = time.perf_counter()

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None and self.is_used_up:
            write_json(self.path, [max(self.spent, self.minutes), self.step])
        else:
            self.save()

    def save(self) -> None:
        """After every answer, so that a run that is killed has spent its time too."""
        write_json(self.path, [self.spent + self.seconds() / 60, self.step])

    def seconds(self) -> float:
        """Of this run."""
        return time.perf_counter() - self.started

    def allows(self, tokens: int) -> bool:
        """Whether so many more steps fit."""
        return self.minutes is None or 60 * self.spent + self.seconds() + tokens * self.step <= 60 * self.minutes

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.step += (seconds - self.step) * (0.05 if self.step else 1)


Ended = list[tuple[Conversation, "States | None"]]


class _Batch:
    """Conversations that are answered together, one in each place. A place whose answer has ended takes the next conversation.

    places: what is in each row of the cache; None = nothing.
    """

    def __init__(self, target: TargetModel, config: AnswerConfig, size: int, with_states: bool):
        self.target, self.config, self.with_states = target, config, with_states
        size = max(size, 2)  # a cache of one row takes all its memory at once
        self.cache = target.new_cache(size, target.max_positions)
        self.places: list[_Answer | None] = [None] * size

    def live(self) -> list[int]:
        return [place for place, answer in enumerate(self.places) if answer is not None]

    def free(self) -> list[int]:
        return [place for place, answer in enumerate(self.places) if answer is None]

    def compact(self) -> None:
        """Give up free places, once there are enough of them: it copies keys and values."""
        live = self.live()
        if live and len(live) <= COMPACT * len(self.places):
            self.cache.select(live)
            self.places = [self.places[place] for place in live]

    @torch.inference_mode()
    def admit(self, conversations: list[Conversation]) -> Ended:
        """Run the texts so far, each once for all its answers, those of similar length together, and sample the first token of each
        answer. At most as many conversations as places are free. Returns those that have ended with it."""
        texts: dict[tuple[int, ...], list[tuple[int, Conversation]]] = {}
        for place, conversation in zip(self.free(), conversations, strict=False):
            texts.setdefault(tuple(conversation.input_ids), []).append((place, conversation))
        lengths, ended = [len(text) for text in texts], []
        for part in _parts(lengths, self.target.device):
            own, answers = lengths[part], list(texts.values())[part]
            ids = torch.zeros(len(own), max(own), dtype=torch.int64)
            for row, text in zip(ids, list(texts)[part], strict=True):
                row[: len(text)] = torch.tensor(text)
            cache = self.target.new_cache(len(own), max(own))
            step = self.target.forward(
                ids.to(self.target.device), cache, counts=own, want_taps=self.with_states, logits_for="last"
            )
            row_of = [row for row, those in enumerate(answers) for _ in those]
            placed = [answer for those in answers for answer in those]
            places = [place for place, _ in placed]
            cache.select(row_of)
            self.cache.fill(places, cache)
            for row, (place, conversation) in zip(row_of, placed, strict=True):
                answer = _Answer(conversation, _generator(conversation, self.config))
                if self.with_states:
                    answer.states = [(step.taps[row, : own[row]], step.last[row, : own[row]])]
                self.places[place] = answer
            ended += self._sample(places, step.logits[row_of, 0])
        return ended

    @torch.inference_mode()
    def step(self) -> Ended:
        """One more token of every answer. Returns those that have ended with it."""
        live = self.live()
        last = [0 if answer is None else answer.conversation.input_ids[-1] for answer in self.places]
        counts = [int(answer is not None) for answer in self.places]
        column = torch.tensor(last, device=self.target.device)[:, None]
        step = self.target.forward(column, self.cache, counts=counts, want_taps=self.with_states, logits_for="last")
        if self.with_states:
            for place in live:
                self.places[place].states.append((step.taps[place], step.last[place]))
        return self._sample(live, step.logits[live, 0])

    def _sample(self, places: list[int], logits: Tensor) -> Ended:
        """logits [n, V] -> the next token of the answers in n places; those that end with it leave."""
        ended = []
        tokens = _draw(logits, [self._generator(place) for place in places], self.config.sampling)
        for place, token in zip(places, tokens, strict=True):
            conversation = self.places[place].conversation
            conversation.input_ids.append(token)
            conversation.spans[-1][1] += 1
            conversation.finished[-1] = token in self.target.eos_token_ids
            start, end = conversation.spans[-1]
            if conversation.finished[-1] or end - start == self.config.max_new_tokens:
                ended.append((conversation, self._states(self.places[place])))
                self.places[place] = None
        return ended

    def _generator(self, place: int) -> torch.Generator | None:
        """What the next token of an answer is drawn with; None = it is the most likely one."""
        start, end = self.places[place].conversation.spans[-1]
        greedy_after = self.config.greedy_after
        return None if greedy_after is not None and end - start >= greedy_after else self.places[place].generator

    def _states(self, answer: _Answer) -> States | None:
        """Of every token. The last one was never run: its state is zero, and no row is trained that would read it."""
        if not self.with_states:
            return None
        taps, last = (torch.cat([*parts, torch.zeros_like(parts[0][:1])]) for parts in zip(*answer.states, strict=True))
        return States(taps.to(self.target.dtype), last.to(self.target.dtype))


class _Answer:
    """One turn of a conversation while it is written. states: taps and last states of the tokens that were run, in parts."""

    def __init__(self, conversation: Conversation, generator: torch.Generator | None):
        self.conversation, self.generator = conversation, generator
        self.states: list[tuple[Tensor, Tensor]] = []
        conversation.spans.append([conversation.length()] * 2)
        conversation.finished.append(False)


def _parts(lengths: list[int], device: torch.device) -> Iterator[slice]:
    """Neighbours that are prefilled together: padding takes at most PADDING of their tokens, unless they are too few to keep the
    device busy."""
    few = FEW_TOKENS if device.type == "cpu" else math.inf
    start = 0
    for end in range(1, len(lengths) + 1):
        grown = lengths[start : end + 1]
        padded = len(grown) * max(grown)
        if end == len(lengths) or (padded > few and padded - sum(grown) > PADDING * padded):
            yield slice(start, end)
            start = end


def _draw(logits: Tensor, generators: list[torch.Generator | None], sampling: Sampling) -> list[int]:
    """logits [n, V] -> one token a row, the most likely one where it has no generator."""
    tokens = greedy(logits).tolist()
    drawn = [row for row, generator in enumerate(generators) if generator is not None]
    if drawn:
        for row, law in zip(drawn, sampling.law(logits[drawn]), strict=True):
            tokens[row] = int(draw(law, generators[row]))
    return tokens


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
    return render_prompt(target.tokenizer, first_turn(target.tokenizer, prompt.system, prompt.turns[0]))


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
    rows = (row for path in sorted(folder.glob("part-*.jsonl")) for row in read_answers(path, is_growing=True))
    return answers_to(target, rows, prompts)


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    return hash_json([[prompt.id, prompt.system, *prompt.turns] for prompt in prompts])


def minutes_spent(folder: Path, prompts: Sequence[Prompt]) -> float:
    """On answers to these prompts in `folder`, by the process that took longest."""
    return max((_Budget(path, prompts, None).spent for path in folder.glob("part-*.jsonl")), default=0.0)


def answers_to(target: TargetModel, rows: Iterable[AnswerRow], prompts: Sequence[Prompt]) -> dict[str, AnswerRow]:
    """Those of `rows` that answer exactly one of `prompts`, by prompt id."""
    wanted = {prompt.id: prompt for prompt in prompts}
    return {row.id: row for row in rows if row.id in wanted and _answers(target, row, wanted[row.id])}


def estimate_answers(
    target: TargetModel,
    prompts: Sequence[Prompt],
    config: AnswerConfig,
    path: Path,
    of: Sequence[Prompt] | None = None,
) -> str:
    """One line: tokens, memory, disk, and the time that follows from a few timed steps at full batch size; or that the time for
    answers into `path` is spent already. of: see `answer_prompts`."""
    budget = _Budget(path, of or prompts, config.max_minutes)
    if not budget.allows(config.max_new_tokens):
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
    """Rows of an earlier run; writes the key file beside `path` on the first run, drops stale rows, and a line cut by a crash, from the
    file. Its only writer calls this."""
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
    with open(path, "r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
    rows = {row.id: row for row in read_answers(path, is_growing=True)}
    kept = {id: row for id, row in rows.items() if id not in wanted or _answers(target, row, wanted[id])}
    if len(kept) < len(rows):
        with atomic_path(path) as temporary:
            temporary.write_text("".join(row.to_json() + "\n" for row in kept.values()), encoding="utf-8")
    return kept


def _answers(target: TargetModel, row: AnswerRow, prompt: Prompt) -> bool:
    """Whether `row` answers exactly this prompt: what stands before its first answer is the prompt, token by token."""
    return bool(row.spans) and row.input_ids[: row.spans[0][0]] == _prompt_ids(target, prompt)
