"""Paged attention in Triton for prefill, decode, chains and trees of a ragged batch: one kernel, and for large tiles a merge of splits.

A program owns a tile of rows of one sequence, one KV head, and one of the splits of the keys that the tile sees (flash-decoding). The
query heads that share the KV head are packed with the rows into the M dimension of the products (m = row * group + head), so a decode
step of a grouped model fills a tensor-core tile and every key is read once per tile, not once per query head. A program first runs the
key tiles that every row sees whole, without a mask, then the others: window or `first` edge, causal edge, tree nodes by ancestor word.

Tile and splits are chosen by the host from shapes alone (`tiling.py`, with the argument in numbers), so that a CUDA graph may hold the
launches. Where the splits lie is found on the device: each takes an equal share, in whole key tiles and at least two, of what its row
tile sees. Of a small tile the program that comes last merges all splits, in their order and from what memory holds of them, its own
included, so the bits do not depend on who that is; those left without keys are not waited for. Of a large one a second launch does.

Not a fixed order: tiles are in slot order (tree nodes by index, not by depth), and tile and split sizes depend on T and B.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.kv_fp8 import FP8, UNSCALED, Scales
from specdec.kernels.tree_attention import tiling, triton_parts
from specdec.kernels.tree_attention.triton_parts import (
    LOG2E,
    MERGED,
    ancestor,
    any_of,
    card,
    load_cache,
    load_query,
    locate,
    workspace,
)  # fmt: skip
from specdec.kernels.triton_common import after_launches, dot, early
from specdec.kernels.triton_e4m3 import from_cache, handed
from specdec.kernels.triton_gemm import zeroed

__all__ = ["rejects", "tree_attention"]


def rejects(*args: Tensor, scale: float = 1.0, **kwargs: Any) -> str | None:
    """Why the kernel cannot run the call, or None."""
    if not scale > 0.0:
        return f"scale {scale}; it takes positive ones"
    return triton_parts.rejects(*args, **kwargs)


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
    kv_scales: Scales = UNSCALED,
    splits: int | None = None,
) -> Tensor:
    """Shapes in `specdec.ops.tree_attention`; T may exceed the rows in use. splits: None = chosen; tests force it."""
    rows, heads, hd = q.shape
    sequences, (block, kv_heads) = ctx_lens.shape[0], k_cache.shape[1:3]
    out = q.new_empty(rows, heads * hd)
    if rows == 0:
        return out
    group, half = heads // kv_heads, k_cache.dtype is FP8 and q.dtype is not torch.float32
    shared, processors = card(q.device)
    longest = block_table.shape[1] * block
    stored = k_cache.element_size()
    cut = tiling.fast(rows, sequences, group, kv_heads, hd, q.element_size(), stored, longest=longest, shared=shared, processors=processors)
    splits = splits or cut.splits
    parts = workspace(q, splits, rows) if splits > 1 else (out, out, out)
    tiles = rows // (cut.packed // group) + sequences + 1
    at_once = tiling.merged_at_once(cut, min(-(-rows // max(sequences, 1)) * group, cut.packed), splits, hd)
    unit = math.gcd(k_cache.stride(0), k_cache.stride(1))
    _attend[(tiles * splits * kv_heads,)](
        out, *parts, zeroed(tiles * kv_heads, q.device) if at_once else ctx_lens,
        q, handed(k_cache), handed(v_cache), block_table, cu_query, ctx_lens, tree_len, tree_mask, positions,
        q if sinks is None else sinks, ctx_lens if first is None else first,
        rows, sequences, kv_heads, splits, cut.least, cut.alone, scale * kv_scales[0] * LOG2E.value, kv_scales[1], window or 0,
        q.stride(0), q.stride(1), k_cache.stride(0) // unit, k_cache.stride(1) // unit, k_cache.stride(2), block_table.stride(0),
        UNIT=unit, BLOCK=block, GROUP=group, HD=hd, PACKED=cut.packed, KEYS=cut.keys, EDGE=min(cut.keys, 64),
        SEQUENCES=tiling.power_of_two(sequences + 1),
        HALF=half, WINDOW=window is not None, SINKS=sinks is not None, FIRST=first is not None, SPLIT=splits > 1,
        CHUNK=tiling.power_of_two(splits) if at_once else 0, PART=at_once,
        num_warps=cut.warps, num_stages=cut.stages, **early(q.device),
    )  # fmt: skip
    if splits > 1 and not at_once:
        chunk, pairs = tiling.power_of_two(splits), rows * heads
        part = max(1, MERGED // (chunk * tiling.power_of_two(hd)))  # (row, head) pairs a program takes
        _merge_few[(triton.cdiv(pairs, part),)](
            out, *parts, cu_query, q if sinks is None else sinks, pairs, sequences, splits, kv_scales[1],
            HEADS=heads, HD=hd, CHUNK=chunk, PART=part, SINKS=sinks is not None, **early(q.device),
        )  # fmt: skip
    return out


@triton.jit
def _located(
    tile, packed, cu_query, rows, sequences, ROWS: tl.constexpr, GROUP: tl.constexpr, SEQUENCES: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """As `locate`, once what the launches before have written is there."""
    after_launches(EARLY)
    return locate(tile, packed, cu_query, rows, sequences, ROWS, GROUP, SEQUENCES)


@triton.jit
def _visible(slot, position, low, high, ctx, nodes, stop, window, lowest, WINDOW: tl.constexpr, FIRST: tl.constexpr):
    """[M, KEYS] bool: which slot positions each packed row sees. slot [KEYS]; position (-1: none) and halves of the word [M]."""
    node = slot - ctx
    in_tree = ((node >= 0) & (node < nodes))[None, :]
    half = tl.where((node >= 32)[None, :], high[:, None], low[:, None])
    earlier = tl.where(slot < stop, slot, 2147483647)[None, :] <= position[:, None]
    seen = tl.where(in_tree, ((half >> (node & 31)[None, :]) & 1) == 1, earlier)
    if WINDOW or FIRST:  # the key of an ancestor has the position ctx + number of ancestors before it
        _, before = ancestor(low[:, None], high[:, None], node[None, :])
        logical = tl.where(in_tree, ctx + before, slot[None, :])
        if WINDOW:
            seen = seen & (position[:, None] - logical < window)
        if FIRST:
            seen = seen & (logical >= lowest)
    return seen


@triton.jit
def _readable(slot, low, high, ctx, nodes, lower, stop):
    """[KEYS] bool: slot positions that some row sees. low, high: halves of the word of all their ancestors."""
    node = tl.where(nodes > 0, slot - ctx, -1)
    has = ((tl.where(node >= 32, high, low) >> (node & 31)) & 1) == 1
    return (slot >= lower) & (slot < stop) & ((node < 0) | has)


@triton.jit
def _ranges(position, valid, ctx, nodes, window, lowest, KEYS: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr):
    """Slot positions (lower, begin, whole, tail, stop), those between on tile borders: every row of the tile sees all of [whole, tail),
    none anything outside [lower, stop)."""
    smallest = tl.min(tl.where(valid, position, 2147483647), 0)
    largest = tl.max(tl.where(valid, position, -1), 0)
    stop = tl.where(nodes > 0, ctx + nodes, largest + 1)
    tail = tl.where(nodes > 0, ctx, smallest + 1) // KEYS * KEYS
    lower = tl.maximum(lowest, 0)  # the first key that some row sees, and the first that all do
    full = lower
    if WINDOW:
        lower = tl.maximum(lower, smallest - window + 1)
        full = tl.maximum(full, largest - window + 1)
    begin = lower // KEYS * KEYS
    whole = (full + KEYS - 1) // KEYS * KEYS
    return lower, begin, tl.minimum(whole, tl.maximum(tail, begin)), tl.maximum(tail, begin), stop


@triton.jit
def _share(begin, stop, split, splits, least, alone, KEYS: tl.constexpr):
    """The slot positions [low, high) of one split, low >= high where nothing is left, and how many splits have a share, maybe an empty one.

    Shares are equal, in whole tiles, at least `least` of them; up to `alone` the first split takes all.

    What needs a mask lies mostly at the end and is not read ahead: it counts as two tiles more."""
    tiles = (stop - begin + KEYS - 1) // KEYS + 2
    used = tl.where(tiles <= alone, 1, tl.maximum(tl.minimum(splits, tiles // least), 1))
    low = tl.where(split < used, begin + split * tiles // used * KEYS, stop)
    return low, tl.minimum(begin + (split + 1) * tiles // used * KEYS, stop), used


@triton.jit
def _cells(start, KEYS: tl.constexpr, BLOCK: tl.constexpr):
    """(slot within the block, entry of the block table) of the KEYS slot positions from `start`, a multiple of KEYS."""
    lane = tl.arange(0, KEYS)
    if KEYS % BLOCK == 0:  # the first does not change from tile to tile
        return lane % BLOCK, start // BLOCK + lane // BLOCK
    else:
        return (start + lane) % BLOCK, (start + lane) // BLOCK


@triton.jit
def _tile(
    q, k_own, v_own, place, wanted, seen, top, norm, acc, scale, UNIT: tl.constexpr, HD: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Online softmax over the keys at `place` [KEYS], in units of UNIT so that 32 bits hold it. Returns the new top, norm, acc.

    Where MASKED count seen [M, KEYS] and wanted [KEYS], the slots that may be read: what no row sees may hold anything, NaN included.
    K is read as V is, so that both share their addresses. The scale, which must be positive, goes into the multiply-add before the
    exponential.
    """
    column = tl.arange(0, acc.shape[1])[None, :]
    if not MASKED:
        wanted = tl.full(place.shape, 1, tl.int1)
    offset = place.to(tl.int64)[:, None] * UNIT
    k = from_cache(load_cache(k_own + column + offset, column < HD, wanted[:, None], acc.shape[1] == HD, MASKED), q.dtype)
    scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], place.shape[0]], tl.float32))
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    base = new_top
    if MASKED:  # a tile of which a row sees nothing changes nothing
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(top - base)
    v = from_cache(load_cache(v_own + column + offset, column < HD, wanted[:, None], acc.shape[1] == HD, MASKED), q.dtype)
    return new_top, norm * shrink + tl.sum(p, 1), dot(p.to(q.dtype), v, acc * shrink[:, None])


@triton.jit
def _write(out, pair, column, acc, mask, HD: tl.constexpr):
    """Rows of a tile [PACKED, HD] to out [T, nh, hd]; pair: token times heads, plus head."""
    tl.store(out + pair.to(tl.int64)[:, None] * HD + column[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _whole_tiles(
    q, k, v, table, whole, tail, top, norm, acc, scale, kv_block, kv_slot,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, HD: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The tiles that every row sees all of. A tile's blocks are looked up a tile before its keys are asked for, the last one's twice."""
    inside, entry = _cells(whole, KEYS, BLOCK)
    blocks = tl.load(table + entry, mask=tl.full([KEYS], 0, tl.int32) + whole < tail, other=0)
    for start in range(whole, tail, KEYS):
        inside, entry = _cells(start, KEYS, BLOCK)
        place = blocks * kv_block + inside * kv_slot
        inside, entry = _cells(tl.minimum(start + KEYS, tail - KEYS), KEYS, BLOCK)
        blocks = tl.load(table + entry)
        top, norm, acc = _tile(q, k, v, place, place, place, top, norm, acc, scale, UNIT, HD, False)
    return top, norm, acc


@triton.jit
def _edge_tiles(
    q, k, v, table, from_slot, whole, tail, stop, word, position, ctx, nodes, lower, lowest, window, top, norm, acc, scale,
    kv_block, kv_slot,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, HD: tl.constexpr, EDGE: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """The tiles that need a mask, which lie on both sides of the whole ones."""
    low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
    any_low, any_high = any_of(low), any_of(high)
    skipped = tail - whole
    for at_whole in tl.range(from_slot, stop - skipped, EDGE, num_stages=1):
        start = tl.where(at_whole < whole, at_whole, at_whole + skipped)
        slot = start + tl.arange(0, EDGE)
        want = _readable(slot, any_low, any_high, ctx, nodes, lower, stop)
        seen = _visible(slot, position, low, high, ctx, nodes, stop, window, lowest, WINDOW, FIRST)
        within, entry = _cells(start, EDGE, BLOCK)
        edge = tl.load(table + entry, mask=want, other=0) * kv_block + within * kv_slot
        top, norm, acc = _tile(q, k, v, edge, want, seen, top, norm, acc, scale, UNIT, HD, True)
    return top, norm, acc


@triton.jit
def _merged(
    acc_parts, top_parts, norm_parts, sinks, pair, head, there, used, pairs, splits, v_scale,
    HD: tl.constexpr, CHUNK: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """[PART, HD]: (row, head) pairs from all their splits, sinks counted once; 0 where a pair is there but not used.

    All loads are asked for at once, what no split wrote included: its weight is 0.
    """
    split, column = tl.arange(0, CHUNK), tl.arange(0, triton.next_power_of_2(HD))
    at = split[:, None] * pairs + pair[None, :]
    inside = (split < splits)[:, None] & there[None, :]
    place = at.to(tl.int64)[:, :, None] * HD + column[None, None, :]
    mask = inside[:, :, None] & (column < HD)[None, None, :]
    part = tl.load(acc_parts + place, mask=mask, other=0.0, cache_modifier=".cg")
    norms = tl.load(norm_parts + at, mask=inside, other=0.0, cache_modifier=".cg")
    tops = tl.load(top_parts + at, mask=inside, other=float("-inf"), cache_modifier=".cg")
    tops = tl.where(used[None, :], tops, float("-inf"))
    top = tl.max(tops, 0)
    sink = tl.full(top.shape, float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(tops - base[None, :])
    norm = tl.sum(tl.where(weight > 0.0, norms * weight, 0.0), 0) + tl.exp2(sink - base)
    acc = tl.sum(tl.where(weight[:, :, None] > 0.0, part * weight[:, :, None], 0.0), 0)
    return acc / tl.where(used, norm, 1.0)[:, None] * v_scale


@triton.jit
def _merge_tile(
    out, acc_parts, top_parts, norm_parts, sinks, first, count, own, heads, pairs, splits, v_scale,
    GROUP: tl.constexpr, HD: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Writes the `count` packed rows of a tile, from row `first` on, of one KV head."""
    column = tl.arange(0, triton.next_power_of_2(HD))
    for start in tl.range(0, count, PART, num_stages=1):
        packed = start + tl.arange(0, PART)
        head, there = own * GROUP + packed % GROUP, packed < count
        pair = (first + packed // GROUP) * heads + head
        acc = _merged(
            acc_parts, top_parts, norm_parts, sinks, pair, head, there, there, pairs, splits, v_scale, HD, CHUNK, SINKS
        )  # fmt: skip
        _write(out, pair, column, acc, there[:, None] & (column < HD)[None, :], HD)


@triton.jit
def _hand_over(
    out, acc_parts, top_parts, norm_parts, counter, sinks, at, top, norm, row, valid, split, used, own, heads, rows, v_scale,
    GROUP: tl.constexpr, HD: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Leaves what a split found of its share; where no launch of its own merges, the split of a tile that comes last does."""
    if not PART or (split < used and used > 1):
        tl.store(top_parts + at, top, mask=valid)
        tl.store(norm_parts + at, norm, mask=valid)
    if PART and split < used and used > 1:
        tl.debug_barrier()  # every thread's results before the one thread's release
        if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
            tl.store(counter, 0)  # as it was found
            count = tl.sum(valid.to(tl.int32), 0)
            _merge_tile(
                out, acc_parts, top_parts, norm_parts, sinks, tl.min(row, 0), count, own, heads, rows * heads, used, v_scale,
                GROUP, HD, CHUNK, PART, SINKS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "sequences", "kv_heads", "splits", "least", "alone", "window"])
def _attend(
    out, acc_parts, top_parts, norm_parts, counters,
    q_base, k_base, v_base, block_table, cu_query, ctx_lens, tree_len, tree_mask, positions,
    sinks, first, rows, sequences, kv_heads, splits, least, alone, scale, v_scale, window,
    q_row, q_head, kv_block, kv_slot, kv_head, table_row,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, HD: tl.constexpr, PACKED: tl.constexpr, KEYS: tl.constexpr,
    EDGE: tl.constexpr, SEQUENCES: tl.constexpr, HALF: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, FIRST: tl.constexpr,
    SPLIT: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: row tiles × splits × KV heads, the last fastest. One tile of PACKED // GROUP rows of one sequence against its share of the
    keys, those that need a mask in tiles of EDGE. PART: pairs that the last split merges at a time; 0 = a launch of its own merges."""
    own, rest = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    split, tile = rest % splits, rest // splits
    heads, packed = kv_heads * GROUP, tl.arange(0, PACKED)
    column = tl.arange(0, triton.next_power_of_2(HD))
    b, row, valid = _located(tile, packed, cu_query, rows, sequences, PACKED // GROUP, GROUP, SEQUENCES, EARLY)
    head = own * GROUP + packed % GROUP
    pair = row * heads + head
    mask = valid[:, None] & (column < HD)[None, :]
    acc = tl.zeros([PACKED, column.shape[0]], tl.float32)
    if b == sequences:
        if not SPLIT or (PART and split == 0):  # the merge writes the zeros of the padding rows
            _write(out, pair, column, acc, mask, HD)
    elif tl.max(valid.to(tl.int32), 0) == 1:
        ctx, nodes = tl.load(ctx_lens + b), tl.load(tree_len + b)
        lowest = tl.load(first + b) if FIRST else 0
        position = tl.load(positions + row, mask=valid, other=-1).to(tl.int32)
        word = tl.load(tree_mask + row, mask=valid, other=0)  # asked for with the positions: a wait less before the first keys
        q = load_query(q_base, row, head, mask, q_row, q_head, column, HALF)
        lower, begin, whole, tail, stop = _ranges(position, valid, ctx, nodes, window, lowest, KEYS, WINDOW, FIRST)
        from_slot, used = begin, splits
        if SPLIT:
            from_slot, stop, used = _share(begin, stop, split, splits, least, alone if PART else 0, KEYS)
            at = split * rows * heads + pair
        top, norm = tl.full([PACKED], float("-inf"), tl.float32), tl.zeros([PACKED], tl.float32)
        if from_slot < stop:
            if SINKS and (PART or not SPLIT):  # a merge counts them itself
                sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
                top = tl.where(used == 1, sink, top)
                norm = norm + tl.where(used == 1, 1.0, 0.0)
            k, v = k_base + own * kv_head, v_base + own * kv_head
            table = block_table + b.to(tl.int64) * table_row
            whole = tl.minimum(tl.maximum(whole, from_slot), stop)
            tail = tl.minimum(tl.maximum(tail, whole), stop)
            top, norm, acc = _whole_tiles(
                q, k, v, table, whole, tail, top, norm, acc, scale, kv_block, kv_slot, UNIT, BLOCK, HD, KEYS,
            )  # fmt: skip
            top, norm, acc = _edge_tiles(
                q, k, v, table, from_slot, whole, tail, stop, word, position, ctx, nodes, lower, lowest, window, top, norm, acc, scale,
                kv_block, kv_slot, UNIT, BLOCK, HD, EDGE, WINDOW, FIRST,
            )  # fmt: skip
            if (PART or not SPLIT) and used == 1:
                _write(out, pair, column, acc / tl.where(valid, norm, 1.0)[:, None] * v_scale, mask, HD)
            elif SPLIT:
                tl.store(acc_parts + at.to(tl.int64)[:, None] * HD + column[None, :], acc, mask=mask)
        if SPLIT:
            _hand_over(
                out, acc_parts, top_parts, norm_parts, counters + tile * kv_heads + own, sinks, at, top, norm, row, valid, split, used,
                own, heads, rows, v_scale, GROUP, HD, CHUNK, PART, SINKS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["pairs", "sequences", "splits"])
def _merge_few(
    out, acc_parts, top_parts, norm_parts, cu_query, sinks, pairs, sequences, splits, v_scale,
    HEADS: tl.constexpr, HD: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, SINKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (pairs / PART): out of (row, head) pairs; padding rows become 0."""
    pair = tl.program_id(0) * PART + tl.arange(0, PART)
    column, there = tl.arange(0, triton.next_power_of_2(HD)), pair < pairs
    after_launches(EARLY)
    used = there & (pair // HEADS < tl.load(cu_query + sequences))
    acc = _merged(acc_parts, top_parts, norm_parts, sinks, pair, pair % HEADS, there, used, pairs, splits, v_scale, HD, CHUNK, SINKS)
    _write(out, pair, column, acc, there[:, None] & (column < HD)[None, :], HD)
