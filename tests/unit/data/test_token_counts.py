import json
import pickle
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from specdraft.config import UserError
from specdraft.data import token_counts
from specdraft.data.chat import AnswerRow, encode_conversation
from specdraft.data.token_counts import (
    COUNTERS,
    TokenCounts,
    add,
    cached_counts,
    counts_of_ranking,
    read_frequency_list,
)
from specdraft.data.vocab import VocabMap
from specdraft.testing import TINY_VOCAB, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def write_lines(path: Path, rows) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def chat(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def bag(tokenizer, *texts):
    return torch.bincount(
        torch.tensor([i for text in texts for i in tokenizer(text)["input_ids"]]), minlength=TINY_VOCAB
    )


@pytest.fixture
def answers(tokenizer, tmp_path):
    """Two categories; p2 is in neither answer's question."""
    rows = [("p0", "chat", "the wind", "the sea"), ("p1", "code", "a boat", "five"), ("p2", "chat", "?", "a story")]
    made = [
        asdict(AnswerRow.from_example(encode_conversation(tokenizer, chat(q, a), 99, id_), category, [2]))
        for id_, category, q, a in rows
    ]
    return write_lines(tmp_path / "answers.jsonl", made)


def test_answers_count_supervised_tokens_by_category(tokenizer, answers):
    found = COUNTERS["answers"](answers, tokenizer, TINY_VOCAB, None)
    assert found.categories == ("chat", "code")
    assert torch.equal(found.counts[0], bag(tokenizer, "the sea<|im_end|>", "a story<|im_end|>"))
    assert torch.equal(found.total, found.counts[0] + bag(tokenizer, "five<|im_end|>"))
    assert "3 of 3 rows kept" in found.account


def test_a_split_parts_the_rows(tokenizer, answers):
    inside, outside = (
        COUNTERS["answers"](answers, tokenizer, TINY_VOCAB, (side, ["p1", "x"])) for side in ("in", "out")
    )
    assert inside.categories == ("code",)
    assert torch.equal(inside.total, bag(tokenizer, "five<|im_end|>"))
    assert torch.equal(add([inside, outside]).total, COUNTERS["answers"](answers, tokenizer, TINY_VOCAB, None).total)


def test_a_side_of_a_split_may_be_empty(tokenizer, answers, tmp_path):
    """Of one file; not of all together."""
    counted = lambda ids: cached_counts("answers", answers, tokenizer, TINY_VOCAB, tmp_path, ("in", ids))  # noqa: E731
    for _ in ("counted", "kept"):
        none = counted([])
        assert (none.categories, none.counts.shape) == ((), (0, TINY_VOCAB))
    some = counted(["p1"])
    both = add([none, some])
    assert (both.categories, both.total.tolist()) == (("code",), some.total.tolist())
    assert "0 of 0 rows kept" in both.account
    with pytest.raises(UserError, match=r"0 of 0 rows kept.*, so there is nothing to count"):
        add([none, none])


def test_conversations_count_what_the_assistant_wrote(tokenizer, tmp_path):
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": chat("the wind", "the sea")}, {"messages": []}])
    found = COUNTERS["answers"](path, tokenizer, TINY_VOCAB, None)
    assert torch.equal(found.total, bag(tokenizer, "the sea<|im_end|>"))
    assert "1 of 2 rows kept, skipped" in found.account


def test_corpora(tokenizer, tmp_path):
    """Fault 4: a text of any length in whole lines; every form of JSON row; rows without a text are counted."""
    lines = ["The sea and the wind.\n"] * 4000  # more than one block
    (tmp_path / "text.txt").write_text("".join(lines))
    found = COUNTERS["corpus"](tmp_path / "text.txt", tokenizer, TINY_VOCAB, None)
    assert torch.equal(found.total, bag(tokenizer, *lines))
    assert "4000 lines" in found.account
    rows = [
        {"text": "the sea"},
        "the wind",
        {"content": "a boat"},
        {"turns": ["one", "two"]},
        {"messages": chat("What", "five")},
        {"nothing": 1},
        {"text": ""},
        3,
    ]
    path = write_lines(tmp_path / "rows.jsonl", [json.dumps(row) for row in rows] + ["{broken"])
    found = COUNTERS["corpus"](path, tokenizer, TINY_VOCAB, None)
    assert torch.equal(found.total, bag(tokenizer, "the sea", "the wind", "a boat", "one\n\ntwo", "What\n\nfive"))
    assert "5 rows kept, 4 rows skipped, without a text" in found.account
    with pytest.raises(UserError, match="nothing to count"):
        COUNTERS["corpus"](write_lines(tmp_path / "none.jsonl", [{"a": 1}]), tokenizer, TINY_VOCAB, None)
    with pytest.raises(UserError, match="got token id"):
        COUNTERS["corpus"](tmp_path / "text.txt", tokenizer, 100, None)


def test_counting_happens_once(tokenizer, answers, tmp_path, monkeypatch):
    """Faults 5 and 17: another size needs no tokenisation; other content, tokenizer or split is another count."""
    cached = lambda path=answers, split=None, by=tokenizer: cached_counts(  # noqa: E731
        "answers", path, by, TINY_VOCAB, tmp_path / "cache", split
    )
    first = cached()
    cached(split=("out", ["p1"]))

    def fail(*_):
        raise AssertionError("counted again")

    monkeypatch.setattr(token_counts, "COUNTERS", {"answers": fail})
    again = cached()
    assert torch.equal(again.counts, first.counts)
    assert (again.categories, again.account) == (first.categories, first.account)
    moved = answers.rename(tmp_path / "moved.jsonl")
    assert torch.equal(cached(moved).counts, first.counts), "the content counts, not the name"
    other = tiny_tokenizer()
    other.add_tokens(["<new>"])
    changed = tmp_path / "changed.jsonl"
    changed.write_text("\n".join(moved.read_text().splitlines()[:2]))
    for options in ({"path": moved, "by": other}, {"path": changed}, {"path": moved, "split": ("out", ["p2"])}):
        with pytest.raises(AssertionError, match="counted again"):
            cached(**options)
    with pytest.raises(UserError, match="answers nowhere: no such file"):
        cached(Path("nowhere"))


def test_the_same_bytes_as_rows_and_as_text_are_two_counts(tokenizer, tmp_path):
    found = {}
    for name in ("rows.jsonl", "rows.txt"):
        path = write_lines(tmp_path / name, [{"text": "the sea"}])
        found[name] = cached_counts("corpus", path, tokenizer, TINY_VOCAB, tmp_path / "cache")
    assert torch.equal(found["rows.jsonl"].total, bag(tokenizer, "the sea"))
    assert torch.equal(found["rows.txt"].total, bag(tokenizer, '{"text": "the sea"}\n'))


def test_counts_file_of_another_tokenizer_is_refused(tokenizer, tmp_path):
    """Fault 5."""
    path = tmp_path / "counts.safetensors"
    counts = TokenCounts(torch.arange(TINY_VOCAB)[None], ("all",), "made up")
    counts.save(path, tokenizer)
    assert torch.equal(TokenCounts.load(path, tokenizer, TINY_VOCAB).total, counts.total)
    other = tiny_tokenizer()
    other.add_tokens(["<new>"])
    for by, size in ((other, TINY_VOCAB), (tokenizer, TINY_VOCAB + 1)):
        with pytest.raises(UserError, match="count with this target"):
            TokenCounts.load(path, by, size)
    (tmp_path / "text").write_text("no counts")
    VocabMap.identity(4).save(tmp_path / "map.safetensors")
    for name in ("text", "nowhere", "map.safetensors"):
        with pytest.raises(UserError, match="count again"):
            TokenCounts.load(tmp_path / name, tokenizer, TINY_VOCAB)


@pytest.mark.parametrize(
    "make", [list, tuple, lambda ids: torch.tensor(ids, dtype=torch.int32)], ids=["list", "tuple", "tensor"]
)
def test_frequency_list_keeps_its_order(tmp_path, make):
    ids = [7, 2, 9, 4]
    torch.save(make(ids), tmp_path / "freq.pt")
    found = read_frequency_list(tmp_path / "freq.pt", 10)
    assert found.tolist() == ids
    assert VocabMap.from_counts(counts_of_ranking(found, 10), 3).target_ids.tolist() == ids[:3]
    assert VocabMap.from_counts(counts_of_ranking(found, 10), 3, always=[0]).target_ids.tolist() == [7, 2, 0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 1], "1 of 2 target ids are repeated"),
        ([1, 10], "allowed: 0 to 9"),
        ([-1], "allowed: 0 to 9"),
        ([], "no ids"),
        ([1.5], "a list of token ids"),
        ([True, False], "a list of token ids"),
        ({"ids": [1]}, "a list of token ids"),
        (torch.ones(2, 2, dtype=torch.int64), "a list of token ids"),
        (torch.ones(2), "a list of token ids"),
    ],
    ids=str,
)
def test_bad_frequency_lists_are_refused(tmp_path, value, message):
    torch.save(value, tmp_path / "freq.pt")
    with pytest.raises(UserError, match=message):
        read_frequency_list(tmp_path / "freq.pt", 10)


class Spy:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_code_in_a_frequency_list_is_not_run(tmp_path):
    torch.save([1, Spy(tmp_path / "ran")], tmp_path / "freq.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Spy(tmp_path / "ran")))
    (tmp_path / "text.pt").write_text("1 2 3")
    for name in ("freq.pt", "plain.pt", "text.pt", "nowhere.pt"):
        with pytest.raises(UserError, match="cannot be read as data"):
            read_frequency_list(tmp_path / name, 10)
    assert not (tmp_path / "ran").exists()
