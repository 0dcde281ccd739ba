"""Mixture of experts in four launches, without a look from the host: sort, gate|up with activation, down, combine.

*Sort.* The pairs (row, choice) are grouped by expert, and each expert's pairs cut into blocks of ROWS. The number of blocks has a bound
that shapes give (`_blocks`); the blocks past the last say so and their programs leave at once. One program an expert finds its
place by a histogram of all pairs: no program waits for another.

*Products.* A program owns one block and one tile of weight rows, and walks along K. The weight tile is the left factor: it fills the
64 or 128 rows of a tensor-core instruction, the few tokens its 16 columns, so an expert hit by one row costs what its bytes cost.
Weights are read once per block, which is once per expert up to ROWS rows of it.

*Combine.* Down writes every pair's weighted output in float32; the last kernel adds a row's k pairs in the order of its choices. There
are no atomics: an atomic sum would need the zeroing before and the rounding after, two launches instead of one, and lose the fixed order.

Two numbers. One token of Qwen3-30B-A3B in FP8 touches 8 experts, 37.7 MB, 8.8 µs at 4.3 TB/s, and does 0.08 GFLOP; 64 tokens touch
126 of 128 experts, 594 MB, 138 µs, 4.8 GFLOP (at 450 TFLOP/s: 11 µs). gpt-oss-120b: 53 MB and 12.3 µs for one token. It is all
reading up to hundreds of tokens, hence few tokens a tile and no second reading of a weight: at one token gate|up of A3B is 8 experts × 12
tiles of 2 × 64 rows = 96 programs for 132 SMs, down 256, and four stages of 16 and 8 KB keep more than 40 KB in flight per SM, which
is what 4.3 TB/s × 1 µs asks of each. What the pairs add, float32 outputs of k·H·4 bytes a row, 4 MB at 64 rows, stays in L2.

The other limit is unpacking. At that speed an SM reads 18.6 bytes a clock and issues 128 lane instructions: 6.9 a byte. The loop of
gate|up on sm_90 (counted in the code, all in) takes 3.8 instructions an FP8 weight, so reading is the limit; an MXFP4 weight takes 5.8 and
an INT4 weight 5.5 where 3.4 would be hidden, so these two are limited by arithmetic, MXFP4 to about 1.7 times the read time if nothing
else helps. What costs there: a product and its synchronisation for each group of 32 columns; 2.6 of the 5.8 are the unpacking itself.

Bits: the order of a sum depends on the tile sizes, which depend on the shapes and the storage, and ROWS on the number of pairs too.
`moe_experts_fixed` keeps ROWS at 16: bits of a row then depend on the row alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.fp8_linear.weight import BLOCK as FP8_BLOCK
from specdec.kernels.fp8_linear.weight import Fp8Weight
from specdec.kernels.int4_linear.weight import Int4Weight
from specdec.kernels.moe_experts.weight import Experts, ExpertWeight, storage
from specdec.kernels.mxfp4.weight import BLOCK, Mxfp4Weight
from specdec.kernels.triton_common import INTERPRET, dot

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_DENSE, _FP8, _INT4, _MXFP4 = (tl.constexpr(i) for i in range(4))
_MOST_EXPERTS = 2048
_SORTED_AT_ONCE = 1024


def rejects(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> str | None:
    """Why this kernel cannot run the call, or None."""
    if x.dtype not in _DTYPES or not x.is_contiguous():
        return "rows must be dense, of float32, float16 or bfloat16"
    if experts.count > _MOST_EXPERTS:
        return f"{experts.count} experts; it takes up to {_MOST_EXPERTS}"
    return _storage_rejects(experts.gate_up, x) or _storage_rejects(experts.down, x)


def _storage_rejects(weight: ExpertWeight, x: Tensor) -> str | None:
    if not all(t.is_contiguous() for t in storage(weight)):
        return "weights must be dense"
    if isinstance(weight, Tensor):
        return None if weight.dtype is x.dtype else f"weights of {weight.dtype} with rows of {x.dtype}"
    if isinstance(weight, Int4Weight) and (weight.group % 32 or (weight.group & (weight.group - 1) and weight.group % 128)):
        return f"groups of {weight.group}; it takes 32, 64 and multiples of 128"
    if isinstance(weight, Mxfp4Weight) and x.dtype is torch.float16:
        return "MXFP4 scales do not fit float16"
    return None


def moe_experts(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """Shapes in `specdec.ops.moe_experts`."""
    return _run(x, ids, weights, experts, _rows_per_block(ids.numel(), experts.count))


def moe_experts_fixed(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """`moe_experts` with blocks of 16 rows whatever their number."""
    return _run(x, ids, weights, experts, 16)


def _rows_per_block(pairs: int, experts: int) -> int:
    """16 up to 16 rows an expert on average, then what fills the tensor cores."""
    mean = pairs // max(experts, 1)
    return 16 if mean <= 16 else 32 if mean <= 64 else 64


def _blocks(pairs: int, experts: int, rows: int) -> int:
    """The most blocks of `rows` pairs there can be: every expert hit has one that is not full."""
    hit = min(experts, pairs)
    return (pairs + hit * (rows - 1)) // rows


@dataclass(frozen=True, slots=True)
class _Form:
    """How a kernel reads a weight: what of it are pointers (data, scale, zero) and what constants."""

    data: Tensor
    scale: Tensor
    zero: Tensor
    constants: dict[str, Any]


def _form(weight: ExpertWeight, x: Tensor) -> _Form:
    """PACKED: numbers a byte; GROUP: columns a scale outside the numbers, 0 = none; SCALE_ROWS: rows a scale; SCALES: scales an expert."""
    if isinstance(weight, Tensor):
        return _Form(weight, weight, weight, {"KIND": _DENSE.value, "PACKED": 1, "GROUP": 0, "SCALE_ROWS": 1, "SCALES": 0})
    if isinstance(weight, Mxfp4Weight):
        constants = {"KIND": _MXFP4.value, "PACKED": 2, "GROUP": BLOCK, "SCALE_ROWS": 1, "SCALES": weight.scale[0].numel()}
        return _Form(weight.data, weight.scale, weight.scale, constants)
    if isinstance(weight, Int4Weight):
        constants = {"KIND": _INT4.value, "PACKED": 2, "GROUP": weight.group, "SCALE_ROWS": 1, "SCALES": weight.scale[0].numel()}
        return _Form(weight.data.view(torch.uint8), weight.scale, weight.zero, constants)
    return _fp8_form(weight)


def _fp8_form(weight: Fp8Weight) -> _Form:
    blocked, scales = weight.scale.dim() == 3, weight.scale[0].numel()
    rows = FP8_BLOCK if blocked else 1 if scales > 1 else weight.data.shape[1]
    group = FP8_BLOCK if blocked else weight.data.shape[2]
    constants = {"KIND": _FP8.value, "PACKED": 1, "GROUP": group, "SCALE_ROWS": rows, "SCALES": scales}
    return _Form(weight.data.view(torch.uint8), weight.scale, weight.scale, constants)


def _tiling(form: _Form, columns: int, itemsize: int) -> dict[str, int]:
    """Weight rows a tile, columns a product and products an iteration, warps, stages: some 4 to 16 KB of weights a stage.

    64 rows and 4 warps: on Hopper the compiler then takes the warp-group product with the weights from registers, each unpacked once.
    """
    kind, group = form.constants["KIND"], form.constants["GROUP"]
    unit = 32 if itemsize == 4 else 64 if kind == _DENSE.value else 128
    unit = min(unit, group) if 0 < group < columns or kind == _MXFP4.value else unit
    units = max(n for n in range(1, 7) if columns // BLOCK % n == 0) if kind == _MXFP4.value else 1
    return {"TALL": 64, "UNIT": unit, "UNITS": units, "num_warps": 4, "num_stages": 2 if itemsize == 4 else 4}


def _run(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, rows: int) -> Tensor:
    """The four launches; `rows`: pairs a block."""
    out = torch.empty_like(x)
    (tokens, hidden), pairs, inner, count = x.shape, ids.numel(), experts.inner, experts.count
    if not pairs or not hidden:
        return out.zero_()
    blocks = _blocks(pairs, count, rows)
    order, plan = torch.empty(pairs, dtype=torch.int32, device=x.device), torch.empty(3, blocks, dtype=torch.int32, device=x.device)
    _sort[(count,)](ids, order, plan, pairs, blocks, count, BINS=triton.next_power_of_2(count + 1), CHUNK=_chunk(pairs), ROWS=rows)
    middle, outputs = x.new_empty(pairs, inner), torch.empty(pairs, hidden, dtype=torch.float32, device=x.device)
    form, bias = _form(experts.gate_up, x), experts.gate_up_bias
    tiles = _tiling(form, hidden, x.element_size())
    _gate_up[(triton.cdiv(inner, tiles["TALL"]), blocks)](
        x, form.data, form.scale, form.zero, x if bias is None else bias, middle, order, plan, blocks, experts.limit or 0.0, experts.alpha,
        CHOICES=ids.shape[1], N=inner, K=hidden, ROWS=rows, BIAS=bias is not None, CUT=experts.limit is not None, **form.constants, **tiles,
    )  # fmt: skip
    form, bias = _form(experts.down, x), experts.down_bias
    tiles = _tiling(form, inner, x.element_size())
    _down[(triton.cdiv(hidden, tiles["TALL"]), blocks)](
        middle, form.data, form.scale, form.zero, x if bias is None else bias, weights, outputs, order, plan, blocks,
        N=hidden, K=inner, ROWS=rows, BIAS=bias is not None, **form.constants, **tiles,
    )  # fmt: skip
    _combine[(tokens, triton.cdiv(hidden, 1024))](outputs, ids, out, count, H=hidden, CHOICES=ids.shape[1], TILE=1024)
    return out


def _chunk(pairs: int) -> int:
    return min(_SORTED_AT_ONCE, max(32, triton.next_power_of_2(pairs)))


@triton.jit
def _bins(ids, at, pairs, count, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """(pair [CHUNK], its expert, BINS - 1 where it has none or there is no such pair)."""
    pair = at + tl.arange(0, CHUNK)
    expert = tl.load(ids + pair, mask=pair < pairs, other=-1)
    return pair, tl.where((expert >= 0) & (expert < count), expert, BINS - 1)


@triton.jit(do_not_specialize=["pairs", "blocks", "count"])
def _sort(ids, order, plan, pairs, blocks, count, BINS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """Grid (experts). order [pairs]: pairs by expert, then by number; plan [3, blocks]: a block's expert or -1, its first entry in
    `order`, its number of entries."""
    own = tl.program_id(0)
    counts = tl.zeros([BINS], tl.int32)
    for at in range(0, pairs, CHUNK):
        pair, expert = _bins(ids, at, pairs, count, BINS, CHUNK)
        counts += tl.histogram(expert, BINS)
    each = tl.arange(0, BINS)
    needed = tl.where(each < count, (counts + ROWS - 1) // ROWS, 0)
    mine = tl.sum(tl.where(each == own, counts, 0), 0)
    start = tl.sum(tl.where(each < own, counts, 0), 0)
    first = tl.sum(tl.where(each < own, needed, 0), 0)
    for block in range(0, (mine + ROWS - 1) // ROWS):
        tl.store(plan + first + block, own)
        tl.store(plan + blocks + first + block, start + block * ROWS)
        tl.store(plan + 2 * blocks + first + block, tl.minimum(mine - block * ROWS, ROWS))
    for block in range(tl.sum(needed, 0) + own, blocks, count):  # unused ones, shared out
        tl.store(plan + block, -1)
    if mine > 0:
        for at in range(0, pairs, CHUNK):
            pair, expert = _bins(ids, at, pairs, count, BINS, CHUNK)
            fits = (expert == own).to(tl.int32)
            tl.store(order + start + tl.cumsum(fits, 0) - 1, pair, mask=fits == 1)
            start += tl.sum(fits, 0)


_FROM_E4M3 = tl.constexpr("""{ .reg .b32 t, u;
    prmt.b32 t, $1, 0, 0x1404;  shr.b32 u, t, 4;  and.b32 u, u, 0x07f007f0;  lop3.b32 $0, t, 0x80008000, u, 0xEA; }""")
_FROM_LOW_E2M1 = tl.constexpr("""{ .reg .b32 t, u;
    prmt.b32 t, $1, 0, 0x4140;  shl.b32 u, t, 6;  and.b32 u, u, 0x01c001c0;  shl.b32 t, t, 12;  lop3.b32 $0, t, 0x80008000, u, 0xEA; }""")
_FROM_HIGH_E2M1 = tl.constexpr("""{ .reg .b32 t, u;
    prmt.b32 t, $1, 0, 0x1404;  shr.b32 u, t, 6;  and.b32 u, u, 0x01c001c0;  lop3.b32 $0, t, 0x80008000, u, 0xEA; }""")


@triton.jit
def _small(code, ASM: tl.constexpr):
    """Two codes (uint8) at a time to bfloat16: sign, exponent and mantissa where it has them, bias not repaired."""
    return tl.inline_asm_elementwise(ASM, "=r,r", [code], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def _e4m3(code, DTYPE: tl.constexpr):
    """Values of e4m3 codes (uint8, none NaN); in bfloat16 on a card 2^-120 times them."""
    if tl.bfloat16 == DTYPE and not INTERPRET:
        return _small(code, _FROM_E4M3)
    else:
        bits = code.to(tl.int32)
        return ((((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DTYPE)  # 2^120


@triton.jit
def _e2m1(code, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """Values of the e2m1 codes in the low or high nibbles (uint8); in bfloat16 on a card 2^-126 times them."""
    if tl.bfloat16 == DTYPE and not INTERPRET:
        return _small(code, _FROM_HIGH_E2M1 if HIGH else _FROM_LOW_E2M1)
    else:
        nibble = (code >> 4 if HIGH else code & 15).to(tl.int32)
        bits = ((nibble & 8) << 28) | ((nibble & 7) << 22)
        return (bits.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(DTYPE)  # 2^126


@triton.jit
def _lift(x, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """x times the root of what `_e4m3` and `_e2m1` leave out: once on the rows, which keeps the products out of the subnormals, and
    once on the sums. DTYPE: of the rows."""
    if tl.bfloat16 == DTYPE and not INTERPRET:
        if KIND == _FP8:
            x = (x.to(tl.float32) * 1.152921504606847e18).to(x.dtype)  # 2^60
        if KIND == _MXFP4:
            x = (x.to(tl.float32) * 9.223372036854775808e18).to(x.dtype)  # 2^63
    return x


@triton.jit
def _rows(source, used, at, K: tl.constexpr, KIND: tl.constexpr, SPAN: tl.constexpr):
    """Columns at … at + SPAN of the rows that start at source [ROWS]: [SPAN, ROWS]."""
    column = at + tl.arange(0, SPAN)[:, None]
    rows = tl.load(source[None, :] + column, mask=used[None, :] & (column < K), other=0.0)
    return _lift(rows, KIND, rows.dtype)


@triton.jit
def _numbers(data, row, inside, at, K: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr, DTYPE: tl.constexpr):
    """Weight rows `row` [TALL], columns at … at + WIDE, as stored [TALL, WIDE], or in DTYPE if plain numbers; 0 outside."""
    column = at + tl.arange(0, WIDE)[None, :]
    number = tl.load(data + row.to(tl.int64)[:, None] * K + column, mask=inside[:, None] & (column < K), other=0)
    return _e4m3(number, DTYPE) if KIND == _FP8 else number


@triton.jit
def _int4(data, zero, row, inside, at, K: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, DTYPE: tl.constexpr):
    """code - zero of weight rows `row` [TALL], columns at … at + WIDE, in DTYPE [TALL, WIDE]."""
    code = _numbers(data, row, inside, at // 2, K // 2, _INT4, WIDE // 2, DTYPE)
    shift = tl.load(zero + row * (K // GROUP) + at // GROUP, mask=inside, other=0).to(tl.float32)
    both = tl.reshape(tl.join(code & 15, code >> 4), [row.shape[0], WIDE])
    return (both.to(tl.float32) - shift[:, None]).to(DTYPE)


@triton.jit
def _scales(scale, row, inside, at, K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr):
    """The scale of columns at … of each row, f32 [TALL]. An E8M0 scale is an exponent, but for its ends: none is NaN, 0 is 0."""
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    stored = tl.load(scale + row // SCALE_ROWS * groups + at // GROUP, mask=inside, other=0)
    return (stored.to(tl.int32) << 23).to(tl.float32, bitcast=True) if KIND == _MXFP4 else stored.to(tl.float32)


@triton.jit
def _add(
    acc, x, high_x, data, scale, zero, row, inside, at,
    K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """acc [TALL, ROWS] + the weights' columns at … at + UNIT times x [UNIT, ROWS]; scaled where scales differ along K.

    MXFP4: x and high_x are the columns of the low and of the high nibbles, [UNIT / 2, ROWS] each.
    """
    SCALED: tl.constexpr = KIND == _MXFP4 or (GROUP > 0 and GROUP < K)
    part = tl.zeros_like(acc) if SCALED else acc
    if KIND == _MXFP4:
        codes = _numbers(data, row, inside, at // 2, K // 2, KIND, UNIT // 2, x.dtype)
        part = dot(_e2m1(codes, False, x.dtype), x, part)
        part = dot(_e2m1(codes, True, x.dtype), high_x, part)
    elif KIND == _INT4:
        part = dot(_int4(data, zero, row, inside, at, K, GROUP, UNIT, x.dtype), x, part)
    else:
        part = dot(_numbers(data, row, inside, at, K, KIND, UNIT, x.dtype), x, part)
    if SCALED:
        part = acc + part * _scales(scale, row, inside, at, K, KIND, GROUP, SCALE_ROWS)[:, None]
    return part


@triton.jit
def _finish(
    acc, scale, bias, row, inside,
    K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The sums with what they lack: an exponent, the scale that all of a row's columns share, the bias."""
    acc = _lift(acc, KIND, DTYPE)
    if GROUP >= K and KIND != _MXFP4:
        acc = acc * _scales(scale, row, inside, 0, K, KIND, GROUP, SCALE_ROWS)[:, None]
    if BIAS:
        acc = acc + tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit
def _expert_base(data, scale, zero, expert, numbers, PACKED: tl.constexpr, SCALES: tl.constexpr):
    """Pointers to the expert's numbers, scales and zeros. numbers: of one expert."""
    wide = expert.to(tl.int64)
    return data + wide * (numbers // PACKED), scale + wide * SCALES, zero + wide * SCALES


@triton.jit(do_not_specialize=["blocks", "limit", "alpha"])
def _gate_up(
    x, data, scale, zero, bias, middle, order, plan, blocks, limit, alpha,
    CHOICES: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BIAS: tl.constexpr, CUT: tl.constexpr,
    KIND: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALES: tl.constexpr,
    TALL: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of TALL gate rows and as many up rows, blocks). middle [pairs, N] in the order of `order`."""
    block = tl.program_id(1)
    expert = tl.load(plan + block)
    if expert >= 0:
        start = tl.load(plan + blocks + block)
        entry = tl.arange(0, ROWS)
        used = entry < tl.load(plan + 2 * blocks + block)
        token = tl.load(order + start + entry, mask=used, other=0) // CHOICES
        data, scale, zero = _expert_base(data, scale, zero, expert, 2 * N * K, PACKED, SCALES)
        row = tl.program_id(0) * TALL + tl.arange(0, TALL)
        inside = row < N
        gate = tl.zeros([TALL, ROWS], tl.float32)
        up = tl.zeros([TALL, ROWS], tl.float32)
        source = x + token.to(tl.int64) * K
        HALF: tl.constexpr = UNIT // 2 if KIND == _MXFP4 else 0
        for begin in range(0, K, UNIT * UNITS):
            for unit in tl.static_range(UNITS):
                at = begin + unit * UNIT
                rows = _rows(source, used, at, K, KIND, UNIT - HALF)
                high = _rows(source, used, at + HALF, K, KIND, UNIT - HALF) if HALF else rows
                gate = _add(gate, rows, high, data, scale, zero, row, inside, at, K, KIND, GROUP, SCALE_ROWS, UNIT)
                up = _add(up, rows, high, data, scale, zero, row + N, inside, at, K, KIND, GROUP, SCALE_ROWS, UNIT)
        own = bias + expert.to(tl.int64) * (2 * N)
        gate = _finish(gate, scale, own, row, inside, K, KIND, GROUP, SCALE_ROWS, BIAS, x.dtype.element_ty)
        up = _finish(up, scale, own, row + N, inside, K, KIND, GROUP, SCALE_ROWS, BIAS, x.dtype.element_ty)
        if CUT:
            gate = tl.where(gate > limit, limit, gate)  # NaN stays
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
            active = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
        else:
            active = gate / (1.0 + tl.exp(-gate)) * up
        place = middle + (start + entry).to(tl.int64)[None, :] * N + row[:, None]
        tl.store(place, active.to(middle.dtype.element_ty), mask=used[None, :] & inside[:, None])


@triton.jit(do_not_specialize=["blocks"])
def _down(
    middle, data, scale, zero, bias, weights, outputs, order, plan, blocks,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BIAS: tl.constexpr,
    KIND: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALES: tl.constexpr,
    TALL: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of TALL rows, blocks). outputs [pairs, N] f32 by pair: what the pair's expert says, times its weight."""
    block = tl.program_id(1)
    expert = tl.load(plan + block)
    if expert >= 0:
        start = tl.load(plan + blocks + block)
        entry = tl.arange(0, ROWS)
        used = entry < tl.load(plan + 2 * blocks + block)
        data, scale, zero = _expert_base(data, scale, zero, expert, N * K, PACKED, SCALES)
        row = tl.program_id(0) * TALL + tl.arange(0, TALL)
        inside = row < N
        acc = tl.zeros([TALL, ROWS], tl.float32)
        source = middle + (start + entry).to(tl.int64) * K
        HALF: tl.constexpr = UNIT // 2 if KIND == _MXFP4 else 0
        for begin in range(0, K, UNIT * UNITS):
            for unit in tl.static_range(UNITS):
                at = begin + unit * UNIT
                rows = _rows(source, used, at, K, KIND, UNIT - HALF)
                high = _rows(source, used, at + HALF, K, KIND, UNIT - HALF) if HALF else rows
                acc = _add(acc, rows, high, data, scale, zero, row, inside, at, K, KIND, GROUP, SCALE_ROWS, UNIT)
        own = bias + expert.to(tl.int64) * N
        acc = _finish(acc, scale, own, row, inside, K, KIND, GROUP, SCALE_ROWS, BIAS, middle.dtype.element_ty)
        pair = tl.load(order + start + entry, mask=used, other=0)
        acc = acc * tl.load(weights + pair, mask=used, other=0.0)[None, :]
        tl.store(outputs + pair.to(tl.int64)[None, :] * N + row[:, None], acc, mask=used[None, :] & inside[:, None])


@triton.jit(do_not_specialize=["count"])
def _combine(outputs, ids, out, count, H: tl.constexpr, CHOICES: tl.constexpr, TILE: tl.constexpr):
    """Grid (rows, column tiles): a row's outputs added in the order of its choices; a pair without an expert wrote none."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = token * CHOICES + choice
        expert = tl.load(ids + pair)
        width = tl.where((expert >= 0) & (expert < count), H, 0)
        total += tl.load(outputs + pair * H + column, mask=column < width, other=0.0)
    tl.store(out + token * H + column, total.to(out.dtype.element_ty), mask=column < H)
