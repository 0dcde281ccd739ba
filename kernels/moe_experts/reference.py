"""Mixture of experts, the experts' half: every row through the experts chosen for it, one expert after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.linear.reference import rowwise_linear
from specdec.kernels.moe_experts.weight import Experts, ExpertWeight, dense_expert


def moe_experts(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """Shapes in `specdec.ops.moe_experts`. Float32 but for the activation, which is rounded to x's dtype, as the result is.

    The weighted outputs of a row are added in the order of its choices, and products are made row by row, so that a
    row's bits depend on nothing but the row.
    """
    outputs = x.new_zeros(*ids.shape, x.shape[1], dtype=torch.float32)
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        row, choice = (ids == expert).nonzero(as_tuple=True)
        inner = activate(_linear(x[row].float(), experts.gate_up, experts.gate_up_bias, expert), experts).to(x.dtype)
        outputs[row, choice] = _linear(inner.float(), experts.down, experts.down_bias, expert) * weights[row, choice, None]
    total = outputs.new_zeros(x.shape)
    for choice in range(ids.shape[1]):
        total += outputs[:, choice]
    return total.to(x.dtype)


def _linear(x: Tensor, weight: ExpertWeight, bias: Tensor | None, expert: int) -> Tensor:
    y = rowwise_linear(x, dense_expert(weight, expert))
    return y if bias is None else y + bias[expert].float()


def activate(gate_up: Tensor, experts: Experts) -> Tensor:
    """gate_up f32 [n,2I] -> f32 [n,I], the formula of `Experts`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if experts.limit is None:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
    return (up + 1) * gate * torch.sigmoid(experts.alpha * gate)
