"""NaN and infinity reach whoever reads them and nobody else: a key or value that is none of the numbers, a row of activations in tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdec.kernels.cases import random_weight
from specdec.kernels.fp8_linear.cases import awkward_rows
from specdec.kernels.inputs import Rows, attention_batch, random_tree
from specdec.kernels.kv_fp8 import FP8, raw
from specdec.kernels.linear.tiles import KINDS
from specdec.kernels.registry import Backend
from tests.kernels.device import at_home
from tests.kernels.matrix import implementations, label, poisoned, use

ROWS = [Rows(100), Rows(40, 5), Rows(70, tree=tuple(random_tree(9, 1)))]
HEADS, KV, HD, BLOCK = 6, 2, 32, 16
READ = slice(1, 6)  # rows of the second sequence, all of which see its position 10
NAN = 0x7F  # e4m3


def spoilt(cache: Tensor, slot: int, value: float) -> Tensor:
    """The cache with one number of KV head 1 replaced, as a code where it holds codes."""
    out = cache.clone()
    if out.dtype is FP8:
        raw(out).view(-1, KV, HD)[slot, 1, 7] = NAN
    else:
        out.view(-1, KV, HD)[slot, 1, 7] = value
    return out


@pytest.mark.parametrize("side", ["k_cache", "v_cache"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=["f32", "bf16", "fp8"])
@pytest.mark.parametrize("entry", implementations("tree_attention"), ids=label)
def test_a_key_or_value_that_is_no_number(entry: tuple[str, Backend, str | None], dtype: torch.dtype, side: str) -> None:
    _, backend, variant = entry
    batch = attention_batch(ROWS, HEADS, KV, HD, BLOCK)
    batch |= {name: batch[name].to(dtype) for name in ("k_cache", "v_cache")}
    if dtype is not torch.float32:
        batch["q"] = batch["q"].bfloat16()
    if backend.name == "cpu" and dtype is not torch.float32:
        pytest.skip("compiled for float32 only")
    slot = int(batch["block_table"][1, 0]) * BLOCK + 10
    for value in (torch.nan, torch.inf):
        with use(variant), poisoned():
            clean = at_home(backend, *batch.values(), scale=0.2)
            found = at_home(backend, *(batch | {side: spoilt(batch[side], slot, value)}).values(), scale=0.2)
        assert clean.isfinite().all()
        found, clean = found.view(-1, HEADS, HD), clean.view(-1, HEADS, HD)
        seen = found[READ, 3:]  # the query heads of KV head 1
        if side == "v_cache":
            assert not seen[..., 7].isfinite().any()
        elif value != value or dtype is FP8:
            assert seen.isnan().all()
        rest = [(found[:1], clean[:1]), (found[6:], clean[6:]), (found[READ, :3], clean[READ, :3])]
        assert all(torch.equal(a, b) for a, b in rest), "who does not read it"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entry", implementations("tiled_linear"), ids=label)
def test_a_row_of_activations_in_tiles(entry: tuple[str, Backend, str | None], kind: str) -> None:
    _, backend, variant = entry
    x, weight = awkward_rows(576), random_weight(48, 576, kind)  # the last two have infinity and NaN
    with use(variant), poisoned():
        found, alone = backend.fn(x, weight), backend.fn(x[:3].contiguous(), weight)
    assert torch.equal(found[:3], alone) and alone.isfinite().all()
    assert not found[3:].isfinite().any()
