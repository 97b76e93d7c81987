"""Where a number or a file came from: versions, machine, date, hashes; and writing files so that none is ever half there.

It knows nothing of models or data: only bytes, JSON values, tensors and the machine.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import glob
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError

from specdraft.config import UserError

PACKAGES = ("specdraft", "torch", "transformers", "accelerate", "safetensors", "tokenizers")
# What a process left that is not here (any more) is removed when nobody has touched it for so long: it may run on another machine.
UNTOUCHED_S = 60.0


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
    """Yields a temporary path beside `path` (file or folder) and renames it on success; on failure nothing is left, and what a killed
    process left before is removed. What is written can be read by whom the umask allows.

    Raises:
        UserError: no space, no permission; a file where a folder is, whose contents would be lost.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    _remove(temporary)  # of an earlier process with this number: in a container they come again
    try:
        yield temporary
        follow_umask(temporary)
        if path.is_dir() and not path.is_symlink():
            if not temporary.is_dir():
                require_no_folder(path, "writing")
            shutil.rmtree(path)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        reason = _system_reason(error)
        if reason is None:
            raise
        raise UserError(f"writing {path}: {reason}; free some space or choose another folder") from error
    finally:
        _remove(temporary)


def require_no_folder(path: Path, what: str) -> None:
    """Raises UserError where a file is to be written and a folder is: before the work whose result it is."""
    if Path(path).is_dir():
        raise UserError(f"{what} {path}: is a folder, allowed: a file; give another path")


def require_writable(folder: Path, what: str) -> None:
    """Makes the folder that results are to be written to. Raises UserError where that cannot be: before the work."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{what} {folder}: cannot be made ({error.strerror}); give another path") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{what} {folder}: may not be written to; give another path, or change its permissions")


def _remove_leftovers(path: Path) -> None:
    """Temporary files and folders for `path` of processes that were killed."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        pid = leftover.name[len(path.name) + 2 : -len(".tmp")]
        with contextlib.suppress(OSError, OverflowError):
            untouched = time.time() - max(part.stat().st_mtime for part in (leftover, *leftover.rglob("*")))
            if pid.isdecimal() and not psutil.pid_exists(int(pid)) and untouched > UNTOUCHED_S:
                _remove(leftover)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _system_reason(error: OSError | SafetensorError) -> str | None:
    """What the system said; None for an error of safetensors' own. It has system errors in its text: `.. (os error 28)`."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = re.search(r"([^:]+) \(os error \d+\)", str(error))
    return None if found is None else found[1].strip()


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


def json_fault(error: ValueError | RecursionError) -> str:
    """What is wrong with a text that is not JSON. A number of thousands of digits, or brackets as deep, is no JSONDecodeError."""
    return f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else f"{error!s:.80}"


def read_json(path: Path, what: str, advice: str, keys: Collection[str] = ()) -> Any:
    """A JSON file; where `keys` are given, an object that has them. Raises UserError: not there, or not such a file; with what it should
    be, and what to do."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{what} {path}: cannot be read ({error.strerror}); {advice}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{what} {path}: is not JSON; {advice}") from None
    if keys and not (isinstance(found, dict) and found.keys() >= set(keys)):
        raise UserError(f"{what} {path}: is no JSON object with {', '.join(keys)}; {advice}")
    return found


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
