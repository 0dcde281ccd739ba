"""Paged attention in one Triton kernel: prefill, decode, chains and trees of a ragged batch, on tensor cores.

A program owns a tile of rows of one sequence and one KV head. The query heads that share the KV head are packed with the rows into
the M dimension of the products (m = row * group + head), so a decode step of a grouped model fills a tensor-core tile and every key
is read once per tile, not once per query head. Keys come in tiles in slot order with an online softmax in base 2: first the tiles that
every row sees whole, without a mask, then the others.

Which tile belongs to which sequence is found on the device: sequence b owns the tiles from cu_query[b] // R + b on (R rows a tile),
which leaves room for its last, partly filled one; the number of programs, T // R + B + 1, needs no look at the device. The programs
past the last sequence write the zeros of the padding rows.

Not a fixed order: tiles are in slot order (tree nodes by index, not by depth), and the tile sizes depend on T / B.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from specdec.kernels.triton_common import dot

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LOG2E = tl.constexpr(1.4426950408889634)


def rejects(q: Tensor, k_cache: Tensor, v_cache: Tensor, *_: object, **__: object) -> str | None:
    """Why this kernel cannot run the call, or None."""
    hd = q.shape[2]
    if hd % 16 or hd > 256:
        return f"head size {hd}; it takes multiples of 16 up to 256"
    if q.dtype not in _DTYPES or k_cache.dtype not in _DTYPES or v_cache.dtype != k_cache.dtype:
        return f"dtypes {q.dtype} and {k_cache.dtype}; it takes float32, float16 and bfloat16, K and V alike"
    if q.stride(2) != 1 or k_cache.stride(3) != 1 or k_cache.stride() != v_cache.stride():
        return "strides: the last dimension must be dense, K and V laid out alike"
    return None


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory a block may have; as on Hopper for the interpreter."""
    return driver.active.utils.get_device_properties(device.index)["max_shared_mem"] if device.type == "cuda" else 232448


def _tiling(rows: int, sequences: int, group: int, hd: int, itemsize: int, shared: int) -> tuple[int, int, int, int]:
    """(packed rows a tile, keys a tile, warps, stages) from what the host knows. Larger tiles spill registers (ptxas, sm_90)."""
    width = triton.next_power_of_2(hd) * itemsize  # bytes of a padded row
    bulk = 16384 if itemsize == 4 or shared < 163840 else 32768
    wanted = triton.next_power_of_2(-(-rows // max(sequences, 1)) * group)
    packed = max(16, triton.next_power_of_2(group), min(wanted, 128, bulk // width))
    stages = 3 if width <= 128 else 2 if width <= 1024 // itemsize else 1
    return packed, 64 if width <= 256 else 32, 8 if packed * width >= 16384 else 4, stages


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_query: Tensor,
    ctx_lens: Tensor,
    tree_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    first: Tensor | None = None,
) -> Tensor:
    """Shapes in `specdec.ops.tree_attention`; T may exceed the rows in use."""
    rows, heads, hd = q.shape
    sequences, kv_heads = ctx_lens.shape[0], k_cache.shape[2]
    out = q.new_empty(rows, heads * hd)
    group = heads // kv_heads
    packed, keys, warps, stages = _tiling(rows, sequences, group, hd, q.element_size(), _shared_memory(q.device))
    if rows:
        _attend[(rows // (packed // group) + sequences + 1, kv_heads)](
            out,
            q,
            k_cache,
            v_cache,
            block_table,
            cu_query,
            ctx_lens,
            tree_len,
            tree_mask,
            positions,
            q if sinks is None else sinks,
            ctx_lens if first is None else first,
            rows,
            sequences,
            scale * _LOG2E.value,
            window or 0,
            q.stride(0),
            q.stride(1),
            k_cache.stride(0),
            k_cache.stride(1),
            k_cache.stride(2),
            block_table.stride(0),
            BLOCK=k_cache.shape[1],
            GROUP=group,
            HD=hd,
            PACKED=packed,
            KEYS=keys,
            WINDOW=window is not None,
            SINKS=sinks is not None,
            FIRST=first is not None,
            num_warps=warps,
            num_stages=stages,
        )
    return out


@triton.jit
def _sequence_of(tile, cu_query, sequences, ROWS: tl.constexpr):
    """The sequence that owns this tile, `sequences` for the padding rows: the last b with cu_query[b] // ROWS + b <= tile."""
    low = 0
    high = sequences
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_query + middle) // ROWS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _bits_set(x):
    """Number of set bits of int32 words."""
    v = x.to(tl.uint32, bitcast=True)
    v = v - ((v >> 1) & 0x55555555)
    v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
    v = (v + (v >> 4)) & 0x0F0F0F0F
    v = v + (v >> 8)
    v = v + (v >> 16)
    return (v & 0x3F).to(tl.int32)


@triton.jit
def _visible(slot, position, low, high, valid, ctx, nodes, window, lowest, WINDOW: tl.constexpr, FIRST: tl.constexpr):
    """[M, KEYS] bool: which slot positions each packed row sees. slot [KEYS]; position, valid, low and high halves of the word [M]."""
    node = (slot - ctx)[None, :]
    in_high = node >= 32
    ancestor = ((tl.where(in_high, high[:, None], low[:, None]) >> (node & 31)) & 1) == 1
    is_node = (node >= 0) & (nodes > 0)
    seen = tl.where(is_node, ancestor & (node < nodes), (nodes > 0) | (slot[None, :] <= position[:, None])) & valid[:, None]
    if WINDOW or FIRST:  # the key of an ancestor has the position ctx + number of ancestors before it
        below = (1 << (node & 31)) - 1
        before = _bits_set(low[:, None] & tl.where(in_high, -1, below)) + _bits_set(high[:, None] & tl.where(in_high, below, 0))
        logical = tl.where(is_node, ctx + before, slot[None, :])
        if WINDOW:
            seen = seen & (position[:, None] - logical < window)
        if FIRST:
            seen = seen & (logical >= lowest)
    return seen


@triton.jit
def _ranges(position, valid, ctx, nodes, window, lowest, KEYS: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr):
    """Slot positions (begin, whole, stop), begin and whole on tile borders: every row of the tile sees all of [begin, whole)
    and nothing outside [begin, stop)."""
    smallest = tl.min(tl.where(valid, position, 2147483647), 0)
    whole = tl.where(nodes > 0, ctx, smallest + 1) // KEYS * KEYS
    stop = tl.where(nodes > 0, ctx + nodes, tl.max(tl.where(valid, position, -1), 0) + 1)
    begin = lowest
    if WINDOW:
        begin = tl.maximum(begin, smallest - window + 1)
    begin = tl.maximum(begin, 0) // KEYS * KEYS
    if WINDOW or FIRST:
        whole = begin
    return begin, whole, stop


@triton.jit
def _one_tile(
    q,
    k_own,
    v_own,
    table,
    slot,
    seen,
    top,
    norm,
    acc,
    scale,
    kv_block,
    kv_slot,
    BLOCK: tl.constexpr,
    HD: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax over the keys at `slot` [KEYS]; seen [M, KEYS] counts where MASKED. Returns the new top, norm, acc."""
    column = tl.arange(0, acc.shape[1])
    inside = column < HD
    wanted = tl.full(slot.shape, 1, tl.int1)
    if MASKED:  # what no row sees may hold anything, NaN included
        wanted = tl.max(seen.to(tl.int32), 0) == 1
    blocks = tl.load(table + slot // BLOCK, mask=wanted, other=0)
    address = blocks.to(tl.int64) * kv_block + (slot % BLOCK) * kv_slot
    keys = k_own + address[None, :] + column[:, None]
    k = tl.load(keys, mask=inside[:, None] & wanted[None, :], other=0.0).to(q.dtype)
    scores = dot(q, k, tl.zeros([q.shape[0], slot.shape[0]], tl.float32)) * scale
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = new_top
    if MASKED:  # a tile of which a row sees nothing changes nothing
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    values = v_own + address[:, None] + column[None, :]
    v = tl.load(values, mask=wanted[:, None] & inside[None, :], other=0.0).to(q.dtype)
    return new_top, norm * shrink + tl.sum(p, 1), dot(p.to(q.dtype), v, acc * shrink[:, None])


@triton.jit(do_not_specialize=["rows", "sequences", "window"])
def _attend(
    out, q_base, k_base, v_base, block_table, cu_query, ctx_lens, tree_len, tree_mask, positions, sinks, first,
    rows, sequences, scale, window, q_row, q_head, kv_block, kv_slot, kv_head, table_row,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, HD: tl.constexpr, PACKED: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, KV heads). One tile of PACKED // GROUP rows of one sequence against its keys."""
    ROWS: tl.constexpr = PACKED // GROUP
    WIDTH: tl.constexpr = triton.next_power_of_2(HD)
    own = tl.program_id(1)
    b = _sequence_of(tl.program_id(0), cu_query, sequences, ROWS)
    start = tl.load(cu_query + b)
    end = rows
    if b < sequences:
        end = tl.load(cu_query + b + 1)
    packed = tl.arange(0, PACKED)
    row = start + (tl.program_id(0) - (start // ROWS + b)) * ROWS + packed // GROUP
    head = own * GROUP + packed % GROUP
    valid = (packed < ROWS * GROUP) & (row < end)
    column = tl.arange(0, WIDTH)
    mask = valid[:, None] & (column < HD)[None, :]
    wide_row = row.to(tl.int64)[:, None]
    place = out + wide_row * (tl.num_programs(1) * GROUP * HD) + head[:, None] * HD + column[None, :]
    acc = tl.zeros([PACKED, WIDTH], tl.float32)
    if b == sequences:
        tl.store(place, acc.to(out.dtype.element_ty), mask=mask)
    elif tl.max(valid.to(tl.int32), 0) == 1:
        ctx = tl.load(ctx_lens + b)
        nodes = tl.load(tree_len + b)
        lowest = 0
        if FIRST:
            lowest = tl.load(first + b)
        position = tl.load(positions + row, mask=valid, other=0).to(tl.int32)
        word = tl.load(tree_mask + row, mask=valid, other=0)
        low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
        q = tl.load(q_base + wide_row * q_row + head[:, None] * q_head + column[None, :], mask=mask, other=0.0)
        top = tl.full([PACKED], float("-inf"), tl.float32)
        norm = tl.zeros([PACKED], tl.float32)
        if SINKS:
            top = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * _LOG2E
            norm = norm + 1.0
        k_own = k_base + own * kv_head
        v_own = v_base + own * kv_head
        table = block_table + b.to(tl.int64) * table_row
        begin, whole, stop = _ranges(position, valid, ctx, nodes, window, lowest, KEYS, WINDOW, FIRST)
        for at in range(begin, whole, KEYS):
            slot = at + tl.arange(0, KEYS)
            top, norm, acc = _one_tile(q, k_own, v_own, table, slot, slot, top, norm, acc, scale, kv_block, kv_slot, BLOCK, HD, False)
        for at in range(whole, stop, KEYS):
            slot = at + tl.arange(0, KEYS)
            seen = _visible(slot, position, low, high, valid, ctx, nodes, window, lowest, WINDOW, FIRST)
            top, norm, acc = _one_tile(q, k_own, v_own, table, slot, seen, top, norm, acc, scale, kv_block, kv_slot, BLOCK, HD, True)
        acc = acc / tl.where(valid, norm, 1.0)[:, None]
        tl.store(place, acc.to(out.dtype.element_ty), mask=mask)
