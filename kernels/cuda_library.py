"""The CUDA C++ kernels of `csrc/cuda` as a library of C functions, called through ctypes.

The device code includes no header of torch, so nvcc alone builds it in seconds, a CPU-only machine can compile it too, and no torch release
breaks it. `setup.py` builds it into the package where torch is a CUDA build and nvcc is there; elsewhere it is built at first use, for
the card at hand, into the cache. Either way its name tells what it was built from, so changed sources never meet an old library.
The products for few rows are right on an H200 but no faster than Triton's there (bench/LOG.md), so SPECDEC_CUDA=1 is what switches them on;
SPECDEC_CUDA=0 goes without any of these kernels. setup.py runs this file, hence it imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent  # specdec, through the link or installed
SOURCES = PACKAGE / "csrc" / "cuda"
FLAGS = ("-O3", "-std=c++17", "-lineinfo")


def find_nvcc() -> Path | None:
    """nvcc of CUDA_HOME, of the PATH, of the usual place, or of the nvidia-cuda-nvcc package."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    found = shutil.which("nvcc")
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(place) / "cu13" for place in (spec.submodule_search_locations or ())] if spec else []
    candidates = [home / "bin" / "nvcc" for home in homes] + ([Path(found)] if found else [])
    candidates += [home / "bin" / "nvcc" for home in (Path("/usr/local/cuda"), *packages)]
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


def arguments(capabilities: Iterable[int]) -> list[str]:
    """nvcc's flags for cards of these compute capabilities (90 for 9.0, whose own instructions have a target of their own)."""
    names = [f"{c}a" if c == 90 else f"{c}" for c in capabilities]
    return [*FLAGS, *(f"-gencode=arch=compute_{name},code=sm_{name}" for name in names)]


def build(nvcc: Path, to: Path, capabilities: Iterable[int], *more: str) -> str:
    """Builds the library into `to`, which appears whole or not at all. Returns the compiler's words; RuntimeError with them on failure."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        out = Path(folder) / to.name
        libraries = f"-L{nvcc.resolve().parents[1] / 'lib'}"  # where the package keeps what nvcc looks for in lib64
        command = [nvcc, *arguments(capabilities), *more, "-shared", "-Xcompiler", "-fPIC", libraries, "-o", out, *SOURCES.glob("*.cu")]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"nvcc failed: {done.stderr.strip()[-2000:]}")
        out.replace(to)
        return done.stderr


def digest() -> str:
    """Of the sources and the flags."""
    total = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sorted(SOURCES.iterdir()):
        total.update(source.name.encode() + source.read_bytes())
    return total.hexdigest()[:16]


def prebuilt() -> Path:
    """Where setup.py puts the library of these sources."""
    return PACKAGE / f"_cuda.{digest()}.so"


def missing() -> str | None:
    """Why there can be no library in this process, or None. Builds nothing."""
    if os.environ.get("SPECDEC_CUDA") == "0":
        return "SPECDEC_CUDA=0 does without"
    return None if find_nvcc() or prebuilt().exists() else "not built with the package, and no nvcc to build it with"


def missing_products() -> str | None:
    """`missing` of the products for few rows."""
    return missing() if os.environ.get("SPECDEC_CUDA") == "1" else "no faster than Triton so far; SPECDEC_CUDA=1 uses it"


@cache
def library(capability: int) -> ctypes.CDLL:
    """The library, built first if need be. OSError or RuntimeError where that fails."""
    path = prebuilt()
    if not path.exists():
        home = os.environ.get("SPECDEC_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "specdec")
        path = Path(home) / "cuda" / f"{digest()}.{capability}.so"
    if not path.exists():
        nvcc = find_nvcc()
        if nvcc is None:
            raise RuntimeError(missing())
        build(nvcc, path, [capability])
    return ctypes.CDLL(str(path))
