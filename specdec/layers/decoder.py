"""The decoder layers of a model and its final norm, run as one op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec import ops
from specdec.layers.attention import Attention, KVStore
from specdec.layers.linear import Activations, Linear
from specdec.layers.moe import MoE
from specdec.layers.norm import RMSNorm
from specdec.quant.fp8 import Codes
from specdec.types import Batch


@dataclass(slots=True)
class Layer:
    """Pre-norm attention and SwiGLU blocks around one residual stream."""

    input_norm: RMSNorm
    attention: Attention
    post_norm: RMSNorm
    gate_up: Linear  # [H] -> [2 I], gate first
    down: Linear  # [I] -> [H]

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its linear layers."""
        return self.attention.qkv, self.attention.out, self.gate_up, self.down

    @property
    def reader(self) -> Linear:
        """What alone reads the norm after attention."""
        return self.gate_up

    def mlp(self, x: Activations) -> Tensor:
        """[T, H] -> [T, H]."""
        wide = self.gate_up(x)
        return self.down(Codes(*ops.silu_mul_fp8(wide), wide.dtype) if self.down.takes_codes else ops.silu_mul(wide))


@dataclass(slots=True)
class MoELayer:
    """Pre-norm attention and a mixture of experts around one residual stream."""

    input_norm: RMSNorm
    attention: Attention
    post_norm: RMSNorm
    moe: MoE

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its linear layers; the experts are none."""
        return self.attention.qkv, self.attention.out, self.moe.router

    @property
    def reader(self) -> None:
        """Router and experts read the norm after attention, as it is."""

    def mlp(self, x: Activations) -> Tensor:
        """[T, H] -> [T, H]."""
        assert isinstance(x, Tensor)
        return self.moe(x)


class DecoderStack:
    """Layers and final norm. Their weights are fixed from here on.

    plan: the stack prepared for one compiled call, or None where that is not possible, with the reason in `why_not`.
    """

    def __init__(self, layers: Sequence[Layer | MoELayer], norm: RMSNorm):
        self.layers = layers
        self.norm = norm
        self.plan, self.why_not = ops.prepare_stack(self)

    def __call__(self, x: Tensor, batch: Batch, kv: KVStore, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """x [T, H] -> (hidden [T, H] after the final norm, tapped [T, len(taps)·H] or None); K and V of the rows go into `kv`."""
        indices = range(len(self.layers))
        return ops.decoder_stack(x, self, batch, [kv.layer(i) for i in indices], [kv.group_of(i) for i in indices], taps)
