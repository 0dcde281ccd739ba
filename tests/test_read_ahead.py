"""What the small ops of a decoder are told to ask for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from torch import Tensor

from specdec.boot import load_target
from specdec.config import EngineConfig
from specdec.layers.decoder import Layer
from specdec.layers.linear import Linear
from specdec.layers.read_ahead import PLACES, read_ahead
from specdec.models.llama import LlamaModel
from tests.harness import checkpoint


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    config = EngineConfig(model=checkpoint(), device="cpu", dtype="bfloat16")  # dense: tiles of the CPU are never asked for
    return load_target(config).model


def asks(model: LlamaModel) -> Iterator[tuple[Linear, list[Tensor]]]:
    """(the product that comes next, what the op before it asks for), in the order of a step."""
    for layer in model.layers:
        assert isinstance(layer, Layer)
        yield layer.attention.qkv, [*layer.input_norm.ahead]
        yield layer.attention.out, [*layer.attention.ahead, *layer.attention.ahead_late]
        yield layer.gate_up, [*layer.post_norm.ahead]
        yield layer.down, [*layer.ahead]
    yield model.lm_head, [*model.norm.ahead]


def spans(model: LlamaModel) -> list[tuple[int, list[tuple[int, int]]]]:
    """`asks` as places in the string of weights: (where the product's begins, [begin, end) of the pieces)."""
    found, steps, start = [], list(asks(model)), 0
    places = []
    for linear, _ in steps:
        storage = linear.storage()
        assert storage is not None
        places.append((storage, start))
        start += storage.numel()
    for (_, begin), (_, pieces) in zip(places, steps, strict=True):
        own = []
        for piece in pieces:
            home = next(s + piece.data_ptr() - w.data_ptr() for w, s in places if 0 <= piece.data_ptr() - w.data_ptr() < w.numel())
            own.append((home, home + piece.numel()))
        found.append((begin, own))
    return found


@pytest.mark.parametrize("window", [1 << 10, 20 << 10, 100 << 10, 1 << 30])
@pytest.mark.parametrize("places", [PLACES, {"norm", "merge"}, {"silu"}])
def test_asks_lie_in_the_window_and_never_twice(model: LlamaModel, window: int, places: set[str]) -> None:
    read_ahead(model.layers, model.norm, model.lm_head, window, places)
    found = spans(model)
    everything = [span for _, pieces in found for span in pieces]
    assert everything
    assert all(a[1] <= b[0] for a, b in pairwise(everything))
    for begin, pieces in found:
        assert len(pieces) <= 2
        assert all(begin <= low < high <= begin + window and low % 16 == high % 16 == 0 for low, high in pieces)


def test_a_short_window_asks_for_the_next_product_alone(model: LlamaModel) -> None:
    read_ahead(model.layers, model.norm, model.lm_head, 1 << 10)
    assert all(pieces == [(begin, begin + 1024)] for begin, pieces in spans(model))


def test_no_window_asks_for_nothing(model: LlamaModel) -> None:
    read_ahead(model.layers, model.norm, model.lm_head, 0)
    assert not any(pieces for _, pieces in asks(model))
