"""Rows to e4m3 with a scale each while they are in registers: what ops with a fused quantisation share. As `quantize_fp8`, to the bit."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.kernels.triton_e4m3 import narrow


@triton.jit
def quantize_rows(y):
    """y [R,C] f32, 0 outside the row -> (codes [R,C] uint8, scales [R] f32). Zero rows get scale 0 and codes 0."""
    magnitude = tl.abs(y).to(tl.int32, bitcast=True)  # as integers NaN is the largest
    largest = tl.max(magnitude, 1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.zeros_like(largest) + 448.0)
    divisor = tl.where(scale == 0.0, 1.0, scale)[:, None]
    number = tl.div_rn(y, tl.zeros_like(y) + divisor)
    return narrow(tl.where((scale == 0.0)[:, None], 0.0, number)), scale
