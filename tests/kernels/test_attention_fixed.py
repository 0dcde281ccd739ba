"""The fixed-order attention kernel: a position has the same bits by prefill, chunk, decode, chain and tree, in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.kernels.inputs import Rows, ancestor_words, attention_batch, chain, depths, random_tree, star
from specdec.kernels.kv_fp8 import FP8
from specdec.kernels.tree_attention import reference, tiling
from tests.kernels.device import DEVICE, ON_CARDS, on
from tests.kernels.matrix import poisoned

fixed = pytest.importorskip("specdec.kernels.tree_attention.triton_fixed")
HEADS, KV, HD, BLOCK = 3, 1, 16, 16
DTYPES = [torch.float32, torch.float16]
LEEWAY = {torch.float32: 5e-6, torch.float16: 1.5e-3}


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 128 keys, so that short sequences have several."""
    monkeypatch.setattr(tiling, "FIXED_SPLIT", 128)


class Text:
    """Queries, keys and values of `length` positions; a run lays the keys out as told and poisons every other slot."""

    def __init__(self, length: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None):
        g = torch.Generator().manual_seed(length)
        self.length, self.dtype, self.kv_dtype = length, dtype, kv_dtype or dtype
        self.q = torch.randn(length, HEADS, HD, generator=g).to(dtype)
        self.kv = torch.randn(2, length, KV, HD, generator=g)

    def run(self, positions: list[int], ctx: int, words: list[int], places: dict[int, int], *, spare: int = 0, **kwargs: Any) -> Tensor:
        """Rows at `positions`, the key of position p in slot position places.get(p, p). spare: unused entries of the block table."""
        blocks = -(-(self.length + 64) // BLOCK)
        order = torch.randperm(blocks + spare, generator=torch.Generator().manual_seed(len(positions)))
        caches = torch.full((2, blocks + spare, BLOCK, KV, HD), torch.nan)
        place = torch.tensor([places.get(p, p) for p in range(self.length)])
        caches.view(2, -1, KV, HD)[:, order[place // BLOCK] * BLOCK + place % BLOCK] = self.kv
        k, v = caches.to(self.kv_dtype)
        n = len(positions)
        call = (
            self.q[positions].contiguous(), k, v, order.int()[None], torch.tensor([0, n], dtype=torch.int32),
            torch.tensor([ctx], dtype=torch.int32), torch.tensor([n if any(words) else 0], dtype=torch.int32),
            torch.tensor(words, dtype=torch.int64), torch.tensor(positions),
        )  # fmt: skip
        with poisoned():
            return fixed.tree_attention(*on(DEVICE, call), scale=HD**-0.5, **on(DEVICE, kwargs)).cpu()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 40},
    "sinks": {"sinks": torch.linspace(-2.0, 3.0, HEADS)},
    "first": {"first": torch.tensor([17], dtype=torch.int32)},
}


@pytest.mark.parametrize(
    ("option", "dtype"),
    [pytest.param(o, d, marks=() if i % 2 == j else ON_CARDS) for i, o in enumerate(OPTIONS) for j, d in enumerate(DTYPES)],
)
def test_prefill_chunk_decode_and_chain_agree_to_the_bit(option: str, dtype: torch.dtype) -> None:
    kwargs, text = OPTIONS[option], Text(140, dtype)
    whole = text.run(list(range(100, 140)), 100, [0] * 40, {}, **kwargs)
    for start, count in ((100, 1), (126, 3), (127, 1), (128, 12), (139, 1)):  # both sides of a split, the last row
        rows = list(range(start, start + count))
        assert torch.equal(text.run(rows, start, [0] * count, {}, **kwargs), whole[start - 100 : start - 100 + count]), (start, count)
    rows = list(range(120, 132))
    assert torch.equal(text.run(rows, 120, ancestor_words(chain(12)), {}, **kwargs), whole[20:32])


def test_prefill_from_nothing_agrees_with_decode() -> None:
    text = Text(70, torch.float16)
    whole = text.run(list(range(70)), 0, [0] * 70, {})
    for p in (0, 63, 64, 69):
        assert torch.equal(text.run([p], p, [0], {}), whole[[p]])


@pytest.mark.parametrize(("parents", "dtype"), [(star(7), torch.float32), (random_tree(12, 1), torch.float16)], ids=["star", "tree"])
@pytest.mark.parametrize("ctx", [0, 60, 125])
def test_every_path_of_a_tree_has_the_bits_of_its_own_sequence(ctx: int, parents: list[int], dtype: torch.dtype) -> None:
    text, words, depth = Text(ctx + len(parents), dtype), ancestor_words(parents), depths(parents)
    leaves = [i for i in range(len(parents)) if i not in parents]
    for leaf in (leaves[0], leaves[-1]):
        path = [i for i in range(len(parents)) if words[leaf] >> i & 1]
        places = {ctx + depth[i]: ctx + i for i in path}
        others = iter(i for i in range(ctx, text.length) if i not in set(places.values()))
        places |= {p: next(others) for p in range(ctx, text.length) if p not in places}
        tree = text.run([ctx + d for d in depth], ctx, words, places)
        alone = text.run([ctx + depth[i] for i in path], ctx, [0] * len(path), {})
        assert torch.equal(tree[path], alone)


@pytest.mark.parametrize("kwargs", [{"spare": 40}, {"room": 1}, {"room": 4000}], ids=["wide table", "a row a launch", "some rows a launch"])
def test_neither_the_table_nor_the_workspace_matter(kwargs: dict[str, int]) -> None:
    text = Text(140, torch.float32)
    rows, words = [130 + d for d in depths(random_tree(6, 2))], ancestor_words(random_tree(6, 2))
    assert torch.equal(text.run(rows, 130, words, {}, **kwargs), text.run(rows, 130, words, {}))


def test_company_does_not_matter() -> None:
    """A batch of sequences against each of them alone, with padding rows that hold NaN."""
    lists = [Rows(70), Rows(20, tree=tuple(random_tree(9, 1))), Rows(0, 30), Rows(127)]
    batch = on(DEVICE, attention_batch(lists, HEADS, KV, HD, BLOCK))
    padded = dict(batch, q=torch.cat((batch["q"], torch.full_like(batch["q"][:5], torch.nan))))
    padded |= {name: torch.cat((batch[name], torch.zeros_like(batch[name][:5]))) for name in ("tree_mask", "positions")}
    with poisoned():
        together = fixed.tree_attention(*padded.values(), scale=0.25)
    assert not together[-5:].any()
    starts = batch["cu_query"].tolist()
    for b in range(len(lists)):
        mine = slice(starts[b], starts[b + 1])
        alone = {name: batch[name][mine] for name in ("q", "tree_mask", "positions")}
        alone |= {name: batch[name][b : b + 1] for name in ("block_table", "ctx_lens", "tree_len")}
        alone |= {"cu_query": torch.tensor([0, mine.stop - mine.start], dtype=torch.int32, device=DEVICE)}
        assert torch.equal(fixed.tree_attention(*(batch | alone).values(), scale=0.25), together[mine])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_agrees_with_the_reference(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    lists = [Rows(130), Rows(60, tree=tuple(random_tree(10, 3))), Rows(5, 12)]
    batch = attention_batch(lists, HEADS, KV, HD, BLOCK)
    batch["q"] = batch["q"].to(dtype)
    batch |= {name: batch[name].to(kv_dtype or dtype) for name in ("k_cache", "v_cache")}
    options: dict[str, Any] = {"scale": 0.25, "kv_scales": (0.5, 3.0)}
    wide = {name: t.float() if t.is_floating_point() else t for name, t in batch.items()}
    exact = reference.tree_attention(*wide.values(), **options)
    got = fixed.tree_attention(*on(DEVICE, batch).values(), **options).cpu()
    assert got.dtype is dtype and ((got.float() - exact).abs().max() / exact.abs().max()).item() < LEEWAY[dtype]


def test_no_rows() -> None:
    batch = on(DEVICE, attention_batch([], HEADS, KV, HD, BLOCK))
    assert fixed.tree_attention(*batch.values(), scale=1.0).shape == (0, HEADS * HD)
