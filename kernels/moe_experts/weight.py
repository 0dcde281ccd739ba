"""Experts of a layer, stacked: their weights in any storage, and how one of them becomes dense."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from specdec.kernels.fp8_linear.weight import Fp8Weight
from specdec.kernels.int4_linear.weight import Int4Weight
from specdec.kernels.mxfp4.units import Mxfp4Units, pack_units
from specdec.kernels.mxfp4.weight import Mxfp4Weight

ExpertWeight = Tensor | Fp8Weight | Int4Weight | Mxfp4Weight | Mxfp4Units
"""E weights N × K. Every tensor of the storage has the experts as an additional first dimension, also Fp8Weight.scale:
[E,1], [E,N] or [E,ceil(N/128),ceil(K/128)]. A plain tensor is [E,N,K]."""


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """E gated MLPs. gate_up: E × 2I × H, the gate's I rows first; down: E × H × I, in the same kind of storage; biases [E,2I] and [E,H].

    limit: None = silu(gate) * up; else gate is cut at `limit` and up to ±`limit`, and (up + 1) * gate * sigmoid(alpha * gate).
    """

    gate_up: ExpertWeight
    down: ExpertWeight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    limit: float | None = None
    alpha: float = 1.0

    @property
    def count(self) -> int:
        """E."""
        return storage(self.gate_up)[0].shape[0]

    @property
    def inner(self) -> int:
        """I."""
        return storage(self.gate_up)[0].shape[-2] // 2

    @property
    def nbytes(self) -> int:
        """Memory the weights occupy."""
        return sum(t.nbytes for weight in (self.gate_up, self.down) for t in storage(weight))


def storage(weight: ExpertWeight) -> tuple[Tensor, ...]:
    """The tensors of a storage, the numbers first."""
    if isinstance(weight, Tensor):
        return (weight,)
    if isinstance(weight, Int4Weight):
        return weight.data, weight.scale, weight.zero
    return weight.data, weight.scale


def dense_expert(weight: ExpertWeight, expert: int) -> Tensor:
    """One expert's weight, float32 [N,K]."""
    if isinstance(weight, Tensor):
        return weight[expert].float()
    if isinstance(weight, Mxfp4Weight):
        return Mxfp4Weight(weight.data[expert], weight.scale[expert]).dequantize()
    if isinstance(weight, Mxfp4Units):
        return Mxfp4Units(weight.data[expert], weight.scale[expert], weight.columns).dequantize()
    if isinstance(weight, Fp8Weight):
        return Fp8Weight(weight.data[expert], weight.scale[expert]).dequantize()
    return Int4Weight(weight.data[expert], weight.scale[expert], weight.zero[expert], weight.group).dequantize()


def streamed(experts: Experts) -> Experts:
    """The same experts as a card's kernel wants to read them: MXFP4 in units."""
    weights = [pack_units(w) if isinstance(w, Mxfp4Weight) else w for w in (experts.gate_up, experts.down)]
    return replace(experts, gate_up=weights[0], down=weights[1])
