"""4-bit weights in groups: the linear method over them, and what the CPU tiles can hold of them."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec import ops
from specdec.kernels.int4_linear.weight import Int4Weight
from specdec.kernels.linear.tiles import BLOCK
from specdec.quant.ggml import GgmlBlocks

MIDDLE = 8  # the zero point of Q4_0


class Int4Linear:
    """A 4-bit weight; activations stay as they come (W4A16). `fixed_order` as in `Dense`."""

    def __init__(self, weight: Int4Weight, *, fixed_order: bool = False):
        self.weight, self.fixed_order = ops.prepare_int4(weight), fixed_order
        self.out_features, self.in_features = weight.shape
        self.name = f"int4 group {weight.group}, W4A16"

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def apply(self, x: Tensor) -> Tensor:
        """x [M,K] in the activation dtype -> [M,N]."""
        return ops.int4_linear(x, self.weight)

    def dequantize(self) -> Tensor:
        """float32 [N,K]."""
        return self.weight.dequantize()


def stack_int4(shards: list[Int4Weight]) -> list[Int4Weight]:
    """Shards stacked along rows; neighbours with groups of one size become one weight."""
    stacked = [shards[0]]
    for shard in shards[1:]:
        last = stacked[-1]
        if shard.group != last.group:
            stacked.append(shard)
            continue
        data, scale, zero = (torch.cat(pair) for pair in ((last.data, shard.data), (last.scale, shard.scale), (last.zero, shard.zero)))
        stacked[-1] = Int4Weight(data, scale, zero, last.group)
    return stacked


def is_symmetric(weight: Int4Weight) -> bool:
    """Whether every zero point is the middle one."""
    return bool((weight.zero == MIDDLE).all())


def offsets(weight: Int4Weight) -> Tensor:
    """(8 - zero) · scale, f32 [N, groups]: what a weight is more than `as_q4_0` of it."""
    return (MIDDLE - weight.zero.float()) * weight.scale.float()


def as_q4_0(weight: Int4Weight) -> GgmlBlocks | None:
    """(code - 8) · scale in Q4_0 blocks (32 columns, fp16 scale), or None where they cannot hold it exactly: groups that 32 does not
    divide, scales that float16 rounds."""
    rows, cols = weight.shape
    scale = weight.scale.half()
    if weight.group % BLOCK or not torch.equal(scale.float(), weight.scale.float()):
        return None
    grouped = weight.codes().view(rows, cols // BLOCK, BLOCK)
    quants = grouped[..., :16] | (grouped[..., 16:] << 4)
    scales = scale.repeat_interleave(weight.group // BLOCK, 1)[..., None].view(torch.uint8)
    return GgmlBlocks(torch.cat((scales, quants), -1).view(rows, -1), "Q4_0", (rows, cols))
