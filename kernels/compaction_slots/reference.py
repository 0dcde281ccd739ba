"""Which slots the K and V of accepted nodes go from and to, before the host knows which these are."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.tree_layout.reference import device_slots


def compaction_slots(
    path: Tensor, num_accepted: Tensor, num_committed: Tensor, lengths: Tensor, slots: Tensor, tables: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Shapes and meaning in `specdec.ops.compaction_slots`."""
    root = (lengths[slots] - 1 - num_committed)[:, None]
    depth = torch.arange(1, path.shape[1] + 1, device=path.device)
    nodes = torch.where(depth <= num_accepted[:, None], path, depth)
    return device_slots(tables, root + nodes, block_size).flatten(1), device_slots(tables, root + depth, block_size).flatten(1)
