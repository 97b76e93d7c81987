"""eval/stream.py as users run it, on a tiny pair; a second run goes on from the sessions of the first."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specdraft.config import UserError, parse_config, run_program
from specdraft.models.checkpoint import save_drafter
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, new_drafter
from specdraft.models.target import TargetModel
from specdraft.testing import tiny_model, tiny_tokenizer

PROGRAM = Path(__file__).parents[2] / "eval" / "stream.py"
FLAGS = (
    *("--drafter=drafter", "--target=target", "--dtype=float32", "--threads=1", "--policies.frequency=answers.jsonl"),
    *("--domains", "law", "own.jsonl", "--per-visit=1", "--visits=2", "--max-new-tokens=24"),
    *(
        "--policies.frequency-size=60",
        "--policies.evospec.core=40",
        "--policies.evospec.tail=20",
        "--policies.nanospec-capacity=60",
    ),
    *("--online.every=4", "--online.window=16", "--online.capacity=300", "--online.time-share=None"),
)
WAYS = {"target alone", "frozen", "fr_spec", "nanospec", "vocabulary", "alignment", "both", "full"}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    tiny_model().save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    target = TargetModel.load(str(folder / "target"), dtype=torch.float32)
    torch.manual_seed(0)
    drafter = new_drafter(target, DrafterConfig(), HeadConfig("full", init="svd"))
    save_drafter(folder / "drafter", drafter, target, "", {}, torch.float32)
    rows = [{"prompt": f"Write {i} words about the sea."} for i in range(3)]
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ids = list(range(3, 43))
    answer = {"id": "a", "category": "chat", "input_ids": ids, "spans": [[10, 40]], "finished": [False]}
    (folder / "answers.jsonl").write_text(json.dumps(answer) + "\n")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *FLAGS], cwd=folder, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("stream_program", PROGRAM)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def lines_of(folder, output="runs/stream"):
    return [json.loads(line) for line in (folder / output / "lines.jsonl").read_text().splitlines()]


def test_every_way_is_lossless_and_has_its_curves(workdir):
    folder, printed = workdir
    lines = lines_of(folder)
    assert {line["way"] for line in lines} == WAYS
    assert [line["domain"] for line in lines if line["way"] == "both"] == ["law", "own", "law", "own"]
    assert all(line["is_same"] for line in lines)
    last = {line["way"]: line for line in lines}
    assert last["fr_spec"]["live"] == last["vocabulary"]["live"] == last["both"]["live"] == 60
    assert last["frozen"]["live"] == 0
    assert all(last[way]["updates"] > 0 for way in ("alignment", "both", "full"))
    summary = json.loads((folder / "runs/stream/summary.json").read_text())
    rows = {row["way"]: row for row in summary["rows"]}
    assert rows["fr_spec"]["over_reference"] == 1
    assert all(rows[way]["match_rate"] == 1 for way in WAYS)
    memory = summary["memory_bytes"]
    assert memory["alignment"]["optimizer"] < memory["full"]["optimizer"]
    assert "share of full-parameter adaptation" in printed
    assert (folder / "runs/stream/curves.svg").exists()


def test_sessions_go_on(workdir, program, monkeypatch, capsys):
    folder, _ = workdir
    monkeypatch.chdir(folder)
    before = {line["way"]: line for line in lines_of(folder)}["alignment"]
    flags = (*FLAGS, "--ways", "alignment", "--static=all", "--reference=alignment", "--output=more")
    program.main(parse_config(program.StreamConfig, (*flags, "--sessions=runs/stream/sessions")))
    after = lines_of(folder, "more")
    assert {line["way"] for line in after} == {"target alone", "alignment"}
    first = next(line for line in after if line["way"] == "alignment")
    assert first["updates"] + 10 * first["rollbacks"] > before["updates"] + 10 * before["rollbacks"] - 1
    assert all(line["is_same"] for line in after)
    assert "| alignment |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--ways", "magic"), "ways: got magic, allowed: frozen, fr_spec"),
        (("--ways", "frozen", "alignment"), "reference: got fr_spec, allowed: one of the ways: frozen, alignment"),
        (
            ("--domains", "law", "my/own.jsonl", "own.jsonl"),
            "domains: got two that are named own, allowed: different names",
        ),
        (("--domains", "law", "my/law.jsonl"), "domains: got two that are named law"),
        (("--threads=0",), "threads: got 0, allowed: 1 or more"),
        (("--visits=0",), "visits: got 0, allowed: 1 or more"),
        (("--temperature=-1",), "temperature: got -1.0, allowed: 0"),
        (("--dtype=bf16",), "'bf16' for argument '--dtype'"),
        (("--per-visit=30",), "needed: per_visit x visits = 60"),
        (("--domains", "nowhere.jsonl"), "nowhere.jsonl: cannot be read"),
    ],
)
def test_bad_settings_get_one_clear_line(workdir, program, monkeypatch, flags, message):
    monkeypatch.chdir(workdir[0])
    with pytest.raises(UserError, match=message):
        program.main(parse_config(program.StreamConfig, (*FLAGS, "--output=none", *flags)))


def test_a_stream_that_is_interrupted_keeps_what_it_learnt_and_is_not_overwritten(
    workdir, program, monkeypatch, capsys
):
    folder, _ = workdir
    monkeypatch.chdir(folder)
    done, note = [], program.stream.write_lines

    def interrupted(path, lines):
        note(path, lines)
        done.append(len(lines))
        if len(lines) == 4:  # of two prompts
            raise KeyboardInterrupt

    monkeypatch.setattr(program.stream, "write_lines", interrupted)
    flags = (*FLAGS, "--ways", "alignment", "--reference=alignment", "--output=stopped")
    monkeypatch.setattr("sys.argv", ["stream.py", *flags])
    with pytest.raises(SystemExit) as stop:
        run_program(program.main, program.StreamConfig)
    assert stop.value.code == 130
    assert "--sessions stopped/sessions and another --output" in capsys.readouterr().err
    updates = [line["updates"] for line in lines_of(folder, "stopped") if line["way"] == "alignment"][-1]
    assert json.loads((folder / "stopped/sessions/alignment/session.json").read_text())["updates"] == updates > 0
    with pytest.raises(
        UserError, match=r"stopped/lines.jsonl holds the lines of an earlier stream; remove it, or choose"
    ):
        program.main(parse_config(program.StreamConfig, flags))
    assert done == [1, 2, 3, 4]


def test_the_warm_up_teaches_nothing_and_other_taps_are_read(workdir, program, monkeypatch):
    folder, _ = workdir
    monkeypatch.chdir(folder)
    taps = (0, 1, 3)
    target = TargetModel.load("target", dtype=torch.float32, tap_layers=taps)
    save_drafter(
        folder / "others", new_drafter(target, DrafterConfig(), HeadConfig("full")), target, "", {}, torch.float32
    )
    seen = {}

    def run_stream(target, ways, visited, note, **how):
        way = ways["vocabulary"]
        assert target.tap_layers == taps
        assert way.contender.vocab_policy.config.across_requests
        run(target, ways, visited[:1], lambda line: seen.setdefault(line["way"], line), **how)
        seen["rounds"], seen["counts"] = way.contender.vocab_policy._round, way.warm_up.vocab_policy._round

    run = program.stream.run_stream
    monkeypatch.setattr(program.stream, "run_stream", run_stream)
    monkeypatch.setattr(program, "write_results", lambda *args: None)
    flags = (*FLAGS, "--drafter=others", "--ways", "vocabulary", "--reference=vocabulary", "--output=warm")
    program.main(parse_config(program.StreamConfig, flags))
    assert seen["rounds"] <= seen["vocabulary"]["rounds"]
    assert seen["counts"] > 0


@pytest.mark.parametrize("missing", ["drafter", "policies.frequency"])
def test_what_is_needed_is_asked_for(workdir, program, monkeypatch, missing):
    monkeypatch.chdir(workdir[0])
    flags = [flag for flag in (*FLAGS, "--output=none") if not flag.startswith(f"--{missing}=")]
    with pytest.raises(UserError, match=f"{missing}: got none"):
        program.main(parse_config(program.StreamConfig, flags))
