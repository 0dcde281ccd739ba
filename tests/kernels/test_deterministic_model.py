"""Whole models on the Triton kernels that deterministic mode takes on a card, interpreted: KV and logits of a position have the same bits
by prefill, chunks, decode, chain, tree and recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import ops
from specdec.kernels.tree_attention import tiling
from specdec.models.llama import LlamaModel
from specdec.models.load import load_model
from tests.kernels.device import DEVICE
from tests.models.tiny_quantized import FORMATS, write_quantized
from tests.oracle import PlainKV
from tests.tiny import GPT_OSS, QWEN3_MOE, write_tiny

pytestmark = [
    pytest.mark.skipif(ops.WHY_NO_TRITON is not None, reason=str(ops.WHY_NO_TRITON)),
    pytest.mark.skipif(DEVICE != "cpu", reason="PlainKV lies on the CPU; tests/gpu has the whole engine"),
]
TEXT = [(7 * i * i + 13 * i + 5) % 400 for i in range(67)]
START = 61  # the positions from here on are computed in every way; a split of the keys ends among them
BRANCHES = [-1, 0, 0, 1, 1, 3, 4, 5, 6, 8]  # of a tree at START; 0, 1, 4, 6, 8, 9 is the text
PATH = [0, 1, 4, 6, 8, 9]
CHAIN = [*range(-1, len(TEXT) - START - 1)]

Bits = tuple[Tensor, list[Tensor]]  # logits [n, V] and per layer K with V [n, 2, nkv, hd] of the positions from START on


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every op runs the Triton kernel with a fixed order, and nothing is compiled in or kept in tiles: as on a card."""
    monkeypatch.setattr(ops, "WHY_NOT", "not built")
    monkeypatch.setattr(ops, "fixed_dense", lambda device: "triton_fixed")
    monkeypatch.setattr(tiling, "FIXED_SPLIT", 64)  # one tile of keys
    with ExitStack() as stack:
        for name, op in ops.TABLE.ops.items():
            found = [b.name for b in op.backends if b.missing is None and b.name.startswith("triton") and b.fixed_order]
            if found:
                stack.enter_context(ops.override(name, found[0]))
            elif any(b.name == "reference" for b in op.backends):
                stack.enter_context(ops.override(name, "reference"))  # decoder_stack calls the others; embeddings only look up
        yield


def kv_rows(kv: PlainKV, slots: list[int]) -> list[Tensor]:
    where = torch.tensor(slots) + kv.layers[0][0].shape[1]  # block 0 is left unused
    return [torch.stack([side.flatten(0, 1)[where] for side in layer], dim=1) for layer in kv.layers]


@torch.inference_mode()
def fed(model: LlamaModel, chunks: list[int], kv: PlainKV) -> Bits:
    """The text, or the end of it that `kv` lacks, in shares of these sizes."""
    rows, start = [], len(TEXT) - sum(chunks)
    for size in chunks:
        hidden, _ = model.forward(kv.batch(TEXT[start : start + size], start), kv)
        rows.append(model.logits(hidden))
        start += size
    return torch.cat(rows)[START - len(TEXT) :], kv_rows(kv, list(range(START, len(TEXT))))


@torch.inference_mode()
def verified(model: LlamaModel, parents: list[int], path: list[int], kv: PlainKV) -> Bits:
    """Behind the text up to START, which `kv` holds, a tree of which `path` is the text."""
    tokens = [350 + i for i in range(len(parents))]
    for depth, node in enumerate(path):
        tokens[node] = TEXT[START + depth]
    hidden, _ = model.forward(kv.tree(tokens, parents, START), kv)
    return model.logits(hidden)[path], kv_rows(kv, [START + node for node in path])


def assert_same_bits(found: Bits, expected: Bits, how: str) -> None:
    count = len(found[0])
    assert torch.equal(found[0], expected[0][:count]), f"logits by {how}"
    for layer, (other, own) in enumerate(zip(found[1], expected[1], strict=True)):
        assert torch.equal(other, own[:count]), f"KV of layer {layer} by {how}"


def check(model: LlamaModel) -> None:
    empty = PlainKV(model.config, START + len(BRANCHES))
    expected = fed(model, [len(TEXT)], deepcopy(empty))
    assert all(t.isfinite().all() for t in (expected[0], *expected[1]))
    assert_same_bits(fed(model, [40, 23, 4], deepcopy(empty)), expected, "chunks, as recomputation cuts them")
    with torch.inference_mode():
        model.forward(empty.batch(TEXT[:START]), empty)
    begun = partial(deepcopy, empty)
    assert_same_bits(fed(model, [1, 1, 1, 1, 2], begun()), expected, "decode")
    assert_same_bits(verified(model, CHAIN, list(range(len(CHAIN))), begun()), expected, "chain")
    assert_same_bits(verified(model, BRANCHES, PATH, begun()), expected, "tree")


SLOW = pytest.mark.slow
MODELS = [
    pytest.param({}, id="gqa"),
    pytest.param(GPT_OSS, id="gpt_oss"),
    pytest.param(QWEN3_MOE, id="qwen3_moe", marks=SLOW),
    pytest.param({"two_groups": True}, id="two_groups", marks=SLOW),
]


@pytest.mark.parametrize("options", MODELS)
def test_a_position_has_one_set_of_bits(tmp_path: Path, options: dict[str, Any]) -> None:
    check(load_model(write_tiny(tmp_path, seed=4, **options), deterministic=True).model)


@SLOW
@pytest.mark.parametrize("name", ["fp8 blocks", "ct fp8 dynamic", "awq"])
def test_so_it_has_in_every_storage(tmp_path: Path, name: str) -> None:
    write_quantized(tmp_path / "q", FORMATS[name])
    check(load_model(tmp_path / "q", deterministic=True).model)


@SLOW
def test_so_it_has_with_activations_in_fp8(tmp_path: Path) -> None:
    write_quantized(tmp_path / "q", FORMATS["ct fp8 dynamic"])
    check(load_model(tmp_path / "q", deterministic=True, act_dtype="fp8").model)
