"""eval/lossless.py, eval/bench.py and benchmarks/decode.py as users run them, on a tiny pair."""

import copy
import itertools
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specdraft.config import UserError
from specdraft.decoding.bench import Request
from specdraft.decoding.check import GreedyCheck
from specdraft.decoding.length_policies import LENGTH_POLICIES
from specdraft.decoding.vocab_policies import VOCAB_POLICIES
from specdraft.models.checkpoint import save_drafter
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, new_drafter
from specdraft.models.target import TargetModel
from specdraft.testing import tiny_model, tiny_target, tiny_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A tiny target; a drafter that shares enough of it to be accepted now and then; one that never is; one of other layers."""
    folder = tmp_path_factory.mktemp("lossless")
    tiny_model().save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    target = TargetModel.load(str(folder / "target"), dtype=torch.float32)
    torch.manual_seed(0)
    useful = new_drafter(target, DrafterConfig(), HeadConfig("full", init="svd"))
    save_drafter(folder / "useful", useful, target, "", {}, torch.float32)
    low = new_drafter(target, DrafterConfig(), HeadConfig("lowrank", rank=8, init="random"))
    save_drafter(folder / "low", low, target, "", {}, torch.float32)
    torch.nn.init.zeros_(useful.norm.weight)  # all logits equal: token 0 always
    save_drafter(folder / "useless", useful, target, "", {}, torch.float32)
    other = TargetModel.load(str(folder / "target"), dtype=torch.float32, tap_layers=(1, 3, 6))
    odd = new_drafter(other, DrafterConfig(), HeadConfig("full", init="svd"))
    save_drafter(folder / "odd", odd, other, "", {}, torch.float32)
    rows = [{"turns": [f"Write {i} words about the sea."]} for i in range(6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(program, *flags, cwd):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / program), *flags]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def lossless(workdir, *flags):
    return run("eval/lossless.py", "--target=target", "--prompts=prompts.jsonl", *flags, cwd=workdir)


def test_a_lossless_pair_passes(workdir):
    done = lossless(workdir, "--drafter=useful", "--count=4", "--max-new-tokens=32", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["breaks"] == []
    sides = {f"{name}/fixed" for name in VOCAB_POLICIES} | {f"all/{name}" for name in LENGTH_POLICIES}
    sides |= {f"{name}/{tree}" for name in VOCAB_POLICIES for tree in ("eagle2", "sampled")}
    for dtype in ("float32", "bfloat16"):
        assert set(result["results"][dtype]) == sides
    assert all(side["match_rate"] == 1 for side in result["results"]["float32"].values())
    assert result["results"]["float32"]["all/fixed"]["tau"] > 1


def test_a_drafter_of_other_layers_is_checked_and_measured(workdir):
    """The programs load the target with the layers that the drafter's config.json names."""
    done = lossless(workdir, "--drafter=odd", "--quick", "--dtypes", "float32")
    assert "float32, all/fixed: 100% of 2 outputs equal" in done.stdout, done.stderr
    (workdir / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    flags = ("--drafters", "odd", "--tasks", "qa", "--output=odd-bench", "--repeats=1")
    done = bench(workdir, *flags)
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, (workdir / "odd-bench" / "results.jsonl").read_text().splitlines())
    assert [line["name"] for line in lines] == ["target alone", "odd/all/fixed"]


def test_zero_acceptance_is_a_break(workdir):
    """A broken drafter is still lossless (papers 9.6): the check must not be content with that."""
    done = lossless(workdir, "--drafter=useless", "--quick", "--dtypes", "float32")
    assert done.returncode == 1
    assert "BREAK: float32, all/fixed: none of the first drafted tokens was accepted" in done.stdout
    assert "float32, nanospec/fixed: 100% of 2 outputs equal" in done.stdout


@pytest.mark.parametrize(("margin", "breaks"), [(1e-4, 0), (0.5, 1)])
def test_a_divergence_that_rounding_does_not_explain_is_a_break(capsys, margin, breaks):
    side = GreedyCheck(2, 0.5, [{"request": "q1", "index": 7, "margin": margin}], 1.5, 5, 10, True)
    report = runpy.run_path(str(ROOT / "eval" / "lossless.py"))["report"]
    assert len(report("float32", "all/fixed", side)) == breaks
    assert f"float32, all/fixed: q1 parts at new token 7, top-2 margin {margin}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("accepted", "tried", "is_plain", "breaks"), [(0, 3, False, 0), (0, 3, True, 1), (0, 20, False, 1)]
)
def test_no_acceptance_is_a_break_where_enough_was_tried(accepted, tried, is_plain, breaks):
    side = GreedyCheck(2, 1.0, [], 1.0, accepted, tried, is_plain)
    report = runpy.run_path(str(ROOT / "eval" / "lossless.py"))["report"]
    assert len(report("float32", "all/svip", side)) == breaks


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 0}, "count: got 0, allowed: 1 or more"),
        ({"count": -1}, "count: got -1, allowed: 1 or more"),
        ({"drafted": 0}, "drafted: got 0, allowed: 1 or more"),
        ({"dtypes": ()}, "dtypes: got none, allowed: one or more"),
    ],
)
def test_a_check_of_nothing_is_refused(settings, message):
    program = runpy.run_path(str(ROOT / "eval" / "lossless.py"))
    with pytest.raises(UserError, match=message):
        program["main"](program["LosslessConfig"](**settings))


@pytest.mark.slow
def test_every_pair_of_policies(workdir):
    flags = ("--drafter=useful", "--quick", "--every-pair", "--dtypes", "float32")
    done = lossless(workdir, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    pairs = [f"float32, {vocab}/{length}:" for vocab in VOCAB_POLICIES for length in LENGTH_POLICIES]
    assert all(any(line.startswith(pair) for line in done.stdout.splitlines()) for pair in pairs)


BENCH = (
    "--target=target",
    "--dtype=float32",
    "--prompts=questions.jsonl",
    "--output=bench",
    "--max-new-tokens=12",
    "--repeats=2",
    "--cost-prompts=2",
    "--cost-tokens=24",
    "--policies.most=3",
    "--policies.drafted=3",
)


def bench(workdir, *flags):
    return run("eval/bench.py", *BENCH, *flags, cwd=workdir)


QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Write of the sea.", "Again."]},
    {"question_id": 200, "category": "qa", "turns": ["What is wind?"]},
]


def read_results(workdir):
    return [json.loads(line) for line in (workdir / "bench" / "results.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_benchmark(workdir):
    """Drafters x policies x tasks, the target alone always among them; then a second run, which goes on from the first, at one
    temperature more."""
    (workdir / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    flags = ("--drafters", "useful", "low", "--vocab", "all", "nanospec", "--trees", "chain", "eagle2", "sampled")
    done = bench(workdir, *flags)
    assert done.returncode == 0, done.stderr
    assert "3 requests of 2 prompts; 0 turns left out" in done.stdout
    lines = read_results(workdir)
    sides = itertools.product(("useful", "low"), ("all", "nanospec"), ("fixed", "eagle2", "sampled"))
    names = ["target alone", *map("/".join, sides)]
    cells = [(line["task"], line["name"]) for line in lines]
    assert sorted(cells) == sorted((task, name) for task in ("mt_bench", "qa", "all") for name in names)
    by_name = {line["name"]: line for line in lines if line["task"] == "all"}
    assert all(line["match_rate"] == 1 for name, line in by_name.items() if name != "target alone")
    assert by_name["target alone"]["speedup"] == 1
    assert by_name["useful/nanospec/fixed"]["live_rows"] > 0
    assert by_name["low/all/fixed"]["nu"] > 0
    assert by_name["useful/all/fixed"]["hindsight_length"] >= 0
    assert by_name["useful/all/eagle2"]["hindsight_length"] is None
    for line in lines:
        assert (line["requests"], line["repeats"]) == ({"mt_bench": 2, "qa": 1, "all": 3}[line["task"]], 2)
        assert line["config"]["policies"]["most"] == 3
        assert [{"machine", "versions", "date"} <= set(one) for one in line["provenance"]] == [True]

    raw = {path: path.stat().st_mtime_ns for path in (workdir / "bench" / "raw").iterdir()}
    assert len(raw) == 2 * 2
    removed, *others = raw
    removed.unlink()
    for path in others:
        path.write_text(path.read_text().replace(lines[0]["provenance"][0]["date"], "2001-01-01"))
    raw = {path: path.stat().st_mtime_ns for path in others}
    again = bench(workdir, *flags)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("contenders\n") == 1
    assert [path.stat().st_mtime_ns for path in others] == list(raw.values())
    assert removed.exists()
    found = read_results(workdir)
    assert len(found) == len(lines)
    dates = {line["task"]: {one["date"] for one in line["provenance"]} for line in found}
    assert all("2001-01-01" in of for of in dates.values()), "a measurement keeps its date"
    assert len(dates["all"]) == 2


def test_a_measurement_is_that_of_its_device_and_precision():
    """Whoever runs the same command on a GPU does not get the CPU's times."""
    program = runpy.run_path(str(ROOT / "eval" / "bench.py"))
    here, requests = tiny_target(), [Request("q1", "qa", [1, 2])]
    elsewhere, rounded = copy.copy(here), copy.copy(here)
    elsewhere.device, rounded.step_dtype = torch.device("meta"), torch.bfloat16
    runs = [
        program["Run"](program["BenchConfig"](), target, requests, 0, {(0.0, 1): {}})
        for target in (here, elsewhere, rounded)
    ]
    assert len({program["unit_path"](run, (0.0, 1), "qa", 0) for run in runs}) == 3


def test_the_benchmark_at_temperature_1_in_batches(workdir):
    (workdir / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    flags = (
        "--drafters",
        "low",
        "--length",
        "libraspec",
        "--trees",
        "chain",
        "sampled",
        "--temperatures",
        "1",
        "--batches",
        "2",
        "--tasks",
        "mt_bench",
        "--output=sampled",
    )
    done = bench(workdir, *flags)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (workdir / "sampled" / "results.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["target alone", "low/all/libraspec", "low/all/sampled"]
    assert lines[2]["tree"]["shape"] == "sampled"
    assert lines[1]["length"]["retreats"] is False
    assert lines[1]["batch"] == 2
    assert "match_rate" not in lines[1]


@pytest.mark.slow
def test_the_benchmark_of_the_target_that_drafts_for_itself(workdir):
    """Beside a drafter, in chains of one request, greedy and sampled; with a part of its positions."""
    (workdir / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    flags = [
        *("--drafters", "sparse_self", "low", "--length", "fixed", "entropy", "expected_speedup", "--output=self"),
        *("--trees", "chain", "eagle2", "--temperatures", "0", "1", "--batches", "1", "2", "--repeats=1"),
        *("--policies.sparse.recent=8", "--policies.sparse.budget=0.2", "--cost-prompts=4", "--cost-tokens=64"),
    ]
    done = bench(workdir, *flags)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (workdir / "self" / "results.jsonl").read_text().splitlines()]
    own = [line for line in lines if line["drafter"] == "sparse_self"]
    assert {(line["name"], line["temperature"], line["batch"]) for line in own} == {
        (f"sparse_self/all/{length}", temperature, 1)
        for length in ("fixed", "entropy", "expected_speedup")
        for temperature in (0.0, 1.0)
    }
    assert any(line["name"] == "low/all/eagle2" and line["batch"] == 2 for line in lines)
    assert not any("nu" in line for line in lines if line["drafter"] == "low")
    for line in own:
        assert line["sparse"]["recent"] == 8
        assert line.get("match_rate", 1) == 1
        assert line["tau"] == pytest.approx(line["tau_identity"])
        assert 0 <= line["hindsight_length"] <= 3
        assert 0 <= line["hindsight_distance"] <= 3
    costs = [json.loads(path.read_text()) for path in (workdir / "self" / "costs").glob("*/costs.json")]
    assert [len(table["draft"]) for table in costs] == [4] * 4  # two drafters, two temperatures


def test_the_benchmark_with_int8_heads(workdir):
    """Every drafter twice, in its weights' dtype and with its head's rows in INT8, which is compared with the full head as it is."""
    (workdir / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    flags = ("--drafters", "useful", "--head-dtypes", "own", "int8", "--tasks", "qa", "--output=int8", "--repeats=1")
    done = bench(workdir, *flags)
    assert done.returncode == 0, done.stderr
    lines = {
        line["name"]: line for line in map(json.loads, (workdir / "int8" / "results.jsonl").read_text().splitlines())
    }
    assert list(lines) == ["target alone", "useful/all/fixed", "useful int8/all/fixed"]
    assert [lines[name]["head_dtype"] for name in list(lines)[1:]] == ["own", "int8"]
    assert lines["useful int8/all/fixed"]["match_rate"] == 1
    assert lines["useful int8/all/fixed"]["nu"] != 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "error: drafters: got none, allowed: one or more"),
        (
            ["--drafters", "useful", "--vocab", "nanospec", "--head-dtypes", "int8"],
            "head_dtypes: got int8 with vocab nanospec, allowed: all",
        ),
        (
            ["--drafters", "useful", "--vocab", "few", "--prompts=prompts.jsonl"],
            "vocab: got 'few', allowed: all, frequency",
        ),
        (["--drafters", "useful", "--tasks", "poems", "--prompts=prompts.jsonl"], "tasks: got poems, allowed: other"),
        (["--drafters", "nowhere"], "has no config.json"),
        (
            ["--drafters", "useful", "odd", "--prompts=prompts.jsonl"],
            "drafters: odd reads the target's layers (1, 3, 6), allowed: (2, 4, 5), those of useful",
        ),
        (
            ["--drafters", "useful", "--policies.evospec.across-requests"],
            "error: policies.evospec.across_requests: got true, allowed: false, as contenders would learn",
        ),
    ],
)
def test_bad_input_of_the_benchmark(workdir, flags, message):
    done = bench(workdir, *flags)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "error: drafter: got none, and there is none under runs/"),
        (["--drafter=nowhere"], "has no config.json"),
        (["--drafter=useful", "--dtypes", "int8"], "error: dtypes: got 'int8', allowed: float32, bfloat16"),
    ],
)
def test_bad_input(workdir, flags, message):
    done = lossless(workdir, *flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_decode_benchmark(workdir):
    done = run(
        "benchmarks/decode.py",
        "--json",
        "--target=target",
        "--dtype=float32",
        "--prompts=2",
        "--max-new-tokens=12",
        "--trimmed=64",
        "--ranks",
        "4",
        "8",
        cwd=workdir,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["loop_over_generate"] == pytest.approx(
        result["loop_tokens_per_second"] / result["generate_tokens_per_second"]
    )
    assert list(result["heads"]) == ["full", "trimmed 64", "low rank 4", "low rank 8"]
    assert all(value > 0 for row in result["heads"].values() for value in row.values())
