"""Prompts: the built-in text, reading and writing files, mixing, deduplicating, splitting."""

import json
from collections import Counter

import pytest

from specdraft.config import UserError
from specdraft.data.tasks import (
    CATEGORIES,
    DOMAINS,
    Prompt,
    builtin_prompts,
    deduplicate,
    domain_prompts,
    mix,
    normalised,
    read_prompts,
    split_held_out,
    write_prompts,
)
from specdraft.provenance import hash_json

# Of the built-in prompts that are held out: a change makes older figures incomparable.
HELD_OUT_HASH = "80215d4491832fab"


def make(n: int, category: str = "chat") -> list[Prompt]:
    return [Prompt(f"{category}-{i}", category, (f"{category} question {i}",)) for i in range(n)]


def write_rows(path, *rows) -> str:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return str(path)


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return builtin_prompts()


def test_builtin_counts(prompts):
    counts = Counter(prompt.category for prompt in prompts)
    assert len(prompts) >= 2600
    assert set(counts) == set(CATEGORIES)
    assert min(counts.values()) >= 300
    assert sum(len(prompt.turns) > 1 for prompt in prompts) >= 40
    assert sum(prompt.system is not None for prompt in prompts) >= 30


def test_builtin_prompts_are_distinct(prompts):
    assert len(deduplicate(prompts)) == len(prompts)
    assert len({prompt.id for prompt in prompts}) == len(prompts)


def test_builtin_prompts_are_sensible_text(prompts):
    for prompt in prompts:
        words = " ".join(prompt.turns).split()
        assert 3 <= len(words) <= 260, prompt.id
        for turn in prompt.turns:
            assert turn == turn.strip(), prompt.id
            assert not any(mark in turn for mark in ("{p}", "{q}", "|||", "[[You", "\\n\\n")), prompt.id


@pytest.mark.parametrize("category", ["chat", "reasoning", "maths", "code", "translation", "question_answering"])
def test_builtin_prompts_are_not_one_template(prompts, category):
    """Passages serve more than one question, so the categories that live on passages are left out."""
    grams = [five_grams(prompt) for prompt in prompts if prompt.category == category]
    near = sum(any(jaccard(a, b) > 0.5 for b in grams[:i]) for i, a in enumerate(grams))
    assert near <= 0.05 * len(grams)


def test_every_prefix_is_balanced(prompts):
    _, held_out = split_held_out(prompts)
    for part, sizes in ((prompts, (8, 41, 1003, 2400)), (held_out, (8, 41, 80))):
        for n in sizes:
            counts = Counter(prompt.category for prompt in part[:n])
            assert max(counts.values()) - min(counts[category] for category in CATEGORIES) <= 1


def test_builtin_held_out_part_is_fixed(prompts):
    train, held_out = split_held_out(prompts)
    assert len(held_out) >= 100
    assert min(Counter(prompt.category for prompt in held_out)[category] for category in CATEGORIES) >= 5
    assert len(train) + len(held_out) == len(prompts)
    assert hash_json(sorted(map(normalised, held_out))) == HELD_OUT_HASH


def test_held_out_groups_are_not_in_train(prompts):
    train, held_out = split_held_out(prompts)
    assert not {p.group for p in train if p.group} & {p.group for p in held_out if p.group}
    assert not set(map(normalised, train)) & set(map(normalised, held_out))


def test_split_of_a_prompt_does_not_depend_on_the_others():
    prompts = make(400)
    _, all_held_out = split_held_out(prompts, every=10)
    _, half_held_out = split_held_out(prompts[::2], every=10)
    assert 20 <= len(all_held_out) <= 60
    assert half_held_out == [prompt for prompt in all_held_out if prompt in prompts[::2]]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"id": "a", "category": "chat", "turns": ["x", "y"], "system": "s"}, Prompt("a", "chat", ("x", "y"), "s")),
        ({"prompt": "Hello there"}, Prompt("file-1", "other", ("Hello there",))),
        ({"text": "Hello", "source": "web"}, Prompt("file-1", "web", ("Hello",))),
        ({"question_id": 81, "category": "writing", "turns": ["x", "y"]}, Prompt("81", "mt_bench", ("x", "y"))),
        ({"id": "q", "task": "mt_bench", "category": "writing", "turns": ["x"]}, Prompt("q", "mt_bench", ("x",))),
        (
            {
                "messages": [
                    {"role": r, "content": c}
                    for r, c in [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")]
                ]
            },
            Prompt("file-1", "other", ("a", "c"), "s"),
        ),
    ],
)
def test_read_formats(tmp_path, row, expected):
    assert read_prompts(write_rows(tmp_path / "file.jsonl", row)) == [expected]


def test_read_skips_blank_lines_and_a_byte_order_mark(tmp_path):
    (tmp_path / "file.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}')
    assert [(p.id, p.turns) for p in read_prompts(tmp_path / "file.jsonl")] == [("file-1", ("a",)), ("file-3", ("b",))]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{'text': 'x'}", "not valid JSON"),
        ('["x"]', "expected a JSON object"),
        ({"question": "x"}, "got the keys question, expected one of turns"),
        ({"turns": []}, "not empty"),
        ({"turns": ["a", "  "]}, "not empty"),
        ({"turns": "a"}, "expected a list"),
        ({"prompt": None}, "not empty"),
        ({"text": "a", "system": ["b"]}, "not empty"),
        ({"messages": [{"role": "assistant", "content": "b"}]}, "not empty"),
        ({"messages": ["a"]}, "role and content"),
        ({"id": "first", "text": "a"}, "line 1 too"),
        ('{"text": "half \\ud800"}', "lone surrogate"),
        ('{"text": "a", "id": "\\udfff"}', "lone surrogate"),
    ],
)
def test_bad_rows_name_their_line(tmp_path, row, message):
    path = write_rows(tmp_path / "file.jsonl", {"id": "first", "text": "good"}, row)
    with pytest.raises(UserError, match=f"line 2: .*{message}"):
        read_prompts(path)


def test_bad_files(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(UserError, match="no prompts"):
        read_prompts(write_rows(tmp_path / "empty.jsonl", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "a"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(UserError, match=r"line 2: .*UTF-8"):
        read_prompts(tmp_path / "latin.jsonl")


def test_write_and_read_again(tmp_path):
    prompts = [Prompt("a", "chat", ("Grüße\u2028!", "b\n"), "s"), Prompt("b", "code", ("x",), group="g")]
    write_prompts(tmp_path / "file.jsonl", prompts)
    assert read_prompts(tmp_path / "file.jsonl") == prompts


def test_deduplicate_keeps_the_first():
    texts = ["What is  a cat?", "what is a cat", "What is a dog?", "2 + 2", "2 * 2", "?", "!"]
    prompts = [Prompt(str(i), "chat", (text,)) for i, text in enumerate(texts)]
    assert [prompt.id for prompt in deduplicate(prompts)] == ["0", "2", "3", "4", "5", "6"]


def test_mix_by_size_uses_all_in_balance():
    a, b = make(30, "a"), make(10, "b")
    mixed = mix([a, b])
    assert len(mixed) == 40
    assert [prompt for prompt in mixed if prompt.category == "a"] == a
    assert all(abs(sum(p.category == "b" for p in mixed[:n]) - n / 4) <= 1 for n in range(41))


def test_mix_by_weights_ends_with_the_first_empty_source():
    mixed = mix([make(30, "a"), make(10, "b"), make(5, "c")], [1, 1, 0])
    assert Counter(prompt.category for prompt in mixed) in (Counter(a=10, b=10), Counter(a=11, b=10))


@pytest.mark.parametrize("weights", [[1], [1, -1], [0, 0], []])
def test_mix_refuses_bad_weights(weights):
    with pytest.raises(UserError, match="weights"):
        mix([make(2, "a"), make(2, "b")], weights)


def five_grams(prompt: Prompt) -> set[tuple[str, ...]]:
    words = normalised(prompt).split()
    return {tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4))}


def jaccard(a: set, b: set) -> float:
    return len(a & b) / len(a | b)


def test_mt_bench_and_spec_bench_files_as_their_authors_publish_them(tmp_path):
    """Two-turn questions as conversations; MT-bench's eight categories are one task of Spec-Bench."""
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."], "reference": []},
        {"question_id": 125, "category": "coding", "turns": ["Write a program.", "Find its fault."]},
        {"question_id": 161, "category": "translation", "turns": ["Translate: Guten Tag."]},
        {"question_id": 401, "category": "math_reasoning", "turns": ["How many?"]},
        {"id": "spec_bench/85", "task": "mt_bench", "category": "writing", "turns": ["One.", "Two."]},
        {"id": "own", "category": "writing", "turns": ["One."]},
    ]
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = read_prompts(path)
    assert [prompt.category for prompt in prompts] == [
        "mt_bench",
        "mt_bench",
        "translation",
        "math_reasoning",
        "mt_bench",
        "writing",
    ]
    assert prompts[0] == Prompt("81", "mt_bench", ("Compose a post.", "Rewrite it."))


def test_domains_are_there_and_what_is_held_out_comes_first():
    for name in DOMAINS:
        prompts = domain_prompts(name)
        assert {prompt.category for prompt in prompts} == {name}
        assert len(deduplicate(prompts)) == len(prompts) >= 40
    trained = {prompt.id for prompt in split_held_out(builtin_prompts())[0]}
    assert not any(prompt.id in trained for prompt in domain_prompts("code")[:10])
    assert not {prompt.id for prompt in domain_prompts("law")} & {prompt.id for prompt in builtin_prompts()}
    with pytest.raises(UserError, match="domain: got 'cooking', allowed: code, law, medicine"):
        domain_prompts("cooking")
