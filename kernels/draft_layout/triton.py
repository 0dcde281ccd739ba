"""The layout of a recorded draft as one launch: a program per sequence, a lane a node, a depth, a block of the table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.draft_layout.reference import DraftLayout, Laws
from specdec.kernels.tree_layout.triton import cell_slots


def rejects(columns: Tensor, laws: Laws, *rest: object) -> str | None:
    """Why this kernel cannot run the call, or None."""
    return None if all(t.is_contiguous() for t in (columns, *laws)) else "columns and laws must be dense"


def draft_layout(columns: Tensor, laws: Laws, depth: int, passes: int, width: int, block_size: int) -> DraftLayout:
    """Shapes in `specdec.ops.draft_layout`."""
    batch, device, blocks, ended = len(columns), columns.device, columns.shape[1] - 3, laws[-1].shape[1]

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    small = torch.int32
    found = DraftLayout(
        empty(batch), empty(batch), empty(batch, dtype=small), empty(batch, dtype=small), empty(batch, blocks, dtype=small),
        empty(batch, dtype=torch.float32), empty(batch), empty(batch), empty(batch, dtype=torch.bool), empty(batch, ended),
        empty(depth, batch), empty(passes, batch, width), empty(passes, batch, width),
    )  # fmt: skip
    if batch:
        _layout[(batch,)](
            columns, *laws, *found, batch, blocks, ended, depth, passes * width, width, block_size,
            TABLE=triton.next_power_of_2(max(blocks, 1)), NODES=triton.next_power_of_2(max(passes * width, depth, ended, 1)),
        )  # fmt: skip
    return found


@triton.jit
def paged(table, cell, blocks, block_size, inside):
    """As `cell_slots` of cells i64, with a table of `blocks` entries; cells beyond it are its last one."""
    return cell_slots(table, tl.minimum(cell, blocks.to(tl.int64) * block_size - 1), block_size, inside)


@triton.jit(do_not_specialize=["batch", "blocks", "ended", "depth", "nodes", "width", "block_size"])
def _layout(
    columns, temperatures, seeds, lengths, choices, noises, end_ids,
    tokens, newest, context, first, tables, temperature, seed, choice, noisy, ends, drawn, positions, slots,
    batch, blocks, ended, depth, nodes, width, block_size, TABLE: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """Grid (sequences). ended = E, blocks = M, nodes = P * n, width = n."""
    b = tl.program_id(0).to(tl.int64)
    own = columns + b * (blocks + 3)
    slot = tl.load(own)
    length = tl.load(lengths + slot)
    tl.store(tokens + b, tl.load(own + 1))
    tl.store(newest + b, length - 1)
    tl.store(context + b, length.to(tl.int32))
    tl.store(first + b, tl.load(own + 2).to(tl.int32))
    tl.store(temperature + b, tl.load(temperatures + slot))
    tl.store(seed + b, tl.load(seeds + slot))
    tl.store(choice + b, tl.load(choices + slot))
    tl.store(noisy + b, tl.load(noises + slot))
    block = tl.arange(0, TABLE)
    tl.store(tables + b * blocks + block, tl.load(own + 3 + block, mask=block < blocks, other=0).to(tl.int32), mask=block < blocks)
    lane = tl.arange(0, NODES)
    tl.store(ends + b * ended + lane, tl.load(end_ids + slot * ended + lane, mask=lane < ended, other=0), mask=lane < ended)
    tl.store(drawn + lane.to(tl.int64) * batch + b, length + lane, mask=lane < depth)
    place = (lane // width).to(tl.int64) * batch * width + b * width + lane % width
    tl.store(positions + place, length + lane // width, mask=lane < nodes)
    tl.store(slots + place, paged(own + 3, length + lane, blocks, block_size, lane < nodes), mask=lane < nodes)
