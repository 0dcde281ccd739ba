"""The kernel matrix: every usable backend of every op, the compiled ones once per instruction-set variant of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import ops
from specdec.kernels.cases import CASES, Case
from specdec.kernels.linear.tiles import TiledWeight
from specdec.kernels.registry import Backend
from tests.kernels.device import home, on
from tests.kernels.draft_cases import draft_cases
from tests.kernels.stack_cases import stack_cases
from tests.kernels.walk_cases import walk_cases

ALL_CASES = {**CASES, "decoder_stack": stack_cases, "draft_pass": draft_cases, "tree_walk": walk_cases}

needs_extension = pytest.mark.skipif(not ops.compiled(), reason=f"about tiles: {ops.WHY_NOT}")


def variants() -> list[str]:
    """Instruction-set variants of the compiled kernels, none without the extension."""
    if not ops.compiled():
        return []
    from specdec import _C

    return _C.variants()


# The CUDA C++ backends read fragments alone, which no case has: `tests/gpu/test_fragment_linear_cuda.py` runs them.
_ELSEWHERE = "cuda"


def implementations(only: str | None = None) -> list[tuple[str, Backend, str | None]]:
    """(op, backend, variant or None) for everything that this machine can run (`home`), of one op or of all."""
    out: list[tuple[str, Backend, str | None]] = []
    for name, op in ops.TABLE.ops.items():
        for backend in op.backends if only in (None, name) else []:
            if backend.missing is None and home(backend) is not None and backend.name != _ELSEWHERE:
                out += [(name, backend, v) for v in (variants() if backend.name == "cpu" else [None])]
    return out


def names(op: str) -> list[str]:
    """The op's backends that this machine can run."""
    return list(dict.fromkeys(backend.name for _, backend, _ in implementations(op)))


def marked(entries: list[tuple[str, Backend, str | None]]) -> list[Any]:
    """For parametrize: what takes the interpreter minutes counts as slow; `test_attention_fixed.py` has quick cases for it."""
    slow = [e[1].name == "triton_fixed" and not torch.cuda.is_available() for e in entries]
    return [
        pytest.param(e, marks=pytest.mark.slow, id=label(e)) if s else pytest.param(e, id=label(e))
        for e, s in zip(entries, slow, strict=True)
    ]


def label(entry: tuple[str, Backend, str | None]) -> str:
    op, backend, variant = entry
    return f"{op}-{backend.name}" + (f"-{variant}" if variant else "")


@contextmanager
def use(variant: str | None) -> Iterator[None]:
    """The compiled kernels of this variant on this thread."""
    if variant is None:
        yield
        return
    from specdec import _C

    before = _C.use_variant(variant)
    try:
        yield
    finally:
        _C.use_variant(before)


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors are filled with NaN (or the largest integer), so an element no kernel wrote cannot look right."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # not to forbid products and sums of the library on a card
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def copy(value: Any) -> Any:
    """Deep copy of tensors inside lists and tuples; weights are shared."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, (list, tuple)):
        return type(value)(copy(v) for v in value)
    return value


def tensors(value: Any) -> list[Tensor]:
    """All tensors inside, in order. e4m3 ones widened: nothing compares them as they are."""
    if isinstance(value, Tensor):
        return [value.float() if value.dtype is torch.float8_e4m3fn else value]
    if isinstance(value, TiledWeight):
        return [value.data]
    return [t for v in value for t in tensors(v)] if isinstance(value, (list, tuple)) else []


def call(backend: Backend, case: Case, args: tuple[Any, ...] | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """(results, arguments afterwards), on the CPU, of a call on copies where the backend is at home: ops that write into caches are
    compared through the latter."""
    where = home(backend)
    assert where is not None, backend.name
    own, kwargs = copy(case.args if args is None else args), case.kwargs
    if where != "cpu":
        own, kwargs = on(where, own), on(where, kwargs)
    result = backend.fn(*own, **kwargs)
    return on("cpu", tensors(result)), on("cpu", tensors(own))


def first_rows(case: Case, count: int) -> tuple[Any, ...]:
    """Arguments with only the first `count` rows."""
    return tuple(a[:count].contiguous() if i in case.row_args else a for i, a in enumerate(case.args))


# Reasons that are no inability: an interpreted kernel is slow, and of two that can run a product the measured or likelier one is taken.
_PREFERENCES = ("interpreted, hence slow", "not measured", "measured:", "many rows:", "few rows:")


def cases(op: str, backend: Backend | None = None) -> list[Case]:
    """The op's cases, with a backend those that it takes. At least one, or its tests would be empty."""
    found = list(ALL_CASES[op]())
    if backend is None or backend.rejects is None:
        return found
    reasons = (backend.rejects(*case.args, **case.kwargs) for case in found)
    taken = [case for case, reason in zip(found, reasons, strict=True) if reason is None or reason.startswith(_PREFERENCES)]
    assert taken, f"{op}: no case for {backend.name}"
    return taken
