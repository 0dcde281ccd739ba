"""The kernel matrix: every usable backend of every op, the compiled ones once per instruction-set variant of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specdec import ops
from specdec.kernels.cases import CASES, Case
from specdec.kernels.linear.tiles import TiledWeight
from specdec.kernels.registry import Backend
from tests.kernels.draft_cases import draft_cases
from tests.kernels.stack_cases import stack_cases
from tests.kernels.walk_cases import walk_cases

ALL_CASES = {**CASES, "decoder_stack": stack_cases, "draft_pass": draft_cases, "tree_walk": walk_cases}


def variants() -> list[str]:
    """Instruction-set variants of the compiled kernels, none without the extension."""
    if not ops.compiled():
        return []
    from specdec import _C

    return _C.variants()


def implementations(device: str = "cpu") -> list[tuple[str, Backend, str | None]]:
    """(op, backend, variant or None) for everything usable on `device`."""
    out: list[tuple[str, Backend, str | None]] = []
    for name, op in ops.TABLE.ops.items():
        for backend in op.usable.get(device, []):
            out += [(name, backend, v) for v in (variants() if backend.name == "cpu" else [None])]
    return out


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
    torch.use_deterministic_algorithms(True)
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
    """(results, arguments afterwards) of a call on copies: ops that write into caches are compared through the latter."""
    own = copy(case.args if args is None else args)
    result = backend.fn(*own, **case.kwargs)
    return tensors(result), tensors(own)


def first_rows(case: Case, count: int) -> tuple[Any, ...]:
    """Arguments with only the first `count` rows."""
    return tuple(a[:count].contiguous() if i in case.row_args else a for i, a in enumerate(case.args))


def cases(op: str) -> list[Case]:
    return list(ALL_CASES[op]())
