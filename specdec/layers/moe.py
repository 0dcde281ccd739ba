"""Mixture of experts: a router picks a few experts for every row, and their outputs are added by weight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec import ops
from specdec.kernels.moe_experts.weight import Experts
from specdec.layers.linear import Linear


@dataclass(slots=True)
class MoE:
    """router: [H] -> [E] in float32, so that which experts run is as sure as float32 makes it; experts of H columns.

    per_token: experts a row goes through. renormalise: their weights add up to 1.
    """

    router: Linear
    experts: Experts
    per_token: int
    renormalise: bool

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        ids, weights = ops.moe_route(self.router(x.float()), self.per_token, self.renormalise)
        return ops.moe_experts(x, ids, weights, self.experts)
