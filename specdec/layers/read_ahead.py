"""Which weights the small ops of a decoder ask for (`kernels/read_ahead.py`): decided once, at load, from the order in which they are read.

The weights of a step are one long string of bytes. The op before a product asks for what lies within a window from that product's first
byte and has not been asked for: of its own weight, and where the window is longer, of the next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor

from specdec.kernels.read_ahead import PIECES
from specdec.layers.decoder import Layer, MoELayer
from specdec.layers.linear import Linear
from specdec.layers.norm import RMSNorm

WINDOW = 32 << 20  # bytes asked for and not yet read, at most, of the 50 MB that Hopper's second-level cache holds
PLACES = frozenset({"norm", "rope", "silu"})
_UNKNOWN = 1 << 60  # bytes of what nobody can ask for: longer than any window


@dataclass(frozen=True, slots=True)
class _Place:
    """An op that can ask: `owner.name` is what it asks for."""

    kind: str
    owner: Any
    name: str = "ahead"


def read_ahead(
    layers: Sequence[Layer | MoELayer], norm: RMSNorm, head: Linear, window: int = WINDOW, places: Collection[str] = PLACES
) -> None:
    """Tells the small ops of the layers, and the final norm before `head`, what to ask for. window: bytes, 16 divides it; 0 = nothing."""
    steps = [step for layer in layers for step in _steps(layer)] + [_Place("norm", norm), head]
    weights = [None if step is None else step.storage() for step in steps if not isinstance(step, _Place)]
    starts = list(accumulate((_UNKNOWN if weight is None else weight.numel() for weight in weights), initial=0))
    asked = read = 0  # bytes of the string; weights
    for step in steps:
        if not isinstance(step, _Place):
            read += 1
            continue
        begin, end = max(asked, starts[read]), starts[read] + window if step.kind in places else 0
        pieces = tuple(_pieces(weights[read:], starts[read:], begin, end))[:PIECES]
        setattr(step.owner, step.name, pieces)
        asked = max(asked, begin + sum(piece.numel() for piece in pieces))


def _steps(layer: Layer | MoELayer) -> Iterator[_Place | Linear | None]:
    """What a layer does, in order: ops that can ask, weights that are read; None where no one knows which."""
    yield _Place("norm", layer.input_norm)
    yield layer.attention.qkv
    yield _Place("rope", layer.attention)
    yield _Place("merge", layer.attention, "ahead_late")
    yield layer.attention.out
    yield _Place("norm", layer.post_norm)
    if isinstance(layer, Layer):
        yield layer.gate_up
        yield _Place("silu", layer)
        yield layer.down
    else:
        yield layer.moe.router
        yield None  # the experts that the router picks


def _pieces(weights: Sequence[Tensor | None], starts: Sequence[int], begin: int, end: int) -> Iterator[Tensor]:
    """What the weights, which start there, have of the bytes [begin, end), up to the first that nobody can ask for."""
    for weight, start in zip(weights, starts, strict=False):
        if weight is None or start >= end:
            return
        if begin < start + weight.numel():
            yield weight[max(begin - start, 0) : end - start]
