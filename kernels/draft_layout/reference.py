"""Where the rows of a recorded draft lie, from what the host sent and the device's own lengths: the law of every sequence, and positions
and slots of the nodes of all passes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.tree_layout.reference import device_slots

# of `SamplingState`: temperature [S] f32, seed, length, choice [S] i64, noisy [S] bool, end_ids [S, E] i64
Laws = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class DraftLayout(NamedTuple):
    """Of B sequences; D depths; P passes of n nodes each."""

    tokens: Tensor  # [B] i64 newest tokens, as the host knows them
    newest: Tensor  # [B] i64 their positions
    context: Tensor  # [B] i32 keys up to them
    first: Tensor  # [B] i32 first visible keys
    tables: Tensor  # [B, M] i32
    temperature: Tensor  # [B] f32
    seed: Tensor  # [B] i64
    choice: Tensor  # [B] i64
    noisy: Tensor  # [B] bool
    ends: Tensor  # [B, E] i64
    drawn: Tensor  # [D, B] i64: position whose noise the candidates of each depth race with
    positions: Tensor  # [P, B, n] i64 of the nodes
    slots: Tensor  # [P, B, n] i64 flat slots of their keys


def paged(tables: Tensor, cells: Tensor, block_size: int) -> Tensor:
    """[B, k] i64 flat slots of cells [B, k] i64 of sequences with tables [B, M]; cells beyond the tables are the last one's."""
    return device_slots(tables[None], cells.clamp(max=tables.shape[1] * block_size - 1), block_size)[0]


def draft_layout(columns: Tensor, laws: Laws, depth: int, passes: int, width: int, block_size: int) -> DraftLayout:
    """Shapes in `specdec.ops.draft_layout`."""
    batch, device = len(columns), columns.device
    slots, tokens, first = columns[:, :3].t().contiguous()
    tables = columns[:, 3:].int().contiguous()
    temperature, seed, length, choice, noisy, ends = (state[slots] for state in laws)
    nodes, newest = torch.arange(passes * width, device=device), length[:, None] - 1
    shape = batch, passes, width
    positions = (newest + 1 + nodes // max(width, 1)).view(shape).transpose(0, 1).contiguous()
    places = paged(tables, newest + 1 + nodes, block_size).view(shape).transpose(0, 1).contiguous()
    drawn = length + torch.arange(depth, device=device)[:, None]
    sizes = newest[:, 0], length.int(), first.int()
    return DraftLayout(tokens, *sizes, tables, temperature, seed, choice, noisy, ends, drawn, positions, places)
