"""FP8 caches in the kernels: codes to the bit, attention over them, forced splits of the keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.kernels.inputs import Rows, attention_batch, chain, random_tree, star
from specdec.kernels.kv_fp8 import FP8, encode, gather, inverse
from specdec.kernels.move_kv import reference as move_reference
from specdec.kernels.norm_rope import reference as norm_rope_reference
from specdec.kernels.rope import reference as rope_reference
from specdec.kernels.tree_attention import matmul, reference, tiling
from tests.kernels.device import DEVICE, ON_CARDS, on
from tests.kernels.matrix import poisoned

triton_attention = pytest.importorskip("specdec.kernels.tree_attention.triton")
triton_rope = pytest.importorskip("specdec.kernels.rope.triton")
triton_norm_rope = pytest.importorskip("specdec.kernels.norm_rope.triton")
triton_move = pytest.importorskip("specdec.kernels.move_kv.triton")
KV, HD, SLOTS = 2, 16, 64


def _bytes(cache: Tensor) -> Tensor:
    return cache.cpu().view(torch.uint8)


# -- codes ----------------------------------------------------------------------------------------------------------------


def test_codes_are_the_nearest_saturated() -> None:
    """Against a search over all finite codes, ties to the even code."""
    table = torch.arange(256, dtype=torch.uint8).view(FP8).double()
    finite = [c for c in range(256) if c & 0x7F != 0x7F]
    x = torch.cat((torch.randn(300) * 0.01, torch.randn(300) * 100, (table[:126] + table[1:127]).float() / 2, torch.tensor([1e9, -449.0])))
    for value, code in zip(x.tolist(), encode(x, FP8, 1.0).view(torch.uint8).tolist(), strict=True):
        best = min(finite, key=lambda c: (abs(table[c].item() - min(max(value, -448.0), 448.0)), c & 1))
        assert table[code] == table[best], value


def test_infinity_saturates_and_nan_stays() -> None:
    codes = encode(torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0]), FP8, 1.0)
    assert codes.float()[:2].tolist() == [448.0, -448.0] and codes.float()[2].isnan() and codes.float()[3] == 0
    assert torch.equal(gather(codes, torch.tensor([3, 1])), torch.tensor([0.0, -448.0]))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_must_be_a_positive_number(scale: float) -> None:
    with pytest.raises(ConfigError, match="positive and finite"):
        inverse(scale)


def _rope_call(values: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """One token of rotation 0 per row of values [T, KV·HD], used as K and as V."""
    rows = values.shape[0]
    qkv = torch.cat((torch.zeros(rows, 2 * HD), values, -values), dim=1).to(dtype)
    caches = torch.arange(2 * SLOTS * KV * HD).view(2, SLOTS // 16, 16, KV, HD).remainder(100).to(torch.uint8).view(FP8)
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))[:rows]
    slots[rows // 2] = -1
    table = torch.zeros(1, HD // 2)
    return [qkv, torch.zeros(rows, dtype=torch.int64), table.cos(), table.sin(), *caches, slots]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.37, 12.5)])
def test_written_codes_are_the_references(dtype: torch.dtype, scales: tuple[float, float]) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, KV * HD, generator=g) * torch.logspace(-5, 4, 40).unsqueeze(1)  # from all zeros to all saturated
    x[3, :5] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])
    x[4] = (2.0**-9) * (torch.arange(KV * HD) + 0.5)  # ties between denormals, and where they end
    call = _rope_call(x, dtype)
    wanted, got = (on(DEVICE, [t.clone() for t in call]) for _ in range(2))
    rope_reference.rope_write_kv(*wanted, scales)
    triton_rope.rope_write_kv(*got, scales)
    for side in (4, 5):
        assert torch.equal(_bytes(got[side]), _bytes(wanted[side]))
        assert not torch.equal(_bytes(got[side]), _bytes(call[side]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.037, 12.5)])
def test_normed_keys_are_written_as_codes(dtype: torch.dtype, scales: tuple[float, float]) -> None:
    """V's codes to the bit; those of normed keys are neighbours at most, as the sum of squares has another order."""
    x = torch.randn(40, KV * HD, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 3, 40).unsqueeze(1)
    qkv, *rest = _rope_call(x, dtype)
    weights = torch.linspace(0.5, 2.0, HD).to(dtype), torch.linspace(3.0, 0.1, HD).to(dtype)
    call = [qkv, *weights, 1e-6, *rest]
    wanted, got = (on(DEVICE, [t.clone() if isinstance(t, Tensor) else t for t in call]) for _ in range(2))
    expected, found = norm_rope_reference.norm_rope_write_kv(*wanted, scales), triton_norm_rope.norm_rope_write_kv(*got, scales)
    torch.testing.assert_close(found, expected)
    assert torch.equal(_bytes(got[8]), _bytes(wanted[8])) and not torch.equal(_bytes(got[8]), _bytes(call[8]))
    keys, other = got[7].cpu().float(), wanted[7].cpu().float()
    assert ((keys - other).abs() <= 0.126 * other.abs() + 2.0**-9).all()
    few = 0.02 if dtype is torch.float32 else 0.06  # the interpreter cuts bfloat16 off where others round
    assert (keys != other).float().mean() < few and not torch.equal(_bytes(got[7]), _bytes(call[7]))


def test_moves_copy_every_code() -> None:
    g = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (3, 2, 4, 16, KV, HD), dtype=torch.uint8, generator=g)
    src, dst = torch.tensor([5, 7, 6, 63]), torch.tensor([4, 5, 7, 6])
    results = []
    for move in (move_reference.move_kv, triton_move.move_kv):
        caches = data.clone().to(DEVICE).view(FP8)
        move([c[0] for c in caches], [c[1] for c in caches], *on(DEVICE, (src, dst)))
        results.append(_bytes(caches))
    flat = data.view(3, 2, 64, KV * HD).clone()
    flat[:, :, dst] = data.view(3, 2, 64, KV * HD)[:, :, src]
    assert all(torch.equal(r.view_as(flat), flat) for r in results)


# -- attention ------------------------------------------------------------------------------------------------------------


def _attention(rows: list[Rows], group: int, hd: int, block: int, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> dict[str, Tensor]:
    batch = attention_batch(rows, group * KV, KV, hd, block, seed=group + hd)
    batch["q"] = batch["q"].to(q_dtype)
    return batch | {name: batch[name].to(kv_dtype) for name in ("k_cache", "v_cache")}


def _error(batch: dict[str, Tensor], options: dict[str, Any], **more: Any) -> float:
    """Largest difference from the float32 reference over the same rounded inputs, in units of its largest value."""
    wide = {name: t.float() if t.is_floating_point() else t for name, t in batch.items()}
    exact = reference.tree_attention(*wide.values(), **options)
    with poisoned():
        got = triton_attention.tree_attention(*on(DEVICE, batch).values(), **on(DEVICE, options), **more).cpu()
    assert got.dtype is batch["q"].dtype and got.isfinite().all()
    return ((got.float() - exact).abs().max() / exact.abs().max()).item()


# half an ulp of the output and of each weight before the second product; over FP8 keys the products are in float16
LIMIT = {torch.float32: 5e-6, torch.float16: 1.5e-3, torch.bfloat16: 6e-3}


@pytest.mark.parametrize("q_dtype", list(LIMIT))
def test_attention_over_codes(q_dtype: torch.dtype) -> None:
    batch = _attention([Rows(150), Rows(70, tree=tuple(random_tree(20, 1))), Rows(10, 20)], 3, 64, 16, q_dtype, FP8)
    assert _error(batch, {"scale": 0.125, "kv_scales": (0.5, 3.0)}) < LIMIT[q_dtype]
    wide = {name: t.float() if t.is_floating_point() else t for name, t in batch.items()}
    for options in ({"scale": 0.125, "kv_scales": (0.5, 3.0)}, {"scale": 0.125, "kv_scales": (1.0, 1.0)}):
        by_scale = matmul.tree_attention(*batch.values(), **options).float()
        torch.testing.assert_close(by_scale, reference.tree_attention(*wide.values(), **options), rtol=0, atol=4 * LIMIT[q_dtype])


TREES = {"one": [0], "chain": chain(64), "star": star(64), "tree": random_tree(33, 4)}
SHAPES = [(1, 64, 32), (3, 64, 16), (4, 128, 16), (8, 64, 32)]  # group, head size, block


MERGING = {"last": {"merged": 1 << 20, "alone": 0, "least": 1}, "launch": {"merged": 0}, "usual": {}}


@pytest.fixture(params=MERGING)
def merging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whom splits are merged: the last program of a tile, a launch of its own, as the tiling says."""
    chosen = tiling.fast
    monkeypatch.setattr(tiling, "fast", lambda *args, **kwargs: replace(chosen(*args, **kwargs), **MERGING[request.param]))


@pytest.mark.parametrize(
    ("merging", "splits"),
    [
        *(("last", 5), ("launch", 2), ("usual", 2)),
        *(pytest.param(how, n, marks=ON_CARDS) for how, n in (("last", 2), ("launch", 5), ("usual", 5))),
    ],
    indirect=["merging"],
)
@pytest.mark.usefixtures("merging")
@pytest.mark.parametrize(("tree", "shape"), list(zip(TREES, SHAPES, strict=True)), ids=list(TREES))
def test_forced_splits(tree: str, shape: tuple[int, int, int], splits: int) -> None:
    """A long and a short sequence (which leaves splits without keys), and sinks, counted once."""
    parents = TREES[tree]
    rows = [Rows(300, tree=tuple(parents) if len(parents) > 1 else None), Rows(3)]
    batch = _attention(rows, *shape, torch.float32, torch.float32)
    options = {"scale": 0.125, "sinks": torch.linspace(-3.0, 4.0, shape[0] * KV)}
    assert _error(batch, options, splits=splits) < 5e-6


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("kv", "nodes"), [(FP8, 20), (torch.bfloat16, 60)], ids=["codes", "128 rows"])
def test_tiles_of_128_keys(kv: torch.dtype, nodes: int, splits: int) -> None:
    """Several whole ones and the narrower ones at the edge, of trees of unlike length and of a sequence with none whole."""
    rows = [Rows(700, tree=tuple(random_tree(nodes, 3))), Rows(530, tree=tuple(random_tree(nodes, 4))), Rows(90, nodes)]
    batch = _attention(rows, 3, 64, 16, torch.bfloat16, kv)
    limit = LIMIT[torch.bfloat16] * (1 if kv is FP8 else 2)  # weights are rounded to bfloat16 too
    assert _error(batch, {"scale": 0.125}, splits=splits) < limit
    assert _error(batch, {"scale": 0.125, "window": 300}, splits=splits) < limit


@pytest.mark.usefixtures("merging")
@pytest.mark.parametrize("options", [{"window": 130}, {"first": torch.tensor([290, 2], dtype=torch.int32)}, {"window": 3}], ids=str)
def test_forced_splits_with_hidden_keys(options: dict[str, Any]) -> None:
    batch = _attention([Rows(300, tree=tuple(random_tree(16, 2))), Rows(90, 12)], 4, 32, 16, torch.float32, torch.float32)
    assert _error(batch, {"scale": 0.2} | options, splits=3) < 5e-6


@pytest.mark.usefixtures("merging")
def test_padding_rows_are_zero_with_splits() -> None:
    batch = _attention([Rows(300)], 4, 32, 16, torch.float32, torch.float32)
    batch["q"] = torch.cat((batch["q"], torch.full((5, 8, 32), torch.nan)))
    batch |= {name: torch.cat((batch[name], torch.zeros(5, dtype=torch.int64))) for name in ("tree_mask", "positions")}
    with poisoned():
        out = triton_attention.tree_attention(*on(DEVICE, batch).values(), scale=0.2, splits=4).cpu()
    assert out[0].isfinite().all() and not out[1:].any()
    assert torch.equal(out[0], triton_attention.tree_attention(*on(DEVICE, batch).values(), scale=0.2, splits=4).cpu()[0])
