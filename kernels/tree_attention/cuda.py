"""Attention of a few rows in CUDA C++ (`csrc/cuda/few_attention.h`, which has the argument): decode steps, chains and small trees, bf16.

Not a fixed order: who takes which keys depends on how many sequences there are.

In a recorded pass it reads lengths, tables, words, and keys and values of committed tokens before the launch before has ended: what records
a pass must have the kernel that writes q and the new keys and values right before attention, and all the rest before that.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.cuda_fragments import capability, compiled, launches_early, multiprocessors
from specdec.kernels.kv_fp8 import UNSCALED, Scales

__all__ = ["rejects", "tree_attention"]

PACKED, MOST_BLOCKS, SIZES = 16, 16, (64, 128)  # as in few_attention.h
FEW_CLUSTERS = 16  # up to which tiles that share keys have blocks enough to read them for themselves
LOG2E = 1.4426950408889634


class Call(ctypes.Structure):
    """`specdec::few::Call`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "sinks", "table", "cu_query", "context", "nodes", "first")),
        *((name, ctypes.c_void_p) for name in ("words", "positions", "out")),
        *((name, ctypes.c_int64) for name in ("q_row", "q_head", "kv_block", "kv_slot", "kv_head", "table_row")),
        *(
            (name, ctypes.c_int)
            for name in ("rows", "sequences", "heads", "kv_heads", "group", "block", "block_bits", "window", "tiles", "ahead")
        ),
        *((name, ctypes.c_float) for name in ("scale", "v_scale")),
    ]


def packed_rows(rows: int, sequences: int, group: int) -> int:
    """Of a sequence and KV head, were the rows spread evenly: row times `group` query heads."""
    return -(-rows // max(sequences, 1)) * group


def rejects(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_query: Tensor,
    ctx_lens: Tensor,
    *_: Tensor,
    scale: float = 1.0,
    sinks: Tensor | None = None,
    **__: Any,
) -> str | None:
    """Why the kernel cannot run the call, or should not, or None."""
    if any(t.dtype is not torch.bfloat16 for t in (q, k_cache, v_cache, *(() if sinks is None else (sinks,)))):
        return "it takes bfloat16 alone"
    if q.shape[2] not in SIZES or not scale > 0.0:
        return f"head size {q.shape[2]}, scale {scale}; it takes heads of {SIZES} numbers and positive scales"
    sequences, kv_heads = ctx_lens.shape[0], k_cache.shape[2]
    packed = packed_rows(q.shape[0], sequences, q.shape[1] // kv_heads)
    most = 2 * PACKED if sequences * kv_heads <= FEW_CLUSTERS else PACKED
    if packed > most or q.shape[1] // kv_heads > PACKED:
        return f"{packed} rows times query heads a sequence and KV head; it is for {most}"
    strides = (*k_cache.stride()[:3], q.stride(0), q.stride(1))
    whole = k_cache.stride() == v_cache.stride() and k_cache.stride(3) == q.stride(2) == block_table.stride(1) == 1
    if not whole or any(s % 8 for s in strides) or any(t.data_ptr() % 16 for t in (q, k_cache, v_cache)):
        return "strides: rows must be dense and at multiples of 16 bytes, K and V laid out alike"
    block = k_cache.shape[1]
    if block % PACKED or block & (block - 1):
        return f"blocks of {block} slots; it takes powers of two from {PACKED} on"
    return None if capability(q.device) >= 90 else "it needs thread block clusters (Hopper)"


def cut(rows: int, sequences: int, group: int, kv_heads: int, processors: int) -> tuple[int, int]:
    """(tiles, as many as rows may need however ragged they are; blocks a cluster, as many as the card has processors for: with two on each,
    keys of 8192 positions at batch 8 come slower than with one)."""
    tiles = min(rows, max(rows - sequences, 0) // (PACKED // group) + sequences)
    blocks = 1
    while blocks < MOST_BLOCKS and 2 * blocks * tiles * kv_heads <= processors:
        blocks *= 2
    return tiles, blocks


def tree_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, *rest: Tensor, **how: Any) -> Tensor:
    """Shapes in `specdec.ops.tree_attention`; T may exceed the rows in use."""
    out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
    if q.shape[0] == 0:
        return out
    begins = launches_early(q.device)
    how |= {"ahead": begins and torch.cuda.is_current_stream_capturing(), "processors": multiprocessors(q.device)}
    call, *numbers = prepare_call(out, q, k_cache, v_cache, block_table, *rest, **how)
    functions, stream = compiled(q.device), torch.cuda.current_stream(q.device).cuda_stream
    numbers += [int(begins), q.device.index]
    if error := functions.specdec_few_attention(ctypes.byref(call), *numbers, stream):
        raise RuntimeError(f"the CUDA attention: {functions.specdec_error(error).decode()}")
    return out


def prepare_call(
    out: Tensor,
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
    ahead: bool = False,
    processors: int,
) -> tuple[Call, int, int]:
    """The kernel's arguments, which share memory with these tensors; numbers of a head, and blocks a cluster. ahead: see
    `specdec::few::Call`. processors: of the card."""
    (rows, heads, hd), (block, kv_heads), sequences = q.shape, k_cache.shape[1:3], ctx_lens.shape[0]
    group = heads // kv_heads
    tiles, blocks = cut(rows, sequences, group, kv_heads, processors)
    tensors = q, k_cache, v_cache, sinks, block_table, cu_query, ctx_lens, tree_len, first, tree_mask, positions, out
    strides = q.stride(0), q.stride(1), *k_cache.stride()[:3], block_table.stride(0)
    counts = rows, sequences, heads, kv_heads, group, block, block.bit_length() - 1, window or 0, tiles, int(ahead)
    call = Call(*(None if t is None else t.data_ptr() for t in tensors), *strides, *counts, scale * kv_scales[0] * LOG2E, kv_scales[1])
    return call, hd, blocks
