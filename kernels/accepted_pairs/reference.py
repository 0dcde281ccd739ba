"""The rows that run a verdict's tokens through a draft head, as many for every sequence as there can be; those beyond write nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.draft_layout.reference import paged


class AcceptedPairs(NamedTuple):
    """Of B sequences with W rows each, of them some pairs, then masks, then what is not there."""

    tokens: Tensor  # [B, W] i64, of what is no pair the mask's
    positions: Tensor  # [B, W] i64
    slots: Tensor  # [B, W] i64, -1 = no write
    seen: Tensor  # [B] i32 keys before the first pair
    last: Tensor  # [B, 1 + masks] i64: rows of the last pair and the masks, counted over all sequences
    roots: Tensor  # [B] i64 token of the last pair
    pair: Tensor  # [B, W] bool


def accepted_pairs(said: Tensor, newest: Tensor, tables: Tensor, masks: int, mask_token: int, block_size: int) -> AcceptedPairs:
    """Shapes in `specdec.ops.accepted_pairs`."""
    count, (size, width), device = said[:, -1:], (len(said), said.shape[1] - 1 + masks), said.device
    row = torch.arange(width, device=device)
    pair, seen = row < count, newest[:, None] + 1 - count
    positions = seen + row
    tokens = torch.nn.functional.pad(said[:, :-1], (0, masks))
    slots = torch.where(row < count + masks, paged(tables, positions, block_size), -1)
    first = torch.arange(0, size * width, width, device=device)[:, None]
    last = first + count - 1 + torch.arange(1 + masks, device=device)
    roots = tokens.gather(1, count - 1)[:, 0]
    return AcceptedPairs(torch.where(pair, tokens, mask_token), positions, slots, seen[:, 0].int(), last, roots, pair)
