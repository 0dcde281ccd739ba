"""Packed formats against the gguf package, layers over mixed shards, tied heads, refusals."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from specdec import ops
from specdec.errors import UnsupportedCheckpoint
from specdec.kernels.linear.tiles import FLOATS, HEADER, RAW_BYTES, pack_blocks, pack_dense, unpack
from specdec.layers.embedding import make_embedding
from specdec.layers.linear import make_linear
from specdec.quant.fp8 import to_fp8
from specdec.quant.ggml import GgmlBlocks
from tests.kernels.matrix import needs_extension

CPU = {"device": "cpu", "dtype": torch.float32}


def blocks(rows: int, cols: int, kind: str, seed: int = 0) -> GgmlBlocks:
    g = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (rows, cols // 32, RAW_BYTES[kind]), dtype=torch.uint8, generator=g)
    raw[..., : HEADER[kind]] = (torch.randn(rows, cols // 32, HEADER[kind] // 2, generator=g) * 0.01).half().view(torch.uint8)
    return GgmlBlocks(raw.view(rows, -1), kind, (rows, cols))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("rows", [1, 15, 16, 50])
def test_packing_and_unpacking_is_the_gguf_value_exactly(kind: str, rows: int) -> None:
    raw = blocks(rows, 96, kind)
    oracle = gguf.quants.dequantize(raw.data.numpy(), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(raw.dequantize().numpy(), oracle)
    assert np.array_equal(unpack(pack_blocks(raw.data, kind, 96)).numpy(), oracle)


@pytest.mark.parametrize("dtype, kind", [*FLOATS.items(), (torch.float64, "F32")])
def test_dense_tiles_round_trip(dtype: torch.dtype, kind: str) -> None:
    weight = torch.randn(37, 21).to(dtype)
    tiles = pack_dense(weight)
    assert tiles.kind == kind and torch.equal(unpack(tiles), weight.float())


def test_fp8_rounds_every_row_to_nearest() -> None:
    """Half a unit in the last of three mantissa bits, or half the least step at the row's scale; the largest number is kept."""
    weight = torch.randn(50, 77) * torch.logspace(-4, 3, 50).view(-1, 1)
    weight[7] = 0.0
    found, scale = to_fp8(weight).dequantize(), weight.abs().amax(1, keepdim=True) / 448
    bound = torch.maximum(weight.abs() * 2**-4, scale * 2**-10) * (1 + 1e-6)
    assert bool(((found - weight).abs() <= bound).all()) and not found[7].any()
    torch.testing.assert_close(found.abs().amax(1), weight.abs().amax(1), rtol=1e-6, atol=0.0)


STORAGES = {"F16": torch.randn(50, 64).half(), "BF16": torch.randn(50, 64).bfloat16(), "F8": to_fp8(torch.randn(50, 64))}
BYTES = {"F16": 2 * 50 * 64, "BF16": 2 * 50 * 64, "F8": 50 * 68, "Q8_0": 50 * 68, "Q4_1": 50 * 40}
"""Of the weight itself; tiles of 16 rows add what 64 rows need."""


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", BYTES)
def test_kept_storage_is_small_where_no_kernel_reads_it(kind: str, deterministic: bool) -> None:
    """float64 activations have no compiled kernels, as a GPU has none for these storages."""
    raw = STORAGES[kind] if kind in STORAGES else blocks(50, 64, kind)
    where = {"device": "cpu", "dtype": torch.float64, "deterministic": deterministic}
    kept, loose = make_linear([raw, raw], keep=True, **where), make_linear([raw, raw], **where)
    assert (kept.method.name, kept.method.nbytes) == (f"packed {kind}", BYTES[kind] * 2 * 112 // 100)
    assert loose.method.nbytes == 2 * 50 * 64 * 8 and kept.method.fixed_order == deterministic
    x = torch.randn(5, 64, dtype=torch.float64)
    assert torch.equal(kept(x), loose(x)) and torch.equal(kept.dequantize(), loose.dequantize())
    embedding = make_embedding(raw, keep=True, **where)
    assert torch.equal(embedding(torch.tensor([0, 49])), kept.dequantize()[[0, 49]].double())


def test_nothing_is_kept_that_is_not_smaller() -> None:
    for raw in (torch.randn(16, 32), STORAGES["BF16"]):
        assert make_linear([raw], device="cpu", dtype=torch.bfloat16, keep=True).method.name == "dense bfloat16"


@needs_extension
@pytest.mark.parametrize("kind", STORAGES)
def test_compiled_numbers_have_the_bits_of_float32(kind: str) -> None:
    """Widening is exact; the scale of an FP8 row comes after its sum, so there a rounding of the weight is missing."""
    raw = STORAGES[kind]
    layer, wide = make_linear([raw], **CPU), make_linear([raw.float() if isinstance(raw, torch.Tensor) else raw.dequantize()], **CPU)
    x = torch.randn(11, 64)
    assert (layer.method.name, wide.method.name) == (f"tiled {kind}", "tiled F32")
    if kind == "F8":
        torch.testing.assert_close(layer(x), wide(x), rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(layer(x), wide(x))


@pytest.mark.parametrize(
    "kinds", [("Q4_1", "Q4_1", "Q4_1"), ("Q4_1", "Q4_1", "Q8_0"), ("F32", "Q4_0", "F32"), ("F32", "F32"), ("F8", "F8", "BF16", "F16")]
)
def test_shards_of_any_formats_stack_along_rows(kinds: tuple[str, ...]) -> None:
    shards = [STORAGES.get(k, torch.randn(20, 64)) if k in ("F32", *STORAGES) else blocks(24, 64, k, i) for i, k in enumerate(kinds)]
    bias = torch.randn(sum(s.shape[0] for s in shards))
    layer = make_linear(shards, bias, **CPU)
    weight = torch.cat([s.float() if isinstance(s, torch.Tensor) else s.dequantize() for s in shards])
    x = torch.randn(5, 64)
    assert (layer.in_features, layer.out_features) == (64, weight.shape[0])
    assert torch.equal(layer.dequantize(), weight)
    torch.testing.assert_close(layer(x), x @ weight.T + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("raw", [torch.randn(50, 64), blocks(50, 64, "Q8_0")], ids=["dense", "packed"])
def test_the_tied_head_shares_storage_and_gives_float32(raw: torch.Tensor | GgmlBlocks, dtype: torch.dtype) -> None:
    embedding = make_embedding(raw, device="cpu", dtype=dtype)
    head = embedding.head()
    assert head.method is embedding.method and (embedding.num_embeddings, embedding.embedding_dim) == (50, 64)
    weight = raw if isinstance(raw, torch.Tensor) else raw.dequantize()
    rows = embedding(torch.tensor([0, 49, 17]))
    assert rows.dtype is dtype and torch.equal(rows, weight[[0, 49, 17]].to(dtype))
    logits = head(rows)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, rows.float() @ weight.to(dtype).float().T, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 17])
def test_the_deterministic_dense_layer_does_not_depend_on_the_rows(rows: int) -> None:
    layer = make_linear([torch.randn(100, 96)], device="cpu", dtype=torch.float64, deterministic=True)
    x = torch.randn(17, 96, dtype=torch.float64)
    assert layer.method.fixed_order and torch.equal(layer(x)[:rows], layer(x[:rows]))


def test_without_the_extension_layers_are_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "WHY_NOT", "not built")
    raw = blocks(24, 64, "Q4_1")
    layer, x = make_linear([raw], **CPU), torch.randn(3, 64)
    assert layer.method.name == "dense float32"
    torch.testing.assert_close(layer(x), x @ raw.dequantize().T, rtol=1e-5, atol=1e-5)


def test_damaged_weights_are_refused() -> None:
    good = blocks(4, 64, "Q4_1")
    with pytest.raises(UnsupportedCheckpoint, match="Q4_1 weight of shape"):
        GgmlBlocks(good.data[:, :-1], "Q4_1", (4, 64))
    with pytest.raises(UnsupportedCheckpoint, match="multiples of 32"):
        GgmlBlocks(good.data, "Q4_1", (4, 65))
    with pytest.raises(UnsupportedCheckpoint, match="'Q5_K' is not supported"):
        GgmlBlocks(good.data, "Q5_K", (4, 64))
    with pytest.raises(UnsupportedCheckpoint, match="different widths"):
        make_linear([good, torch.randn(4, 32)], **CPU)


def test_a_row_with_nan_or_infinity_spoils_only_itself() -> None:
    layer = make_linear([blocks(40, 64, "Q4_1")], **CPU)
    x = torch.randn(6, 64)
    clean = layer(x)
    x[1, 3], x[4, 60] = torch.nan, torch.inf
    out = layer(x)
    assert not out[[1, 4]].isfinite().any()
    assert torch.equal(out[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])


def test_ids_outside_the_vocabulary_are_refused() -> None:
    embedding = make_embedding(blocks(20, 64, "Q8_0"), **CPU)
    for bad in (-1, 20):
        with pytest.raises(IndexError):
            embedding(torch.tensor([0, bad]))
