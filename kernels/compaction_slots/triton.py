"""A program a sequence, a lane a depth: one launch for what were nineteen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.tree_layout.triton import cell_slots


def rejects(
    path: Tensor, num_accepted: Tensor, num_committed: Tensor, lengths: Tensor, slots: Tensor, tables: Tensor, *_: int
) -> str | None:
    """Why this kernel cannot run the call, or None."""
    return None if tables.stride(2) == 1 else "rows of tables must be dense"


def compaction_slots(
    path: Tensor, num_accepted: Tensor, num_committed: Tensor, lengths: Tensor, slots: Tensor, tables: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Shapes and meaning in `specdec.ops.compaction_slots`."""
    (batch, deepest), groups = path.shape, len(tables)
    source, target = torch.empty((2, groups, batch * deepest), dtype=torch.int64, device=path.device)
    if source.numel():
        _compact[(batch,)](
            path.contiguous(), num_accepted, num_committed, lengths, slots, tables, source, target,
            deepest, groups, block_size, tables.stride(0), tables.stride(1), DEPTHS=triton.next_power_of_2(deepest), num_warps=1,
        )  # fmt: skip
    return source, target


@triton.jit(
    do_not_specialize=["deepest", "groups", "table_group", "table_row"],
    do_not_specialize_on_alignment=["path", "num_accepted", "num_committed", "slots", "tables", "target"],
)
def _compact(
    path, num_accepted, num_committed, lengths, slots, tables, source, target, deepest, groups, block_size, table_group, table_row,
    DEPTHS: tl.constexpr,
):  # fmt: skip
    """Grid (sequences). source, target [G, B · D]. Strides of tables in elements."""
    sequence = tl.program_id(0).to(tl.int64)
    depth = tl.arange(0, DEPTHS) + 1
    there = depth <= deepest
    own = sequence * deepest + depth - 1
    root = tl.load(lengths + tl.load(slots + sequence)) - 1 - tl.load(num_committed + sequence)
    node = tl.load(path + own, mask=there, other=0)
    node = tl.where(depth <= tl.load(num_accepted + sequence), node, depth)
    for group in range(groups):
        table = tables + group * table_group + sequence * table_row
        place = group * tl.num_programs(0) * deepest + own
        tl.store(source + place, cell_slots(table, root + node, block_size, there), mask=there)
        tl.store(target + place, cell_slots(table, root + depth, block_size, there), mask=there)
