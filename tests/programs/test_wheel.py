"""The wheel, installed somewhere else, runs from anywhere; and it ships no top-level `eval`, `recipes` or `tests`."""

import os
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_installed_wheel_runs_the_programs(tmp_path):
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    wheel = next(tmp_path.glob("*.whl"))
    top = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert top == {"specdraft", next(name for name in top if name.endswith(".dist-info"))}
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    packages = next((venv / "lib").glob("python*")) / "site-packages"
    (packages / "dependencies.pth").write_text(
        "\n".join(site.getsitepackages())
    )  # torch and the rest, without this project
    pip = [
        str(venv / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--force-reinstall",
        str(wheel),
    ]
    subprocess.run(pip, check=True, capture_output=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    where = subprocess.run(
        [str(venv / "bin" / "python"), "-c", "import specdraft, specdraft.recipes; print(specdraft.__file__, specdraft.recipes.__file__)"],
        capture_output=True, text=True, cwd=tmp_path, env=env,
    )  # fmt: skip
    assert where.stdout.count(str(venv)) == 2, where
    listing = subprocess.run(
        [str(venv / "bin" / "specdraft"), "--help"], capture_output=True, text=True, cwd=tmp_path, env=env
    )
    assert "train-slimspec" in listing.stdout, listing.stderr
    usage = subprocess.run(
        [str(venv / "bin" / "specdraft"), "train-slimspec", "--help"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=env,
    )
    assert usage.returncode == 0, usage.stderr
    assert "--head.rank" in usage.stdout
    unknown = subprocess.run(
        [str(venv / "bin" / "specdraft"), "nothing"], capture_output=True, text=True, cwd=tmp_path, env=env
    )
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("error: specdraft nothing: no such program")
