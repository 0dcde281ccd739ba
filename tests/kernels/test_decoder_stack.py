"""The compiled stack gives the bits of the single ops, follows overrides, and refuses what it cannot run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec import ops
from specdec.kernels.cases import Case
from specdec.layers.decoder import DecoderStack
from specdec.types import Batch
from tests.kernels.matrix import call, use, variants
from tests.kernels.stack_cases import BATCHES, SHAPES, Shape, arguments, stack

OP = ops.TABLE.ops["decoder_stack"]


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("shape", SHAPES)
def test_one_call_has_the_bits_of_the_single_ops(shape: str, variant: str) -> None:
    before = torch.get_num_threads()
    for name in ("decode", "tree") if variant == "generic" else BATCHES:
        args, kwargs = arguments(SHAPES[shape], BATCHES[name], (0, len(SHAPES[shape].windows)), padding=1)
        with use(variant):
            expected = call(OP.find("reference"), Case(name, args, kwargs))
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                try:
                    found = call(OP.find("cpu"), Case(name, args, kwargs))
                finally:
                    torch.set_num_threads(before)
                for a, b in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
                    assert torch.equal(a.nan_to_num(), b.nan_to_num()), f"{name}, {threads} threads"
        assert expected[0][0].isfinite().all()


def _selected(args: tuple[Any, ...]) -> str:
    return OP.select("cpu", args, {}).name


def test_an_override_of_a_part_is_followed() -> None:
    args, _ = arguments(Shape(), BATCHES["decode"])
    compiled = "cpu" if ops.compiled() else "reference"
    assert _selected(args) == compiled
    with ops.override("silu_mul", "reference"):
        assert _selected(args) == "reference"
        with ops.deterministic("cpu"):
            assert _selected(args) == "reference"
    with ops.deterministic("cpu"):
        assert _selected(args) == compiled
    with ops.override("decoder_stack", "reference"):
        ops.decoder_stack(*args)


def test_stacks_that_cannot_be_compiled_say_why() -> None:
    odd = stack(Shape())
    odd.layers[1].attention.scale *= 2
    reasons = {
        "": stack(Shape()),
        "head sizes": stack(Shape(head_dim=20, hidden=100, inner=77, kinds=("F32",))),
        "differ in": DecoderStack(odd.layers, odd.norm),
    }
    for reason, made in reasons.items():
        if ops.compiled():
            assert (made.plan is not None) == (reason == "") and reason in str(made.why_not)
        else:
            assert made.plan is None and "specdec._C" in str(made.why_not)


BAD: dict[str, Callable[[Batch], Batch]] = {
    "position": lambda b: replace(b, positions=b.positions + 1000),
    "slot": lambda b: replace(b, slot_mapping=b.slot_mapping + 10**6),
    "block table": lambda b: replace(b, block_tables=b.block_tables[:, :, :1].contiguous()),
    "sizes": lambda b: replace(b, tree_mask=b.tree_mask[:-1].contiguous()),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("compiled", variants()[:1])
def test_a_wrong_batch_is_an_error(what: str, compiled: str) -> None:
    (x, made, batch, caches, groups), _ = arguments(Shape(), BATCHES["tree"])
    with use(compiled), pytest.raises((IndexError, RuntimeError), match=what):
        OP.find("cpu").fn(x, made, BAD[what](batch), caches, groups)
    with use(compiled), pytest.raises(RuntimeError, match="tap 3 of 2 layers"):
        OP.find("cpu").fn(x, made, batch, caches, groups, (3,))
