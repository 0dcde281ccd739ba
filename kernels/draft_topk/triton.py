"""lm_head and candidates: a product that reads the weight once, races its tiles on the spot, and a small kernel that picks the best.

The product of R rows with 32,000 × 4096 weights in bf16 is 262 MB, 62 µs at 4.2 TB/s, so all rows share a tile of the weight (128
rows of it, on the wide side of the tensor core, as in `triton_gemm`) up to 128 of them; each result is the same sequence of tensor-core
steps however many rows there are. A program stores its scores, 128 kB for a row of all of them against those 262 MB, and goes over
them again two rows a warp at a time: all programs end together, with nothing left to read, so absent rows should cost nothing.
The noise is float32 (`near_gumbel`): a draft's race is as good as its logits, whose sums are float32 too.

The best WIDTH of a row lie in the WIDTH parts of 64 tokens that have the best tops, equals by rising id. So the merging program
picks these parts from the tops and then the candidates from the parts, one warp a row: every pick is one vote of the warp for the
largest and one for the lowest id, on integers that are ordered as the floats are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.fp8_linear.weight import Fp8Weight
from specdec.kernels.noise.triton import near_gumbel, words
from specdec.kernels.triton_common import capability, dot, ordered
from specdec.kernels.triton_e4m3 import native, widen_finite

_PART = 64  # tokens of which the best and the sums are kept
_STAGED = 110 << 10  # bytes of shared memory that stages may take: of a multiprocessor's two programs each
_NONE = tl.constexpr(-(2**31))  # below every ordered float
_MOST = 64  # candidates a row
_PARTS = 1 << 14  # what the merging program holds


def rejects(hidden: Tensor, weight: Tensor | Fp8Weight, *rest: object) -> str | None:
    """Why this kernel cannot run the call, or None."""
    width, numbers = rest[-1], weight.data if isinstance(weight, Fp8Weight) else weight
    assert isinstance(width, int)
    if isinstance(weight, Fp8Weight):
        if weight.blocked:
            return "it takes e4m3 weights with a scale a row or for all"
    elif hidden.dtype is not weight.dtype:
        return f"{hidden.dtype} by {weight.dtype}; it takes equal floats of 16 or 32 bits"
    if hidden.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"{hidden.dtype}; it takes floats of 16 or 32 bits"
    if not (hidden.is_contiguous() and numbers.is_contiguous()):
        return "hidden and weight must be dense"
    too_many = not 1 <= width <= min(_MOST, weight.shape[0]) or weight.shape[0] > _PARTS * _PART
    return f"{width} of {weight.shape[0]} candidates; it takes up to {_MOST} of {_PARTS * _PART}" if too_many else None


def _shape(row_tile: int, size: int) -> tuple[int, int, int, int]:
    """Tokens and depth of a tile, warps, stages, for weights of `size` bytes."""
    return 128, 64, 4 if row_tile <= 32 else 8, min(5, _STAGED // (size * 64 * (128 + row_tile)))


def draft_topk(
    hidden: Tensor,
    weight: Tensor | Fp8Weight,
    temperature: Tensor,
    target_ids: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    choices: Tensor,
    noisy: Tensor | None,
    purpose: int,
    share: float,
    width: int,
    *,
    shape: tuple[int, int, int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes in `specdec.ops.draft_topk`. shape: tokens and depth of a tile, warps, stages in place of the usual."""
    rows, depth = hidden.shape
    vocab, device = weight.shape[0], hidden.device
    ids = torch.empty((rows, width), dtype=torch.int64, device=device)
    chances = torch.empty((rows, width), dtype=torch.float32, device=device)
    mass = torch.empty(rows, dtype=torch.float32, device=device)
    if rows == 0:
        return ids, chances, mass
    row_tile = min(128, max(16, triton.next_power_of_2(rows))) if hidden.element_size() == 2 else 16
    columns, step, warps, stages = shape or _shape(row_tile, hidden.element_size())
    codes = isinstance(weight, Fp8Weight)
    numbers, scale = (weight.data.view(torch.uint8), weight.scale) if isinstance(weight, Fp8Weight) else (weight, hidden)
    parts = triton.cdiv(vocab, columns) * (columns // _PART)
    race = torch.empty((rows, vocab), dtype=torch.float32, device=device)
    sums = torch.empty((4, rows, parts), dtype=torch.float32, device=device)  # race: largest, sum; scores: largest, sum
    noise, mapped = noisy is not None, target_ids is not None
    keys = [t.contiguous() for t in (seeds, positions, choices)] + [seeds if noisy is None else noisy.contiguous()]
    table = target_ids if mapped else seeds
    _race[(triton.cdiv(rows, row_tile), triton.cdiv(vocab, columns))](
        hidden, numbers, scale, temperature.contiguous(), table, *keys, race, sums, purpose, share, rows, rows // len(temperature), vocab,
        parts, CODES=codes, EACH=scale.numel() > 1, NATIVE=native(device), PACK=2 if capability(device) >= 90 else 4, DEPTH=depth,
        NOISE=noise, MAPPED=mapped, ROWS=row_tile, CHUNK=2 * warps, COLUMNS=columns, PART=_PART, STEP=step,
        EVEN=depth % step == 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    slots = triton.next_power_of_2(width)
    _merge[(rows,)](
        race, sums, table, ids, chances, mass, rows, vocab, parts,
        WIDTH=width, SLOTS=slots, MAPPED=mapped, PART=_PART, PARTS=triton.next_power_of_2(parts), num_warps=max(1, slots // 16),
    )  # fmt: skip
    return ids, chances, mass


@triton.jit
def _sum_of_exp(x, axis: tl.constexpr):
    """(largest, sum of exp(x - largest)) along the axis; infinities are not shifted."""
    top = tl.max(x, axis)
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    return top, tl.sum(tl.exp(x - tl.expand_dims(shift, axis)), axis)


@triton.jit
def _product(
    hidden, weight, row, column, rows, vocab,
    CODES: tl.constexpr, NATIVE: tl.constexpr, PACK: tl.constexpr,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """[COLUMNS, ROWS]. Columns past the end read the last one again, which needs no mask; rows past the end read nothing. CODES: of e4m3,
    PACK of them to a register, not yet scaled."""
    at_column = weight + tl.minimum(column, vocab - 1).to(tl.int64)[:, None] * DEPTH
    at_row = hidden + row.to(tl.int64)[None, :] * DEPTH
    present = (row < rows)[None, :]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for k in range(0, DEPTH, STEP):
        place = k + tl.arange(0, STEP)
        if EVEN:
            w = tl.load(at_column + place[None, :])
            x = tl.load(at_row + place[:, None], mask=present, other=0.0)
        else:
            w = tl.load(at_column + place[None, :], mask=(place < DEPTH)[None, :], other=0)
            x = tl.load(at_row + place[:, None], mask=present & (place < DEPTH)[:, None], other=0.0)
        if CODES:
            w = widen_finite(w, x.dtype, NATIVE, PACK)
        total = dot(w, x, total)
    return total


@triton.jit(do_not_specialize=["purpose", "rows", "each", "parts"])
def _race(
    hidden, weight, scales, temperatures, target_ids, seeds, positions, choices, noisy, races, sums, purpose, share, rows, each, vocab,
    parts, CODES: tl.constexpr, EACH: tl.constexpr, NATIVE: tl.constexpr, PACK: tl.constexpr, DEPTH: tl.constexpr, NOISE: tl.constexpr,
    MAPPED: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr, STEP: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, vocabulary tiles). each: rows that share a key. CODES: the weight is e4m3, with a scale for all, or EACH row.
    races [R,V]; sums [4,R,parts], of PART columns each."""
    first = tl.program_id(0) * ROWS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = (column < vocab)[None, :]
    every = first + tl.arange(0, ROWS)
    total = _product(hidden, weight, every, column, rows, vocab, CODES, NATIVE, PACK, DEPTH, ROWS, COLUMNS, STEP, EVEN)
    if CODES:
        total *= tl.load(scales + tl.where(EACH, tl.minimum(column, vocab - 1), 0))[:, None]
    there = (every < rows)[None, :] & (column < vocab)[:, None]
    tl.store(races + every.to(tl.int64)[None, :] * vocab + column[:, None], total, mask=there)
    tl.debug_barrier()  # what threads stored, others load
    token = column.to(tl.int64)
    if NOISE and MAPPED:
        token = tl.load(target_ids + column, mask=column < vocab, other=0)
    part = tl.program_id(1) * (COLUMNS // PART) + tl.arange(0, COLUMNS // PART)
    plane = rows.to(tl.int64) * parts
    for start in range(first, tl.minimum(first + ROWS, rows), CHUNK):
        row = start + tl.arange(0, CHUNK)
        real, key = row < rows, row // each
        own = races + row.to(tl.int64)[:, None] * vocab + column[None, :]
        score = tl.load(own, mask=real[:, None] & known, other=0.0) / tl.load(temperatures + key, mask=real, other=1.0)[:, None]
        score = tl.where(known & (score == score), score, float("-inf"))
        race = score
        if NOISE:
            mine = tl.load(noisy + key, mask=real, other=0) != 0
            g = _noise(token, key, real, seeds, positions, choices, purpose)
            race = score + tl.where(mine[:, None], share * g, 0.0)
        tl.store(own, race, mask=real[:, None] & known)
        place = sums + row.to(tl.int64)[:, None] * parts + part[None, :]
        top, mass = _sum_of_exp(tl.reshape(race, [CHUNK, COLUMNS // PART, PART]), 2)
        tl.store(place, top, mask=real[:, None])
        tl.store(place + plane, mass, mask=real[:, None])
        if NOISE:
            top, mass = _sum_of_exp(tl.reshape(score, [CHUNK, COLUMNS // PART, PART]), 2)
        tl.store(place + 2 * plane, top, mask=real[:, None])
        tl.store(place + 3 * plane, mass, mask=real[:, None])


@triton.jit
def _noise(token, row, real, seeds, positions, choices, purpose):
    """g of the tokens [C] in the rows [R]: [R,C]."""
    seed = tl.load(seeds + row, mask=real, other=0)[:, None]
    position = tl.load(positions + row, mask=real, other=0)[:, None]
    choice = tl.load(choices + row, mask=real, other=0)[:, None]
    counter = (token >> 2).to(tl.uint32)[None, :] + tl.zeros_like(position).to(tl.uint32)
    w0, w1, w2, w3 = words(counter, seed, position, choice, purpose)
    lane = (token & 3).to(tl.int32)[None, :]
    return near_gumbel(tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3))))


@triton.jit
def _log_mass(tops, masses, part, parts, PARTS: tl.constexpr):
    """log of the sum over parts of exp(top) * mass."""
    top = tl.load(tops + part, mask=part < parts, other=float("-inf"))
    mass = tl.load(masses + part, mask=part < parts, other=0.0)
    peak = tl.max(top, 0)
    shift = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    total = tl.sum(mass * tl.exp(tl.where(tl.abs(top) == float("inf"), 0.0, top) - shift), 0)
    return tl.where(total > 0.0, tl.log(tl.maximum(total, 1e-30)) + shift, float("-inf"))


@triton.jit
def _best(value, index, slot, WIDTH: tl.constexpr):
    """(the WIDTH largest of value, the lowest index first among equals; their indices), both in the shape of slot. `_NONE` is no value."""
    values, indices = tl.full(slot.shape, _NONE, tl.int32), tl.full(slot.shape, 0x7FFFFFFF, tl.int32)
    for place in range(WIDTH):
        top = tl.max(value, 0)
        at = tl.min(tl.where((value == top) & (top > _NONE), index, 0x7FFFFFFF), 0)
        values = tl.where(slot == place, top, values)
        indices = tl.where(slot == place, at, indices)
        value = tl.where(index == at, _NONE, value)
    return values, indices


@triton.jit(do_not_specialize=["rows", "parts"])
def _merge(
    races, sums, target_ids, ids, chances, masses, rows, vocab, parts,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr, MAPPED: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    part, slot = tl.arange(0, PARTS), tl.arange(0, SLOTS)
    own = sums + row * parts
    plane = rows.to(tl.int64) * parts
    whole = _log_mass(own, own + plane, part, parts, PARTS)
    tl.store(masses + row, _log_mass(own + 2 * plane, own + 3 * plane, part, parts, PARTS))
    top = tl.load(own + part, mask=part < parts, other=0.0)
    _, chosen = _best(tl.where(part < parts, ordered(top), _NONE), part, slot, WIDTH)
    column = tl.where(chosen < parts, chosen, parts)[:, None] * PART + tl.arange(0, PART)[None, :]
    value = tl.load(races + row * vocab + column, mask=column < vocab, other=0.0)
    value = tl.reshape(tl.where(column < vocab, ordered(value), _NONE), [SLOTS * PART])
    values, indices = _best(value, tl.reshape(column, [SLOTS * PART]), slot, WIDTH)
    bits = values ^ ((values >> 31) & 0x7FFFFFFF)
    chance = tl.exp(bits.to(tl.float32, bitcast=True) - whole)
    place = row * WIDTH + slot
    token = indices.to(tl.int64)
    if MAPPED:
        token = tl.load(target_ids + indices, mask=slot < WIDTH, other=0)
    tl.store(ids + place, token, mask=slot < WIDTH)
    tl.store(chances + place, tl.where(chance == chance, chance, 0.0), mask=slot < WIDTH)
