"""Choosing a vocabulary and training with it, as users do it, on a tiny Gemma-3 without a chat template (a base model: plain-text
prompts). In this process, since starting many is slow; it runs the same files as the main program."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from specdraft.data import token_counts
from specdraft.data.chat import read_answers
from specdraft.data.vocab import VocabMap, required_ids
from specdraft.decoding import head_times
from specdraft.models.checkpoint import load_drafter, read_config
from specdraft.models.target import TargetModel
from specdraft.testing import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
TOPICS = ["the sea", "a boat", "the wind", "two and three", "a short story", "an answer", "a question", "an assistant"]
RECIPE = [
    "--threads=1",
    "--prompts=prompts.jsonl",
    "--target=gemma",
    "--answers.max-new-tokens=16",
    "--answers-each=1",
    "--train.objective.steps=2",
    "--train.epochs=1",
    "--train.mixed-precision=no",
    "--measure.prompts=2",
    "--measure.max-new-tokens=12",
    "--measure.draft-length=2",
]
BUILD = ["--target=gemma", "--answers=answers.jsonl", "--prompts=prompts.jsonl", "--lowest=1", "--min-coverage=0.5"]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabulary")
    tiny_model("gemma3").save_pretrained(folder / "gemma")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder / "gemma")
    rows = [
        {"id": f"p{i}", "turns": [f"Write {i} words about {TOPICS[i % 8]}."], "category": "ab"[i % 2]}
        for i in range(120)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def run(workdir, monkeypatch, capfd):
    """Runs a program in the folder: (exit code, stdout, last line of stderr)."""
    monkeypatch.chdir(workdir)

    def call(program, *flags):
        monkeypatch.setattr(sys, "argv", [program, *flags])
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            runpy.run_path(str(ROOT / program), run_name="__main__")
            code = 0
        except SystemExit as stop:
            code = stop.code
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
        out, err = capfd.readouterr()
        return code, out, (err.strip().splitlines() or [""])[-1]

    return call


@pytest.fixture
def full(workdir, run):
    """A trained full-head drafter of the target without a template, and its answers; made once."""
    if not (workdir / "answers.jsonl").exists():
        code, _, error = run("recipes/train_eagle3.py", *RECIPE, "--name=full", "--head.kind=full")
        assert code == 0, error
        (part,) = workdir.glob("runs/answers/*/part-*.jsonl")
        (workdir / "answers.jsonl").write_bytes(part.read_bytes())
    return workdir


def test_a_target_without_a_chat_template_trains_on_plain_text(full):
    """What it was asked is the prompt's text and an empty line, nothing else; the summary is whole."""
    tokenizer = tiny_tokenizer()
    rows = {row.id: row for row in read_answers(full / "answers.jsonl")}
    assert len(rows) == 120
    row = rows["p3"]
    assert tokenizer.decode(row.input_ids[: row.spans[0][0]]) == "Write 3 words about two and three.\n\n"
    found = json.loads((full / "runs" / "full" / "summary.json").read_text())
    assert found["head"] == {"kind": "full", "rows": 320, "width": 32}
    assert found["tau"] >= 1
    assert found["match_rate"] == 1


def test_every_way_to_choose(full, run, monkeypatch):
    """One map for each; the table holds all of them, and their coverage is of the held-out prompts' answers."""
    monkeypatch.setattr(head_times, "BUSY", 1.1)  # times of a busy machine would not be kept
    maps = {}
    for how in ("size", "coverage", "utility", "measured", "throughput"):
        flags = ["--frontier=front"] if how == "throughput" else []
        code, out, error = run(
            "data_prep/build_vocab.py", *BUILD, "--size=300", f"--choose={how}", f"--output={how}.safetensors", *flags
        )
        assert code == 0, error
        maps[how] = VocabMap.load(full / f"{how}.safetensors")
        assert f"tokens by {how}" in out
        assert "of held-out tokens" in out
        assert {0, 1, 2} <= set(maps[how].target_ids.tolist()), "fault 16"
    assert len(maps["size"]) == 300
    record = json.loads((full / "front" / "frontier.json").read_text())
    chosen = {how: point["rows"] for point in record["points"] for how in point["chosen_by"]}
    assert chosen["coverage"] == len(maps["coverage"])
    assert chosen["utility"] == len(maps["utility"])
    assert chosen["measured"] == len(maps["measured"])
    assert chosen["throughput"] == len(maps["throughput"])
    assert set(record["points"][0]["by_domain"]) == {"a", "b"}
    assert record["points"][0]["mass_coverage"] < 1
    assert [point["rank"] for point in record["points"][-3:]] == [2, 4, 8]
    assert all(point["head_ms"] > 0 and point["speedup"] > 0 for point in record["points"])
    assert record["held_out_tokens"] < 120 * 17 / 4
    assert (full / "front" / "frontier.svg").exists()


def test_another_size_counts_nothing_again(full, run, monkeypatch):
    """Fault 17: neither tokens nor states."""
    assert run("data_prep/build_vocab.py", *BUILD, "--size=300", "--output=first.safetensors")[0] == 0

    def fail(*_):
        raise AssertionError("counted again")

    monkeypatch.setattr(token_counts, "COUNTERS", dict.fromkeys(token_counts.COUNTERS, fail))
    code, _, error = run("data_prep/build_vocab.py", *BUILD, "--size=290", "--output=second.safetensors")
    assert code == 0, error
    first, second = (VocabMap.load(full / f"{name}.safetensors") for name in ("first", "second"))
    assert set(second.target_ids.tolist()) < set(first.target_ids.tolist())


def test_other_sources(full, run):
    """A corpus, a counts file of the cache, and an FR-Spec list whose order is kept."""
    (full / "text.txt").write_text("The sea and the wind.\n" * 50)
    target = ["--target=gemma", "--size=290"]
    assert (
        run("data_prep/build_vocab.py", *target, "--corpus=text.txt", "--output=c.safetensors", "--cache=own")[0] == 0
    )
    (counts,) = (full / "own").glob("*.safetensors")
    assert run("data_prep/build_vocab.py", *target, f"--counts={counts}", "--output=d.safetensors")[0] == 0
    assert VocabMap.load(full / "c.safetensors") == VocabMap.load(full / "d.safetensors")
    torch.save([319, 7, 300, *range(8, 299)], full / "freq.pt")
    assert (
        run("data_prep/build_vocab.py", *target[:1], "--freq-list=freq.pt", "--size=270", "--output=f.safetensors")[0]
        == 0
    )
    assert VocabMap.load(full / "f.safetensors").target_ids[:3].tolist() == [319, 7, 300]


def test_a_list_gives_no_more_than_it_names(full, run, monkeypatch):
    """A search ends where the list does; no other size stands in the table, but for the full head."""
    monkeypatch.setattr(head_times, "BUSY", 1.1)
    ids = [*range(40), 318, 319]
    torch.save(ids, full / "ids.pt")
    flags = ["--target=gemma", "--freq-list=ids.pt", "--held-out=answers.jsonl", "--lowest=1", "--min-coverage=0"]
    flags += ["--choose=utility", "--weight=1", "--frontier=list", "--output=l.safetensors"]
    code, _, error = run("data_prep/build_vocab.py", *flags)
    assert code == 0, error
    vocab = VocabMap.load(full / "l.safetensors")
    target = TargetModel.load("gemma")
    required = required_ids(target.tokenizer, target.eos_token_ids, 320)
    assert set(required) <= set(vocab.target_ids.tolist()) <= {*ids, *required}
    rows = sorted({point["rows"] for point in json.loads((full / "list" / "frontier.json").read_text())["points"]})
    assert rows[0] >= len(required)
    assert rows[-2] <= len({*ids, *required}) < rows[-1] == 320


BAD = {
    "nothing to count": ([], "got nothing to count"),
    "both": (["--answers=answers.jsonl", "--freq-list=freq.pt"], "got both counts and freq_list"),
    "size below the required": (["--answers=answers.jsonl", "--size=3"], "size: got 3, allowed: 25"),
    "size above V": (["--answers=answers.jsonl", "--size=321"], "size: got 321, allowed: 25"),
    "list without answers": (
        ["--freq-list=freq.pt", "--choose=utility"],
        "choose utility: coverage is measured on held-out",
    ),
    "frontier without answers": (
        ["--corpus=text.txt", "--frontier=front"],
        "frontier: coverage is measured on held-out",
    ),
    "coverage of what is counted": (["--answers=answers.jsonl", "--choose=coverage"], "give --prompts or --held-out"),
    "frontier of what is counted": (["--answers=answers.jsonl", "--frontier=front"], "give --prompts or --held-out"),
    "list too short": (["--freq-list=short.pt", "--size=310"], "size: got 310, allowed: up to"),
    "list too short, with coverage": (
        ["--freq-list=short.pt", "--held-out=answers.jsonl", "--size=310"],
        "size: got 310, allowed: up to 259, what short.pt",
    ),
    "list covers too little": (
        ["--freq-list=short.pt", "--held-out=answers.jsonl", "--choose=coverage"],
        "min_coverage: got 0.9, allowed: up to 0.",
    ),
    "coverage out of reach": (
        [*BUILD[1:3], "--choose=utility", "--min-coverage=1", "--lowest=1", "--highest=270"],
        "min_coverage: got 1.0, allowed: up to 0.",
    ),
    "prompts without answers": (
        ["--corpus=text.txt", "--prompts=prompts.jsonl"],
        "prompts: splits the rows of answers",
    ),
    "unknown way": (["--answers=answers.jsonl", "--choose=best"], "choose"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(full, run, case):
    flags, message = BAD[case]
    (full / "text.txt").write_text("The sea.\n")
    torch.save([5, 6], full / "short.pt")
    torch.save(list(range(200)), full / "freq.pt")
    code, _, error = run("data_prep/build_vocab.py", "--target=gemma", "--output=bad.safetensors", *flags)
    assert code == 2
    assert error.startswith("error: ")
    assert message in error
    assert not (full / "bad.safetensors").exists()


def test_training_with_a_map_and_with_no_other(full, run):
    """The recipe takes the map; the answers are there already (fault 17); going on or starting from it with another map of the
    same size is refused by both hashes (fault 18), and so are a map of a full head, and one without end-of-turn tokens (16, 19)."""
    build = ["data_prep/build_vocab.py", "--target=gemma", "--answers=answers.jsonl", "--size=290"]
    assert run(*build, "--output=own.safetensors")[0] == 0
    own = VocabMap.load(full / "own.safetensors")
    other, endless = VocabMap(own.target_ids.flip(0), 320), VocabMap(torch.arange(3, 293), 320)
    other.save(full / "other.safetensors")
    endless.save(full / "endless.safetensors")
    recipe = ["recipes/train_eagle3.py", *RECIPE, "--name=trimmed", "--head.kind=trimmed"]
    code, out, error = run(*recipe, "--head.vocab=own.safetensors")
    assert code == 0, error
    assert "120 answered already" in out
    config = read_config(full / "runs" / "trimmed" / "drafter")
    assert config["vocab_hash"] == own.hash
    weights = load_file(full / "runs" / "trimmed" / "drafter" / "model.safetensors")
    assert weights["lm_head.weight"].shape == (290, 32)
    assert torch.equal(weights["d2t"], own.offsets)
    code, _, error = run(*recipe, "--head.vocab=other.safetensors")
    assert code == 2
    assert f"vocabulary map = {own.hash}, got {other.hash}" in error
    warm = [*recipe, "--name=warm", "--warm-start=runs/trimmed/drafter"]
    code, _, error = run(*warm, "--head.vocab=other.safetensors")
    assert code == 2
    assert own.hash in error
    assert other.hash in error
    code, _, error = run(*warm, "--head.vocab=own.safetensors", "--train.mixed-precision=bf16")
    assert code == 0, f"bf16, which a target is not on every processor: {error}"
    code, _, error = run(*recipe, "--head.vocab=endless.safetensors")
    assert code == 2
    assert "end-of-turn ids [" in error
    code, _, error = run(*recipe, "--head.kind=full", "--head.vocab=own.safetensors")
    assert code == 2
    assert "head.vocab: got own.safetensors with head.kind full" in error


def test_trimming_a_trained_drafter(full, run):
    """FR-Spec: rows of the trained head, nothing else changes; a drafter that is trimmed already is refused."""
    vocab = VocabMap(torch.arange(299, -1, -1), 320)
    vocab.save(full / "v.safetensors")
    flags = ["--target=gemma", "--vocab=v.safetensors"]
    code, out, error = run("recipes/trim_head.py", *flags, "--drafter=runs/full/drafter", "--output=runs/cut/drafter")
    assert code == 0, error
    assert "trimmed head of 300 x 32" in out
    before, after = (load_file(full / "runs" / name / "drafter" / "model.safetensors") for name in ("full", "cut"))
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"][vocab.target_ids])
    assert all(torch.equal(after[key], before[key]) for key in before if key != "lm_head.weight")
    target = TargetModel.load(str(full / "gemma"))
    assert load_drafter(full / "runs" / "cut" / "drafter", target).lm_head.vocab_map == vocab
    code, _, error = run("recipes/trim_head.py", *flags, "--drafter=runs/cut/drafter", "--output=runs/twice/drafter")
    assert code == 2
    assert "got a trimmed head of 300 rows" in error
