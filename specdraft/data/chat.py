"""Conversations and answers -> token ids and loss masks.

Two ways in. `answers.jsonl` holds what the target itself wrote: token ids and spans, which are the data and are never
encoded again. Conversations from elsewhere are rendered by the tokenizer's chat template and tokenised **once**; the
mask is derived from the character offsets of exactly those ids. It knows nothing of models, batches or hidden states.
T tokens.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import torch
from torch import Tensor
from transformers.utils.chat_template_utils import render_jinja_template

from specdraft.config import UserError
from specdraft.provenance import hash_json, json_fault

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
A_DAY = datetime.date(2026, 1, 1)  # which it always is in a template that prints the date
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
PLAIN_SEPARATOR = "\n\n"  # between turns, for tokenizers without a chat template (base models)
Span = tuple[int, int]  # half-open range of characters


@dataclass(frozen=True)
class Example:
    """One sequence to train on.

    input_ids: [T] int64, unpadded.
    loss_mask: [T] bool, True where the token belongs to an assistant answer, its end-of-turn token included.
    """

    id: str
    input_ids: Tensor
    loss_mask: Tensor

    def __post_init__(self) -> None:
        assert self.input_ids.dtype == torch.int64, self.input_ids.dtype
        assert self.loss_mask.dtype == torch.bool, self.loss_mask.dtype
        assert self.input_ids.shape == self.loss_mask.shape, (self.input_ids.shape, self.loss_mask.shape)


@dataclass
class Account:
    """What became of every row: kept, or skipped for a stated reason. `str()` is one line for the terminal."""

    kept: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.kept + self.skipped.total()

    def __str__(self) -> str:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in self.skipped.most_common())
        return f"{self.kept} of {self.total} rows kept" + (f", skipped: {reasons}" if reasons else "")


# ---------------------------------------------------------------------------------------------------- answers.jsonl


@dataclass(frozen=True)
class AnswerRow:
    """One line of answers.jsonl: a conversation whose assistant turns the target wrote.

    spans: half-open token ranges [start, end) of the answers in `input_ids`, ascending, end-of-turn token included.
    finished: per answer, whether it ended with an end-of-turn token (False: cut at the length limit).
    """

    id: str
    category: str
    input_ids: list[int]
    spans: list[list[int]]
    finished: list[bool]

    @classmethod
    def from_example(cls, example: Example, category: str, eos_token_ids: Sequence[int]) -> AnswerRow:
        """Spans are the runs of the mask; an answer is finished where it ends with one of `eos_token_ids`."""
        ids, mask = example.input_ids.tolist(), torch.nn.functional.pad(example.loss_mask.int(), (1, 1))
        spans = mask.diff().nonzero().reshape(-1, 2).tolist()
        return cls(example.id, category, ids, spans, [ids[end - 1] in eos_token_ids for _, end in spans])

    def to_json(self) -> str:
        """The line without its newline."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)

    def example(self, max_length: int | None = None) -> Example:
        """Ids and mask, cut to the first `max_length` tokens. The mask may be empty after the cut."""
        mask = torch.zeros(len(self.input_ids), dtype=torch.bool)
        for start, end in self.spans:
            mask[start:end] = True
        return Example(self.id, torch.tensor(self.input_ids[:max_length], dtype=torch.int64), mask[:max_length])


def read_answers(path: Path, is_growing: bool = False) -> list[AnswerRow]:
    """Read answers.jsonl.   is_growing: somebody may be writing to it, or was when he was killed: it may be empty, and its last line, where
    that has no end, is left out.

    Raises:
        UserError: no such file, no rows, or a bad row (with its line number).
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"answers {path}: no such file; make it with data_prep/generate_responses.py")
    rows = [
        _answer_row(line, f"{path} line {number}")
        for number, line in read_lines(path)
        if line.endswith("\n") or not is_growing
    ]
    if not rows and not is_growing:
        raise UserError(f"answers {path}: got no rows; make it with data_prep/generate_responses.py")
    _require_unique([row.id for row in rows], str(path))
    return rows


def answers_to_examples(rows: Iterable[AnswerRow], max_length: int | None = None) -> tuple[list[Example], Account]:
    """Every row becomes an example, or is skipped because `max_length` leaves none of its answer."""
    examples, account = [], Account()
    for row in rows:
        example = row.example(max_length)
        if example.loss_mask.any():
            examples.append(example)
            account.kept += 1
        else:
            cut = any(start < end for start, end in row.spans)
            account.skipped[f"prompt alone fills max_length={max_length}" if cut else "empty answer"] += 1
    return examples, account


def read_examples(path: Path, tokenizer: Any, max_length: int) -> tuple[list[Example], Account]:
    """Examples of a JSONL file: answers (see `AnswerRow`), or conversations, `{"messages": [...], "id": ...}` a line.

    Raises:
        UserError: no such file, no rows, a line that is neither, or no row that can be used.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"data {path}: no such file; give answers.jsonl or a JSONL file of conversations")
    _, first = next(read_lines(path), (0, ""))
    if '"messages"' not in first:
        return answers_to_examples(read_answers(path), max_length)
    rows = [_conversation(line, path, number) for number, line in read_lines(path)]
    _require_unique([id_ for id_, _ in rows], str(path))
    return encode_conversations(tokenizer, rows, max_length)


def check_masks(examples: Sequence[Example], tokenizer: Any) -> None:
    """Refuse data that would train on nothing: no examples, or examples without one supervised token.

    Raises:
        UserError: with the counts and one rendered example.
    """
    if not examples:
        raise UserError("training data: got 0 examples, at least 1 is needed; see the reasons for skipped rows")
    empty = [example for example in examples if not example.loss_mask.any()]
    if empty:
        tokens = sum(len(example.input_ids) for example in examples)
        supervised = sum(int(example.loss_mask.sum()) for example in examples)
        shown = repr(tokenizer.decode(empty[0].input_ids[:200].tolist()))
        raise UserError(
            f"loss mask: {len(empty)} of {len(examples)} examples have no supervised token ({supervised} of {tokens} "
            f"tokens are supervised); check that the chat template matches the data. "
            f"Example {empty[0].id!r} begins {shown}"
        )


# ------------------------------------------------------------------------------------------------- chat templates


def chat_template(tokenizer: Any) -> str:
    """The tokenizer's template, with one date in the place of today's: what a text becomes must be the same tomorrow. Raises UserError
    where there are several and none is the default one."""
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise UserError(f"chat template: {error}") from None
    return TODAY.sub(lambda call: repr(A_DAY.strftime(call[2])), template)


def first_turn(tokenizer: Any, system: str | None, user: str) -> list[dict[str, str]]:
    """Messages that begin a conversation. Where the template refuses a system turn (Gemma-2's), its text stands before the user's."""
    if not system:
        return [{"role": "user", "content": user}]
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    try:
        render_prompt(tokenizer, messages)
    except UserError:
        return [{"role": "user", "content": system + PLAIN_SEPARATOR + user}]
    return messages


def render_prompt(tokenizer: Any, turns_so_far: Sequence[dict[str, str]]) -> list[int]:
    """Messages (`role`, `content`) -> token ids up to where the assistant begins to write, generation prompt included.

    A tokenizer without a chat template (a base model) gets plain text: the contents, each followed by an empty line.

    Raises:
        UserError: the template refuses the messages.
    """
    if not tokenizer.chat_template:
        text = "".join(message["content"] + PLAIN_SEPARATOR for message in turns_so_far)
        return _plain_prefix(tokenizer) + tokenizer(text, add_special_tokens=False)["input_ids"]
    text = _render(tokenizer, turns_so_far, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def follow_up(tokenizer: Any, user: str) -> list[int]:
    """Ids of a further user turn and of the header of its answer, to append to a conversation whose last answer ended
    with its end-of-turn token. The conversation's own ids stay as the target wrote them."""
    if not tokenizer.chat_template:
        return tokenizer(PLAIN_SEPARATOR + user + PLAIN_SEPARATOR, add_special_tokens=False)["input_ids"]
    sentinel = _absent_character(user)
    turns = [("user", "a"), ("assistant", sentinel), ("user", user)]
    messages = [{"role": role, "content": content} for role, content in turns]
    after = _render(tokenizer, messages, add_generation_prompt=True).partition(sentinel)[2]
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    return ids[_end_of_turn(tokenizer, ids) :]  # it is there already


def encode_conversation(tokenizer: Any, messages: Sequence[dict[str, Any]], max_length: int, id: str = "") -> Example:
    """Render, tokenise once, and mask what the assistant writes: reasoning, answer and end-of-turn token.

    The mask comes from the template's `{% generation %}` marks where it has them, else from where the answers stand in
    the rendered text. A token belongs to where its first character lies: one that a merge laid across the start of an
    answer is not supervised (at generation the prompt ends there, so it is never drafted), one across its end is.
    What comes after the last answer is dropped; then the sequence is cut to `max_length` tokens.

    messages: `role` and `content`; reasoning as `reasoning_content` (or `reasoning`, `thinking`), or inside the content
        up to `</think>`. Where a template strips reasoning from earlier turns, it stays stripped, as at generation;
        reasoning of the last turn is kept even where the template would lose it.

    Raises:
        UserError: the reason why this row cannot be used (one that many rows can share; no text of the row in it).
    """
    messages = _normalise(messages)
    if tokenizer.chat_template:
        text, spans = _marked_spans(tokenizer, messages) or _searched_spans(tokenizer, messages)
        prefix = []
    else:
        text, spans = _plain_spans(tokenizer, messages)
        prefix = _plain_prefix(tokenizer)
    ids, mask = _tokenise(tokenizer, text, spans)
    ids, mask = prefix + ids, [False] * len(prefix) + mask
    if not any(mask[:max_length]):
        raise UserError(f"prompt alone fills max_length={max_length}" if any(mask) else "no assistant tokens")
    end = len(mask) - mask[::-1].index(True)
    length = min(end, max_length)
    return Example(id, torch.tensor(ids[:length]), torch.tensor(mask[:length]))


def encode_conversations(
    tokenizer: Any, rows: Iterable[tuple[str, Sequence[dict[str, Any]]]], max_length: int
) -> tuple[list[Example], Account]:
    """`encode_conversation` over (id, messages) rows; every row is kept, or counted under the reason for skipping it.

    Raises:
        UserError: no row could be used; with the counts and the first row.
    """
    examples, account, first = [], Account(), None
    for id_, messages in rows:
        first = messages if first is None else first
        try:
            examples.append(encode_conversation(tokenizer, messages, max_length, id_))
            account.kept += 1
        except UserError as reason:
            account.skipped[str(reason)] += 1
    if not examples:
        raise UserError(
            f"conversations: {account}; check the data and the chat template. The first row is {first!r:.500}"
        )
    return examples, account


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of all that decides which ids a text becomes: the tokenizer's state, its special tokens, its template."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state.pop("padding", None)
    state.pop("truncation", None)
    return hash_json([state, tokenizer.chat_template, {k: str(v) for k, v in tokenizer.special_tokens_map.items()}])


def _render(tokenizer: Any, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = False) -> str:
    return _render_with_marks(tokenizer, messages, add_generation_prompt)[0]


def _render_with_marks(
    tokenizer: Any, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = False, marks: bool = False
) -> tuple[str, list[Span]]:
    try:
        texts, spans = render_jinja_template(
            conversations=[list(messages)],
            chat_template=chat_template(tokenizer),
            add_generation_prompt=add_generation_prompt,
            return_assistant_tokens_mask=marks,
            **tokenizer.special_tokens_map,
        )
    except (jinja2.TemplateError, TypeError, KeyError) as error:
        raise UserError(f"chat template: {str(error) or type(error).__name__}") from None
    return texts[0], list(spans[0]) if marks else []


def _normalise(messages: Any) -> list[dict[str, str]]:
    """Checked copies, reasoning under one name, cut after the last assistant turn."""
    if not isinstance(messages, list | tuple) or not all(isinstance(message, dict) for message in messages):
        raise UserError("messages must be a list of objects with role and content")
    result = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise UserError("every message needs a role and a content, both text")
        reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name)), None)
        if not isinstance(reasoning, str | None):
            raise UserError("a message's reasoning must be text")
        result.append({"role": role, "content": content} | ({"reasoning_content": reasoning} if reasoning else {}))
    while result and result[-1]["role"] != "assistant":
        result.pop()
    if not result:
        raise UserError("no assistant turn")
    return result


def _marked_spans(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[str, list[Span]] | None:
    """Text and answer spans by the template's own marks; None where it has none, or where they leave reasoning out."""
    if not GENERATION_MARK.search(chat_template(tokenizer)):
        return None
    text, spans = _render_with_marks(tokenizer, messages, marks=True)
    if spans and _last_reasoning(messages)[0] not in text[slice(*spans[-1])]:
        return None
    return text, spans


def _searched_spans(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[str, list[Span]]:
    """Text and answer spans for templates without marks.

    The answers are replaced by a sentinel that occurs nowhere else; what the template puts around the sentinels must
    stand around the answers too, which finds every answer exactly, or shows that it cannot be found. An answer then
    begins where the generation prompt ends, so that reasoning and headers that the model has to write are in it.
    """
    text = _render(tokenizer, messages)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    sentinel = _absent_character(text)
    blanked = [dict(message) for message in messages]
    for i in turns:
        thoughts, _ = _split_inline_reasoning(messages[i]["content"])
        blanked[i]["content"] = thoughts + sentinel
    around = _render(tokenizer, blanked).split(sentinel)
    if len(around) != len(turns) + 1:
        raise UserError("the chat template drops or repeats an assistant turn")
    spans, position = [], len(around[0])
    for i, after in zip(turns, around[1:], strict=True):
        _, answer = _split_inline_reasoning(messages[i]["content"])
        forms = (answer, answer.strip(), answer.lstrip(), answer.rstrip(), answer.lstrip("\n"), answer.rstrip("\n"))
        shown = next((form for form in forms if text.startswith(form + after, position)), None)
        if shown is None:
            raise UserError("the chat template rewrites the text of an answer")
        prompt = _render(tokenizer, messages[:i], add_generation_prompt=True)
        start = len(prompt) if text.startswith(prompt) and len(prompt) <= position else position
        spans.append((start, position + len(shown)))
        position += len(shown) + len(after)
    return _restore_reasoning(tokenizer, messages, text, spans, around[-1])


def _restore_reasoning(
    tokenizer: Any, messages: list[dict[str, str]], text: str, spans: list[Span], tail: str
) -> tuple[str, list[Span]]:
    """Some templates strip reasoning from every turn, the last included (DeepSeek-R1's), or do not know it: then the
    last turn is built from the generation prompt and what the model wrote after it."""
    reasoning, answer = _last_reasoning(messages)
    if reasoning in text[slice(*spans[-1])]:
        return text, spans
    prompt = _render(tokenizer, messages[:-1], add_generation_prompt=True)
    if len(spans) > 1 and prompt[: spans[-2][1]] != text[: spans[-2][1]]:
        raise UserError("the chat template renders earlier turns differently before a generation prompt")
    written = _with_reasoning(reasoning, answer)
    if prompt.rstrip().endswith("<think>"):
        written = written.removeprefix("<think>\n")
    return prompt + written + tail, [*spans[:-1], (len(prompt), len(prompt) + len(written))]


def _plain_spans(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[str, list[Span]]:
    """As `render_prompt` writes prompts; the last answer ends with the end-of-text token."""
    text, spans = "", []
    for message in messages:
        content = message["content"]
        if message.get("reasoning_content"):
            content = _with_reasoning(message["reasoning_content"], content)
        if message["role"] == "assistant":
            spans.append((len(text), len(text) + len(content)))
        text += content + PLAIN_SEPARATOR
    return text.removesuffix(PLAIN_SEPARATOR) + (tokenizer.eos_token or ""), spans


def _plain_prefix(tokenizer: Any) -> list[int]:
    """The beginning-of-text id, where the tokenizer puts one."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a")["input_ids"][0] == bos else []


def _split_inline_reasoning(content: str) -> tuple[str, str]:
    """'<think>r</think>a' -> ('<think>r</think>', 'a'); without reasoning the first part is empty."""
    thoughts, mark, answer = content.rpartition("</think>")
    return thoughts + mark, answer


def _last_reasoning(messages: list[dict[str, str]]) -> tuple[str, str]:
    """Reasoning and answer of the last turn, whichever way it holds them."""
    thoughts, answer = _split_inline_reasoning(messages[-1]["content"])
    inline = thoughts.removesuffix("</think>").split("<think>")[-1]
    return (messages[-1].get("reasoning_content") or inline).strip(), answer


def _with_reasoning(reasoning: str, answer: str) -> str:
    return "<think>\n" + reasoning.strip() + "\n</think>\n\n" + answer.strip()


def _tokenise(tokenizer: Any, text: str, spans: list[Span]) -> tuple[list[int], list[bool]]:
    """Ids of `text` and, per id, whether it belongs to a span or is the end-of-turn token right after one."""
    if not tokenizer.is_fast:
        raise UserError("the tokenizer gives no character offsets; use its fast (tokenizers) version")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    begins = _token_begins(offsets)
    mask = [False] * len(ids)
    for start, end in spans:
        first = next((j for j, begin in enumerate(begins) if begin >= start), len(ids))
        stop = next((j for j, begin in enumerate(begins) if begin >= end), len(ids))
        stop += _end_of_turn(tokenizer, ids[stop:])
        mask[first:stop] = [True] * (stop - first)
    return ids, mask


def _end_of_turn(tokenizer: Any, following: list[int]) -> int:
    """How many of the ids that follow an answer end it: a special token, with white space before it; 0 without one."""
    for count, token in enumerate(following, 1):
        if token in tokenizer.added_tokens_decoder:
            return count
        if not tokenizer.decode([token]).isspace():
            break
    return 0


def _absent_character(text: str) -> str:
    """A private-use character that `text` does not contain."""
    return next(character for character in map(chr, range(0xE000, 0xF900)) if character not in text)


def _token_begins(offsets: list[Span]) -> list[int]:
    """First character of every token. Byte-level tokenizers report offsets without the leading spaces that the token
    holds, and several tokens of one character all report that character."""
    begins, previous_end = [], 0
    for start, end in offsets:
        begins.append(min(start, previous_end))
        previous_end = max(previous_end, end)
    return begins


def _answer_row(line: str, where: str) -> AnswerRow:
    names = [f.name for f in dataclasses.fields(AnswerRow)]
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({json_fault(error)}); remove the line or make the file again") from None
    if not isinstance(values, dict) or set(values) != set(names):
        got = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise UserError(f"{where}: got {got}, expected an object with the keys {names}")
    ids, spans, finished = values["input_ids"], values["spans"], values["finished"]
    if not _is_list(ids, int) or not ids or min(ids) < 0 or max(ids) >= 2**31:
        raise UserError(f"{where}: input_ids must be a non-empty list of token ids")
    if not _is_list(finished, bool) or not _is_list(spans, list) or len(spans) != len(finished):
        raise UserError(f"{where}: spans and finished must be lists of one length, got {spans!r} and {finished!r}")
    edges = [edge for span in spans for edge in span]
    if any(len(span) != 2 for span in spans) or not _is_list(edges, int) or sorted(edges) != edges:
        raise UserError(f"{where}: spans must be ascending [start, end) pairs, got {spans!r}")
    if edges and not 0 <= edges[0] <= edges[-1] <= len(ids):
        raise UserError(f"{where}: spans {spans!r} leave the {len(ids)} tokens of the row")
    return AnswerRow(str(values["id"]), str(values["category"]), ids, spans, finished)


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of the lines that are not blank. Raises UserError for bytes that are not UTF-8."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig")
            except UnicodeDecodeError:
                raise UserError(
                    f"{path} line {number}: got bytes that are not UTF-8; save the file as UTF-8, or make it again"
                ) from None
            if text.strip():
                yield number, text


def _conversation(line: str, path: Path, number: int) -> tuple[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} line {number}: not JSON ({json_fault(error)}); remove the line or make the file again"
        ) from None
    if not isinstance(row, dict) or "messages" not in row:
        raise UserError(f"{path} line {number}: got {line.strip()[:80]}, expected an object with messages, as line 1")
    return str(row.get("id", f"{path.stem}-{number}")), row["messages"]


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _require_unique(ids: list[str], where: str) -> None:
    twice = [id_ for id_, count in Counter(ids).items() if count > 1]
    if twice:
        raise UserError(f"{where}: {len(twice)} ids occur more than once ({twice[0]!r}, ...); every row needs its own")
