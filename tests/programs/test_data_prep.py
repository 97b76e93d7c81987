"""The data programs as users run them: subprocesses on a tiny target, offline. Bad input: one line, exit code 2."""

import json
import os
import runpy
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import datasets
import pytest
import torch
from hub_stand_in import serve

from specdraft.data.chat import AnswerRow, answers_to_examples, encode_conversation, read_answers
from specdraft.data.shards import Shards, read_index
from specdraft.data.source import Online
from specdraft.data.tasks import read_prompts
from specdraft.data.vocab import VocabMap, count_tokens
from specdraft.models.target import TargetModel
from specdraft.testing import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
TOPICS = ["the sea", "a boat", "the wind", "two and three", "a short story"]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A tiny target, conversations of which two cannot be used, and a data set in two formats."""
    folder = tmp_path_factory.mktemp("data_prep")
    tiny_model().save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    chats = [{"id": f"c{i}", "messages": chat(f"Tell me about {TOPICS[i % 5]} {i}.")} for i in range(12)]
    chats[3]["messages"] = chat("unanswered")[:1]
    chats[7]["messages"] = "no list"
    write_lines(folder / "chats.jsonl", chats)
    write_lines(folder / "mine.jsonl", [{"turns": [f"Write {i} words."]} for i in range(40)])
    rows = [{"question": f"Question {i % 50} about {TOPICS[i % 5]}?", "messages": chat(f"Chat {i}")} for i in range(60)]
    rows[4]["question"] = rows[5]["question"] = ""
    (folder / "json").mkdir()
    write_lines(folder / "json" / "train.jsonl", rows)
    (folder / "broken").mkdir()
    (folder / "broken" / "train.jsonl").write_text('{"text": "One?"}\n' * 50 + '{"text": ')
    (folder / "parquet").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(folder / "parquet" / "train.parquet")
    return folder


def chat(question):
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": question},
        {"role": "assistant", "content": "The answer is five."},
    ]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(program, *flags, cwd, **environment):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd / "hf"), **environment}
    command = [sys.executable, str(ROOT / "data_prep" / program), *flags]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def succeed(program, *flags, cwd, **environment):
    done = run(program, *flags, cwd=cwd, **environment)
    assert done.returncode == 0, done.stderr
    return done


def test_builtin_prompts_are_mixed_and_split(workdir):
    succeed("make_prompts.py", "--output=builtin.jsonl", cwd=workdir)
    everything, train, held_out = (
        read_prompts(workdir / f"builtin{part}.jsonl") for part in ("", ".train", ".held_out")
    )
    assert len(everything) >= 2000
    assert sorted(prompt.id for prompt in train + held_out) == sorted(prompt.id for prompt in everything)
    assert 0.02 < len(held_out) / len(everything) < 0.09


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_hub_data_set_column_of_text(workdir, kind):
    """Fault 4: the two empty rows are counted. Fault 9: no worker processes. Ten questions come twice."""
    done = succeed(
        "make_prompts.py", f"--source=hub:./{kind}", "--column=question", f"--output={kind}.jsonl", cwd=workdir
    )
    prompts = read_prompts(workdir / f"{kind}.jsonl")
    assert "2 rows skipped, without a user text in column question" in done.stdout
    assert len(prompts) == 50
    assert prompts[0].turns == ("Question 0 about the sea?",)
    assert {prompt.category for prompt in prompts} == {kind}


HUB_CARD = """---
configs:
- config_name: main
  default: true
  data_files: [{split: train, path: data/train.jsonl}, {split: test, path: data/test.jsonl}]
- config_name: more
  data_files: [{split: train, path: more/train.jsonl}]
---
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A Hub on this machine with one data set: two subsets, the first with two splits."""
    folder = tmp_path_factory.mktemp("hub")
    for path, count in {"data/train": 5, "data/test": 3, "more/train": 4}.items():
        (folder / path).parent.mkdir(exist_ok=True)
        rows = [
            {"number": i, "question": f"Question {i} of {path}?", "messages": chat(f"Chat {i}")} for i in range(count)
        ]
        write_lines((folder / path).with_suffix(".jsonl"), rows)
    (folder / "README.md").write_text(HUB_CARD)
    with serve({"org/talks": folder}) as url:
        yield {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}


@pytest.mark.parametrize(
    ("flags", "turns"),
    [
        (["--split=test", "--column=question"], [f"Question {i} of data/test?" for i in range(3)]),
        (["--subset=more", "--max-rows=2", "--column=question"], [f"Question {i} of more/train?" for i in range(2)]),
        ([], [f"Chat {i}" for i in range(5)]),  # the default subset, split and column
    ],
)
def test_data_set_of_a_hub(workdir, hub, flags, turns):
    """By its id, over HTTP."""
    succeed("make_prompts.py", "--source=hub:org/talks", "--output=hub.jsonl", *flags, cwd=workdir, **hub)
    assert [prompt.turns[0] for prompt in read_prompts(workdir / "hub.jsonl")] == turns


@pytest.mark.parametrize(
    ("source", "flags", "message"),
    [
        (
            "hub:org/nothing",
            [],
            "data set org/nothing, split train: cannot be read (Dataset 'org/nothing' doesn't exist",
        ),
        (
            "hub:org/talks",
            ["--subset=less"],
            "data set org/talks, subset less, split train: cannot be read (BuilderConfig 'less'",
        ),
        (
            "hub:org/talks",
            ["--column=answer"],
            "data set org/talks: got column answer, it has number, question, messages",
        ),
    ],
)
def test_what_a_hub_does_not_have(workdir, hub, source, flags, message):
    before = sorted(workdir.iterdir())
    done = run("make_prompts.py", f"--source={source}", "--output=none.jsonl", *flags, cwd=workdir, **hub)
    assert done.returncode == 2
    assert_one_error(done.stderr, message)
    assert {path.name for path in workdir.iterdir()} - {path.name for path in before} <= {"hf"}


def test_ids_of_two_sources_may_collide(workdir):
    """What is written can be read again, and every prompt is in it."""
    write_lines(workdir / "one.jsonl", [{"id": str(i), "prompt": f"First {i}"} for i in range(4)])
    write_lines(workdir / "two.jsonl", [{"id": str(i), "prompt": f"Second {i}"} for i in range(4)])
    succeed("make_prompts.py", "--source", "one.jsonl", "two.jsonl", "--output=both.jsonl", cwd=workdir)
    prompts = read_prompts(workdir / "both.jsonl")
    assert len({prompt.id for prompt in prompts}) == len({prompt.turns for prompt in prompts}) == 8


def test_help_says_what_a_source_is(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["make_prompts.py", "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "data_prep" / "make_prompts.py"), run_name="__main__")
    assert stop.value.code in (0, None)
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for phrase in (
        "hub:org/name",
        "--split",
        "--subset",
        "--column",
        "a list of user turns",
        "--max-rows",
        "--weights",
    ):
        assert phrase in words, phrase


def test_sources_are_mixed_by_weight(workdir):
    flags = ["--source", "mine.jsonl", "hub:./parquet", "--weights", "1", "3", "--max-prompts=16", "--max-rows=30"]
    succeed("make_prompts.py", *flags, "--output=mixed.jsonl", cwd=workdir)
    prompts = read_prompts(workdir / "mixed.jsonl")
    assert len(prompts) == 16
    chats = [prompt for prompt in prompts if prompt.system == "Be brief."]
    assert len(chats) == 12
    assert all(prompt.turns[0].startswith("Chat ") for prompt in chats)


def test_states_of_conversations_by_two_ranks(workdir):
    """Fault 4: the unusable rows are named; and what was written trains like the target itself."""
    flags = ["--data=chats.jsonl", "--target=target", "--output=states", "--max-length=64"]
    first = succeed("extract_hidden_states.py", *flags, "--shards.shard-mb=0", cwd=workdir, RANK="0", WORLD_SIZE="2")
    assert "10 of 12 rows kept, skipped:" in first.stdout
    assert "5 examples" in first.stdout
    assert not read_index(workdir / "states")["complete"]
    succeed("extract_hidden_states.py", *flags, "--shards.shard-mb=0", cwd=workdir, RANK="1", WORLD_SIZE="2")
    target = TargetModel.load(str(workdir / "target"), dtype=torch.bfloat16)
    examples, account = answers_to_examples(read_answers(workdir / "states" / "answers.jsonl"))
    assert account.kept == len(examples) == 10
    stored, online = Shards(workdir / "states", target).batch(examples), Online(target).batch(examples)
    for name in ("input_ids", "loss_mask", "taps", "last"):
        assert torch.equal(getattr(stored, name), getattr(online, name)), name
    assert target.tokenizer.decode(stored.input_ids[0][stored.loss_mask[0]]) == "The answer is five.<|im_end|>"
    other = run("extract_hidden_states.py", *flags[:-1], "--max-length=63", "--shards.shard-mb=0", cwd=workdir)
    assert other.returncode == 2
    assert_one_error(other.stderr, "made with max_length = 64, now 63")


def test_vocabulary_of_answers(workdir):
    tokenizer, answers = tiny_tokenizer(), workdir / "answers.jsonl"
    examples = [encode_conversation(tokenizer, chat(topic), 100, topic) for topic in TOPICS]
    write_lines(answers, [asdict(AnswerRow.from_example(example, "chat", [2])) for example in examples])
    done = succeed("build_vocab.py", f"--answers={answers}", "--size=290", "--target=target", cwd=workdir)
    vocab = VocabMap.load(workdir / "vocab.safetensors")
    assert (len(vocab), vocab.vocab_size) == (290, 320)
    counts = count_tokens(answers_to_examples(read_answers(answers))[0], 320)
    assert counts[vocab.target_ids].tolist() == sorted(counts.tolist(), reverse=True)[:290]
    assert {0, 1, 2} <= set(vocab.target_ids.tolist())
    assert vocab.hash in done.stdout


BAD = {
    "unknown flag": ("make_prompts.py", ["--sauce=builtin"], "sauce"),
    "missing prompts": ("make_prompts.py", ["--source=nowhere.jsonl"], "nowhere.jsonl"),
    "missing data set": ("make_prompts.py", ["--source=hub:./nowhere"], "data set ./nowhere, split train"),
    "missing split": ("make_prompts.py", ["--source=hub:./json", "--split=test"], "split test"),
    "no connection": ("make_prompts.py", ["--source=hub:org/name"], "data set org/name, split train: cannot be read ("),
    "broken rows": ("make_prompts.py", ["--source=hub:./broken"], "data set ./broken, split train: cannot be read ("),
    "missing column": ("make_prompts.py", ["--source=hub:./json", "--column=prompt"], "it has question, messages"),
    "weights": ("make_prompts.py", ["--source=mine.jsonl", "--weights", "1", "2"], "weights"),
    "missing data": ("extract_hidden_states.py", ["--target=target", "--data=nowhere.jsonl"], "nowhere.jsonl"),
    "missing target": ("extract_hidden_states.py", ["--target=nowhere", "--data=chats.jsonl"], "nowhere"),
    "prompts only": ("extract_hidden_states.py", ["--target=target", "--data=mine.jsonl"], "input_ids"),
    "missing answers": ("build_vocab.py", ["--target=target", "--answers=nowhere.jsonl"], "nowhere.jsonl"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(workdir, case, monkeypatch, capfd):
    """In this process, since starting ten others is slow; it runs the same file as the main program."""
    program, flags, message = BAD[case]
    monkeypatch.chdir(workdir)
    monkeypatch.setattr(sys, "argv", [program, *flags])
    for name in ("huggingface_hub.constants.HF_HUB_OFFLINE", "datasets.config.HF_HUB_OFFLINE"):
        monkeypatch.setattr(name, True)
    before = sorted(workdir.iterdir())
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "data_prep" / program), run_name="__main__")
    assert stop.value.code == 2
    assert_one_error(capfd.readouterr().err, message)
    assert sorted(workdir.iterdir()) == before, "something is half-written"


def assert_one_error(stderr, message):
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, stderr
    assert message in errors[0]
    assert "Traceback" not in stderr
