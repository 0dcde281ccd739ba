"""The router's choice in one launch: k rounds of a maximum over integer keys that order logits, ties by lowest id.

A row is E logits (512 bytes at 128 experts), so the launch costs more than the bytes: 64 rows are 32 KB. A program takes a few
whole rows and keeps them in registers for all rounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_common import row_tile

_WIDEST = 1024
_LOWEST = tl.constexpr(-(2**63))


def rejects(logits: Tensor, k: int, renormalise: bool) -> str | None:
    """Why this kernel cannot run the call, or None."""
    if logits.shape[1] > _WIDEST:
        return f"{logits.shape[1]} experts; it takes up to {_WIDEST}"
    usable = logits.is_contiguous() and logits.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return None if usable else "the logits must be dense, of float32, float16 or bfloat16"


def moe_route(logits: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Shapes in `specdec.ops.moe_route`."""
    rows, experts = logits.shape
    ids = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    tile, columns = row_tile(experts, 512)
    if rows:
        wide = triton.next_power_of_2(k)
        _route[(triton.cdiv(rows, tile),)](
            logits, ids, weights, rows, E=experts, K=k, ROWS=tile, COLUMNS=columns, WIDE=wide, OVER_K=renormalise
        )
    return ids, weights


@triton.jit(do_not_specialize=["rows"])
def _route(
    logits, ids, weights, rows,
    E: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, OVER_K: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles). WIDE: K as a power of two; OVER_K: weights are the softmax over the chosen instead of over all."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows)[:, None] & (column < E)
    logit = tl.load(logits + row.to(tl.int64)[:, None] * E + column, mask=inside, other=0.0).to(tl.float32)
    logit = tl.where(logit == logit, logit, float("-inf"))
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)  # both zeros tie
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = tl.where(column < E, (ordered << 32) | (COLUMNS - 1 - column), _LOWEST)
    slot = tl.arange(0, WIDE)[None, :]
    chosen = tl.zeros([ROWS, WIDE], tl.int32)
    value = tl.full([ROWS, WIDE], float("-inf"), tl.float32)
    for j in tl.static_range(K):
        best = tl.max(key, 1)
        high = (best >> 32).to(tl.int32)
        number = tl.where(high < 0, high ^ 0x7FFFFFFF, high).to(tl.float32, bitcast=True)
        chosen = tl.where(slot == j, (COLUMNS - 1 - (best & 0xFFFFFFFF).to(tl.int32))[:, None], chosen)
        value = tl.where(slot == j, number[:, None], value)
        key = tl.where(key == best[:, None], _LOWEST, key)
    top = tl.max(tl.where(slot == 0, value, float("-inf")), 1)[:, None]
    mass = tl.exp(value - top)
    total = tl.sum(tl.where(slot < K, mass, 0.0), 1)
    if not OVER_K:
        total = tl.sum(tl.where(column < E, tl.exp(logit - top), 0.0), 1)
    place = row.to(tl.int64)[:, None] * K + slot
    mask = (row < rows)[:, None] & (slot < K)
    tl.store(ids + place, chosen, mask=mask)
    tl.store(weights + place, mass / total[:, None], mask=mask)
