"""The CUDA attention of a few rows against the reference: its very source on an emulated machine, and on a card."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.kernels.case import randn
from specdec.kernels.inputs import Rows, attention_batch, chain, random_tree, star
from specdec.kernels.tree_attention import cuda, reference
from tests.kernels.device import on
from tests.kernels.fragment_emulator import emulated, guarded

Batch = dict[str, Tensor]
PROCESSORS = 132  # of an H200

TREE = Rows(37, tree=tuple(random_tree(7, 5)))
RAGGED = [Rows(20), Rows(0, 3), TREE, Rows(63, tree=tuple(chain(4))), Rows(0, 0), Rows(16), Rows(47, 2)]
CASES: dict[str, tuple[list[Rows], int, int, int, int, dict[str, Any]]] = {  # rows, heads, KV heads, head size, block, more
    "one key": ([Rows(0)], 4, 1, 64, 16, {}),
    "decode": ([Rows(100)], 8, 2, 128, 16, {}),
    "chain": ([Rows(90, tree=tuple(chain(4)))], 8, 2, 128, 16, {}),
    "tree, group 1": ([Rows(70, tree=tuple(random_tree(24, 3)))], 2, 2, 64, 32, {}),
    "star across halves of a word": ([Rows(5, tree=tuple(star(40)))], 2, 1, 64, 16, {}),
    "ragged, group 3": (RAGGED, 6, 2, 64, 16, {}),
    "ragged, group 4": (RAGGED, 4, 1, 128, 16, {}),
    "ragged, group 8": (RAGGED, 8, 1, 64, 64, {}),
    "window": (RAGGED, 3, 1, 64, 16, {"window": 7}),
    "sinks": (RAGGED, 3, 1, 64, 16, {"sinks": True, "window": 20}),
    "hidden keys": (RAGGED, 4, 2, 64, 16, {"first": True}),
    "scales": ([Rows(33)], 2, 1, 128, 16, {"kv_scales": (0.5, 2.0)}),
    "many sequences": ([Rows(3 + b % 20) for b in range(34)], 2, 1, 64, 16, {}),
}


def example(name: str) -> tuple[Batch, dict[str, Any]]:
    """In bfloat16."""
    rows, heads, kv_heads, hd, block, more = CASES[name]
    batch = {key: t.bfloat16() if t.is_floating_point() else t for key, t in attention_batch(rows, heads, kv_heads, hd, block).items()}
    how = {"scale": hd**-0.5, **more}
    if "sinks" in how:
        how["sinks"] = randn(heads, scale=3.0).bfloat16()
    if "first" in how:
        how["first"] = torch.tensor([max(0, r.context - 9) for r in rows], dtype=torch.int32)
    return batch, how


def check(found: Tensor, batch: Batch, how: dict[str, Any]) -> None:
    """Weights and results are rounded to bfloat16; padding rows are 0."""
    wide = {key: t.float() if t.is_floating_point() else t for key, t in batch.items()}
    exact = reference.tree_attention(*wide.values(), **{k: t.float() if k == "sinks" else t for k, t in how.items()})
    torch.testing.assert_close(found.float(), exact, rtol=2e-2, atol=1e-2)
    assert (found.float() - exact).abs().mean() < 2e-3


def padded(batch: Batch, rows: int) -> Batch:
    """With rows of no sequence."""
    return batch | {
        key: torch.cat((batch[key], batch[key][:1].expand(rows, *batch[key].shape[1:]))) for key in ("q", "tree_mask", "positions")
    }


def emulate(batch: Batch, how: dict[str, Any], blocks: int, seed: int = 0) -> Tensor:
    q = batch["q"]
    out, beside = guarded(torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=torch.bfloat16))
    call, hd, _ = cuda.prepare_call(out, *batch.values(), **how, processors=PROCESSORS)
    emulated("emulated_few_attention.cpp").emulate_few_attention(ctypes.byref(call), hd, blocks, ctypes.c_uint64(seed))
    assert all(margin.isnan().all() for margin in beside), "a write outside the results"
    return out


@pytest.mark.parametrize(("name", "blocks"), [*((name, 3) for name in CASES), ("ragged, group 4", 1), ("decode", 8)])
def test_on_the_emulated_machine(name: str, blocks: int) -> None:
    """With more blocks than chunks too, and begun ahead or not."""
    batch, how = example(name)
    check(emulate(batch, how | {"ahead": blocks > 1}, blocks, seed=blocks), batch, how)


def test_more_rows_than_a_tile_and_rows_of_no_sequence() -> None:
    """Most sequences are short, so tiles are; the one chunk among them takes several."""
    rows = [Rows(9, 21), *(Rows(4 + b) for b in range(8))]
    batch = {k: t.bfloat16() if t.is_floating_point() else t for k, t in attention_batch(rows, 4, 1, 64, 16).items()}
    found = emulate(padded(batch, 3), {"scale": 0.125}, 2)
    check(found[:-3], batch, {"scale": 0.125})
    assert not found[-3:].any()


def test_a_key_that_is_not_a_number_spoils_those_who_see_it_and_nobody_else() -> None:
    batch, how = example("chain")
    batch["k_cache"][int(batch["block_table"][0, 1]), 3, 0, 7] = torch.nan
    found = emulate(batch, how, 2).view(4, 8, 128)
    assert found[:, :4].isnan().all() and found[:, 4:].isfinite().all()


@pytest.mark.parametrize(
    ("rows", "sequences", "group", "kv_heads"), [(1, 1, 4, 8), (4, 1, 4, 8), (32, 8, 4, 8), (128, 32, 4, 8), (3, 5, 1, 2)]
)
def test_there_are_tiles_enough_however_ragged_the_rows(rows: int, sequences: int, group: int, kv_heads: int) -> None:
    tiles, blocks = cuda.cut(rows, sequences, group, kv_heads, PROCESSORS)
    tall = cuda.PACKED // group
    one_long = max(rows - sequences + 1, 0)
    for lengths in ([one_long] + [1] * (min(rows, sequences) - 1), [rows], [1] * min(rows, sequences)):
        assert sum(-(-n // tall) for n in lengths) <= tiles
    assert 1 <= blocks <= cuda.MOST_BLOCKS and (blocks == 1 or blocks * tiles * kv_heads <= PROCESSORS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_card(name: str) -> None:
    batch, how = example(name)
    card, given = on("cuda", padded(batch, 2)), on("cuda", how)
    if reason := cuda.rejects(*card.values(), **given):
        assert "rows times query heads" in reason
        pytest.skip(reason)
    found = cuda.tree_attention(*card.values(), **given).cpu()
    check(found[:-2], batch, how)
    assert not found[-2:].any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sequences", "context", "nodes"), [(1, 600, 4), (8, 600, 4), (32, 300, 1), (1, 9000, 4), (3, 2000, 8), (64, 100, 2)]
)
def test_real_shapes_on_a_card(sequences: int, context: int, nodes: int) -> None:
    rows = [Rows(context + 7 * b, tree=tuple(random_tree(nodes, b)) if nodes > 1 else None) for b in range(sequences)]
    batch = on("cuda", {k: t.bfloat16() if t.is_floating_point() else t for k, t in attention_batch(rows, 32, 8, 128, 16).items()})
    assert cuda.rejects(*batch.values(), scale=0.1) is None
    found = cuda.tree_attention(*batch.values(), scale=0.088)
    wide = {k: t.float() if t.is_floating_point() else t for k, t in batch.items()}
    torch.testing.assert_close(found.float(), reference.tree_attention(*wide.values(), scale=0.088), rtol=2e-2, atol=1e-2)
