"""Answers in batches are the answers one by one; files survive a crash and never mix up targets, settings or prompts."""

import json
from dataclasses import replace

import pytest
import torch

from specdraft.config import UserError
from specdraft.data.chat import follow_up, render_prompt
from specdraft.data.source import Online, example_key, run_target
from specdraft.data.tasks import Prompt
from specdraft.decoding import answers
from specdraft.decoding.answers import AnswerConfig, answer_prompts, estimate_answers, read_parts
from specdraft.decoding.generate import autoregressive_generate
from specdraft.models.target import TargetModel
from specdraft.provenance import sole_writer
from specdraft.testing import TINY_VOCAB, tiny_model, tiny_target, tiny_tokenizer

PROMPTS = [
    Prompt(f"p{i}", "chat", (text,))
    for i, text in enumerate(["What is two?", "Sea", "A long question about the wind and the sea"] * 3)
]
CONFIG = AnswerConfig(max_new_tokens=12, batch_size=4)


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", dtype=torch.float32)


def test_batched_answers_are_the_single_ones(target, tmp_path):
    """Ragged prompts, rows that end early and leave: nothing of it shows in the tokens."""
    rows = answer_prompts(target, PROMPTS, tmp_path / "a.jsonl", CONFIG)
    assert [row.id for row in rows] == [prompt.id for prompt in PROMPTS]
    for prompt, row in zip(PROMPTS, rows, strict=True):
        ids = render_prompt(target.tokenizer, [{"role": "user", "content": prompt.turns[0]}])
        alone = autoregressive_generate(target, ids, max_new_tokens=12)
        assert row.input_ids == ids + alone.tokens
        assert row.spans == [[len(ids), len(row.input_ids)]]
        assert row.finished == [alone.reason == "eos"]


def test_rows_end_at_any_eos_and_leave_the_batch(target, tmp_path):
    """Fault 34. With many EOS ids rows end at different steps; those that stay are what they are alone."""
    ending = tiny_target("llama", dtype=torch.float32)
    ending.eos_token_ids = tuple(range(0, TINY_VOCAB, 9))
    together, alone = (
        answer_prompts(ending, PROMPTS, tmp_path / f"{size}.jsonl", AnswerConfig(12, size, temperature=1.0))
        for size in (9, 1)
    )
    assert together == alone
    answers = [row.input_ids[slice(*row.spans[0])] for row in together]
    assert len({len(answer) for answer in answers}) > 2
    for row, answer in zip(together, answers, strict=True):
        assert not any(token in ending.eos_token_ids for token in answer[:-1])
        assert row.finished == [answer[-1] in ending.eos_token_ids]


def test_sampled_answers_do_not_depend_on_the_batch(target, tmp_path):
    """Fault 35."""
    sampled = [
        answer_prompts(target, prompts, tmp_path / f"{size}.jsonl", AnswerConfig(12, size, temperature=1.0))
        for size, prompts in ((4, PROMPTS), (1, PROMPTS[::-1]))
    ]
    assert {row.id: row.input_ids for row in sampled[0]} == {row.id: row.input_ids for row in sampled[1]}


def test_a_prompt_is_run_once_for_all_its_answers(target, tmp_path, monkeypatch):
    """With its states, which all of them have; answers and states are those of prompts that are run one by one."""
    prompts = [Prompt(f"{text}{n}", "chat", (text,)) for text in ("What is two?", "Sea and wind") for n in range(3)]
    config, run, ran = AnswerConfig(8, 6, temperature=1.0), TargetModel.forward, []

    def counted(self, ids, *arguments, **options):
        ran.append(tuple(ids.shape))
        return run(self, ids, *arguments, **options)

    monkeypatch.setattr(TargetModel, "forward", counted)
    kept, rows = {1: {}, 6: {}}, []
    for size, states_of in kept.items():
        settings = replace(config, batch_size=size)
        ran.clear()

        def keep(example, states, states_of=states_of):
            states_of[example.id] = states

        rows.append(answer_prompts(target, prompts, tmp_path / f"{size}.jsonl", settings, keep))
    assert rows[0] == rows[1]
    assert sum(rows for rows, tokens in ran if tokens > 1) == 2
    for id, states in kept[6].items():
        torch.testing.assert_close(states.taps, kept[1][id].taps)
        torch.testing.assert_close(states.last, kept[1][id].last)


def test_answers_that_begin_sampled_and_go_on_greedily(target, tmp_path):
    config = AnswerConfig(12, 4, temperature=1.0, greedy_after=3)
    greedy_rows = answer_prompts(target, PROMPTS, tmp_path / "greedy.jsonl", AnswerConfig(12, 4))
    rows = answer_prompts(target, PROMPTS, tmp_path / "mixed.jsonl", config)
    sampled = answer_prompts(target, PROMPTS, tmp_path / "sampled.jsonl", AnswerConfig(12, 4, temperature=1.0))
    for row, other in zip(rows, sampled, strict=True):
        start, end = row.spans[0]
        begun = min(start + 3, end)
        assert row.input_ids[:begun] == other.input_ids[:begun]
        going_on = (
            autoregressive_generate(target, row.input_ids[:begun], max_new_tokens=12 - 3).tokens if end > begun else []
        )
        assert row.input_ids[begun:end] == going_on
    assert [row.input_ids for row in rows] != [row.input_ids for row in greedy_rows]


def test_an_interrupted_run_goes_on(target, tmp_path):
    """Fault 6: a line cut by a crash is not taken for an answer; whole ones are kept as they are."""
    path = tmp_path / "a.jsonl"
    whole = answer_prompts(target, PROMPTS, path, CONFIG)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5]) + lines[5][:20])
    assert answer_prompts(target, PROMPTS, path, CONFIG) == whole
    assert path.read_text().startswith("".join(lines[:5]))


def test_a_reader_leaves_a_line_on_its_way_to_its_writer(target, tmp_path):
    """Another run reads the folder while an answer is being written: the line is not taken, and not cut."""
    path = tmp_path / "part-00000.jsonl"
    answer_prompts(target, PROMPTS[:3], path, CONFIG)
    lines = path.read_text().splitlines(keepends=True)
    whole = {json.loads(lines[0])["id"]}
    for written, ids in ((lines[0] + lines[1][:20], whole), (lines[0][:20], set()), ("", set())):
        path.write_text(written)
        assert set(read_parts(target, tmp_path, PROMPTS)) == ids
        assert path.read_text() == written


def test_an_answer_to_another_text_is_not_reused(target, tmp_path):
    """Fault 5."""
    answer_prompts(target, PROMPTS[:2], tmp_path / "part-0.jsonl", CONFIG)
    changed = [PROMPTS[0], Prompt("p1", "chat", ("Something else",))]
    assert set(read_parts(target, tmp_path, changed)) == {"p0"}
    rows = answer_prompts(target, changed, tmp_path / "part-0.jsonl", CONFIG)
    assert "Something else" in target.tokenizer.decode(rows[1].input_ids)
    assert set(read_parts(target, tmp_path, changed)) == {"p0", "p1"}


def test_another_configuration_is_refused(target, tmp_path):
    """Fault 5."""
    answer_prompts(target, PROMPTS[:1], tmp_path / "a.jsonl", CONFIG)
    with pytest.raises(UserError, match="max_new_tokens = 12, now 13"):
        answer_prompts(target, PROMPTS[:1], tmp_path / "a.jsonl", AnswerConfig(max_new_tokens=13))


@pytest.mark.parametrize("part", ["template", "words"])
def test_another_tokenizer_is_refused(target, tmp_path, part):
    """Fault 5: the same weights, and a tokenizer or a template that makes other ids of the same text."""
    answer_prompts(target, PROMPTS[:1], tmp_path / "a.jsonl", CONFIG)
    changed = tiny_target("llama", dtype=torch.float32)
    if part == "template":
        changed.tokenizer.chat_template += " "
    else:
        changed.tokenizer.add_tokens(["sea and"])
    assert changed.hash == target.hash
    with pytest.raises(UserError, match="was made with tokenizer_hash = "):
        answer_prompts(changed, PROMPTS[:1], tmp_path / "a.jsonl", CONFIG)


def test_two_turns_are_one_conversation(target, tmp_path):
    """The second turn follows the first answer's own ids, never re-encoded ones."""
    ending = tiny_target("llama", dtype=torch.float32)
    ending.eos_token_ids = tuple(range(TINY_VOCAB))  # every answer is one token
    row = answer_prompts(ending, [Prompt("t", "chat", ("One?", "Two?"))], tmp_path / "a.jsonl", CONFIG)[0]
    assert len(row.spans) == 2
    (_, end), (start, _) = row.spans
    assert row.input_ids[end:start] == follow_up(ending.tokenizer, "Two?")
    assert "Two?" in ending.tokenizer.decode(row.input_ids[end:start])


def test_the_follow_up_is_what_the_template_would_write(target):
    """Against one rendering of the whole conversation."""
    turns = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Yes"}]
    whole = render_prompt(target.tokenizer, [*turns, {"role": "user", "content": "Two?"}])
    first = render_prompt(target.tokenizer, turns[:1])
    answer = target.tokenizer("Yes", add_special_tokens=False)["input_ids"] + [target.tokenizer.eos_token_id]
    assert first + answer + follow_up(target.tokenizer, "Two?") == whole


def test_bad_prompts_are_refused_before_any_work(target, tmp_path):
    with pytest.raises(UserError, match="got none"):
        answer_prompts(target, [], tmp_path / "a.jsonl", CONFIG)
    long = [Prompt("long", "chat", ("sea " * target.max_positions,))]
    with pytest.raises(UserError, match=r"'long': got \d+ tokens, allowed"):
        answer_prompts(target, long, tmp_path / "a.jsonl", CONFIG)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    """Its ids have no embedding."""
    target = TargetModel.from_model(tiny_model("llama", vocab=100), tiny_tokenizer())
    with pytest.raises(UserError, match=r"its tokenizer gives the id \d+, allowed: below 100"):
        answer_prompts(target, PROMPTS[:1], tmp_path / "a.jsonl", CONFIG)


@pytest.mark.parametrize("setting", ["max_new_tokens", "batch_size", "greedy_after", "temperature"])
def test_bad_settings_are_refused(setting):
    with pytest.raises(UserError, match=f"{setting}: got -1"):
        AnswerConfig(**{setting: -1})


def test_two_programs_do_not_write_one_file(target, tmp_path):
    path = tmp_path / "a.jsonl"
    with sole_writer(path), pytest.raises(UserError, match=r"a\.jsonl: another process is writing"):
        answer_prompts(target, PROMPTS[:1], path, CONFIG)
    assert answer_prompts(target, PROMPTS[:1], path, CONFIG)


def test_files_edited_by_hand(target, tmp_path):
    """A row without an answer is answered again; a broken budget is a new one, a broken key is not ours."""
    path = tmp_path / "a.jsonl"
    first = answer_prompts(target, PROMPTS[:1], path, CONFIG)
    row = json.loads(path.read_text()) | {"spans": [], "finished": []}
    path.write_text(json.dumps(row) + "\n")
    answers._Budget(path, PROMPTS[:1], None).path.write_text("")
    assert answer_prompts(target, PROMPTS[:1], path, CONFIG) == first
    path.with_suffix(".key.json").write_text("{")
    with pytest.raises(UserError, match="was made with target = None"):
        answer_prompts(target, PROMPTS[:1], path, CONFIG)


def test_the_estimate_names_tokens_time_memory_and_disk(target, tmp_path):
    line = estimate_answers(target, PROMPTS, CONFIG, tmp_path / "a.jsonl")
    assert "108 tokens" in line
    assert all(word in line for word in ("minutes", "memory", "disk"))
    assert json.dumps(line)


def test_no_estimate_of_what_the_time_does_not_allow(target, tmp_path):
    """Of two minutes 1.5 are spent, and 16 steps of 2 seconds do not fit into the rest; of 1.8 they do."""
    config = replace(CONFIG, max_new_tokens=16, max_minutes=2)
    path = answers._Budget(tmp_path / "a.jsonl", PROMPTS, None).path
    path.write_text("[1.5, 2.0]")
    line = estimate_answers(target, PROMPTS, config, tmp_path / "a.jsonl")
    assert line.startswith(
        f"answers: 1.5 of 2 minutes are spent, and no more fits: {len(PROMPTS)} prompts are left out"
    )
    path.write_text("[1.5, 1.8]")
    assert "answers: at most" in estimate_answers(target, PROMPTS, config, tmp_path / "a.jsonl")


def test_states_made_on_the_way_are_those_of_a_forward_pass(target, tmp_path):
    """For every row that training may read: all but the last token's, two turns and early ends included."""
    ending = tiny_target("llama", dtype=torch.float32)
    ending.eos_token_ids = tuple(range(0, TINY_VOCAB, 5))
    kept = []
    prompts = [*PROMPTS, Prompt("t", "chat", ("One?", "Two?"))]
    config = AnswerConfig(12, 4, temperature=1.0)
    rows = answer_prompts(
        ending, prompts, tmp_path / "a.jsonl", config, lambda example, states: kept.append((example, states))
    )
    assert {example.id for example, _ in kept} == {row.id for row in rows}
    for example, states in kept:
        fresh = run_target(ending, [example])[0]
        for name in ("taps", "last"):
            torch.testing.assert_close(getattr(states, name)[:-1], getattr(fresh, name)[:-1], atol=1e-4, rtol=1e-4)
            assert len(getattr(states, name)) == len(example.input_ids)
            assert not getattr(states, name)[-1].any()


def test_kept_states_survive_on_disk(target, tmp_path, monkeypatch):
    """What was remembered is what is read, bit for bit, from files of a bounded size; a later save adds only what is new."""
    states = Online(target, cache_bytes=10**8)
    found = {}
    rows = answer_prompts(
        target, PROMPTS, tmp_path / "a.jsonl", CONFIG, lambda *item: found.update({example_key(item[0]): item})
    )
    examples, kept = [row.example() for row in rows], list(found.values())
    monkeypatch.setattr("specdraft.data.source.PART_BYTES", kept[0][1].nbytes)
    folder = tmp_path / "states"
    for item in kept[:-1]:
        states.remember(*item)
    states.save(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(before) > 1
    states.remember(*kept[-1])
    states.save(folder)
    assert all(path.stat().st_mtime_ns == before[path] for path in before)
    assert len(list(folder.iterdir())) == len(before) + 1

    part = Online(target, cache_bytes=10**8)
    part.load(folder, examples[:1])  # of a run that was answered with others
    assert 0 < part.used_bytes < states.used_bytes
    part.save(folder)
    assert len(list(folder.iterdir())) == len(before) + 1
    loaded = Online(target, cache_bytes=10**8)
    loaded.load(folder, examples)
    assert loaded.used_bytes == states.used_bytes > 0
    loaded.save(folder)
    assert len(list(folder.iterdir())) == len(before) + 1
    monkeypatch.setattr("specdraft.data.source.run_target", lambda target, examples: [])  # nothing is left to run
    for name in ("taps", "last"):
        wanted = states.batch(examples)
        assert torch.equal(getattr(loaded.batch(examples), name), getattr(wanted, name))
    (folder / "00000.safetensors").write_bytes(b"broken")
    with pytest.raises(UserError, match="cannot be read"):
        Online(target, cache_bytes=1).load(folder, examples)


@pytest.fixture
def minutes(monkeypatch):
    """The clock stands still, but for a minute in every step of a batch."""
    passed, step = [0], answers._Batch.step

    def slow(batch):
        passed[0] += 1
        return step(batch)

    monkeypatch.setattr(answers._Batch, "step", slow)
    monkeypatch.setattr("specdraft.decoding.answers.time.perf_counter", lambda: 60 * passed[0])


@pytest.mark.parametrize("turns", [1, 2])
def test_a_budget_of_minutes(target, tmp_path, minutes, turns):
    """Prompts that do not fit are left out, in order; a second run with the same budget answers no more, a larger one goes on. Answers
    take three steps, and two are written together."""
    prompts = [Prompt(str(i), "chat", (f"Question {i}?",) * turns) for i in range(9)]
    path = tmp_path / "part-00000.jsonl"

    def answered(minutes):
        config = AnswerConfig(max_new_tokens=4, batch_size=2, max_minutes=minutes)
        rows = answer_prompts(target, prompts, path, config)
        assert not any(row.finished[0] for row in rows)
        return [row.id for row in rows]

    fit = {1: 6, 2: 2}[turns]  # two turns want eight minutes when they begin, though here the first is the last
    for _ in range(2):
        assert answered(10) == [prompt.id for prompt in prompts[:fit]]
        assert (
            answers.minutes_spent(tmp_path, prompts) == 10
        )  # all of it, and no more by asking again: training has the same rest
    assert answered(None) == [prompt.id for prompt in prompts]


def test_other_prompts_have_minutes_of_their_own(target, tmp_path, minutes):
    """In the same file, of the same target and settings; a part of them in several runs or processes shares theirs."""
    config = AnswerConfig(max_new_tokens=4, batch_size=2, max_minutes=10)
    first, second = ([Prompt(f"{name}{i}", "chat", (f"{name} {i}?",)) for i in range(9)] for name in "ab")
    path = tmp_path / "part-00000.jsonl"
    assert len(answer_prompts(target, first, path, config)) == 6
    assert len(answer_prompts(target, second, path, config)) == 6
    assert answers.minutes_spent(tmp_path, first) == answers.minutes_spent(tmp_path, second) == 10
    assert answer_prompts(target, first[6:], path, config, of=first) == []
    assert "are spent" in estimate_answers(target, first[6:], config, path, of=first)


def test_a_run_that_is_killed_has_spent_its_time(target, tmp_path, minutes):
    """It is on disk with every answer, not only at the end: two answers take three minutes."""
    path, spent = tmp_path / "a.jsonl", []
    config = AnswerConfig(max_new_tokens=4, batch_size=2, max_minutes=100)
    four = PROMPTS[:4]
    answer_prompts(target, four, path, config, lambda *_: spent.append(answers._Budget(path, four, 100).spent))
    assert spent == [3, 3, 6, 6]


def test_an_interrupted_run_has_spent_its_time(target, tmp_path, minutes, monkeypatch):
    def stop(self, *_):
        raise KeyboardInterrupt

    path = tmp_path / "a.jsonl"
    config = AnswerConfig(max_new_tokens=4, batch_size=2, max_minutes=100)
    monkeypatch.setattr(answers._Batch, "_states", stop)
    with pytest.raises(KeyboardInterrupt):
        answer_prompts(target, PROMPTS, path, config)
    assert answers._Budget(path, PROMPTS, 100).spent == 3


@pytest.mark.parametrize("lengths", [[5], [60, 61, 62, 300], list(range(20, 420, 4)), [100] * 40, [1, 1, 1, 900]])
def test_prefills_have_little_padding(lengths):
    """Every row is in one part; a part has at most a tenth of padding, unless it is small."""
    parts = [lengths[part] for part in answers._parts(lengths, torch.device("cpu"))]
    assert [length for part in parts for length in part] == lengths
    for part in parts:
        padded = len(part) * max(part)
        assert padded <= answers.FEW_TOKENS or padded - sum(part) <= answers.PADDING * padded or len(part) == 1
    assert [lengths] == [lengths[part] for part in answers._parts(lengths, torch.device("meta"))]
