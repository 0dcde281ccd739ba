"""The streaming GEMMs beyond the matrix: float32 held closer, every way to split, layouts, the PTX of 4-bit weights, the tables."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec import ops
from specdec.kernels import tilings
from specdec.kernels.fp8_fp8_linear.library import rejects as library_rejects
from specdec.kernels.fp8_linear import widened
from specdec.kernels.fp8_linear.cases import random_fp8
from specdec.kernels.fp8_linear.reference import fp8_linear as fp8_reference
from specdec.kernels.fp8_linear.weight import Fp8Weight
from specdec.kernels.int4_linear.cases import random_int4
from specdec.kernels.int4_linear.planes import pack_planes, rejects_group, unpack_planes
from specdec.kernels.int4_linear.triton import pair_asm
from specdec.kernels.tilings import BUCKETS, CANDIDATES, FIXED, Choice, Table, Tiling, bucket, candidates, usual
from specdec.kernels.triton_e4m3 import bf16_asm, native
from specdec.kernels.triton_gemm import _RING, _ring, fitted, row_chunks
from tests.kernels.device import DEVICE, on
from tests.kernels.matrix import poisoned

CPU = torch.device("cpu")
PRODUCTS = ("dense_linear", "fp8_linear", "fp8_fp8_linear", "int4_linear")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def arguments(op: str, m: int, n: int, k: int, layout: str = "channel") -> tuple[object, ...]:
    """Float32 activations (or codes) and a weight of the op, on the CPU."""
    if op == "dense_linear":
        return randn(m, k), randn(n, k, seed=1) * 0.05
    if op == "int4_linear":
        return randn(m, k), random_int4(n, k, 32, symmetric=False)
    if op == "fp8_linear":
        return randn(m, k), random_fp8(n, k, layout)
    q, scale = ops.quantize_fp8(randn(m, k))
    return q, scale, random_fp8(n, k, layout), torch.float32


def run(op: str, backend: str, *args: object) -> Tensor:
    """The op on one backend, Triton's where Triton runs, new memory poisoned; the result on the CPU."""
    device = DEVICE if backend.startswith("triton") else "cpu"
    moved = on(device, args)
    with ops.override(op, backend), poisoned():
        return getattr(ops, op)(*moved).cpu()


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    """An empty table in place of the process's contents."""
    monkeypatch.setattr(tilings.MEASURED, "choices", {})
    monkeypatch.setattr(tilings.MEASURED, "card", None)
    return tilings.MEASURED


@pytest.mark.parametrize("op", PRODUCTS)
@pytest.mark.parametrize("splits", [1, 3])
def test_float32_agrees_closely_however_k_is_split(op: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """704 columns are 5½ steps: the last step is masked, and three splits of two steps each share them."""
    args = arguments(op, 21, 70, 704)
    expected = run(op, "rowwise" if op == "dense_linear" else "reference", *args)
    monkeypatch.setattr(Table, "choice", lambda *_: Choice("triton", Tiling(64, 128, 16, splits, 4, 2), 0.0))
    actual = run(op, "triton", *args)
    place = torch.empty(0, device=DEVICE).device
    # Hopper's FP8 product keeps some 14 bits of a sum over 128 columns
    leeway = 5e-4 if op == "fp8_fp8_linear" and native(place) else 5e-6
    assert (actual - expected).abs().max() <= leeway * expected.abs().max()
    assert not _ring(place).counters.any()  # as they were found: a graph can run again


@pytest.mark.parametrize("op", PRODUCTS)
def test_a_row_is_the_same_alone_and_among_others_to_the_bit(op: str) -> None:
    """Deterministic mode: one tiling for every M, whose splits do not depend on M either."""
    args = arguments(op, 70, 64, 1024)
    rows = (0, 1) if op == "fp8_fp8_linear" else (0,)
    whole = run(op, "triton_fixed", *args)
    assert usual(op, FIXED, 64, 1024).splits > 1
    for start, stop in ((0, 1), (69, 70), (10, 43)):
        part = [a[start:stop].contiguous() if i in rows else a for i, a in enumerate(args)]  # type: ignore[index]
        assert torch.equal(run(op, "triton_fixed", *part), whole[start:stop])


def test_deterministic_mode_takes_the_fixed_tiling_on_a_card() -> None:
    """Asked of the table alone: what a card would be given."""
    for op in PRODUCTS:
        backends = [b.name for b in ops.TABLE.ops[op].backends if b.fixed_order and b.name != "cuda"]  # that one takes fragments alone
        assert backends[0] == "triton_fixed", backends


@pytest.mark.parametrize("layout", ["tensor", "channel", "block"])
def test_nan_codes_and_zero_groups(layout: str) -> None:
    """A weight may not hold NaN codes; the kernels still show one in the feature that has it, and in no other."""
    weight = random_fp8(70, 256, layout)
    weight.data.view(torch.uint8)[3, 5] = 0x7F
    weight.data.view(torch.uint8)[66, 200] = 0xFF
    weight.data.view(torch.uint8)[10:20] = 0x80  # negative zeros
    x = randn(3, 256)
    for backend in ("triton", "triton_fixed"):
        y = run("fp8_linear", backend, x, weight)
        assert y.isnan().any(0).nonzero().flatten().tolist() == [3, 66] and y[:, [3, 66]].isnan().all()
        assert (y[:, 10:20] == 0).all()
    q, scale = ops.quantize_fp8(x)
    y = run("fp8_fp8_linear", "triton", q, scale, weight, torch.float32)
    assert y.isnan().any(0).nonzero().flatten().tolist() == [3, 66]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["tensor", "channel"])
def test_the_widened_product_is_of_the_same_recipe(layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Widened in parts; nothing is rounded before the scales but what float32 sums round."""
    monkeypatch.setattr(widened, "_PART", 200 * 64)
    x, weight = randn(9, 64).to(dtype), random_fp8(500, 64, layout)
    actual, exact = widened.fp8_linear(x, weight), x.double() @ weight.dequantize().double().t()
    step = 2.0**-8 if dtype is torch.bfloat16 else 1e-5
    assert ((actual.double() - exact).abs() <= exact.abs() * step + exact.abs().max() * 1e-6).all()
    assert (fp8_reference(x, weight).double() - actual.double()).abs().max() <= exact.abs().max() * 2 * step


def test_the_widened_product_and_the_library_refuse_scales_inside_the_sum() -> None:
    block, channel = random_fp8(128, 128, "block"), random_fp8(128, 128, "channel")
    q, scale = ops.quantize_fp8(randn(2, 128))
    assert widened.rejects(randn(2, 128), block) and widened.rejects(randn(2, 128), channel) is None
    assert library_rejects(q, scale, block, torch.bfloat16) and library_rejects(q, scale[:, None], channel, torch.bfloat16)
    assert library_rejects(q, scale, channel, torch.float32) and library_rejects(q, scale, channel, torch.bfloat16) is None
    odd = Fp8Weight(channel.data[:100], channel.scale[:100])
    assert "16" in (library_rejects(q, scale, odd, torch.bfloat16) or "")


@pytest.mark.parametrize(("n", "k", "group"), [(3, 128, 32), (5, 576, 64), (1, 200, 200), (7, 768, 128), (4, 16, 16), (2, 512, 256)])
def test_planes_are_another_order_of_the_same_weight(n: int, k: int, group: int) -> None:
    weight = random_int4(n, k, group, symmetric=False)
    planes = pack_planes(weight)
    assert rejects_group(group, k) is None and planes.shape == weight.shape
    codes = weight.codes().int()
    for column in {0, 1, 15, 16, 127, k // 2, k - 1} & set(range(k)):
        chunk, place = divmod(column, 128)
        assert torch.equal((planes.data[chunk, :, place % 16] >> 4 * (place // 16)) & 15, codes[:, column])
    back = unpack_planes(planes)
    assert torch.equal(back.data, weight.data) and torch.equal(back.scale, weight.scale) and torch.equal(back.zero, weight.zero)
    assert torch.equal(planes.dequantize(), weight.dequantize())
    x = randn(3, k)
    assert torch.equal(run("int4_linear", "triton", x, planes), run("int4_linear", "triton", x, weight))
    assert torch.equal(ops.int4_linear(x, planes), ops.int4_linear(x, weight))  # the reference


def test_groups_that_planes_cannot_hold_are_refused_by_name() -> None:
    assert all("groups of" in (rejects_group(group, 4096) or "") for group in (8, 24, 48, 96, 192))


def _bf16(pattern: int) -> float:
    return struct.unpack("<f", struct.pack("<I", pattern << 16))[0]


def _f16(pattern: int) -> float:
    return struct.unpack("<e", struct.pack("<H", pattern))[0]


def emulate(asm: str, inputs: dict[str, int], outputs: int, half: dict[str, object]) -> list[int]:
    """Runs the few instructions that our PTX consists of; anything else is a KeyError. Returns $0 and up to as many outputs."""
    registers = dict(inputs)
    number = lambda name: registers[name] if name in registers else int(name, 0)  # noqa: E731

    def fused(a: int, b: int, c: int) -> int:
        out = 0
        for shift in (0, 16):
            x, y, z = (half["widen"]((v >> shift) & 0xFFFF) for v in (a, b, c))  # type: ignore[operator]
            out |= half["narrow"](x * y + z) << shift  # type: ignore[operator]
        return out

    def permute(a: int, b: int, selector: int) -> int:
        parts = (a | b << 32).to_bytes(8, "little")
        picked = [(parts[(selector >> 4 * i) & 7], (selector >> 4 * i) & 8) for i in range(4)]
        return int.from_bytes(bytes((0xFF if part & 0x80 else 0) if sign else part for part, sign in picked), "little")

    def lookup(a: int, b: int, c: int, truth: int) -> int:
        return sum(((truth >> (((a >> i) & 1) << 2 | ((b >> i) & 1) << 1 | ((c >> i) & 1))) & 1) << i for i in range(32))

    def left(a: int, b: int) -> int:
        return (a << b) & 0xFFFFFFFF

    run_one = {
        "mov": lambda a: a,
        "prmt": permute,
        "shr": lambda a, b: a >> b,
        "shl": left,
        "and": int.__and__,
        "lop3": lookup,
        "fma": fused,
    }
    for line in asm.strip("{}").split(";"):
        name, _, operands = line.strip().partition(" ")
        if name and not name.startswith(".reg"):
            target, *sources = (part.strip() for part in operands.split(","))
            registers[target] = run_one[name.split(".")[0]](*(number(s) for s in sources))  # type: ignore[operator]
    return [registers[f"${i}"] for i in range(outputs)]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("codes", [2, 4])
def test_the_ptx_of_e4m3_makes_every_number(codes: int, whole: bool) -> None:
    """All codes but NaN, subnormals and negative ones included, in every place; emulated, since nothing here can run it. What lies beside
    the codes in the register is nobody's."""
    patterns = {_bf16(p): p for p in range(1 << 16) if _bf16(p) == _bf16(p)}
    half: dict[str, object] = {"widen": _bf16, "narrow": patterns.__getitem__}
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    finite = [code for code in range(256) if code & 0x7F != 0x7F]
    for i in range(len(finite)):
        own = [finite[(i + 67 * place) % len(finite)] for place in range(codes)]
        word = sum(code << 8 * place for place, code in enumerate(own))
        pairs = emulate(bf16_asm(codes, whole), {f"${codes // 2}": word | (0xFFFF0000 if codes == 2 else 0)}, codes // 2, half)
        factor = 1.0 if whole else 2.0**120
        assert [factor * _bf16(pair >> shift & 0xFFFF) for pair in pairs for shift in (0, 16)] == [numbers[code] for code in own]


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_the_ptx_of_pairs_makes_codes_less_zero(kind: str) -> None:
    """Every code in every place, against every zero; the instruction sequence is emulated, since nothing here can run it."""
    bias, pattern = (128, _bf16) if kind == "bf16" else (1024, _f16)
    patterns = {pattern(p): p for p in range(1 << 16) if pattern(p) == pattern(p)}
    half: dict[str, object] = {"widen": pattern, "narrow": patterns.__getitem__}  # KeyError where a sum is no such number: inexact
    for zero in range(16):
        spread = patterns[float(-bias - zero)]
        for shift in range(16):
            nibbles = [(i + shift) % 16 for i in range(8)], [(5 * i + 3 * shift + 7) % 16 for i in range(8)]
            words = tuple(sum(code << 4 * i for i, code in enumerate(part)) for part in nibbles)
            outputs = emulate(pair_asm(kind), {"$8": words[0], "$9": words[1], "$10": spread | spread << 16}, 8, half)
            for i, pair in enumerate(outputs):
                assert (pattern(pair & 0xFFFF), pattern(pair >> 16)) == (nibbles[0][i] - zero, nibbles[1][i] - zero)


def test_buckets_round_up() -> None:
    assert [bucket(m) for m in (1, 16, 17, 64, 65, 512, 5000)] == [16, 16, 32, 64, 128, 512, 512]


@pytest.mark.parametrize("op", CANDIDATES)
@pytest.mark.parametrize(("n", "k"), [(10240, 8192), (57344, 8192), (8192, 28672), (960, 576), (16, 16)])
def test_usual_tilings_are_listed_and_fill_the_card_without_tiny_splits(op: str, n: int, k: int) -> None:
    for m in (FIXED, *BUCKETS):
        tiling = usual(op, m, n, k)
        listed = [(t.features, t.depth, t.rows, t.warps, t.stages) for t in CANDIDATES[op]]
        assert (tiling.features, tiling.depth, tiling.rows, tiling.warps, tiling.stages) in listed
        steps = -(-k // tiling.depth)
        assert tiling.splits == 1 or steps // tiling.splits >= 4
        found = candidates(op, m, n, k)
        assert found and all(t.splits == 1 or -(-k // t.depth) >= 4 * t.splits for t in found)
        assert len(set(found)) == len(found)


def test_the_fixed_tiling_does_not_ask_for_m_and_bounds_its_workspace() -> None:
    tiling = usual("fp8_linear", FIXED, 8192, 8192)
    chunks = row_chunks(2000, tiling)
    assert tiling.splits > 1 and max(c.stop - c.start for c in chunks) <= 512
    assert [r for c in chunks for r in range(c.start, c.stop)] == list(range(2000))
    assert row_chunks(2000, Tiling(64, 128, 64, 1, 4, 4)) == [slice(0, 2000)] and row_chunks(0, tiling) == []


@pytest.mark.parametrize("x_bytes", [2, 4])
def test_stages_fit_whatever_the_numbers(x_bytes: int) -> None:
    """As listed for 16 bits; float32 rows leave room for fewer, but for two, with every tiling."""
    for op, tilings_of in CANDIDATES.items():
        w_bytes = x_bytes if op == "dense_linear" else 1
        for tiling in () if op.startswith("int4") else tilings_of:
            stages = fitted(tiling, w_bytes, x_bytes).stages
            assert stages == tiling.stages if x_bytes == 2 else 2 <= stages <= tiling.stages, (op, tiling)


def test_launches_in_flight_have_their_own_counters() -> None:
    ring = _ring(CPU)
    one, two = ring.take(100), ring.take(100)
    assert one.data_ptr() != two.data_ptr()
    ring.next = _RING - 50
    assert ring.take(100).storage_offset() == 0


def test_a_table_survives_the_disk_and_bad_files_change_nothing(tmp_path: Path, table: Table) -> None:
    made, tiling = Table(), Tiling(64, 128, 16, 4, 4, 5)
    made.card = "Some Card 9000"
    made.choices = {
        ("fp8_linear", 8192, 8192, 16): Choice("triton", tiling, 19.5),
        ("fp8_linear", 8192, 8192, 512): Choice("widened", None, 99.0),
        ("fp8_linear", 8192, 8192, FIXED): Choice("triton_fixed", tiling, 23.0),
    }
    made.save(tmp_path / tilings.file_name(made.card))
    assert [p.name for p in tmp_path.iterdir()] == ["some-card-9000.json"]
    assert ops.load_tilings(tmp_path, "Some Card 9000") and table.choices == made.choices
    assert table.tiling("fp8_linear", 7, 8192, 8192) == tiling and table.microseconds("fp8_linear", 9, 8192, 8192) == 19.5
    assert table.tiling("fp8_linear", 7, 8192, 4096) == usual("fp8_linear", 7, 8192, 4096)
    assert table.microseconds("fp8_linear", 40, 8192, 8192) is None
    assert ops.explain("cuda")["fp8_linear"].endswith("measured on Some Card 9000: triton 1, triton_fixed 1, widened 1")
    for text in ("{", "{}", '{"card": "x", "choices": [{"op": "fp8_linear"}]}', "[]"):
        (tmp_path / "some-card-9000.json").write_text(text)
        assert not ops.load_tilings(tmp_path, "Some Card 9000") and table.choices == made.choices
    assert not ops.load_tilings(tmp_path, "Another Card")


def test_the_table_chooses_among_backends_of_one_recipe(table: Table) -> None:
    from specdec.kernels.fp8_fp8_linear import triton as fp8_fp8
    from specdec.kernels.fp8_linear import triton as fp8
    from specdec.kernels.linear import triton as dense

    x, weight = randn(3, 128), random_fp8(128, 128, "channel")
    q, scale = ops.quantize_fp8(x)
    assert dense.rejects(x, x) and fp8.rejects(x, weight) is None and fp8_fp8.rejects(q, scale, weight, torch.bfloat16) is None
    assert fp8.rejects(randn(513, 128), weight) and fp8.rejects(randn(513, 128), random_fp8(128, 128, "block")) is None
    table.choices = {
        ("dense_linear", 3, 128, 16): Choice("triton", None, 1.0),
        ("fp8_linear", 128, 128, 16): Choice("widened", None, 1.0),
        ("fp8_fp8_linear", 128, 128, 16): Choice("scaled_mm", None, 1.0),
    }
    assert dense.rejects(x, x) is None and fp8.rejects(x, weight) and fp8.rejects(x, random_fp8(128, 128, "block")) is None
    assert fp8_fp8.rejects(q, scale, weight, torch.bfloat16) and fp8_fp8.rejects(q, scale, weight, torch.float32) is None
