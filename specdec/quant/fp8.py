"""FP8 weights: rounding to e4m3, and the linear methods over them (W8A16, W8A8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec import ops
from specdec.kernels.fp8_linear.weight import BLOCK, Fp8Weight
from specdec.kernels.quantize_fp8.reference import quantize_fp8


def to_fp8(weight: Tensor) -> Fp8Weight:
    """weight [N,K], each row scaled so that its largest magnitude is e4m3's, then rounded to nearest; a row of zeros has scale 0."""
    return Fp8Weight(*quantize_fp8(weight))


@dataclass(frozen=True, slots=True)
class Codes:
    """Activations as e4m3 numbers [T,K] with a scale [T] each, of rows that were in `dtype`."""

    numbers: Tensor
    scale: Tensor
    dtype: torch.dtype


class Fp8Linear:
    """An e4m3 weight. `act_fp8`: activations become e4m3 too, by row (W8A8); else they stay as they come (W8A16).

    Which of the two is fixed here, at load, and never depends on M. `fixed_order` as in `Dense`. dtype: of the activations; known, a
    card may keep the weight in another order.
    """

    def __init__(self, weight: Fp8Weight, *, act_fp8: bool = False, fixed_order: bool = False, dtype: torch.dtype | None = None):
        self.act_fp8, self.fixed_order = act_fp8, fixed_order
        self.weight = weight if act_fp8 or dtype is None else ops.prepare_fp8(weight, dtype)
        self.out_features, self.in_features = weight.shape
        layout = f"per {BLOCK}x{BLOCK} block" if weight.blocked else "per tensor" if weight.scale.numel() == 1 else "per channel"
        self.name = f"fp8 {layout}, {'W8A8' if act_fp8 else 'W8A16'}"

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def apply(self, x: Tensor) -> Tensor:
        """x [M,K] in the activation dtype -> [M,N]."""
        if not self.act_fp8:
            return ops.fp8_linear(x, self.weight)
        return self.apply_codes(Codes(*ops.quantize_fp8(x), x.dtype))

    def apply_codes(self, x: Codes) -> Tensor:
        """As `apply`, of rows that whoever made them has quantised: W8A8 alone."""
        assert isinstance(self.weight, Fp8Weight)  # fragments are for activations in 16 bits
        return ops.fp8_fp8_linear(x.numbers, x.scale, self.weight, x.dtype)

    def dequantize(self) -> Tensor:
        """float32 [N,K]."""
        return self.weight.dequantize()


def by_columns(weight: Fp8Weight) -> list[Fp8Weight]:
    """A weight with a scale per block, cut into its columns of blocks, each with a scale per row."""
    scales = weight.scale.repeat_interleave(BLOCK, 0)[: weight.shape[0]]
    return [Fp8Weight(data, scales[:, i].contiguous()) for i, data in enumerate(weight.data.split(BLOCK, dim=1))]


def stack_fp8(shards: list[Fp8Weight]) -> list[Fp8Weight]:
    """Shards stacked along rows, in as few weights as hold them exactly: scales per tensor that differ become scales per channel;
    blocks go together where every shard but the last ends with a whole one."""
    stacked = [shards[0]]
    for shard in shards[1:]:
        last = stacked[-1]
        if shard.blocked != last.blocked or (last.blocked and last.shape[0] % BLOCK):
            stacked.append(shard)
            continue
        if last.blocked:
            scale = torch.cat((last.scale, shard.scale))
        elif last.scale.numel() == 1 == shard.scale.numel() and torch.equal(last.scale, shard.scale):
            scale = last.scale
        else:
            scale = torch.cat((last.row_scales(), shard.row_scales()))
        data = torch.cat((last.data.view(torch.uint8), shard.data.view(torch.uint8)))
        stacked[-1] = Fp8Weight(data.view(torch.float8_e4m3fn), scale)
    return stacked
