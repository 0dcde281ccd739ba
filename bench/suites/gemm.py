"""Linear layers of real models: bf16, W8A16, W8A8, W4A16, and the libraries they compete with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench.kernel_case import KernelCase
from specdec import ops
from specdec.kernels.fp8_linear.weight import BLOCK, Fp8Weight
from specdec.kernels.int4_linear.planes import Int4Planes
from specdec.kernels.int4_linear.weight import Int4Weight
from specdec.kernels.tilings import MEASURED

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 512)
GROUPS = {"channel": 128, "block": 32}  # columns of 4-bit groups: scales beside the sum over a step, or inside
SHAPES = {  # model, layer: N, K
    ("llama-70b", "qkv"): (10240, 8192),
    ("llama-70b", "o"): (8192, 8192),
    ("llama-70b", "gate_up"): (57344, 8192),
    ("llama-70b", "down"): (8192, 28672),
    ("llama-8b", "qkv"): (6144, 4096),
    ("llama-8b", "o"): (4096, 4096),
    ("llama-8b", "gate_up"): (28672, 4096),
    ("llama-8b", "down"): (4096, 14336),
    ("smollm2-135m", "qkv"): (960, 576),
    ("smollm2-135m", "o"): (576, 576),
    ("smollm2-135m", "gate_up"): (3072, 576),
    ("smollm2-135m", "down"): (576, 1536),
}
LAYOUTS = {"fp8_linear": ("channel", "block"), "fp8_fp8_linear": ("channel", "block"), "int4_linear": ("channel",)}
_LEFT_OUT = ("reference", "rowwise")  # definitions, not competitors


def weight_bytes(op: str, n: int, k: int, layout: str = "") -> int:
    """Bytes of an N × K weight as `op` reads it, scales and zeros included."""
    if op == "dense_linear":
        return 2 * n * k
    if op == "int4_linear":
        return n * -(-k // 128) * 64 + 3 * n * (k // group_of(k, layout))
    scales = {"tensor": 1, "channel": n, "block": -(-n // BLOCK) * -(-k // BLOCK)}[layout]
    return n * k + 4 * scales


def group_of(k: int, layout: str) -> int:
    """Columns of a 4-bit group; all of them where K has no whole groups."""
    return GROUPS[layout] if k % GROUPS[layout] == 0 else k


def moved_bytes(op: str, m: int, n: int, k: int, layout: str = "") -> int:
    """What a call reads and writes at least: weight, activations, output in bf16."""
    scales = m * (k // BLOCK if layout == "block" and k % BLOCK == 0 else 1)
    activations = m * k + 4 * scales if op == "fp8_fp8_linear" else 2 * m * k
    return weight_bytes(op, n, k, layout) + activations + 2 * m * n


def fp8_weight(n: int, k: int, layout: str, device: torch.device) -> Fp8Weight:
    """Random codes without NaN."""
    codes = torch.randint(0, 127, (n, k), dtype=torch.uint8, device=device) | (torch.randint(0, 2, (n, 1), device=device) << 7).byte()
    sizes = {"tensor": (1,), "channel": (n,), "block": (-(-n // BLOCK), -(-k // BLOCK))}
    return Fp8Weight(codes.view(torch.float8_e4m3fn), torch.full(sizes[layout], 1e-3, device=device))


def int4_weight(n: int, k: int, group: int, device: torch.device) -> Int4Weight | Int4Planes:
    """Random codes, prepared as at load."""
    words = torch.randint(-(2**31), 2**31, (n, k // 8), dtype=torch.int32, device=device)
    zero = torch.randint(0, 16, (n, k // group), dtype=torch.uint8, device=device)
    return ops.prepare_int4(Int4Weight(words, torch.full((n, k // group), 1e-2, dtype=torch.bfloat16, device=device), zero, group))


def arguments(op: str, m: int, n: int, k: int, layout: str, device: torch.device) -> tuple[Any, ...]:
    """Random arguments of the op, activations in bf16."""
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    if op == "dense_linear":
        return x, torch.randn(n, k, device=device, dtype=torch.bfloat16)
    if op == "int4_linear":
        return x, int4_weight(n, k, group_of(k, layout), device)
    if op == "fp8_linear":
        return x, fp8_weight(n, k, layout, device)
    q, scale = ops.quantize_fp8(x, BLOCK if layout == "block" and k % BLOCK == 0 else None)
    return q, scale, fp8_weight(n, k, layout, device), torch.bfloat16


def call_with(op: str, backend: str, args: tuple[Any, ...]) -> Callable[[], Tensor]:
    """The op on `backend`, whatever its table prefers."""

    def call() -> Tensor:
        with ops.override(op, backend):
            return getattr(ops, op)(*args)

    return call


def competitors(op: str, layout: str, device: str = "cuda") -> list[str]:
    """Backends of the op that run on a card and take the layout."""
    names = [b.name for b in ops.TABLE.ops[op].usable.get(device, []) if b.name not in _LEFT_OUT]
    return [name for name in names if layout != "block" or name not in ("widened", "scaled_mm")]


def _scaled_mm(m: int, n: int, k: int) -> Callable[[], Tensor]:
    """W8A8 of the library with one scale a tensor: its fastest form."""
    device = torch.device("cuda")
    q, _, weight, dtype = arguments("fp8_fp8_linear", max(m, 16), n, k, "tensor", device)
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(q, weight.data.t(), one, one, out_dtype=dtype, use_fast_accum=True)


def one_scale(m: int, n: int, k: int, device: str = "cuda") -> Callable[[], Tensor]:
    """Our W8A8 kernel at its measured tiling with one scale for the weight and none for rows: what per-token scales are compared with."""
    from specdec.kernels.triton_gemm import stream  # needs Triton

    q, _, weight, dtype = arguments("fp8_fp8_linear", m, n, k, "tensor", torch.device(device))
    return lambda: stream(q, weight.data, weight.scale, None, dtype, MEASURED.tiling("fp8_fp8_linear", m, n, k))


BASELINES = {"torch._scaled_mm": _scaled_mm, "triton_one_scale": one_scale}
"""W8A8 with scales per tensor alone, which no backend has."""


def cases(rows: tuple[int, ...] = ROWS, models: tuple[str, ...] | None = None) -> Iterator[KernelCase]:
    """Every op, backend, layout, shape and M."""
    device = torch.device("cuda")
    for (model, layer), (n, k) in SHAPES.items():
        for m in rows if models is None or model in models else ():
            for op in ("dense_linear", "fp8_linear", "fp8_fp8_linear", "int4_linear"):
                for layout in LAYOUTS.get(op, ("",)):
                    shape = {"model": model, "layer": layer, "N": n, "K": k} | ({"scales": layout} if layout else {})
                    moved, flops = moved_bytes(op, m, n, k, layout), 2 * m * n * k
                    for backend in competitors(op, layout):
                        make = _maker(op, backend, m, n, k, layout, device)
                        yield KernelCase(op, backend, shape, m, moved, flops, make)
            if k % 16 == 0 and n % 16 == 0:
                shape = {"model": model, "layer": layer, "N": n, "K": k, "scales": "tensor"}
                moved = moved_bytes("fp8_fp8_linear", m, n, k, "tensor")
                for name, baseline in BASELINES.items():
                    yield KernelCase("fp8_fp8_linear", name, shape, m, moved, 2 * m * n * k, _baseline_maker(baseline, m, n, k))


def _maker(op: str, backend: str, m: int, n: int, k: int, layout: str, device: torch.device) -> Callable[[int], Callable[[], object]]:
    return lambda _: call_with(op, backend, arguments(op, m, n, k, layout, device))


def _baseline_maker(call: Callable[[int, int, int], Callable[[], Tensor]], m: int, n: int, k: int) -> Callable[[int], Callable[[], object]]:
    return lambda _: call(m, n, k)
