"""Rotary position embedding tables (half-split layout), float32."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.config import MAX_NODES

if TYPE_CHECKING:
    from specdec.models.config import RopeConfig

SLACK = 2 * MAX_NODES  # rows of a step that is begun before it is known who ends may stand beyond the last position; nobody reads them


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] f32 angular frequencies, with linear, llama3 or yarn scaling applied.

    llama3 divides wavelengths beyond original_max / low_freq_factor by `factor`, leaves those below original_max /
    high_freq_factor alone and blends linearly between; it does not depend on the length of the sequence.
    """
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.kind == "default":
        return plain
    scaled = plain / rope.factor
    if rope.kind == "linear":
        return scaled
    if rope.kind == "yarn":
        keep = _yarn_keeps(rope, head_dim)
        return scaled * (1 - keep) + plain * keep
    wavelength = 2 * math.pi / plain
    blend = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    medium = (1 - blend) * scaled + blend * plain
    result = torch.where(wavelength > rope.original_max_positions / rope.low_freq_factor, scaled, medium)
    return torch.where(wavelength < rope.original_max_positions / rope.high_freq_factor, plain, result)


def _yarn_keeps(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] how much of each frequency YaRN leaves alone: 1 where it turns more than beta_fast times within the original
    positions, 0 below beta_slow times, linear in the dimension between."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    return 1 - ramp.clamp(0, 1)


class Rotary:
    """`cos`, `sin`: [positions, head_dim / 2] f32 on `device`, indexed by absolute position; one pair for all layers. YaRN's attention
    factor is in both, hence twice in every score."""

    def __init__(self, rope: RopeConfig, head_dim: int, positions: int, *, device: torch.device):
        angles = torch.outer(torch.arange(positions).float(), inverse_frequencies(rope, head_dim))
        self.cos = (angles.cos() * rope.attention_factor).to(device)
        self.sin = (angles.sin() * rope.attention_factor).to(device)
