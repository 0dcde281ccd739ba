"""Where the nodes of numbered trees that lie on the device stand in a batch, and where their K and V go."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TreeLayout(NamedTuple):
    """Rows of B trees of N nodes, T = B · N."""

    input_ids: Tensor  # [T] i64
    positions: Tensor  # [T] i64
    slot_mapping: Tensor  # [G, T] i64, -1 = no write
    ctx_lens: Tensor  # [B] i32


def device_slots(tables: Tensor, cells: Tensor, block_size: int, inside: Tensor | None = None) -> Tensor:
    """`flat_slots` on a device: [G, B, n] i64 of cells [B, n] i64 of sequences with tables [G, B, M] i32; -1 where not inside."""
    block = (cells // block_size).expand(len(tables), *cells.shape)
    slots = tables.gather(2, block).long() * block_size + cells % block_size
    return slots if inside is None else torch.where(inside, slots, -1)


def tree_layout(
    tokens: Tensor, depth: Tensor, num_nodes: Tensor, lengths: Tensor, slots: Tensor, tables: Tensor, block_size: int
) -> TreeLayout:
    """Shapes and meaning in `specdec.ops.tree_layout`."""
    newest = lengths[slots] - 1
    node = torch.arange(tokens.shape[1], device=tokens.device)
    cells = device_slots(tables, newest[:, None] + node, block_size, node < num_nodes[:, None])
    return TreeLayout(tokens.flatten().clamp(min=0), (newest[:, None] + depth).flatten(), cells.flatten(1), newest.int())
