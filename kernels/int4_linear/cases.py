"""Cases of the linear layer over 4-bit weights: groups of every published size, symmetric or not, edge rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from specdec.kernels.case import Case, randn
from specdec.kernels.fp8_linear.cases import awkward_rows
from specdec.kernels.inputs import generator
from specdec.kernels.int4_linear.weight import Int4Weight


def random_int4(rows: int, cols: int, group: int, *, symmetric: bool, dtype: torch.dtype = torch.float32, seed: int = 0) -> Int4Weight:
    """Codes and zero points with equal chance, the size trained weights have."""
    g = generator(seed)
    words = torch.randint(-(2**31), 2**31, (rows, cols // 8), generator=g).int()
    scale = (torch.rand(rows, cols // group, generator=g) * 0.01 + 1e-4).to(dtype)
    zero = torch.randint(0, 16, (rows, cols // group), dtype=torch.uint8, generator=g)
    return Int4Weight(words, scale, torch.full_like(zero, 8) if symmetric else zero, group)


def int4_linear() -> Iterator[Case]:
    for m in (0, 1, 3, 17, 33, 65):
        yield Case(f"{m}x40x64", (randn(m, 64), random_int4(40, 64, 32, symmetric=False)), row_args=(0,))
    odd = ((1, 1, 8, 8), (2, 33, 72, 24), (3, 130, 256, 128), (5, 48, 256, 64), (4, 40, 200, 200))
    for m, n, k, group in (*odd, (2, 960, 576, 64), (1, 576, 1536, 128)):
        for symmetric in (True, False):
            weight = random_int4(n, k, group, symmetric=symmetric)
            yield Case(f"{m}x{n}x{k}, group {group}, symmetric {symmetric}", (randn(m, k), weight), row_args=(0,))
    for dtype in (torch.bfloat16, torch.float16):
        weight = random_int4(130, 256, 128, symmetric=False, dtype=dtype)
        yield Case(str(dtype), (randn(17, 256).to(dtype), weight), row_args=(0,))
    zeros = random_int4(40, 256, 64, symmetric=True)
    zeros.data[:, :16] = -0x77777778  # every code 8: groups of zeros
    yield Case("zeros", (randn(3, 256), zeros), row_args=(0,))
    yield Case("awkward rows", (awkward_rows(256), random_int4(40, 256, 128, symmetric=False)), row_args=(0,))


CASES = {"int4_linear": int4_linear}
