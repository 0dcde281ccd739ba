"""A batch into the inputs of a recorded pass, which are at fixed addresses and as large as its shape."""

from __future__ import annotations

import torch
from torch import Tensor

Fields = tuple[Tensor, ...]
"""input_ids, positions, tree_mask [T] i64, slot_mapping [G, T] i64, ctx_lens, tree_len [B], cu_query [B + 1], block_tables [G, B, M] i32
and, for a draft head, first_key [B] i32."""


def pad_batch(own: Fields, given: Fields) -> None:
    """Shapes and meaning in `specdec.ops.pad_batch`."""
    slots, sequences, rows = own[3], len(given[4]), len(given[0])
    for mine, values in zip((*own[:3], *own[4:7], *own[8:]), (*given[:3], *given[4:7], *given[8:]), strict=True):
        mine[: len(values)].copy_(values)
    slots[:, :rows].copy_(given[3])
    slots[:, rows:].fill_(-1)
    own[6][sequences + 1 :].fill_(rows)
    own[7][:, :sequences, : given[7].shape[2]].copy_(given[7])


def zeroed(rows: int, sequences: int, groups: int, blocks: int, device: torch.device, *, first_key: bool) -> Fields:
    """Inputs of such a pass, empty: no row belongs to a sequence or writes."""
    longs = torch.zeros((3 + groups, rows), dtype=torch.int64, device=device)
    longs[3:] = -1
    lengths = torch.zeros((2 + first_key, sequences), dtype=torch.int32, device=device)
    ends = torch.zeros(sequences + 1, dtype=torch.int32, device=device)
    tables = torch.zeros((groups, sequences, blocks), dtype=torch.int32, device=device)
    return (longs[0], longs[1], longs[2], longs[3:], lengths[0], lengths[1], ends, tables, *lengths[2:])
