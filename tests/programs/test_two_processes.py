"""Real launches of a tiny run: two processes against one, the launch files, a process that is killed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "tests" / "programs" / "tiny_training.py")
LAUNCH = ROOT / "recipes" / "launch"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]

pytestmark = pytest.mark.slow


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT)


def records(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """One process that accumulates twice: the global batch of two processes."""
    output = tmp_path_factory.mktemp("one") / "run"
    done = run(sys.executable, PROGRAM, "--output", str(output), "--train.accumulation", "2")
    assert done.returncode == 0, done.stderr[-2000:]
    return output


def assert_same_run(output: Path, expected: Path) -> None:
    got, wanted = records(output), records(expected)
    assert [record["step"] for record in got] == [record["step"] for record in wanted]
    for one, other in zip(got, wanted, strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() - {"seconds", "tokens_per_second"}:
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), (one["step"], key)
        for key in ("alpha", "hit", "joint", "eval_alpha", "eval_hit", "eval_joint"):
            assert all(0 <= value <= 1 for value in one.get(key, []))
    weights, reference = (load_file(folder / "best.safetensors") for folder in (output, expected))
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, reference[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_two_processes_are_one(one_process, tmp_path):
    """Faults 21, 28, 31: DDP over gloo gives the losses, metrics and weights of one process on the same global batch. On the
    way a signal that only one of the two gets makes both save and stop at the same step; and launch/cpu2.yaml starts two."""
    options = ["--output", str(tmp_path / "run"), "--train.processes", "2"]
    stopped = run(*TORCHRUN, PROGRAM, *options, "--kill", "SIGTERM", "--kill-at", "5", "--kill-rank", "1")
    assert stopped.returncode != 0
    assert "exitcode  : 143" in stopped.stderr, stopped.stderr[-2000:]
    assert len(records(tmp_path / "run")) == 5 + 2
    assert (tmp_path / "run" / "state" / "step-00000005" / "complete.json").exists()
    done = run(*ACCELERATE, "--config_file", str(LAUNCH / "cpu2.yaml"), PROGRAM, *options)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("going on from") == 1
    assert_same_run(tmp_path / "run", one_process)


def test_killed_process_resumes_exactly(one_process, tmp_path):
    """Fault 26: bit for bit, over a real SIGKILL in the middle of a step."""
    command = [sys.executable, PROGRAM, "--output", str(tmp_path / "run"), "--train.accumulation", "2"]
    assert run(*command, "--kill", "SIGKILL", "--kill-at", "5").returncode == -9
    assert [path.name for path in (tmp_path / "run" / "state").iterdir()] == ["step-00000003"]
    assert run(*command).returncode == 0
    for name in ("best.safetensors", "state/step-00000010/model.safetensors", "state/step-00000010/optimizer.bin"):
        assert (tmp_path / "run" / name).read_bytes() == (one_process / name).read_bytes(), name


@pytest.mark.deepspeed
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_zero_is_one_process(one_process, tmp_path, stage, precision):
    """launch/zero2.yaml and zero3.yaml: DeepSpeed's own division, clipping and precision do what ours do; killed and resumed on
    the way; and the drafter is whole and free of DeepSpeed afterwards, as tiny_training checks."""
    config = (LAUNCH / f"{stage}.yaml").read_text().replace("num_processes: 8", "num_processes: 2")
    (tmp_path / "zero.yaml").write_text(config)
    command = [*ACCELERATE, "--config_file", str(tmp_path / "zero.yaml"), PROGRAM, "--output", str(tmp_path / "run")]
    command += ["--train.processes", "2", "--train.mixed-precision", precision]
    assert run(*command, "--kill", "SIGKILL", "--kill-at", "5").returncode != 0
    done = run(*command)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("going on from") == 1
    assert done.stdout.count("usable") == 2
    for record, expected in zip(records(tmp_path / "run"), records(one_process), strict=True):
        for key in {"loss", "grad_norm", "eval_alpha"} & record.keys():
            assert record[key] == pytest.approx(expected[key], rel=1e-5 if precision == "no" else 2e-2)


def test_objective_under_fsdp2():
    done = run(*TORCHRUN, str(ROOT / "tests" / "programs" / "sharded_objective.py"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("sharded gradients are the whole ones") == 2


def test_one_process_where_two_were_wanted(tmp_path):
    """accelerate's MULTI_CPU starts one process in silence; `processes` says so, in one line, before anything is written."""
    config = (LAUNCH / "cpu2.yaml").read_text().replace("distributed_type: MULTI_GPU", "distributed_type: MULTI_CPU")
    (tmp_path / "multi_cpu.yaml").write_text(config)
    options = ["--output", str(tmp_path / "run"), "--train.processes", "2"]
    done = run(*ACCELERATE, "--config_file", str(tmp_path / "multi_cpu.yaml"), PROGRAM, *options)
    assert done.returncode != 0
    assert "error: train.processes: wanted 2, got 1" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("path", sorted(LAUNCH.glob("*.yaml")), ids=lambda path: path.stem)
def test_launch_files_are_valid(path):
    """accelerate knows every key; mixed precision is left to the recipe; the first line says which hardware it is for."""
    config = load_config_from_file(str(path))
    assert config.mixed_precision == "no"
    assert config.use_cpu == path.stem.startswith("cpu")
    assert config.num_processes == {"cpu": 1, "cpu2": 2, "one_gpu": 1}.get(path.stem, 8)
    assert path.read_text().startswith("# ")
    assert ("CPU" in path.read_text().splitlines()[0]) == config.use_cpu
