"""Fused quantisation is the op's own result, quantised: to the bit, but for norms on a card."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec import ops
from specdec.kernels.case import Case
from specdec.kernels.quantize_fp8.reference import quantize_fp8
from tests.kernels.device import DEVICE, at_home
from tests.kernels.matrix import cases, names

PAIRS = [
    (fused, plain, backend)
    for fused, plain in (("rms_norm_fp8", "rms_norm"), ("add_rms_norm_fp8", "add_rms_norm"), ("silu_mul_fp8", "silu_mul"))
    for backend in names(fused)
]


def _run(op: str, backend: str, case: Case) -> Any:
    return at_home(ops.TABLE.ops[op].find(backend), *case.args, **case.kwargs)


@pytest.mark.parametrize(("fused", "plain", "backend"), PAIRS)
def test_codes_and_scales_are_those_of_the_wide_result(fused: str, plain: str, backend: str) -> None:
    """Compiled for a card, a norm's sum has another order in the kernel that stores bytes: there, what one rounding of it may change."""
    exact = DEVICE == "cpu" or backend == "reference" or plain == "silu_mul"
    for case in cases(fused, ops.TABLE.ops[fused].find(backend)):
        q, scale, *rest = _run(fused, backend, case)
        wide = _run(plain, backend, case)
        wide, *wide_rest = wide if isinstance(wide, tuple) else (wide,)
        expected_q, expected_scale = quantize_fp8(wide)
        sound = expected_scale.isfinite()
        codes, expected_codes = q.view(torch.uint8)[sound], expected_q.view(torch.uint8)[sound]
        if exact:
            assert torch.equal(scale.nan_to_num(-1.0), expected_scale.nan_to_num(-1.0)), case.name
            assert torch.equal(codes, expected_codes), case.name
        else:
            step = torch.finfo(wide.dtype).eps
            torch.testing.assert_close(scale, expected_scale, rtol=2 * step, atol=0.0, equal_nan=True)
            assert (codes.int() - expected_codes.int()).abs().le(1).all(), f"{case.name}: further than the next code"
        assert q.float()[~sound].isnan().all(), f"{case.name}: a row with NaN must not look like numbers"
        for a, b in zip(rest, wide_rest, strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), case.name
