"""The CUDA fragment linear layer on the CPU: its very source, compiled by the C++ compiler against `cuda/emulator.h`."""

from __future__ import annotations

import ctypes
import os
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from specdec.kernels.cuda_fragments import NUMBERS, Fragments, prepare_call
from specdec.kernels.cuda_library import SOURCES

HERE = Path(__file__).with_name("cuda")
MARGIN = 4096


@cache
def emulated(source: str) -> ctypes.CDLL:
    """`cuda/<source>` compiled against the emulated machine, once per process; a compiler is part of what the tests need."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "emulated.so"
        flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
        command = [os.environ.get("CXX", "g++"), *flags, f"-I{HERE}", f"-I{SOURCES}", str(HERE / source), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(out))


def emulator() -> ctypes.CDLL:
    """Of the fragment linear layer."""
    return emulated("emulated.cpp")


def guarded(like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(a tensor like that, full of NaN; the margins around it)."""
    whole = torch.full((like.numel() + 2 * MARGIN,), torch.nan, dtype=like.dtype)
    return whole[MARGIN:-MARGIN].view(like.shape), [whole[:MARGIN], whole[-MARGIN:]]


def emulate(x: Tensor, w: Fragments, *, ctas: int, stages: int = 3, seed: int = 0) -> Tensor:
    """y of at most 64 rows on a card of `ctas` multiprocessors; the order of CTAs and threads is drawn from `seed`."""
    call, (y, _, partial) = prepare_call(x, w, ctas)
    (y, beside_y), (partial, beside_partial) = guarded(y), guarded(partial)
    call.y, call.partial, call.stages = y.data_ptr(), partial.data_ptr(), stages
    emulator().emulate_fragment_linear(ctypes.byref(call), w.FORMAT, NUMBERS[x.dtype], ctas, ctypes.c_uint64(seed))
    assert not w.arrived.any(), "the counters must be zero again"
    for margin in (*beside_y, *beside_partial):
        assert margin.isnan().all(), "a write outside the results"
    return y
