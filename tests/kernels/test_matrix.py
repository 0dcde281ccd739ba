"""Every backend against the reference, over every case; row independence and thread independence to the bit."""

from __future__ import annotations

import pytest
import torch

from specdec import ops
from specdec.kernels.registry import Backend
from specdec.kernels.tolerances import TOLERANCE
from tests.kernels.matrix import ALL_CASES, call, cases, first_rows, implementations, label, marked, poisoned, use

MATRIX = implementations()


def test_every_op_has_cases_and_a_tolerance() -> None:
    assert set(ALL_CASES) == set(ops.TABLE.ops) == set(TOLERANCE)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_op_has_a_fixed_order_backend(device: str) -> None:
    for name, op in ops.TABLE.ops.items():
        assert any(b.fixed_order for b in op.usable[device]), name


def _assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float, name: str) -> None:
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape, name
        scale = e[e.isfinite()].abs().max().item() if e.is_floating_point() and e.isfinite().any() else 1.0
        torch.testing.assert_close(a, e, rtol=0.0, atol=tolerance * max(scale, 1e-30), equal_nan=True, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("entry", marked(MATRIX))
def test_agrees_with_the_reference(entry: tuple[str, Backend, str | None]) -> None:
    op, backend, variant = entry
    # the last backend of an op is its reference; for the dense linear layer the row-wise one plays that part
    reference = ops.TABLE.ops[op].backends[-1]
    for case in cases(op, backend):
        expected, expected_after = call(reference, case)
        with use(variant), poisoned():
            actual, after = call(backend, case)
        _assert_close(actual, expected, TOLERANCE[op], f"{op} {case.name}")
        _assert_close(after, expected_after, TOLERANCE[op], f"{op} {case.name}, arguments after the call")


@pytest.mark.parametrize("entry", marked([e for e in MATRIX if e[1].fixed_order]))
def test_a_row_does_not_depend_on_the_rows_beside_it(entry: tuple[str, Backend, str | None]) -> None:
    op, backend, variant = entry
    for case in cases(op, backend):
        rows = case.args[case.row_args[0]].shape[0] if case.row_args else 0
        for count in {1, 2, rows - 1} if rows > 1 else ():
            with use(variant):
                whole, _ = call(backend, case)
                part, _ = call(backend, case, first_rows(case, count))
            for w, p in zip(whole, part, strict=True):
                assert torch.equal(w[:count].nan_to_num(), p.nan_to_num()), f"{op} {case.name}: {count} of {rows} rows"


@pytest.mark.parametrize(
    "entry", [e for e in MATRIX if e[1].fixed_order and "triton" not in e[1].name], ids=label
)  # one thread, interpreted; none of the CPU's, on a card
def test_bits_do_not_depend_on_the_thread_count(entry: tuple[str, Backend, str | None]) -> None:
    op, backend, variant = entry
    before = torch.get_num_threads()
    for case in cases(op, backend):
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            try:
                with use(variant):
                    results.append([t for part in call(backend, case) for t in part])
            finally:
                torch.set_num_threads(before)
        for other in results[1:]:
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(results[0], other, strict=True)), f"{op} {case.name}"
