"""What `cases.py` and the case lists in the ops' folders share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.inputs import generator


@dataclass(frozen=True, slots=True)
class Case:
    """One call. row_args: positions of arguments whose dimension 0 is rows of a row-wise op; empty = not row-wise."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    row_args: tuple[int, ...] = ()


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)) * scale
