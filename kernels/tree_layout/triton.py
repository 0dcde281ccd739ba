"""The layout in one launch: a program a tree, a lane a node. Some 2 kB; in torch it was seventeen launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.tree_layout.reference import TreeLayout

_MOST_NODES = 64


def rejects(
    tokens: Tensor, depth: Tensor, num_nodes: Tensor, lengths: Tensor, slots: Tensor, tables: Tensor, block_size: int
) -> str | None:
    """Why this kernel cannot run the call, or None."""
    if tokens.shape[1] > _MOST_NODES:
        return f"trees of {tokens.shape[1]} nodes; it takes {_MOST_NODES}"
    return None if tables.stride(2) == 1 else "rows of tables must be dense"


def tree_layout(
    tokens: Tensor, depth: Tensor, num_nodes: Tensor, lengths: Tensor, slots: Tensor, tables: Tensor, block_size: int
) -> TreeLayout:
    """Shapes and meaning in `specdec.ops.tree_layout`."""
    (batch, nodes), groups, device = tokens.shape, len(tables), tokens.device
    made = torch.empty((2 + groups, batch * nodes), dtype=torch.int64, device=device)
    contexts = torch.empty(batch, dtype=torch.int32, device=device)
    if batch:
        _layout[(batch,)](
            tokens.contiguous(), depth.contiguous(), num_nodes, lengths, slots, tables, made, contexts,
            nodes, groups, block_size, tables.stride(0), tables.stride(1), NODES=triton.next_power_of_2(nodes), num_warps=1,
        )  # fmt: skip
    return TreeLayout(made[0], made[1], made[2:], contexts)


@triton.jit
def cell_slots(table, cell, block_size, inside):
    """Flat slots of cells, which are places counted from a sequence's start, by its row of a block table; -1 where not inside."""
    block = tl.load(table + cell // block_size, mask=inside, other=0).to(tl.int64)
    return tl.where(inside, block * block_size + cell % block_size, -1)


@triton.jit(
    do_not_specialize=["nodes", "groups", "table_group", "table_row"],
    do_not_specialize_on_alignment=["tokens", "depth", "num_nodes", "slots", "tables"],
)
def _layout(
    tokens, depth, num_nodes, lengths, slots, tables, made, contexts, nodes, groups, block_size, table_group, table_row,
    NODES: tl.constexpr,
):  # fmt: skip
    """Grid (trees). made [2 + G, T]: input ids, positions, flat slots by group. Strides of tables in elements."""
    tree = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    own = tree * nodes + node
    there = node < nodes
    newest = tl.load(lengths + tl.load(slots + tree)) - 1
    rows = tl.num_programs(0) * nodes
    tl.store(made + own, tl.maximum(tl.load(tokens + own, mask=there, other=0), 0), mask=there)
    tl.store(made + rows + own, newest + tl.load(depth + own, mask=there, other=0), mask=there)
    written = there & (node < tl.load(num_nodes + tree))
    for group in range(groups):
        table = tables + group * table_group + tree * table_row
        tl.store(made + (2 + group) * rows + own, cell_slots(table, newest + node, block_size, written), mask=there)
    tl.store(contexts + tree, newest.to(tl.int32))
