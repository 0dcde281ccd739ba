"""Tree attention in Triton in one order of sums: a row's bits depend on its query and its keys by logical position, on nothing else.

Not on the rows beside it, on the batch, on the room in the block table, nor on whether the position came by prefill, decode, chain or
tree. What makes it so:

- Logical keys 0, 1, 2, … (committed positions, then the row's own ancestors by depth) lie in fixed tiles from 0, and those in fixed
  splits of `FIXED_SPLIT` keys; every split starts an online softmax anew, and one merge kernel sums the splits in order, always.
- Tile sizes, and with them the instructions, follow from model and dtype. A tensor-core product gives each row of a tile the same sum
  over K wherever it lies in M and whoever else is there.
- Tiles that end within the context are shared by all rows of a tree. In those that its paths touch (at most two of 64 keys for 64
  nodes), which key lies where differs by path: each node gathers its ancestors and runs the same product, and keeps its own rows.
- A tile of which a row sees nothing changes no bit of it: weight 0, factor 1. No multiply is fused with an add, so that the compiler
  has no choice between two roundings where masked and unmasked code differ.

Cost beside the free order: packed rows are 64 whatever the tree (a context is read once per 64 / group nodes), every split is written
and merged even in prefill (one part in hd of its operations), and a tree of N nodes adds up to 2 N tile products per KV head,
in the one split that holds its end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.kv_fp8 import FP8, UNSCALED, Scales
from specdec.kernels.tree_attention import tiling
from specdec.kernels.tree_attention.triton_parts import LOG2E, ancestor, card, load_cache, load_query, locate, merge, rejects, workspace
from specdec.kernels.triton_common import dot
from specdec.kernels.triton_e4m3 import from_cache, handed

__all__ = ["rejects", "tree_attention"]

_WORKSPACE = 1 << 26  # float32 numbers of partial results; more rows go in several launches


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
    room: int = _WORKSPACE,
) -> Tensor:
    """Shapes in `specdec.ops.tree_attention`; T may exceed the rows in use. room: numbers of the workspace; tests make it small."""
    rows, heads, hd = q.shape
    sequences, (block, kv_heads) = ctx_lens.shape[0], k_cache.shape[1:3]
    out = q.new_empty(rows, heads * hd)
    group, half = heads // kv_heads, k_cache.dtype is FP8 and q.dtype is not torch.float32
    cut = tiling.fixed(group, hd, q.element_size(), card(q.device)[0])
    splits = max(1, triton.cdiv(block_table.shape[1] * block, tiling.FIXED_SPLIT))
    step = min(rows, max(1, room // (splits * heads * (hd + 2))))
    parts = workspace(q, splits, step)
    for base in range(0, rows, max(step, 1)):
        _attend_fixed[((rows // (cut.packed // group) + sequences + 1) * splits * kv_heads,)](
            *parts, q, handed(k_cache), handed(v_cache), block_table, cu_query, ctx_lens, tree_len, tree_mask, positions,
            ctx_lens if first is None else first, rows, sequences, kv_heads, splits, base, step, scale * kv_scales[0] * LOG2E.value,
            window or 0,
            q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_table.stride(0),
            BLOCK=block, GROUP=group, HD=hd, PACKED=cut.packed, KEYS=cut.keys, SEQUENCES=tiling.power_of_two(sequences + 1),
            SPAN=tiling.FIXED_SPLIT, HALF=half, WINDOW=window is not None, FIRST=first is not None,
            num_warps=cut.warps, num_stages=cut.stages, enable_fp_fusion=False,
        )  # fmt: skip
        merge(out, parts, cu_query, positions, sinks, heads, splits, kv_scales[1], base=base, keys_a_split=tiling.FIXED_SPLIT)
    return out


@triton.jit
def _ranges(
    position, valid, ctx, nodes, window, lowest, split,
    KEYS: tl.constexpr, SPAN: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Logical positions (lower, begin, whole, shared, stop) of a split, begin and whole on tile borders: every row sees all of
    [begin, whole); up to `shared` the slots are the same for all rows; nothing is seen outside [lower, stop)."""
    smallest = tl.min(tl.where(valid, position, 2147483647), 0)
    stop = tl.minimum((split + 1) * SPAN, tl.max(tl.where(valid, position, -1), 0) + 1)
    lower = tl.maximum(lowest, 0)
    if WINDOW:
        lower = tl.maximum(lower, smallest - window + 1)
    begin = tl.maximum(lower // KEYS * KEYS, split * SPAN)
    shared = tl.minimum(tl.maximum(tl.where(nodes > 0, ctx // KEYS * KEYS, stop), begin), stop)
    whole = tl.minimum(tl.maximum((smallest + 1) // KEYS * KEYS, begin), shared)
    if WINDOW or FIRST:
        whole = begin
    return lower, begin, whole, shared, stop


@triton.jit
def _path_slots(logical, ctx, word):
    """Slot positions of the logical positions [KEYS] along the path of a node's ancestor word; those past its end are ctx."""
    node = tl.arange(0, 64)
    has, before = ancestor(word.to(tl.int32), (word >> 32).to(tl.int32), node)
    mine = has[None, :] & (before[None, :] == (logical - ctx)[:, None])
    return tl.where(logical < ctx, logical, ctx + tl.sum(tl.where(mine, node[None, :], 0), 1))


@triton.jit
def _one_tile(
    q, k_own, v_own, table, slot, wanted, seen, top, norm, acc, scale, kv_block, kv_slot,
    BLOCK: tl.constexpr, HD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys at `slot` [KEYS]. Returns the new top, norm, acc.

    Where MASKED count seen [M, KEYS] and wanted [KEYS], the slots that may be read: what no row sees may hold anything, NaN included.
    """
    column = tl.arange(0, acc.shape[1])
    if not MASKED:
        wanted = tl.full(slot.shape, 1, tl.int1)
    blocks = tl.load(table + slot // BLOCK, mask=wanted, other=0)
    address = blocks.to(tl.int64) * kv_block + (slot % BLOCK) * kv_slot
    keys = k_own + address[None, :] + column[:, None]
    k = from_cache(load_cache(keys, column[:, None] < HD, wanted[None, :], acc.shape[1] == HD, MASKED), q.dtype)
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
    v = from_cache(load_cache(values, column[None, :] < HD, wanted[:, None], acc.shape[1] == HD, MASKED), q.dtype)
    return new_top, norm * shrink + tl.sum(p, 1), dot(p.to(q.dtype), v, acc * shrink[:, None])


@triton.jit(do_not_specialize=["rows", "sequences", "kv_heads", "splits", "base", "count", "window", "table_row"])
def _attend_fixed(
    acc_parts, top_parts, norm_parts, q_base, k_base, v_base, block_table, cu_query, ctx_lens, tree_len, tree_mask, positions, first,
    rows, sequences, kv_heads, splits, base, count, scale, window, q_row, q_head, kv_block, kv_slot, kv_head, table_row,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, HD: tl.constexpr, PACKED: tl.constexpr, KEYS: tl.constexpr, SEQUENCES: tl.constexpr,
    SPAN: tl.constexpr, HALF: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Grid: row tiles × splits × KV heads, the last fastest. The rows from `base` on, `count` of them, of a tile against
    one split of their keys."""
    own = tl.program_id(0) % kv_heads
    split = tl.program_id(0) // kv_heads % splits
    heads = kv_heads * GROUP
    packed = tl.arange(0, PACKED)
    column = tl.arange(0, triton.next_power_of_2(HD))
    b, row, valid = locate(tl.program_id(0) // kv_heads // splits, packed, cu_query, rows, sequences, PACKED // GROUP, GROUP, SEQUENCES)
    valid = valid & (row >= base) & (row < tl.where(b < sequences, base + count, 0))  # the merge writes the zeros of padding rows
    if tl.max(valid.to(tl.int32), 0) == 1:
        head = own * GROUP + packed % GROUP
        mask = valid[:, None] & (column < HD)[None, :]
        ctx, nodes = tl.load(ctx_lens + b), tl.load(tree_len + b)
        lowest = 0
        if FIRST:
            lowest = tl.load(first + b)
        position = tl.load(positions + row, mask=valid, other=-1).to(tl.int32)
        lower, begin, whole, shared, stop = _ranges(position, valid, ctx, nodes, window, lowest, split, KEYS, SPAN, WINDOW, FIRST)
        at = (split * count + row - base) * heads + head
        top, norm = tl.full([PACKED], float("-inf"), tl.float32), tl.zeros([PACKED], tl.float32)
        if begin < stop:
            acc = tl.zeros([PACKED, column.shape[0]], tl.float32)
            q = load_query(q_base, row, head, mask, q_row, q_head, column, HALF)
            k, v = k_base + own * kv_head, v_base + own * kv_head
            table = block_table + b.to(tl.int64) * table_row
            for start in range(begin, whole, KEYS):
                slot = start + tl.arange(0, KEYS)
                top, norm, acc = _one_tile(q, k, v, table, slot, slot, slot, top, norm, acc, scale, kv_block, kv_slot, BLOCK, HD, False)
            common = tl.cdiv(shared - whole, KEYS)  # masked tiles for all rows together; then, node by node, those of its path
            each = tl.cdiv(stop - shared, KEYS)
            members = tl.max(tl.where(valid, packed // GROUP, -1), 0) + 1
            for item in tl.range(0, common + each * members, num_stages=1):
                member = tl.maximum(item - common, 0) // tl.maximum(each, 1)
                on_path = item >= common
                start = tl.where(on_path, shared + (item - common - member * each) * KEYS, whole + item * KEYS)
                logical = start + tl.arange(0, KEYS)
                of_member = tl.min(row, 0) + member
                slot = tl.where(on_path, _path_slots(logical, ctx, tl.load(tree_mask + of_member)), logical)
                end = tl.where(on_path, tl.load(positions + of_member).to(tl.int32) + 1, stop)
                want = (logical >= lower) & (logical < end)
                # no row but the node's own sees its path
                reach = tl.where((packed // GROUP == member) | (item < common), position, -1)
                seen = logical[None, :] <= reach[:, None]
                if WINDOW:
                    seen = seen & (position[:, None] - logical[None, :] < window)
                if FIRST:
                    seen = seen & (logical >= lowest)[None, :]
                top, norm, acc = _one_tile(q, k, v, table, slot, want, seen, top, norm, acc, scale, kv_block, kv_slot, BLOCK, HD, True)
            tl.store(acc_parts + at.to(tl.int64)[:, None] * HD + column[None, :], acc, mask=mask)
        tl.store(top_parts + at, top, mask=valid)
        tl.store(norm_parts + at, norm, mask=valid)
