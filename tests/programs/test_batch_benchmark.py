"""benchmarks/batch.py as a user runs it, on a tiny target."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specdraft.models.checkpoint import save_drafter
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, new_drafter
from specdraft.models.target import TargetModel
from specdraft.testing import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/batch.py"), *flags],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_more_rows_than_prompts_are_refused(tmp_path):
    done = run(tmp_path, "--prompts=100000", "--batches", "1", "50000")
    assert done.returncode == 2
    assert "allowed: at least the largest batch, 50000" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("drafter", ["none", "of other layers"])
def test_the_benchmark_of_batches(drafter, tmp_path):
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    own = []
    if drafter == "of other layers":
        target = TargetModel.load(str(tmp_path / "target"), dtype=torch.float32, tap_layers=(1, 3, 6))
        odd = new_drafter(target, DrafterConfig(), HeadConfig("full", init="svd"))
        save_drafter(tmp_path / "odd", odd, target, "", {}, torch.float32)
        own = ["--drafter=odd"]
    flags = ["--target=target", "--dtype=float32", "--batches", "1", "3", "--prompts=3", "--max-new-tokens=6"]
    tree = ["--total-tokens=9", "--depth=3", "--top-k=3", "--repeats=1", "--json"]
    done = run(tmp_path, *flags, *tree, *own)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["throughput"]) == {"1", "3"}
    for sides in result["throughput"].values():
        assert set(sides) == {"target alone", "chain", "tree"}
        assert sides["target alone"]["speedup"] == 1
        assert sides["target alone"]["tau"] == 1
        assert all(row["tokens_per_second"] > 0 for row in sides.values())
    assert {"select", "place", "verify", "keep"} < set(result["python_ms"])
    assert all(milliseconds > 0 for milliseconds in result["python_ms"].values())
