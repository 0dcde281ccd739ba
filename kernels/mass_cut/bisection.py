"""The cut without a sort: bisect over the bits of the rank at which the mass reaches p. No look from the host, any device."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.mass_cut.reference import masses, targets

_LOWEST, _HIGHEST = -(2**31), 2**31 - 1


def _ordered(rank: Tensor) -> Tensor:
    """Integers [R, V] i32 in the order of the ranks; both zeros are one."""
    bits = (rank + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def mass_cut(log_p: Tensor, rank: Tensor, p: Tensor) -> Tensor:
    """See `reference.mass_cut`. 32 passes over integers, whose sums do not depend on their order."""
    mass, key, target = masses(log_p), _ordered(rank), targets(p)
    low = torch.full_like(target, _LOWEST)
    high = torch.full_like(target, _HIGHEST)
    for _ in range(32):  # the highest key whose mass, with all above it, reaches the target stays in [low, high]
        middle = (low + high + 1) >> 1
        reached = torch.where(key >= middle, mass, 0).sum(dim=-1, keepdim=True) >= target
        low, high = torch.where(reached, middle, low), torch.where(reached, high, middle - 1)
    tied = torch.where(key == low, mass, 0)
    ahead = torch.where(key > low, mass, 0).sum(dim=-1, keepdim=True) + tied.cumsum(dim=-1) - tied
    return (key > low) | ((key == low) & (ahead < target))
