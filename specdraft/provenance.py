"""Where a number or a file came from: versions, machine, date, hashes; and writing files so that none is ever half there.

It knows nothing of models or data: only bytes, JSON values, tensors and the machine.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from specdraft.config import UserError

PACKAGES = ("specdraft", "torch", "transformers", "accelerate", "safetensors", "tokenizers")


def hash_bytes(data: bytes) -> str:
    """First 16 hex digits of SHA-256: enough to tell two of anything apart, short enough for an error message."""
    return hashlib.sha256(data).hexdigest()[:16]


def hash_json(value: Any) -> str:
    """Hash of a JSON value, whatever the order of its keys."""
    return hash_bytes(json.dumps(value, sort_keys=True, ensure_ascii=False).encode())


def hash_file(path: Path) -> str:
    """Hash of a file's bytes, read in blocks."""
    with open(path, "rb") as file:
        return (
            hashlib.file_digest(file, "sha256").hexdigest()[:16]
            if hasattr(hashlib, "file_digest")
            else hash_bytes(file.read())
        )


def hash_tensors(tensors: dict[str, torch.Tensor]) -> str:
    """Hash of named tensors: names, shapes, types and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def provenance() -> dict[str, Any]:
    """Versions, machine, threads, commit and date: stands beside every recorded figure and in every checkpoint."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": _git_commit(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "machine": machine(),
    }


def has_bf16_products(device: str | torch.device) -> bool:
    """Whether matrix products in bf16 pay there: on a processor without instructions for them they take many times as long."""
    return torch.device(device).type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def machine() -> dict[str, Any]:
    """The hardware that a time was measured on. `memory_gb` is in units of 1e9 bytes."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpus": gpus,
    }


def others_cpu_share(seconds: float = 0.5) -> float:
    """Share (0..1) of all cores that processes other than this one used over the last `seconds`. Times taken while
    this is above a few per cent are not worth much: one busy neighbour slows small products several times."""
    process = psutil.Process()
    own = sum(process.cpu_times()[:2])
    start = time.perf_counter()
    total = psutil.cpu_percent(interval=seconds) / 100
    own = (sum(process.cpu_times()[:2]) - own) / (time.perf_counter() - start) / (os.cpu_count() or 1)
    return max(0.0, total - own)


def cache_folder() -> Path:
    """Where converted targets and compiled kernels are kept: $SPECDRAFT_CACHE, or ~/.cache/specdraft."""
    return Path(os.environ.get("SPECDRAFT_CACHE", "~/.cache/specdraft")).expanduser()


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path` (file or folder) and renames it on success; on failure nothing is left. What is
    written can be read by whom the umask allows."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        follow_umask(temporary)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(
            f"writing {path}: {error.strerror or error}; free some space or choose another folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True) if temporary.is_dir() else temporary.unlink(missing_ok=True)


def follow_umask(path: Path) -> None:
    """Give a file, or all files of a folder, the permissions of any new file: safetensors makes its own private."""
    umask = os.umask(0o077)
    os.umask(umask)
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            file.chmod(file.stat().st_mode & 0o7777 | 0o666 & ~umask)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON value atomically, indented, with a final newline."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Holds the lock of a file or folder that is written to; the system lets it go whenever this process ends.

    Raises:
        UserError: another process holds it.
    """
    lock = Path(path).with_name(f".{Path(path).name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{path}: another process is writing there; wait until it has ended, or give another path"
            ) from None
        yield


def require_disk(path: Path, needed_bytes: int, what: str) -> None:
    """Raises UserError where the disk of `path` has less than `needed_bytes` free."""
    folder = next(parent for parent in [Path(path).absolute(), *Path(path).absolute().parents] if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise UserError(
            f"{what}: needs {needed_bytes / 1e9:.1f} GB in {path}, {free / 1e9:.1f} GB are free; free some space or choose another folder"
        )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
