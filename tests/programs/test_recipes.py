"""The recipes as users run them: subprocesses, on a tiny model with real weights on disk. Bad input: one line, exit code 2."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from safetensors import safe_open

from specdraft.models.checkpoint import read_taps
from specdraft.testing import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
TOPICS = ["the sea", "a boat", "the wind", "two and three", "a short story", "an answer", "a question", "an assistant"]
TINY = [
    "--threads=1",
    "--prompts=prompts.jsonl",
    "--target=target",
    "--answers.max-new-tokens=24",
    "--answers-each=1",
    "--answers.batch-size=16",
    "--head.rank=8",
    "--train.objective.steps=3",
    "--train.epochs=1",
    "--train.mixed-precision=no",
    "--measure.prompts=2",
    "--measure.trial-prompts=1",
    "--measure.max-new-tokens=24",
    "--measure.draft-length=2",
]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A folder with a tiny target and 120 prompts."""
    folder = tmp_path_factory.mktemp("recipes")
    tiny_model("llama").save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    rows = [{"id": f"p{i}", "turns": [f"Write {i} words about {TOPICS[i % 8]}."]} for i in range(120)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(program, *flags, cwd):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / program), *flags]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def test_slimspec_from_prompts_to_summary(workdir):
    """Everything that make train leaves behind; and the second time the answers are there already."""
    done = run("recipes/train_slimspec.py", *TINY, "--name=one", cwd=workdir)
    assert done.returncode == 0, done.stderr
    for step in ("answers: at most", "training: ", "measuring: at most"):  # what each will take, before it starts
        lines = [line for line in done.stdout.splitlines() if line.startswith(step)]
        assert any(all(what in line for what in ("minutes", "GB of memory", "disk")) for line in lines), step
    folder = workdir / "runs" / "one"
    found = json.loads((folder / "summary.json").read_text())
    for key in ("tau", "speedup", "tokens_per_second", "target_tokens_per_second", "minutes", "draft_ms", "verify_ms"):
        assert found[key] > 0, key
    assert found["tau"] >= 1
    assert found["head"] == {"kind": "lowrank", "rows": 320, "width": 8}
    assert "one" in (folder / "summary.md").read_text()
    assert 0 <= found["looping_prompts"] <= 2
    row = f"tau and speedup without the {found['looping_prompts']} of 2 prompts on which the target ends in a loop"
    assert all(row in path.read_text() for path in (folder / "summary.md", folder / "drafter" / "README.md"))
    assert (folder / "summary.md").read_text().strip() in done.stdout
    with safe_open(folder / "drafter" / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
    assert {"lm_head.down", "lm_head.weight", "fc.weight"} <= names
    assert not any("embed" in name for name in names)
    assert "# EAGLE-3 drafter" in (folder / "drafter" / "README.md").read_text()
    again = run("recipes/train_slimspec.py", *TINY, "--name=two", cwd=workdir)
    assert again.returncode == 0, again.stderr
    assert "120 answered already" in again.stdout
    first, second = (workdir / "runs" / name / "drafter" / "model.safetensors" for name in ("one", "two"))
    assert first.read_bytes() == second.read_bytes(), "the same run twice is the same drafter"


def test_a_run_keeps_the_answers_that_it_was_begun_with(workdir):
    """Another run of the same prompts adds to them; the first goes on with its own. Other prompts under its name are refused before they
    are answered."""
    flags = [*TINY, "--output=kept", "--name=first"]
    done = run("recipes/train_slimspec.py", *flags, "--train.max-steps=2", cwd=workdir)
    assert done.returncode == 0, done.stderr
    (part,) = (workdir / "kept" / "answers").glob("*/part-00000.jsonl")
    lines = part.read_text().splitlines(keepends=True)
    chosen = workdir / "kept" / "first" / "answers.json"
    found = json.loads(chosen.read_text())
    assert sorted(found["ids"]) == sorted(json.loads(line)["id"] for line in lines)
    assert found["minutes"] > 0
    fewer = [id_ for id_ in found["ids"] if id_ != json.loads(lines[-1])["id"]]  # as if the last were of another run
    chosen.write_text(json.dumps({**found, "ids": fewer}))
    again = run("recipes/train_slimspec.py", *flags, "--train.max-steps=2", cwd=workdir)
    assert f"answers: the {len(fewer)} that training was begun with" in again.stdout
    other = run("recipes/train_slimspec.py", *flags, "--max-prompts=60", cwd=workdir)
    assert other.returncode == 2
    assert_one_line(other.stderr, "name: got first, whose training was begun with other prompts")


@pytest.mark.slow
def test_the_whole_job_on_two_processes(workdir):
    """Each answers its share; one of them measures and writes."""
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    launch += [
        "--config_file",
        str(ROOT / "recipes" / "launch" / "cpu2.yaml"),
        str(ROOT / "recipes" / "train_slimspec.py"),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    flags = [*TINY, "--output=pair"]
    done = subprocess.run([*launch, *flags], cwd=workdir, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((workdir / "pair" / "slimspec" / "summary.json").read_text())
    assert found["training"]["steps"] > 0
    assert found["tau"] >= 1
    answers = [
        line for path in (workdir / "pair" / "answers").glob("*/part-*.jsonl") for line in path.read_text().splitlines()
    ]
    assert len({json.loads(line)["id"] for line in answers}) == len(answers) == 120
    assert done.stdout.count("# slimspec") == 1


@pytest.mark.gpu
def test_the_whole_job_on_a_gpu(workdir):
    """Answers, a new drafter and its first weights, training, and every draft that is tried."""
    tried = [flag for flag in TINY if "draft-length" not in flag]
    done = run("recipes/train_slimspec.py", *tried, "--measure.trial-tokens=8", "--output=gpu", cwd=workdir)
    assert done.returncode == 0, done.stderr
    found = json.loads((workdir / "gpu" / "slimspec" / "summary.json").read_text())
    assert found["provenance"]["machine"]["gpus"]
    assert "tree of 60, 7 deep" in found["tried"]
    assert found["match_rate"] == 1


@pytest.mark.parametrize("kind", ["full", "trimmed"])
def test_eagle3_shares_the_pipeline(workdir, kind):
    size = ["--head.vocab-size=290", "--drafter.tap-layers", "1", "4", "5"] if kind == "trimmed" else []
    done = run("recipes/train_eagle3.py", *TINY, f"--name={kind}", f"--head.kind={kind}", *size, cwd=workdir)
    assert done.returncode == 0, done.stderr
    found = json.loads((workdir / "runs" / kind / "summary.json").read_text())
    assert found["head"]["rows"] == {"full": 320, "trimmed": 290}[kind]
    assert (read_taps(workdir / "runs" / kind / "drafter") == (1, 4, 5)) == (kind == "trimmed")


@pytest.fixture(scope="module")
def stored(workdir):
    """Answers to the prompts and the states of them, made by the data programs one by one."""
    steps = [
        ["generate_responses.py", "--prompts=prompts.jsonl", "--generate.max-new-tokens=24", "--dtype=float32"],
        ["extract_hidden_states.py", "--data=answers.jsonl", "--output=states", "--max-length=200", "--dtype=float32"],
    ]
    for program, *flags in steps:
        done = run(f"data_prep/{program}", "--target=target", *flags, cwd=workdir)
        assert done.returncode == 0, done.stderr
    return workdir


def test_training_on_stored_states(stored):
    """Nothing is answered, and the held-out part is that of the prompts. That the states are the target's own: test_data_prep."""
    flags = ["--max-length=200", "--states=states", "--output=out", "--name=stored"]
    done = run("recipes/train_slimspec.py", *TINY, *flags, cwd=stored)
    assert done.returncode == 0, done.stderr
    assert "answers and hidden states: 120 of states" in done.stdout
    assert not (stored / "out" / "answers").exists()
    assert json.loads((stored / "out" / "stored" / "summary.json").read_text())["training"]["steps"] > 0


def test_drafts_are_tried_and_the_fastest_is_measured(stored):
    flags = ["--max-length=200", "--states=states", "--output=out", "--name=tried", "--train.max-steps=2"]
    tiny = [flag for flag in TINY if "draft-length" not in flag]
    done = run(
        "recipes/train_slimspec.py", *tiny, *flags, "--measure.trial-tokens=8", "--measure.frequent=300", cwd=stored
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((stored / "out" / "tried" / "summary.json").read_text())
    speedups = {name: tried["median_speedup"] for name, tried in found["tried"].items()}
    assert {"chain of 1", "chain of 4", "tree of 6, 2 deep", "tree of 8, 4 deep, from 300 tokens"} <= speedups.keys()
    assert found["draft"] == max(speedups, key=speedups.get)
    assert found["prompts"] == 2
    assert f"a round drafts a {found['draft']}" in done.stdout
    assert len(json.loads((stored / "out" / "tried" / "drafter" / "frequent_tokens.json").read_text())) == 300


BAD_STATES = {
    "no folder": (["--states=nowhere"], "hidden states nowhere: no index.json"),
    "another target": (["--target=other"], "hidden states states: made with target_hash = "),
    "other prompts": (["--prompts=builtin"], "got answers to 0 of"),
    "another length": (["--max-length=40"], "or max_length (here 200) is not that of the extraction"),
    "a shard is missing": (["--states=holes"], "holes/shard-00000.safetensors: the file is missing"),
}


@pytest.mark.parametrize("case", BAD_STATES)
def test_bad_states_are_one_line_and_exit_code_2(stored, case, monkeypatch, capfd):
    """Fault 5: states of something else are refused before training starts. In this process, since starting five is slow."""
    flags, message = BAD_STATES[case]
    if not (stored / "other").exists():
        tiny_model("llama", seed=1).save_pretrained(stored / "other")
        tiny_tokenizer().save_pretrained(stored / "other")
        shutil.copytree(stored / "states", stored / "holes")
        (stored / "holes" / "shard-00000.safetensors").unlink()
    program = str(ROOT / "recipes" / "train_slimspec.py")
    monkeypatch.chdir(stored)
    monkeypatch.setattr(sys, "argv", [program, *TINY, "--name=bad", "--max-length=200", "--states=states", *flags])
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(program, run_name="__main__")
    AcceleratorState._reset_state(reset_partial_state=True)
    assert stop.value.code == 2
    assert_one_line(capfd.readouterr().err, message)
    assert not (stored / "runs" / "bad").exists()


BAD = [
    (["--no-such-key=1"], "no-such-key"),
    (["--config=nowhere.yaml"], "nowhere.yaml"),
    (["--config=bad.yaml"], "unknown key 'hed'"),
    (["--target=nowhere"], "nowhere"),
    (["--target=t5"], "t5"),
    (["--head.rank=33"], "head.rank: got 33, allowed: 1 to the width 32"),
    (["--head.kind=trimmed", "--head.vocab-size=10", "--output=new"], "vocabulary size: got 10"),
    (["--warm-start=nowhere", "--output=new"], "nowhere"),
    (["--prompts=empty.jsonl"], "empty.jsonl"),
    (["--prompts=broken.jsonl"], "broken.jsonl"),
    (["--prompts=nowhere.jsonl"], "nowhere.jsonl"),
    (["--prompts=long.jsonl"], "'long'"),
    (["--train.epochs=0"], "train.epochs: got 0"),
    (["--measure.temperature=-1"], "temperature: got -1"),
]


@pytest.mark.parametrize(("flags", "message"), BAD, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_bad_input_is_one_line_and_exit_code_2(workdir, flags, message):
    """What, got, allowed, what to do; no traceback; no checkpoint, summary or half a file."""
    (workdir / "bad.yaml").write_text("hed:\n  rank: 8\n")
    (workdir / "empty.jsonl").write_text("")
    (workdir / "broken.jsonl").write_text('{"id": "a", "turns": ["x"]}\n{"id": \n')
    rows = [{"id": f"p{i}", "turns": [f"Question {i}?"]} for i in range(100)]
    rows.append({"id": "long", "turns": ["sea " * 5000]})
    (workdir / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (workdir / "t5").mkdir(exist_ok=True)
    (workdir / "t5" / "config.json").write_text('{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}')
    name = "bad"
    done = run("recipes/train_slimspec.py", *TINY, f"--name={name}", *flags, cwd=workdir)
    assert done.returncode == 2, done.stderr
    assert_one_line(done.stderr, message)
    assert not (workdir / "runs" / name / "drafter").exists()
    assert not (workdir / "runs" / name / "summary.json").exists()
    assert not (workdir / "new").exists(), "answered before it was found"


def assert_one_line(stderr, message):
    lines = [line for line in stderr.splitlines() if line.strip()]
    assert lines[-1].startswith("error: "), stderr
    assert message in lines[-1]
    assert "Traceback" not in stderr
