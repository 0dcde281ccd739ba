"""SwiGLU's elementwise half."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.read_ahead import Ahead


def silu_mul(gate_up: Tensor, ahead: Ahead = ()) -> Tensor:
    """gate_up [T,2I], gate first -> silu(gate) * up, [T,I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)
