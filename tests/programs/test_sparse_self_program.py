"""eval/sparse_self.py as users run it, on a tiny target; an interrupted run goes on."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdraft.config import UserError, parse_config
from specdraft.testing import tiny_model, tiny_tokenizer

PROGRAM = Path(__file__).parents[2] / "eval" / "sparse_self.py"
FLAGS = (
    *("--target=target", "--dtype=float32", "--budgets=0.2", "--lengths=3", "--sparse.recent=8", "--sparse.longest=3"),
    *("--contexts", "950", "--prompts=1", "--max-new-tokens=24", "--long-contexts", "100", "200", "--rounds=2"),
    *("--random-model.hidden=32", "--random-model.layers=2", "--threads=1"),
)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sparse_self")
    model = tiny_model()
    model.config.max_position_embeddings = 1000
    model.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(PROGRAM), *FLAGS]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("sparse_self_program", PROGRAM)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def rows_of(folder, part):
    return json.loads((folder / f"runs/sparse_self/{part}.json").read_text())["rows"]


def test_both_parts(workdir):
    folder, printed = workdir
    real = rows_of(folder, "real")
    assert [(row["context"], row["budget"], row["length"]) for row in real] == [(950, 0.2, 3), (950, 0.2, "adaptive")]
    assert all(row["match_rate"] == 1 for row in real)
    assert real[0]["mean_drafted"] > 2.5
    assert 0 < real[0]["commit_ms"] < real[0]["draft_ms"]
    assert real[0]["token_ms"] < real[0]["draft_ms"] / 2.5
    long = rows_of(folder, "long")
    assert [row["context"] for row in long] == [100, 200]
    assert all(row["measured"].keys() == row["predicted"].keys() == {"3"} for row in long)
    assert sum(line.split()[:1] in (["950"], ["100"], ["200"]) for line in printed.splitlines()) == 4


def test_what_is_there_is_not_measured_again(workdir, program, monkeypatch, capsys):
    folder, _ = workdir
    monkeypatch.chdir(folder)
    before = [rows_of(folder, part) for part in ("real", "long")]
    program.main(parse_config(program.SparseSelfEval, FLAGS))
    assert [rows_of(folder, part) for part in ("real", "long")] == before
    program.main(parse_config(program.SparseSelfEval, (*FLAGS, "--parts", "long", "--long-contexts", "100", "150")))
    assert rows_of(folder, "real") == before[0]
    assert [row["context"] for row in rows_of(folder, "long")] == [100, 200, 150]
    assert "measured (predicted)" in capsys.readouterr().out
    with pytest.raises(UserError, match="other settings"):
        program.main(parse_config(program.SparseSelfEval, (*FLAGS, "--budgets", "0.3")))


def test_every_budget_accepts_what_it_was_seen_to(tmp_path, program, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = {(0.05, 9): 0.5, (0.1, 9): 0.6, (0.1, 20): 0.7, (0.3, 9): 0.8}
    rows = [
        {"context": c, "budget": b, "length": k, "conditional_acceptance": [alpha if k == 3 else 0, None]}
        for (b, c), alpha in seen.items()
        for k in (2, 3)
    ]
    rows.append({"context": 99, "budget": 0.05, "length": "adaptive", "conditional_acceptance": [0.9]})
    Path("real.json").write_text(json.dumps({"key": "", "rows": rows}))
    config = parse_config(program.SparseSelfEval, ["--budgets", "0.3", "0.2", "0.05", "--output=."])
    assert program.acceptance(config) == [[0.8], [0.7], [0.5]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--parts", "long", "--output", "empty"), "acceptance: got none"),
        (("--lengths", "21"), r"lengths: got \(21,\), allowed: from 1 to sparse.longest = 20"),
        (("--budgets", "1.5", "--parts", "long", "--acceptance", "0.5"), "budget: got 1.5"),
    ],
)
def test_bad_settings_get_one_clear_line(tmp_path, program, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        program.main(parse_config(program.SparseSelfEval, flags))
