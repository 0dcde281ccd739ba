"""The compiled pass of a draft head gives the bits of its single ops, follows overrides, and says what it cannot run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec import ops
from tests.kernels.draft_cases import FLAGS, arguments, head
from tests.kernels.matrix import use, variants

OP = ops.TABLE.ops["draft_pass"]


def _outcome(backend: str, flags: dict[str, Any], name: str) -> list[torch.Tensor]:
    """hidden, feedback and all K and V after the call."""
    args = arguments(flags, name)
    with torch.inference_mode():
        found = OP.find(backend).fn(*args)
    return [*found, *(t for pair in args[-1].pairs for t in pair)]


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())
def test_one_call_has_the_bits_of_the_single_ops(flags: dict[str, Any], variant: str) -> None:
    before = torch.get_num_threads()
    for name in ("one", "chunk", "depth"):
        with use(variant):
            expected = _outcome("reference", flags, name)
            untouched = arguments(flags, name)[-1].pairs[0][0]
            assert expected[0].isfinite().all() and not torch.equal(expected[2], untouched)
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                try:
                    found = _outcome("cpu", flags, name)
                finally:
                    torch.set_num_threads(before)
                for a, b in zip(found, expected, strict=True):
                    assert torch.equal(a, b), f"{name}, {threads} threads"


def test_a_plan_is_there_where_the_compiled_pass_would_run() -> None:
    made = head({})
    assert (ops.draft_plan(made) is not None) == ops.compiled()
    for part in ("silu_mul", "tiled_embedding", "decoder_stack", "draft_pass"):
        with ops.override(part, "reference"):
            assert ops.draft_plan(made) is None
    with ops.deterministic("cpu"):
        assert (ops.draft_plan(made) is not None) == ops.compiled()


def test_heads_that_cannot_be_compiled_say_why() -> None:
    for flags, reason in (
        ({"qk_norm": True}, "normalised"),
        ({"own_embedding": True, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1}, ""),
    ):
        made = head(flags)
        if ops.compiled():
            assert (made.plan is None) == bool(reason) and reason in str(made.why_not)
        else:
            assert made.plan is None and "specdec._C" in str(made.why_not)


@pytest.mark.parametrize("compiled", variants()[:1])
def test_a_wrong_batch_is_an_error(compiled: str) -> None:
    features, made, batch, kv = arguments({}, "one")
    batch.input_ids.fill_(made.embedding.num_embeddings)
    with use(compiled), pytest.raises(IndexError, match="outside the vocabulary"):
        OP.find("cpu").fn(features, made, batch, kv)
    with use(compiled), pytest.raises(RuntimeError, match="differ in size"):
        OP.find("cpu").fn(features[:, :-32].contiguous(), made, arguments({}, "one")[2], kv)
