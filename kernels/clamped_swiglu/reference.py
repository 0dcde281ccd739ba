"""GPT-OSS's SwiGLU: gate and up interleaved, both clamped, up shifted by one (reference §7.4)."""

from __future__ import annotations

import torch
from torch import Tensor


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """gate_up [T,2I], columns gate, up, gate, up, … -> (up + 1) * gate * sigmoid(alpha * gate), [T,I]; gate <= limit, |up| <= limit."""
    gate = gate_up[:, 0::2].float().clamp(max=limit)
    up = gate_up[:, 1::2].float().clamp(-limit, limit)
    return ((up + 1) * (gate * torch.sigmoid(alpha * gate))).to(gate_up.dtype)
