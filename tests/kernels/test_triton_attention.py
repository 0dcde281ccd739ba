"""Tree attention in Triton beyond the matrix: narrow dtypes (the interpreter's trap), padding, strides, who picks it."""

from __future__ import annotations

import pytest
import torch

from specdec import ops
from specdec.kernels.inputs import Rows, attention_batch, random_tree
from specdec.kernels.tree_attention import reference
from tests.kernels.device import DEVICE, on

triton_attention = pytest.importorskip("specdec.kernels.tree_attention.triton")
MIXED = [Rows(70), Rows(20, tree=tuple(random_tree(40, 1))), Rows(0, 30), Rows(130)]


def _batch(block: int, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    batch = attention_batch(MIXED, 9, 3, 64, block)
    batch["q"] = batch["q"].to(q_dtype)
    batch |= {name: batch[name].to(kv_dtype) for name in ("k_cache", "v_cache")}
    return on(DEVICE, batch)


def _error(batch: dict[str, torch.Tensor], got: torch.Tensor) -> float:
    """Largest difference from the float32 reference over the same, already rounded inputs, in units of its largest value."""
    wide = {name: t.float() if t.is_floating_point() else t for name, t in batch.items()}
    exact = reference.tree_attention(*wide.values(), scale=0.125)
    return ((got.float() - exact).abs().max() / exact.abs().max()).item()


@pytest.mark.parametrize(("q_dtype", "kv_dtype"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16")])
@pytest.mark.parametrize("block", [16, 32])
def test_narrow_dtypes(block: int, q_dtype: str, kv_dtype: str) -> None:
    batch = _batch(block, getattr(torch, q_dtype), getattr(torch, kv_dtype))
    got = triton_attention.tree_attention(*batch.values(), scale=0.125)
    # half an ulp of the output, and of each weight before the second product: 2**-8 for bfloat16, 2**-11 for float16
    limit = {"bfloat16": 1.2e-2, "float16": 1.5e-3, "float32": 5e-6}[q_dtype]
    assert got.dtype is batch["q"].dtype and _error(batch, got) < limit


def test_rows_past_the_last_sequence_are_zero_and_change_nothing() -> None:
    batch = _batch(16, torch.float32, torch.float32)
    alone = triton_attention.tree_attention(*batch.values(), scale=0.125)
    rows = len(alone)
    batch["q"] = torch.cat((batch["q"], torch.full_like(batch["q"][:9], torch.nan)))
    batch |= {name: torch.cat((batch[name], torch.zeros_like(batch[name][:9]))) for name in ("tree_mask", "positions")}
    got = triton_attention.tree_attention(*batch.values(), scale=0.125)
    assert not got[rows:].any()
    torch.testing.assert_close(got[:rows], alone, rtol=0.0, atol=2e-6)  # the tile size may differ


def test_sequences_without_rows() -> None:
    batch = _batch(16, torch.float32, torch.float32)
    whole = triton_attention.tree_attention(*batch.values(), scale=0.125)
    order = [0, 0, 1, 2, 2, 3, 3]
    empty = torch.tensor([True, False, False, True, False, True, False])
    counts = torch.where(empty, 0, batch["cu_query"].cpu().diff()[order])
    batch |= {name: batch[name][order] for name in ("block_table", "ctx_lens", "tree_len")}
    batch["cu_query"] = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int())).to(DEVICE)
    torch.testing.assert_close(triton_attention.tree_attention(*batch.values(), scale=0.125), whole, rtol=0.0, atol=2e-6)


def test_queries_may_be_a_view_of_the_projection() -> None:
    batch = _batch(16, torch.float32, torch.float32)
    dense = triton_attention.tree_attention(*batch.values(), scale=0.125)
    batch["q"] = torch.cat((batch["q"], torch.full_like(batch["q"], torch.nan)), dim=1)[:, :9]
    assert torch.equal(triton_attention.tree_attention(*batch.values(), scale=0.125), dense)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q": torch.zeros(2, 9, 24), "k_cache": torch.zeros(1, 16, 3, 24), "v_cache": torch.zeros(1, 16, 3, 24)}, "head size 24"),
        ({"v_cache": torch.zeros(1, 16, 3, 64, dtype=torch.float16)}, "K and V alike"),
        ({"k_cache": torch.zeros(1, 16, 64, 3).transpose(2, 3)}, "strides"),
    ],
)
def test_refusals_say_why(change: dict[str, torch.Tensor], reason: str) -> None:
    call = {"q": torch.zeros(2, 9, 64), "k_cache": torch.zeros(1, 16, 3, 64), "v_cache": torch.zeros(1, 16, 3, 64)} | change
    assert reason in (triton_attention.rejects(*call.values()) or "")
    assert "scale" in (triton_attention.rejects(*call.values(), scale=-1.0) or "")


def test_deterministic_mode_picks_the_fixed_order() -> None:
    op = ops.TABLE.ops["tree_attention"]
    assert not op.find("triton").fixed_order and op.find("triton_fixed").fixed_order
    batch = _batch(16, torch.bfloat16, torch.bfloat16)
    with ops.deterministic(DEVICE):
        picked = op.select(DEVICE, tuple(batch.values()), {"scale": 0.125}).name
        assert picked == ("triton_fixed" if DEVICE == "cuda" else "reference"), "interpreted kernels run for whoever names them"
