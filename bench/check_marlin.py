"""The CUDA fp8_linear and int4_linear on a card: builds, compares, and times them against a kernel that only reads the same bytes.

    SPECDEC_CUDA=1 python -m bench.check_marlin [--sanitize] [--no-timing] [--out FILE]

Comparison, fp8: every scale layout and dtype, ragged and real shapes, exact integers to the bit, all 256 codes, rows independent of
their number, the same bits in every run; int4: every size of group. --sanitize runs a small part of it under compute-sanitizer
(memcheck, racecheck, synccheck).
Timing: a CUDA graph of calls that rotate through copies of the weight, together far larger than L2; median of replays. `read` is
the yardstick: the fastest of three grids of the reading kernel, over the same copies, in the same run.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from bench.cuda_timing import microseconds
from bench.schema import environment
from specdec import ops
from specdec.kernels.cuda_fragments import compiled, multiprocessors
from specdec.kernels.fp8_linear.cases import LAYOUTS, awkward_rows, random_fp8
from specdec.kernels.fp8_linear.fragments import Fp8Fragments, pack
from specdec.kernels.fp8_linear.weight import Fp8Weight
from specdec.kernels.int4_linear import fragments as int4
from specdec.kernels.int4_linear.cases import random_int4
from specdec.kernels.tolerances import TOLERANCE

DEVICE = torch.device("cuda:0")
MODEL_SHAPES = {"qkv": (10240, 8192), "o": (8192, 8192), "gate|up": (57344, 8192), "down": (8192, 28672)}  # N × K of Llama-70B
SMALL_SHAPES = ((64, 128), (192, 256), (448, 512), (960, 1536), (4096, 4096))
ROWS = (1, 7, 8, 9, 16, 24, 31, 32, 33, 47, 48, 63, 64, 65, 130)
TIMED_ROWS = (1, 8, 16, 24, 32, 48, 64)
ROTATED_BYTES = 512 << 20

Packed = TypeVar("Packed", Fp8Fragments, int4.Int4Fragments)


def expected(x: Tensor, w: Fp8Weight) -> Tensor:
    """float32 products and sums, 8192 rows of the weight at a time."""
    parts = [w.rows(i, min(i + 8192, w.shape[0])).dequantize() for i in range(0, w.shape[0], 8192)]
    return torch.cat([x.float() @ part.T for part in parts], 1)


def on_card(n: int, k: int, layout: str, seed: int = 0) -> Fp8Weight:
    return random_fp8(n, k, layout, seed).to(DEVICE)


def check_close(name: str, x: Tensor, w: Fp8Weight) -> None:
    y, want = ops.fp8_linear(x, pack(w)).float(), expected(x, w)
    size = want[want.isfinite()].abs().max().item()
    torch.testing.assert_close(y, want, rtol=0.0, atol=TOLERANCE["fp8_linear"] * size, equal_nan=True, msg=lambda m: f"{name}: {m}")


def check_shapes(shapes: list[tuple[int, int]], rows: tuple[int, ...]) -> Iterator[str]:
    for n, k in shapes:
        for layout in LAYOUTS:
            w = on_card(n, k, layout)
            for dtype in (torch.bfloat16, torch.float16):
                for m in rows:
                    x = torch.randn(m, k, device=DEVICE, dtype=dtype)
                    check_close(f"{layout} {dtype} {m}x{n}x{k}", x, w)
        yield f"{n}x{k}: agrees, {len(LAYOUTS) * 2 * len(rows)} calls"


def check_exact() -> Iterator[str]:
    """Integers and powers of two: every order of adding gives the same bits."""
    for layout in LAYOUTS:
        w = on_card(448, 2048, layout)
        scale = torch.exp2(torch.randint(-3, 4, w.scale.shape, device=DEVICE).float())
        w = Fp8Weight(torch.randint(-6, 7, (448, 2048), device=DEVICE).float().to(torch.float8_e4m3fn), scale)
        for m in ROWS:
            x = torch.randint(-4, 5, (m, 2048), device=DEVICE).bfloat16()
            want = (x.double() @ w.dequantize().double().T).to(x.dtype)
            assert torch.equal(ops.fp8_linear(x, pack(w)), want), f"{layout}, {m} rows"
    yield "integers: equal to the bit"
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).masked_fill_(torch.arange(256, device=DEVICE) % 128 == 127, 0)
    w = Fp8Weight(codes.repeat(64, 1).view(torch.float8_e4m3fn), torch.ones(1, device=DEVICE))
    for dtype in (torch.bfloat16, torch.float16):
        y = ops.fp8_linear(torch.eye(256, device=DEVICE, dtype=dtype), pack(w))
        assert torch.equal(y.float(), w.dequantize().T), dtype
    yield "all codes: equal to the bit, subnormals included"


def check_rows() -> Iterator[str]:
    """Inputs that break things, rows independent of their number, repeated runs."""
    for layout in LAYOUTS:
        w = on_card(640, 1280, layout)
        check_close(f"awkward rows, {layout}", awkward_rows(1280).to(DEVICE, torch.bfloat16), w)
        packed, x = pack(w), torch.randn(130, 1280, device=DEVICE).bfloat16()
        whole = ops.fp8_linear(x, packed)
        for m in ROWS:
            assert torch.equal(ops.fp8_linear(x[:m], packed), whole[:m]), f"{layout}: {m} rows"
        for _ in range(100):
            assert torch.equal(ops.fp8_linear(x, packed), whole), f"{layout}: another run, other bits"
        assert not packed.arrived.any()
    yield "rows: independent of their number, the same in 100 runs"


def int4_on_card(n: int, k: int, group: int, dtype: torch.dtype) -> int4.Int4Fragments:
    return int4.pack(random_int4(n, k, group, symmetric=False, dtype=dtype).to(DEVICE, dtype))


def check_int4(rows: tuple[int, ...]) -> Iterator[str]:
    for group in (32, 64, 128, 512):
        for dtype in (torch.bfloat16, torch.float16):
            w = random_int4(448, 2048, group, symmetric=False, dtype=dtype).to(DEVICE, dtype)
            packed, wide = int4.pack(w), w.dequantize().T
            for m in rows:
                x = torch.randn(m, 2048, device=DEVICE, dtype=dtype)
                y, want = ops.int4_linear(x, packed), x.float() @ wide
                torch.testing.assert_close(y.float(), want, rtol=0.0, atol=TOLERANCE["int4_linear"] * want.abs().max().item())
                assert torch.equal(ops.int4_linear(x[: m // 2 + 1], packed), y[: m // 2 + 1])
    yield "int4: agrees, rows independent of their number"


def check(small: bool) -> None:
    shapes = [*SMALL_SHAPES[:4]] if small else [*SMALL_SHAPES, *MODEL_SHAPES.values()]
    rows = (1, 9, 33, 64) if small else ROWS
    for lines in (check_shapes(shapes, rows), check_exact(), check_int4(rows), check_rows() if not small else ()):
        for line in lines:
            print(line, flush=True)


def sanitize() -> None:
    for tool in ("memcheck", "racecheck", "synccheck"):
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "bench.check_marlin", "--small"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(f"{tool}: {'clean' if done.returncode == 0 else done.stdout[-3000:] + done.stderr[-1000:]}", flush=True)
        if done.returncode:
            raise SystemExit(1)


def milliseconds(calls: list[Callable[[], object]], repeats: int = 25) -> float:
    """Median time of one call, of graphs that make them all in turn."""
    return statistics.median(microseconds(calls, repeats)) / 1e3


def copies(w: Packed) -> list[Packed]:
    """As many as together outgrow the cache, at least three."""
    count = max(3, -(-ROTATED_BYTES // w.nbytes))
    return [w, *(replace(w, words=w.words.clone(), arrived=w.arrived.clone()) for _ in range(count - 1))]


def read_milliseconds(weights: list[Packed]) -> float:
    functions, sink = compiled(DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def read(words: Tensor, ctas: int) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointers = ctypes.c_void_p(words.data_ptr()), ctypes.c_int64(words.nbytes), ctypes.c_void_p(sink.data_ptr())
        assert functions.specdec_read(*pointers, ctas, DEVICE.index, stream) == 0

    sms = multiprocessors(DEVICE)
    return min(milliseconds([lambda w=w, c=c: read(w.words, c * sms) for w in weights * 2]) for c in (2, 4, 8))


def time_weight(call: Callable[[Tensor, Packed], Tensor], w: Packed, **about: Any) -> Iterator[dict[str, Any]]:
    weights = copies(w)
    read = read_milliseconds(weights)
    n, k = w.shape
    for m in TIMED_ROWS:
        x = torch.randn(m, k, device=DEVICE).bfloat16()
        took = milliseconds([lambda w=w, x=x: call(x, w) for w in weights * 2])
        yield {"backend": "cuda", "n": n, "k": k, "m": m, **about} | {
            "microseconds": round(1e3 * took, 2),
            "read_microseconds": round(1e3 * read, 2),
            "ratio": round(took / read, 3),
            "gigabytes_per_second": round(w.words.nbytes / took / 1e6),
        }


def timing() -> Iterator[dict[str, Any]]:
    for name, (n, k) in MODEL_SHAPES.items():
        for layout in ("channel", "block"):
            yield from time_weight(ops.fp8_linear, pack(on_card(n, k, layout)), op="fp8_linear", shape=name, scales=layout)
        w = int4_on_card(n, k, 128, torch.bfloat16)
        yield from time_weight(ops.int4_linear, w, op="int4_linear", shape=name, scales="int4 128")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitize", action="store_true", help="run a part under compute-sanitizer first")
    parser.add_argument("--small", action="store_true", help="only that part")
    parser.add_argument("--no-timing", action="store_true")
    parser.add_argument("--out", type=Path, help="records, one JSON object a line, appended")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    with ops.override("fp8_linear", "cuda"), ops.override("int4_linear", "cuda"):  # an error without SPECDEC_CUDA=1, never the reference
        run(args)


def run(args: argparse.Namespace) -> None:
    if args.sanitize:
        sanitize()
    check(args.small)
    if args.small or args.no_timing:
        return
    print(f"{'shape':8} {'scales':8} " + " ".join(f"{f'M={m}':>7}" for m in TIMED_ROWS) + "   time / read time, and read in µs")
    records, row = [], []
    for record in timing():
        records.append({**environment(), **record})
        row.append(record)
        if len(row) == len(TIMED_ROWS):
            ratios = " ".join(f"{r['ratio']:7.3f}" for r in row)
            print(f"{row[0]['shape']:8} {row[0]['scales']:8} {ratios}   {row[0]['read_microseconds']}", flush=True)
            row = []
    if args.out:
        with args.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
