"""eval/lossless.py and benchmarks/decode.py as users run them, on a tiny pair."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specdraft.decoding.measure import Divergence
from specdraft.models.checkpoint import save_drafter
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, new_drafter
from specdraft.models.target import TargetModel
from specdraft.testing import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A tiny target; a drafter that shares enough of it to be accepted now and then; one that never is."""
    folder = tmp_path_factory.mktemp("lossless")
    tiny_model().save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    target = TargetModel.load(str(folder / "target"), dtype=torch.float32)
    torch.manual_seed(0)
    useful = new_drafter(target, DrafterConfig(), HeadConfig("full", init="svd"))
    save_drafter(folder / "useful", useful, target, "", {}, torch.float32)
    torch.nn.init.zeros_(useful.norm.weight)  # all logits equal: token 0 always
    save_drafter(folder / "useless", useful, target, "", {}, torch.float32)
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
    done = lossless(workdir, "--drafter=useful", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["breaks"] == []
    assert result["results"]["float32"]["match_rate"] == 1
    assert result["results"]["float32"]["tau"] > 1
    assert result["results"]["bfloat16"]["dtype"] == "bfloat16"


def test_zero_acceptance_is_a_break(workdir):
    """A broken drafter is still lossless (papers 9.6): the check must not be content with that."""
    done = lossless(workdir, "--drafter=useless", "--quick", "--dtypes", "float32")
    assert done.returncode == 1
    assert "BREAK: float32: none of the first drafted tokens was accepted" in done.stdout
    assert "100% of 4 outputs equal" in done.stdout


@pytest.mark.parametrize(("margin", "breaks"), [(1e-4, 0), (0.5, 1)])
def test_a_divergence_that_rounding_does_not_explain_is_a_break(capsys, margin, breaks):
    result = SimpleNamespace(
        match_rate=0.5,
        prompts=2,
        tau=1.5,
        conditional_acceptance=[0.5],
        speedup=1.0,
        divergences=[Divergence(1, 7, margin)],
    )
    report = runpy.run_path(str(ROOT / "eval" / "lossless.py"))["report"]
    assert len(report("float32", result)) == breaks
    assert f"prompt 1 parts at new token 7, top-2 margin {margin}" in capsys.readouterr().out


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
