"""Rotary position embedding tables (half-split layout), float32."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specdec.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] f32 angular frequencies, with linear or llama3 scaling applied.

    llama3 divides wavelengths beyond original_max / low_freq_factor by `factor`, leaves those below original_max /
    high_freq_factor alone and blends linearly between; it does not depend on the length of the sequence.
    """
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.kind == "default":
        return plain
    scaled = plain / rope.factor
    if rope.kind == "linear":
        return scaled
    wavelength = 2 * math.pi / plain
    blend = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    medium = (1 - blend) * scaled + blend * plain
    result = torch.where(wavelength > rope.original_max_positions / rope.low_freq_factor, scaled, medium)
    return torch.where(wavelength < rope.original_max_positions / rope.high_freq_factor, plain, result)


class Rotary:
    """`cos`, `sin`: [positions, head_dim / 2] f32 on `device`, indexed by absolute position; one pair for all layers."""

    def __init__(self, rope: RopeConfig, head_dim: int, positions: int, *, device: torch.device):
        angles = torch.outer(torch.arange(positions).float(), inverse_frequencies(rope, head_dim))
        self.cos = angles.cos().to(device)
        self.sin = angles.sin().to(device)
