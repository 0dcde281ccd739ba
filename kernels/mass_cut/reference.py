"""Where a law is cut: the fewest best-ranked tokens whose mass reaches p, among equals the lowest ids.

The mass of a token is exp(log_p), evaluated in float64 and rounded to a multiple of 2**-52. Sums of such numbers are
integers, exact in any order, so every backend finds the same set and a row's result cannot depend on how it was summed:
backends differ only in the last bit of an exp, which moves the cut if the mass comes within 1e-11 of p there.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ONE = 1023 << 52  # the bits of 1.0


def fixed_point(x: Tensor) -> Tensor:
    """x f64 in [0, 1] in units of 2**-52, i64, rounded to the nearest: 1 + x has just these fraction bits."""
    return (1.0 + x).view(torch.int64) - _ONE


def masses(log_p: Tensor) -> Tensor:
    """log_p [R, V] f32, at most 0 -> [R, V] i64 in units of 2**-52. NaN has none."""
    return fixed_point(log_p.double().exp().nan_to_num(nan=0.0))


def targets(p: Tensor) -> Tensor:
    """p [R] f32 in [0, 1] -> [R, 1] i64 in units of 2**-52, at least one, so that the first token is always wanted."""
    return fixed_point(p.double()).clamp(min=1)[:, None]


def mass_cut(log_p: Tensor, rank: Tensor, p: Tensor) -> Tensor:
    """Keep tokens by falling rank, equals by rising id, until their mass reaches p; all where it never does.

    log_p [R, V] f32, rank [R, V] f32, finite wherever log_p is, p [R] f32 -> kept [R, V] bool.
    """
    ids = rank.sort(dim=-1, descending=True, stable=True).indices
    mass = masses(log_p).gather(-1, ids)
    ahead = mass.cumsum(dim=-1) - mass
    return torch.empty_like(rank, dtype=torch.bool).scatter_(-1, ids, ahead < targets(p))
