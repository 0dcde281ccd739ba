"""The kernel benchmark, as far as it goes without a card: bytes, cases, records, table, the tuner's choice, the read kernel."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from bench import cuda_timing, kernels, schema, tune
from bench.kernel_case import KernelCase, record, table
from bench.read_kernel import programs, read
from bench.suites import gemm
from specdec import ops
from specdec.kernels.int4_linear.planes import pack_planes
from specdec.kernels.tilings import BUCKETS, FIXED, MEASURED, Table, Tiling, candidates, file_name

CPU = torch.device("cpu")


def nbytes(value: object) -> int:
    """Of all tensors in arguments."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return value.nbytes if hasattr(value, "nbytes") else sum(map(nbytes, value)) if isinstance(value, tuple) else 0


@pytest.mark.parametrize(
    ("op", "layout"),
    [("dense_linear", ""), *((op, kind) for op in ("fp8_linear", "fp8_fp8_linear", "int4_linear") for kind in ("channel", "block"))],
)
@pytest.mark.parametrize(("m", "n", "k"), [(3, 48, 256), (16, 960, 576), (1, 130, 128)])
def test_bytes_are_those_of_the_buffers(op: str, layout: str, m: int, n: int, k: int) -> None:
    """As the kernels hold them, so 4-bit weights in planes, whose last chunk may be padded."""
    args = gemm.arguments(op, m, n, k, layout, CPU)
    if op == "int4_linear":
        args = args[0], pack_planes(args[1])
    assert gemm.moved_bytes(op, m, n, k, layout) == nbytes(args) + 2 * m * n
    backend = "rowwise" if op == "dense_linear" else "reference"
    assert gemm.call_with(op, backend, gemm.arguments(op, m, n, k, layout, CPU))().shape == (m, n)


def test_the_weights_of_the_issue_are_there() -> None:
    """Llama-70B in e4m3 per tensor: the four shapes and their megabytes."""
    assert [gemm.SHAPES["llama-70b", layer] for layer in ("qkv", "o", "gate_up", "down")] == [
        (10240, 8192),
        (8192, 8192),
        (57344, 8192),
        (8192, 28672),
    ]
    assert gemm.weight_bytes("fp8_linear", 10240, 8192, "tensor") == 83886080 + 4
    assert gemm.ROWS == (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 512)


def test_every_case_has_bytes_work_and_a_name() -> None:
    found = list(gemm.cases())
    assert {c.shape["model"] for c in found} == {"llama-70b", "llama-8b", "smollm2-135m"}
    assert all(c.moved > 0 and c.flops == 2 * c.rows * c.shape["N"] * c.shape["K"] for c in found)
    names = {(c.op, c.backend) for c in found}
    assert ("dense_linear", "library") in names and {("fp8_fp8_linear", name) for name in gemm.BASELINES} <= names
    assert not any(backend in ("reference", "rowwise") for _, backend in names)
    assert len({(c.op, c.backend, c.rows, str(c.shape)) for c in found}) == len(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a card the benchmark runs it")
def test_the_product_without_scales_of_rows_is_that_product() -> None:
    torch.manual_seed(3)
    found = gemm.one_scale(5, 48, 256, "cpu")()
    torch.manual_seed(3)
    q, scale, weight, dtype = gemm.arguments("fp8_fp8_linear", 5, 48, 256, "tensor", CPU)
    with ops.override("fp8_fp8_linear", "reference"):
        torch.testing.assert_close(found, ops.fp8_fp8_linear(q, torch.ones_like(scale), weight, dtype), rtol=0.02, atol=0.02)


def test_copies_outgrow_the_cache_and_graphs_hold_whole_turns() -> None:
    cache = 50 << 20
    for moved in (1, 4096, 1 << 20, 84 << 20, 900 << 20):
        count = cuda_timing.copies(moved, cache)
        assert 2 <= count <= 64
        assert count == 64 or count * moved >= 8 * cache
        calls = cuda_timing.calls_per_graph(count)
        assert calls % count == 0 and calls >= 16


def test_arguments_select_cases() -> None:
    args = kernels.parser().parse_args(
        ["--suite", "gemm", "--op", "fp8_linear", "--rows", "1", "64", "--model", "llama-8b", "--backend", "triton", "widened"]
    )
    found = [case for _, case in kernels.selected(args)]
    assert {c.op for c in found} == {"fp8_linear"} and {c.rows for c in found} == {1, 64}
    assert {c.shape["model"] for c in found} == {"llama-8b"} and {c.backend for c in found} <= {"triton", "widened"} and found


def test_a_record_says_what_was_timed_and_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = KernelCase(
        "fp8_linear", "triton", {"model": "m", "N": 8192, "K": 8192}, 16, 67_000_000, 2 * 16 * 8192 * 8192, lambda _: lambda: 0
    )
    made = record("gemm", case, [21.0, 20.0, 22.0], [16.0, 16.0, 16.0])
    assert made["us"]["p50"] == 21.0 and made["times_read"] == 21.0 / 16.0 and made["bytes"] == 67_000_000
    assert math.isclose(made["GB_per_s"], 67e6 / 21e-6 / 1e9) and math.isclose(made["TFLOP_per_s"], case.flops / 21e-6 / 1e12)
    assert {"commit", "gpu", "torch", "triton", "time", "argv", "suite", "shape", "rows", "read_us"} <= set(made)
    monkeypatch.setattr(schema, "ROOT", tmp_path)
    schema.append("kernels", made)
    assert schema.records("kernels") == [made]
    other = {**made, "rows": 1, "us": {"p50": 20.0}, "times_read": 1.25}
    lines = table([made, other]).splitlines()
    assert lines[0].split() == ["op", "shape", "backend", "M=1", "M=16"]
    assert lines[1].split() == ["fp8_linear", "m", "8192", "8192", "triton", "20.0", "1.25x", "21.0", "1.31x"]


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> Table:
    monkeypatch.setattr(MEASURED, "choices", {})
    monkeypatch.setattr(MEASURED, "card", "a card")
    return MEASURED


def test_the_tuner_keeps_the_fastest(empty: Table, tmp_path: Path) -> None:
    """A made-up card on which one tiling is fastest, or the library from 256 rows on."""
    liked = candidates("fp8_linear", 32, 4096, 4096)[3]

    def timer(op: str, backend: str, m: int, n: int, k: int) -> float:
        if backend == "widened":
            return 5.0 if m >= 256 else 500.0
        assert backend == "triton"
        return 10.0 if empty.tiling(op, m, n, k) == liked else 11.0

    best = tune.tune_bucket("fp8_linear", 4096, 4096, 32, timer)
    assert (best.backend, best.tiling, best.microseconds) == ("triton", liked, 10.0)
    assert tune.tune_bucket("fp8_linear", 4096, 4096, 256, timer).backend == "widened"
    assert empty.tiling("fp8_linear", 20, 4096, 4096) == liked and empty.microseconds("fp8_linear", 200, 4096, 4096) == 5.0
    empty.save(tmp_path / file_name("a card"))
    empty.choices = {}
    assert ops.load_tilings(tmp_path, "a card") and empty.tiling("fp8_linear", 20, 4096, 4096) == liked


def test_the_tuner_judges_the_fixed_tiling_by_all_m(empty: Table) -> None:
    """Fastest at M = 1 alone does not win."""
    found = candidates("dense_linear", FIXED, 4096, 4096)

    def timer(op: str, backend: str, m: int, n: int, k: int) -> float:
        assert backend == "triton_fixed"
        place = found.index(empty.tiling(op, FIXED, n, k))
        return {0: 1.0 if m == 1 else 100.0, 1: 5.0}.get(place, 50.0)

    best = tune.tune_fixed("dense_linear", 4096, 4096, timer)
    assert best.tiling == found[1] and math.isclose(best.microseconds, 5.0)
    assert all(isinstance(t, Tiling) and t.rows == 64 for t in found)


def test_wanted_shapes() -> None:
    assert tune.wanted(None, ["40x64"]) == [(40, 64)]
    assert tune.wanted(["llama-8b"], ["40x64"])[-1] == (40, 64) and len(tune.wanted(None, None)) == len(set(gemm.SHAPES.values()))
    assert tune.layout("fp8_linear inner") == ("fp8_linear", "block") and tune.layout("dense_linear") == ("dense_linear", "")
    assert FIXED not in BUCKETS


def test_the_read_kernel_reads_every_word() -> None:
    for count in (16, 5000, 4096 * 3):
        words = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(count)).int()
        out = torch.full((programs(count),), 7, dtype=torch.int32)
        read(words, out)
        expected = 0
        for word in words.tolist():
            expected ^= word
        actual = 0
        for word in out.tolist():
            actual ^= word
        assert actual == expected


def test_the_tuner_compiles_each_kernel_once_and_shares_weights_among_all_m() -> None:
    shapes = tune.wanted(["llama-70b"], None)
    kernels_of = tune.to_compile(["fp8_linear", "int4_linear"], shapes, [FIXED, *BUCKETS])
    assert len(set(kernels_of)) == len(kernels_of) <= 40 and {tiling.splits for _, tiling in kernels_of} == {1, 2}
    for op, own in (("fp8_linear", 1), ("fp8_fp8_linear", 2), ("int4_linear", 1)):
        args = gemm.arguments(op, 32, 48, 256, "channel", CPU)
        part = tune.first_rows(op, args, 5)
        assert [a.shape[0] for a in part[:own]] == [5] * own and all(a is b for a, b in zip(part[own:], args[own:], strict=True))
