"""Products of a few rows of fp32 states with bf16 weights, on a processor with AVX2 or more: what a decoding step is made of.

Such a step waits for memory: thin_products.cpp reads every weight once, for up to 8 rows. torch reads them again for every row
where the processor has no bf16 instructions (8 rows take 7 times as long as one), or wants them in fp32: twice the memory
traffic. Where it has, they multiply pairs, and x is rounded to bf16 as torch would. The files are compiled on first use by the
C++ compiler, into ~/.cache/specdraft; where there is none, models run in torch, with a warning. The layers that are made of such
products are compiled with them (draft_layer.py, decode_layers.py), and a batch's attention (row_attention.py). It knows nothing
of models.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specdraft.config import UserError
from specdraft.provenance import atomic_path, cache_folder, has_bf16_products, hash_json

NAMES = (
    "thin.h",
    "thin_products.cpp",
    "draft_layer.cpp",
    "decode_layers.cpp",
    "row_attention.cpp",
    "largest.cpp",
    "cache_slots.cpp",
)
SOURCES = [Path(__file__).with_name(name) for name in NAMES]
MOST_LARGEST = 64
FLAGS = ("-O3", "-fopenmp", "-shared", "-fPIC", "-std=c++17")
AVX2 = ("-mavx2", "-mfma")
AVX512_BF16 = (*AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "bf16")), "-mprefer-vector-width=512")


class Sizes(ctypes.Structure):
    """Of a layer: H, I, h, k, d; and the epsilon of its norms. See thin.h, as for `Block`."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("width", "mlp_width", "heads", "kv_heads", "head_dim")),
        ("eps", ctypes.c_float),
    ]


class Block(ctypes.Structure):
    """Where the weights of a layer behind its queries, keys and values are."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("out", "out_bias", "gate_up", "gate_up_bias", "down", "down_bias", "mlp_norm")
    ]


def require_rows(q: Tensor, keys: Tensor, values: Tensor) -> None:
    """Their heads are d numbers, one behind the other. q [1,n,h,d]; keys, values [1,k,T,d]."""
    assert q.stride()[2:] == keys.stride()[2:] == (q.shape[3], 1), (q.stride(), keys.stride())
    assert keys.stride() == values.stride(), (keys.stride(), values.stride())
    assert q.dtype == keys.dtype == values.dtype == torch.float32, (q.dtype, keys.dtype, values.dtype)


@functools.cache
def available() -> bool:
    """Whether models with bf16 weights run in fp32 states here, whatever the number of rows: there is nothing better."""
    return not has_bf16_products("cpu") and library() is not None


def thin_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..,I] of any dtype -> x @ weight.T + bias [..,O] in fp32, for contiguous bf16 weights [O,I] on the CPU. No gradient.
    Where the file cannot be compiled, or the processor has no AVX2, by torch."""
    compiled = library()
    if compiled is None:
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    outputs, width = weight.shape
    rows = x.reshape(-1, width).float().contiguous()
    y = rows.new_empty(*x.shape[:-1], outputs)
    bias_at = None if bias is None else bias.data_ptr()
    compiled.thin_product(rows.data_ptr(), weight.data_ptr(), bias_at, y.data_ptr(), len(rows), width, outputs)
    return y


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits [w,S] -> of every row the `count` largest [w,count], largest first, their columns [w,count], and the log of the sum of all
    exponentials [w,1]. torch orders all columns of a row to find three."""
    compiled = _compiled_largest(logits, count)
    if compiled is None:
        return *logits.topk(count), logits.logsumexp(-1, keepdim=True)
    values, log_total = logits.new_empty(len(logits), count), logits.new_empty(len(logits), 1)
    places = torch.empty(len(logits), count, dtype=torch.int64)
    compiled(values, places, log_total)
    return values, places, log_total


def largest_into(logits: Tensor, values: Tensor, places: Tensor) -> None:
    """The first two of `largest`, into values and places [w,count], contiguous, which are there already."""
    compiled = _compiled_largest(logits, values.shape[1])
    if compiled is None:
        torch.topk(logits, values.shape[1], out=(values, places))
    else:
        compiled(values, places, None)


def _compiled_largest(logits: Tensor, count: int) -> Callable[[Tensor, Tensor, Tensor | None], None] | None:
    """Takes where to put the values, their columns, and the sums or None; None where it cannot be had for these."""
    compiled = library() if logits.dtype == torch.float32 and logits.device.type == "cpu" else None
    if compiled is None or count > MOST_LARGEST:
        return None
    logits = logits.contiguous()

    def run(values: Tensor, places: Tensor, log_total: Tensor | None) -> None:
        sums = None if log_total is None else log_total.data_ptr()
        compiled.largest(logits.data_ptr(), *logits.shape, count, values.data_ptr(), places.data_ptr(), sums)

    return run


def library() -> ctypes.CDLL | None:
    """The compiled files; None where the compiler cannot make them, or the processor cannot run them."""
    best = instructions()
    return None if best is None else compile_for(best)


@functools.cache
def instructions() -> tuple[str, ...] | None:
    """The compiler's flags for the best that this processor has; None = nothing that thin.h is written for."""
    if torch.cpu._is_avx512_bf16_supported():
        return AVX512_BF16
    return AVX2 if torch.cpu._is_avx2_supported() else None


@functools.cache
def compile_for(instructions: tuple[str, ...]) -> ctypes.CDLL | None:
    flags = (*FLAGS, *instructions)
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    texts = [source.read_text() for source in SOURCES]
    units = [str(source) for source in SOURCES if source.suffix == ".cpp"]
    binary = cache_folder() / "kernels" / f"thin_products-{hash_json([texts, flags])}.so"
    if not binary.exists():
        try:
            with atomic_path(binary) as written:
                subprocess.run([*compiler, *flags, *units, "-o", str(written)], capture_output=True, check=True)
        except (subprocess.CalledProcessError, OSError, UserError) as error:
            logging.getLogger(__name__).warning(
                f"{shlex.join(compiler)}: cannot compile the products of decoding steps ({_reason(error)}), which are several times "
                "slower without; install g++, or set CXX to a C++ compiler"
            )
            return None
    loaded = ctypes.CDLL(str(binary))
    p, n = ctypes.c_void_p, ctypes.c_long
    signatures = {
        "thin_product": [p, p, p, p, n, n, n],
        "draft_project": [p, p, p, p, n, p, p],
        "draft_finish": [p, p, n, p, p, p, n, n, p, n, p, p],
        "decode_layers": [p, p, n, p, p, p, p, p, p, n, n, p, n],
        "largest": [p, n, n, n, p, p, p],
        "move_slots": [p, n, n, n, n, p, n],
        "attend_rows_fp32": [p, p, p, p, p],
        "attend_rows_bf16": [p, p, p, p, p],
    }
    for name, arguments in signatures.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded


def _reason(error: Exception) -> str:
    """What the compiler said first, or the system."""
    if isinstance(error, subprocess.CalledProcessError):
        return error.stderr.decode(errors="replace").strip().partition("\n")[0]
    return str(error.__cause__ or error)
