"""Where the kernels under test run, and how a call gets there and its results come back.

Triton takes tensors of the CPU in its interpreter only, so with a card everything that it is handed must lie on the card. Inputs are
drawn on the CPU all the same: a card's generator draws other numbers.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.kernels.registry import Backend
from specdec.rows import RowInfo
from specdec.sampling import SamplingState

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_CARDS = () if DEVICE == "cuda" else pytest.mark.slow
"""Marks of a case that others nearly cover and the interpreter takes seconds for: a card runs it always, the interpreter among the slow."""


def on(device: str, value: Any) -> Any:
    """The value with every tensor inside it on `device`: of containers, weights, row infos and sampling states."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        moved = [on(device, v) for v in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    if isinstance(value, dict):
        return {name: on(device, v) for name, v in value.items()}
    if isinstance(value, RowInfo):  # its tree stays on the host, as in the engine
        return RowInfo(value.tree, value.request_slots, torch.device(device))
    if isinstance(value, SamplingState):
        moved_state = copy.copy(value)
        for name, field in vars(value).items():
            setattr(moved_state, name, on(device, field) if isinstance(field, Tensor) else field)
        moved_state.device = torch.device(device)
        return moved_state
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **on(device, fields))
    return value


def home(backend: Backend) -> str | None:
    """Where tests run the backend: on the CPU if it can, else on the card, None where there is none."""
    if "cpu" in backend.devices:
        return "cpu"
    return DEVICE if DEVICE in backend.devices else None


def at_home(backend: Backend, *args: Any, **kwargs: Any) -> Any:
    """What the backend makes of a call written down on the CPU; results on the CPU. Arguments that it writes into are not seen again."""
    where = home(backend)
    assert where is not None, backend.name
    if where == "cpu":
        return backend.fn(*args, **kwargs)
    return on("cpu", backend.fn(*on(where, args), **on(where, kwargs)))
