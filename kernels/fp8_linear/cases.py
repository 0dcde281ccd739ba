"""Cases of the linear layers over e4m3 weights: every layout of scales, edge rows, widths that divide nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from specdec.kernels.case import Case, randn
from specdec.kernels.fp8_linear.weight import BLOCK, Fp8Weight
from specdec.kernels.inputs import generator
from specdec.kernels.quantize_fp8.reference import quantize_fp8 as reference

LAYOUTS = ("tensor", "channel", "block")
SHAPES = (
    *((m, 40, 64) for m in (0, 1, 3, 17, 33, 65)),
    *((1, 1, 16), (2, 33, 77), (5, 128, 128), (3, 130, 257), (4, 300, 384)),
)
MODEL_SHAPES = ((2, 960, 576), (1, 576, 1536))  # SmolLM2's q|k|v and down


def shapes(layout: str) -> tuple[tuple[int, int, int], ...]:
    """(M, N, K); those of a model for one layout only, since interpreted kernels take their time."""
    return SHAPES + (MODEL_SHAPES if layout == "channel" else ())


def random_fp8(rows: int, cols: int, layout: str, seed: int = 0) -> Fp8Weight:
    """All e4m3 numbers with equal chance, subnormal and zero included, scaled to the size trained weights have."""
    g = generator(seed)
    codes = torch.randint(0, 256, (rows, cols), dtype=torch.uint8, generator=g)
    codes = torch.where(codes & 0x7F == 0x7F, codes - 1, codes)
    sizes = {"tensor": (1,), "channel": (rows,), "block": (-(-rows // BLOCK), -(-cols // BLOCK))}
    return Fp8Weight(codes.view(torch.float8_e4m3fn), torch.rand(sizes[layout], generator=g) * 1e-3 + 1e-5)


def awkward_rows(cols: int) -> Tensor:
    """[5, cols]: an outlier, zeros, tiny numbers, infinity, NaN."""
    x = randn(5, cols, seed=7)
    x[0, 3] = 1e4
    x[1] = 0.0
    x[2] *= 1e-30
    x[3, 5], x[4, 6] = torch.inf, torch.nan
    return x


def fp8_linear() -> Iterator[Case]:
    for layout in LAYOUTS:
        for m, n, k in shapes(layout):
            yield Case(f"{layout} {m}x{n}x{k}", (randn(m, k), random_fp8(n, k, layout)), row_args=(0,))
        for dtype in (torch.bfloat16, torch.float16):
            yield Case(f"{layout} {dtype}", (randn(17, 200).to(dtype), random_fp8(200, 200, layout)), row_args=(0,))
        zeros = random_fp8(200, 200, layout)
        zeros.data.view(torch.uint8)[:130] = 0  # all-zero blocks and rows
        yield Case(f"{layout} zeros", (randn(3, 200), zeros), row_args=(0,))
        yield Case(f"{layout} awkward rows", (awkward_rows(200), random_fp8(200, 200, layout)), row_args=(0,))


def quantize_fp8() -> Iterator[Case]:
    for m, k in ((0, 64), (1, 1), (1, 64), (3, 77), (33, 576), (2, 2880), (2, 4096), (2, 8192), (1, 28672)):
        yield Case(f"{m}x{k}", (randn(m, k, scale=3.0),), row_args=(0,))
    for dtype in (torch.bfloat16, torch.float16):
        yield Case(str(dtype), (randn(5, 200).to(dtype),), row_args=(0,))
    yield Case("awkward rows", (awkward_rows(200),), row_args=(0,))
    yield Case("edges of e4m3", (edges(),), row_args=(0,))
    yield Case("wider than a tile", (randn(2, 5000),), row_args=(0,))
    for m, k in ((0, 256), (3, 128), (5, 384)):
        yield Case(f"groups {m}x{k}", (randn(m, k, scale=3.0), 128), row_args=(0,))
    zeros = awkward_rows(384)
    zeros[0, 128:256] = 0.0
    yield Case("groups of zeros, awkward rows", (zeros, 128), row_args=(0,))


def edges() -> Tensor:
    """[2, W]: every number halfway between neighbours of e4m3 and beside it, subnormals included; the largest makes the scale 1."""
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (numbers[:-1] + numbers[1:]) / 2
    positive = torch.cat((numbers, middle, torch.nextafter(middle, numbers[1:]), torch.nextafter(middle, numbers[:-1])))
    row = torch.cat((positive, -positive))
    return torch.stack((row, row * 0.75))


def fp8_fp8_linear() -> Iterator[Case]:
    for layout in LAYOUTS:
        for m, n, k in shapes(layout):
            q = randn(m, k, scale=100.0).clamp(-448, 448).to(torch.float8_e4m3fn)
            scale = torch.linspace(1e-3, 2.0, max(m, 1))[:m]
            yield Case(f"{layout} {m}x{n}x{k}", (q, scale, random_fp8(n, k, layout), torch.float32), row_args=(0, 1))
        for dtype in (torch.bfloat16, torch.float16):
            q = randn(3, 200, scale=100.0).clamp(-448, 448).to(torch.float8_e4m3fn)
            yield Case(f"{layout} {dtype}", (q, torch.tensor([1e-3, 0.0, 2e-2]), random_fp8(200, 200, layout), dtype), row_args=(0, 1))
        q, scale = randn(5, 128, scale=100.0).clamp(-448, 448).to(torch.float8_e4m3fn), torch.rand(5) + 1e-3  # what the library takes
        yield Case(f"{layout} 5x64x128 bfloat16", (q, scale, random_fp8(64, 128, layout), torch.bfloat16), row_args=(0, 1))
        q, scale = reference(awkward_rows(200))  # codes of NaN, of infinity and of zeros
        yield Case(f"{layout} awkward rows", (q, scale, random_fp8(200, 200, layout), torch.float32), row_args=(0, 1))
        q, scale = randn(17, 384, scale=100.0).clamp(-448, 448).to(torch.float8_e4m3fn), torch.rand(17, 3)
        yield Case(f"{layout}, groups of x", (q, scale, random_fp8(200, 384, layout), torch.float32), row_args=(0, 1))


CASES = {"fp8_linear": fp8_linear, "quantize_fp8": quantize_fp8, "fp8_fp8_linear": fp8_fp8_linear}
