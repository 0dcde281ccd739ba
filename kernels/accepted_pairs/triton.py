"""The rows behind a verdict as one launch: a program per sequence, a lane a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.accepted_pairs.reference import AcceptedPairs
from specdec.kernels.draft_layout.triton import paged


def rejects(said: Tensor, newest: Tensor, tables: Tensor, *rest: object) -> str | None:
    """Why this kernel cannot run the call, or None."""
    return None if all(t.is_contiguous() for t in (said, newest, tables)) else "arguments must be dense"


def accepted_pairs(said: Tensor, newest: Tensor, tables: Tensor, masks: int, mask_token: int, block_size: int) -> AcceptedPairs:
    """Shapes in `specdec.ops.accepted_pairs`."""
    batch, most, device = len(said), said.shape[1] - 1, said.device
    width = most + masks
    tokens, positions, slots = (torch.empty((batch, width), dtype=torch.int64, device=device) for _ in range(3))
    seen = torch.empty(batch, dtype=torch.int32, device=device)
    last = torch.empty((batch, 1 + masks), dtype=torch.int64, device=device)
    roots, pair = torch.empty(batch, dtype=torch.int64, device=device), torch.empty((batch, width), dtype=torch.bool, device=device)
    found = AcceptedPairs(tokens, positions, slots, seen, last, roots, pair)
    if batch:
        _pairs[(batch,)](
            said, newest, tables, *found, most, masks, mask_token, tables.shape[1], block_size,
            ROWS=triton.next_power_of_2(width + 1), num_warps=1,
        )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["most", "masks", "mask_token", "blocks", "block_size"])
def _pairs(
    said, newest, tables, tokens, positions, slots, seen, last, roots, pair, most, masks, mask_token, blocks, block_size, ROWS: tl.constexpr
):  # fmt: skip
    """Grid (sequences). blocks = M."""
    b = tl.program_id(0).to(tl.int64)
    own, width = said + b * (most + 1), most + masks
    count = tl.load(own + most)
    row = tl.arange(0, ROWS)
    there, paired = row < width, row < count
    start = tl.load(newest + b) + 1 - count
    out = b * width + row
    token = tl.load(own + row, mask=there & paired & (row < most), other=0)
    slot = paged(tables + b * blocks, start + row, blocks, block_size, there & (row < count + masks))
    tl.store(tokens + out, tl.where(paired, token, mask_token), mask=there)
    tl.store(positions + out, start + row, mask=there)
    tl.store(slots + out, slot, mask=there)
    tl.store(pair + out, paired, mask=there)
    tl.store(seen + b, start.to(tl.int32))
    tl.store(last + b * (1 + masks) + row, b * width + count - 1 + row, mask=row <= masks)
    tl.store(roots + b, tl.load(own + count - 1))
