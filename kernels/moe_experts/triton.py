"""Mixture of experts without a look from the host: find the rows, gate|up with activation, down, combine.

*Rows.* The pairs (row, choice) are grouped by expert, and each expert's pairs cut into blocks of ROWS. Of few pairs the products' programs
find their own: block i is that of pair i, if that is the first of its expert, and takes all of them. Of more, a sort makes the
blocks, whose number has a bound that shapes give (`most_blocks`); the blocks past the last say so and their programs leave at once.
One program an expert finds its place by a histogram of all pairs: no program waits for another.

*Products.* A program owns one block and one tile of weight rows, and walks along K, all of it or a split of it. The weight tile is
the left factor, half of it gate and half up: two warps hold 32 rows each, the tokens are the 8 or 16 columns, so an expert hit by one row
costs what its bytes cost. Weights are read once per block, which is once per expert up to ROWS rows of it. Gate|up adds its splits in
the last program of a tile to arrive, down writes each split's outputs.

*Combine.* Down writes every pair's weighted output in float32; the last kernel, or of few pairs the last program of a tile, adds a row's k
pairs in the order of its choices. Nothing is added by atomics, which would lose the fixed order.

Reading. One token of Qwen3-30B-A3B in FP8 touches 8 experts, 37.7 MB, 8.8 µs at 4.3 TB/s; 64 tokens touch 126 of 128 experts, 597 MB,
139 µs. gpt-oss-120b: 53 MB and 12.3 µs for one token. It is all reading up to hundreds of tokens. A program keeps three
stages of 4 (MXFP4) or 8 KB on the way, and seven or eight of them share a multiprocessor, which needs 40 KB on the way in all.
At one token there are too few tiles (192 and 360 of gate|up), hence splits.

Unpacking. At that speed an SM reads 18.6 bytes a clock and issues 128 lane instructions: 6.9 a byte. The loops on sm_90 (counted in the
code, all in) take 2.6 a byte of FP8 and 4.9 a byte of MXFP4 with blocks of 8 rows, 3.1 and 5.9 of 16. The loop of MXFP4 has two
barriers a unit of 128 columns; its scales come with the weights through the pipeline. Left as plain loads they cost a trip to memory
in every step, and products of 32 columns by the warp-group instruction cost a fence and a wait each: 5.7 to 9 times the read time.

Bits: the order of a sum depends on the tile sizes and splits, which depend on the shapes, the storage and the number of pairs.
`moe_experts_fixed` keeps ROWS at 16 and splits nothing: bits of a row then depend on the row alone.
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
from specdec.kernels.moe_experts.triton_rows import find_block, most_blocks, sort_pairs
from specdec.kernels.moe_experts.triton_unpack import (
    DENSE,
    FP8,
    INT4,
    MXFP4,
    e2m1,
    e4m3,
    e8m0,
    lift,
    load_columns,
    load_int4,
    load_numbers,
    load_scales,
)
from specdec.kernels.moe_experts.weight import Experts, ExpertWeight, storage
from specdec.kernels.mxfp4.units import UNIT, WORDS, Mxfp4Units, pack_units
from specdec.kernels.mxfp4.weight import Mxfp4Weight
from specdec.kernels.tilings import Tiling
from specdec.kernels.triton_common import after_launches, dot, early, send_for
from specdec.kernels.triton_gemm import Workspace, arrive, collect, steps, zeroed

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_WORDS, _UNIT = tl.constexpr(WORDS), tl.constexpr(UNIT)
_MOST_EXPERTS = 2048
_FEW_PAIRS = 64  # up to which the products find their rows without a sort
_BUSY = 132 * 6  # programs that fill Hopper's multiprocessors
_MOST_SPLITS = 8


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
    if isinstance(weight, Mxfp4Weight | Mxfp4Units) and x.dtype is torch.float16:
        return "MXFP4 scales do not fit float16"
    return None


def moe_experts(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """Shapes in `specdec.ops.moe_experts`."""
    return run(x, ids, weights, experts, plan(ids, experts))


def moe_experts_fixed(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """`moe_experts` with blocks of 16 rows and whole sums whatever the number of rows."""
    return run(x, ids, weights, experts, _FIXED)


@dataclass(frozen=True, slots=True)
class Plan:
    """rows: pairs a block; features: rows of a weight a tile; stages; splits: parts of K of gate|up and of down, 0 = for busy processors.

    early: launches need not wait for the end of the one before; they wait inside, with the weights of down on their way (Hopper).
    """

    rows: int
    features: int = 64
    stages: int = 4
    splits: tuple[int, int] = (0, 0)
    early: bool = False


_FIXED = Plan(16, splits=(1, 1))


def plan(ids: Tensor, experts: Experts) -> Plan:
    """Blocks of 8 rows up to 4 rows an expert on average, of 16 up to 16, then what fills the tensor cores."""
    mean = ids.numel() // max(experts.count, 1)
    if mean <= 16:
        return Plan(8 if mean <= 4 else 16)
    return Plan(32, 128) if mean <= 64 else Plan(64)


@dataclass(frozen=True, slots=True)
class _Form:
    """How a kernel reads a weight: what of it are pointers (data, scale, zero) and what constants."""

    data: Tensor
    scale: Tensor
    zero: Tensor
    constants: dict[str, Any]


def _form(weight: ExpertWeight) -> _Form:
    """NUMBERS, SCALES: elements an expert has; GROUP: columns a scale outside the numbers, 0 = none; SCALE_ROWS: rows a scale."""
    if isinstance(weight, Mxfp4Weight):
        weight = pack_units(weight)  # for this call alone
    if isinstance(weight, Tensor):
        data = scale = zero = weight
        constants = {"KIND": DENSE.value, "GROUP": 0, "SCALE_ROWS": 1}
    elif isinstance(weight, Mxfp4Units):
        data, scale, zero = weight.data, weight.scale, weight.scale
        constants = {"KIND": MXFP4.value, "GROUP": 32, "SCALE_ROWS": 1}
    elif isinstance(weight, Int4Weight):
        data, scale, zero = weight.data.view(torch.uint8), weight.scale, weight.zero
        constants = {"KIND": INT4.value, "GROUP": weight.group, "SCALE_ROWS": 1}
    else:
        data, scale, zero = weight.data.view(torch.uint8), weight.scale, weight.scale
        constants = {"KIND": FP8.value} | _fp8_groups(weight)
    return _Form(data, scale, zero, constants | {"NUMBERS": data[0].numel(), "SCALES": scale[0].numel()})


def _fp8_groups(weight: Fp8Weight) -> dict[str, int]:
    if weight.scale.dim() == 3:
        return {"GROUP": FP8_BLOCK, "SCALE_ROWS": FP8_BLOCK}
    rows, columns = weight.data.shape[1:]
    return {"GROUP": columns, "SCALE_ROWS": 1 if weight.scale[0].numel() > 1 else rows}


def _tiling(form: _Form, columns: int, itemsize: int, plan: Plan) -> dict[str, int]:
    """Columns a step, warps, stages: 4 to 8 KB of weights a stage.

    Two warps multiply each for itself: half of the rows each, a byte unpacked once, four numbers a register. More tokens take four
    warps and, on Hopper, the warp-group product.
    """
    kind, group = form.constants["KIND"], form.constants["GROUP"]
    deep = 32 if itemsize == 4 else 64 if kind == DENSE.value else 128
    deep = UNIT if kind == MXFP4.value else min(deep, group) if 0 < group < columns else deep
    warps = 4 if plan.rows > 16 or itemsize == 4 or kind == INT4.value else 2
    stages = 2 if itemsize == 4 else plan.stages
    return {"DEEP": deep, "PACK": 4 if warps == 2 else 2, "STAGES": stages, "num_warps": warps, "num_stages": stages}


def _splits(wanted: int, programs: int, columns: int, deep: int) -> int:
    """Parts of K, none of them empty."""
    count = triton.cdiv(columns, deep)
    most = min(count, wanted or min(_MOST_SPLITS, max(1, _BUSY // programs)))
    return triton.cdiv(count, triton.cdiv(count, most))


def run(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, plan: Plan) -> Tensor:
    """The launches."""
    out = torch.empty_like(x)
    (tokens, hidden), pairs, inner, count = x.shape, ids.numel(), experts.inner, experts.count
    if not pairs or not hidden:
        return out.zero_()
    few = pairs <= _FEW_PAIRS and tokens <= plan.rows
    launch = early(x.device, plan.early)
    blocks = pairs if few else most_blocks(pairs, count, plan.rows)
    order = ids if few else sort_pairs(ids, blocks, count, plan.rows, launch)
    where = (order, pairs, blocks, count)
    middle = x.new_empty(pairs, inner)
    constants = {"ROWS": plan.rows, "PAIRS": _FEW_PAIRS if few else 0, "CHOICES": ids.shape[1]} | launch
    form, bias = _form(experts.gate_up), experts.gate_up_bias
    tiles, high = _tiling(form, hidden, x.element_size(), plan), triton.cdiv(inner, plan.features // 2)
    splits = _splits(plan.splits[0], high * blocks, hidden, tiles["DEEP"])
    space = Workspace(Tiling(plan.features, tiles["DEEP"], plan.rows, splits, 0, 0), high * blocks, x.device)
    _gate_up[(high * splits, blocks)](
        x, form.data, form.scale, form.zero, x if bias is None else bias, middle, *where, space.partial, space.counters, splits,
        experts.limit or 0.0, experts.alpha, N=inner, K=hidden, SPLIT=splits > 1, BIAS=bias is not None, CUT=experts.limit is not None,
        TALL=plan.features // 2, **constants, **form.constants, **tiles,
    )  # fmt: skip
    form, bias = _form(experts.down), experts.down_bias
    tiles, high = _tiling(form, inner, x.element_size(), plan), triton.cdiv(hidden, plan.features)
    splits = _splits(plan.splits[1], high * blocks, inner, tiles["DEEP"])
    outputs = torch.empty(splits, pairs, hidden, dtype=torch.float32, device=x.device)
    counters = zeroed(high, x.device) if few else order
    _down[(high * splits, blocks)](
        middle, form.data, form.scale, form.zero, x if bias is None else bias, weights, outputs, out, *where, counters, splits,
        N=hidden, K=inner, BIAS=bias is not None, TALL=plan.features, **constants, **form.constants, **tiles,
    )  # fmt: skip
    if not few:
        _combine[(tokens, triton.cdiv(hidden, 1024))](
            outputs, ids, out, pairs, count, splits, H=hidden, CHOICES=ids.shape[1], TILE=1024, **launch
        )
    return out


@triton.jit
def _send_for(data, row, first, stop, R: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, DEEP: tl.constexpr):
    """Asks for steps first … stop of weight rows `row` [TALL], clamped, to come into the second-level cache; FP8 and MXFP4 only."""
    for step in range(first, stop):
        if KIND == MXFP4:  # 64 bytes a row, one row after the other: the two of a line ask for it twice
            send_for(data + (step * R + row) * _WORDS)
        if KIND == FP8:
            send_for(data + row.to(tl.int64) * K + step * DEEP)


@triton.jit
def _unit_sums(
    acc, source, used, data, scale, row, first, stop,
    R: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, LIFT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """acc [TALL, ROWS] + units first … stop of weight rows `row` of R in the layout of `mxfp4.units`, times the columns from source.

    The loop names its stages, so that scales come through the pipeline too, which otherwise takes only what is multiplied.
    """
    words = data + row[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :]
    for unit in tl.range(first, stop, num_stages=STAGES):
        codes = tl.load(words + unit * (R * _WORDS))
        scales = tl.load(scale + unit * R + row)
        values = e2m1(codes, source.dtype.element_ty)
        for block in tl.static_range(4):
            rows = load_columns(source, used, unit * _UNIT + block * 32, K, K % 128 == 0, 32)
            if LIFT:
                rows = lift(rows, KIND, rows.dtype)
            part = dot(values[block], rows, tl.zeros(acc.shape, tl.float32))
            acc += part * e8m0(scales, block)[:, None]
    return acc


@triton.jit
def _step_sums(
    acc, source, used, data, scale, zero, row, first, stop,
    K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, DEEP: tl.constexpr, PACK: tl.constexpr,
    LIFT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `_unit_sums`, of the other storages, in steps of DEEP columns; scaled where scales differ along K."""
    EVEN: tl.constexpr = K % DEEP == 0
    SCALED: tl.constexpr = GROUP > 0 and GROUP < K
    for step in tl.range(first, stop, num_stages=STAGES):
        at = step * DEEP
        if KIND == INT4:
            weight = load_int4(data, zero, row, at, K, GROUP, EVEN, DEEP, source.dtype.element_ty)
        else:
            weight = load_numbers(data, row, at, K, EVEN, DEEP)
            if KIND == FP8:
                weight = e4m3(weight, source.dtype.element_ty, PACK)
        rows = load_columns(source, used, at, K, EVEN, DEEP)
        if LIFT:
            rows = lift(rows, KIND, rows.dtype)
        if SCALED:
            part = dot(weight, rows, tl.zeros(acc.shape, tl.float32))
            acc += part * load_scales(scale, row, at, K, GROUP, SCALE_ROWS)[:, None]
        else:
            acc = dot(weight, rows, acc)
    return acc


@triton.jit
def _sums(
    source, used, data, scale, zero, row, split, splits,
    R: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr,
    DEEP: tl.constexpr, PACK: tl.constexpr, LIFT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[TALL, ROWS]: weight rows `row` [TALL] of R, times the rows from source [ROWS], over one split of K. LIFT: the rows lack `lift`."""
    first, stop = steps(K, split, splits, DEEP)
    acc = tl.zeros([row.shape[0], ROWS], tl.float32)
    if KIND == MXFP4:
        return _unit_sums(acc, source, used, data, scale, row, first, stop, R, K, KIND, LIFT, STAGES)
    else:
        return _step_sums(acc, source, used, data, scale, zero, row, first, stop, K, KIND, GROUP, SCALE_ROWS, DEEP, PACK, LIFT, STAGES)


@triton.jit
def _finish(
    acc, scale, bias, row,
    K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The sums with what they lack: an exponent, the scale that all of a row's columns share, the bias (a pointer)."""
    acc = lift(acc, KIND, DTYPE)
    if GROUP >= K and KIND != MXFP4:
        acc = acc * load_scales(scale, row, 0, K, GROUP, SCALE_ROWS)[:, None]
    if BIAS:
        acc = acc + tl.load(bias + row).to(tl.float32)[:, None]
    return acc


@triton.jit
def _activate(
    acc, middle, scale, bias, row, tile, pair, limit, alpha,
    N: tl.constexpr, K: tl.constexpr, TALL: tl.constexpr, BIAS: tl.constexpr, CUT: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """From sums [2 TALL, ROWS], gate above up, to their columns of `middle`, lifted as down wants them."""
    acc = _finish(acc, scale, bias, row, K, KIND, GROUP, SCALE_ROWS, BIAS, DTYPE)
    gate, up = tl.split(tl.permute(tl.reshape(acc, [2, TALL, acc.shape[1]]), (1, 2, 0)))
    if CUT:
        gate = tl.where(gate > limit, limit, gate)  # NaN stays
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        active = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    else:
        active = gate / (1.0 + tl.exp(-gate)) * up
    column = tile * TALL + tl.arange(0, TALL)
    place = middle + pair.to(tl.int64)[None, :] * N + column[:, None]
    tl.store(place, lift(active.to(DTYPE), KIND, DTYPE), mask=(pair >= 0)[None, :] & (column < N)[:, None])


@triton.jit(do_not_specialize=["pairs", "blocks", "count", "splits", "limit", "alpha"])
def _gate_up(
    x, data, scale, zero, bias, middle, order, pairs, blocks, count, partial, counters, splits, limit, alpha,
    CHOICES: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr, CUT: tl.constexpr,
    EARLY: tl.constexpr, TALL: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr, NUMBERS: tl.constexpr, SCALES: tl.constexpr, DEEP: tl.constexpr, PACK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of TALL gate rows and as many up rows × splits, blocks). middle [pairs, N]."""
    after_launches(EARLY)
    expert, pair = find_block(order, pairs, blocks, count, PAIRS, ROWS)
    if expert >= 0:
        tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
        wide = expert.to(tl.int64)
        data, scale, zero, bias = data + wide * NUMBERS, scale + wide * SCALES, zero + wide * SCALES, bias + wide * (2 * N)
        entry = tl.arange(0, 2 * TALL)
        row = tl.minimum(tile * TALL + entry % TALL, N - 1) + entry // TALL * N
        source = x + (tl.maximum(pair, 0) // CHOICES).to(tl.int64) * K
        acc = _sums(
            source, pair >= 0, data, scale, zero, row, split, splits, 2 * N, K, ROWS, KIND, GROUP, SCALE_ROWS, DEEP, PACK, True, STAGES
        )
        dtype: tl.constexpr = x.dtype.element_ty
        if not SPLIT:
            _activate(acc, middle, scale, bias, row, tile, pair, limit, alpha, N, K, TALL, BIAS, CUT, KIND, GROUP, SCALE_ROWS, dtype)
        else:
            cell = tl.program_id(1) * (tl.num_programs(0) // splits) + tile
            if arrive(acc, partial, counters, cell, split, splits, ROWS):
                acc = collect(acc, partial, counters, cell, splits, ROWS)
                _activate(acc, middle, scale, bias, row, tile, pair, limit, alpha, N, K, TALL, BIAS, CUT, KIND, GROUP, SCALE_ROWS, dtype)


@triton.jit(do_not_specialize=["pairs", "blocks", "count", "splits"])
def _down(
    middle, data, scale, zero, bias, weights, outputs, out, order, pairs, blocks, count, counters, splits,
    CHOICES: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr,
    EARLY: tl.constexpr, TALL: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr, NUMBERS: tl.constexpr, SCALES: tl.constexpr, DEEP: tl.constexpr, PACK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of TALL rows × splits, blocks). outputs [splits, pairs, N] f32: what the pair's expert says, times its weight. Of few
    pairs the last program of a tile adds them up too."""
    if not PAIRS:
        after_launches(EARLY)
    expert, pair = find_block(order, pairs, blocks, count, PAIRS, ROWS)  # ids are older than gate|up, which has waited for them
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    column = tile * TALL + tl.arange(0, TALL)
    row, wide = tl.minimum(column, N - 1), tl.maximum(expert, 0).to(tl.int64)
    data, scale, zero, bias = data + wide * NUMBERS, scale + wide * SCALES, zero + wide * SCALES, bias + wide * N
    if PAIRS and EARLY:
        if expert >= 0:
            first, stop = steps(K, split, splits, DEEP)
            _send_for(data, row, first, stop, N, K, KIND, DEEP)
        after_launches(EARLY)
    if expert >= 0:
        source, used = middle + tl.maximum(pair, 0).to(tl.int64) * K, pair >= 0
        acc = _sums(source, used, data, scale, zero, row, split, splits, N, K, ROWS, KIND, GROUP, SCALE_ROWS, DEEP, PACK, False, STAGES)
        acc = _finish(acc, scale, bias, row, K, KIND, GROUP, SCALE_ROWS, False, middle.dtype.element_ty)
        if BIAS:
            acc += tl.where(split == 0, tl.load(bias + row).to(tl.float32), 0.0)[:, None]
        acc = acc * tl.load(weights + pair, mask=used, other=0.0)[None, :]
        place = outputs + (split * pairs + pair).to(tl.int64)[None, :] * N + column[:, None]
        tl.store(place, acc, mask=used[None, :] & (column < N)[:, None])
    if PAIRS:
        tl.debug_barrier()  # every thread's outputs before the one thread's release
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == blocks * splits - 1:
            tl.store(counters + tile, 0)
            _total(outputs, order, out, tl.arange(0, ROWS), column, pairs, count, splits, N, CHOICES)


@triton.jit
def _total(outputs, ids, out, token, column, pairs, count, splits, H: tl.constexpr, CHOICES: tl.constexpr):
    """A row's outputs added in the order of its choices, for rows `token` and columns `column`; a pair without an expert wrote none."""
    total = tl.zeros([token.shape[0], column.shape[0]], tl.float32)
    for split in range(splits):
        for choice in tl.static_range(CHOICES):
            pair = token * CHOICES + choice
            expert = tl.load(ids + pair, mask=pair < pairs, other=-1)
            place = outputs + (split * pairs + pair).to(tl.int64)[:, None] * H + column[None, :]
            there = ((expert >= 0) & (expert < count))[:, None] & (column < H)[None, :]
            total += tl.load(place, mask=there, other=0.0, cache_modifier=".cg")
    inside = (token * CHOICES < pairs)[:, None] & (column < H)[None, :]
    tl.store(out + token.to(tl.int64)[:, None] * H + column[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["pairs", "count", "splits"])
def _combine(
    outputs, ids, out, pairs, count, splits, H: tl.constexpr, CHOICES: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Grid (rows, column tiles)."""
    after_launches(EARLY)
    token = tl.program_id(0) + tl.arange(0, 1)
    _total(outputs, ids, out, token, tl.program_id(1) * TILE + tl.arange(0, TILE), pairs, count, splits, H, CHOICES)
