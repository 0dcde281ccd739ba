"""Promise 3 for attention: the bits of a position do not depend on how it is computed (prefill, decode, chain, tree)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdec.kernels.inputs import ancestor_words, chain, depths, random_tree, star
from specdec.kernels.registry import Backend
from tests.kernels.device import at_home
from tests.kernels.matrix import implementations, marked, use

HEADS, KV, HD, BLOCK = 6, 2, 32, 16
ENTRIES = [e for e in implementations("tree_attention") if e[1].fixed_order]


class Path:
    """One sequence of `length` positions with its K, V and queries, whatever cache they are put in."""

    def __init__(self, length: int, seed: int):
        g = torch.Generator().manual_seed(seed)
        self.length = length
        self.q = torch.randn(length, HEADS, HD, generator=g)
        self.kv = torch.randn(2, length, KV, HD, generator=g)

    def run(self, backend: Backend, positions: list[int], places: dict[int, int], ctx: int, words: list[int], **kwargs: object) -> Tensor:
        """Rows at `positions`; the key of position p lies in slot position places.get(p, p), everything else is NaN."""
        blocks = -(-(self.length + 64) // BLOCK)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(len(positions)))
        k, v = (torch.full((blocks, BLOCK, KV, HD), torch.nan) for _ in range(2))
        place = torch.tensor([places.get(p, p) for p in range(self.length)])
        slots = order[place // BLOCK] * BLOCK + place % BLOCK
        k.view(-1, KV, HD)[slots], v.view(-1, KV, HD)[slots] = self.kv[0], self.kv[1]
        n = len(positions)
        return at_home(
            backend,
            self.q[positions].contiguous(),
            k,
            v,
            order.int()[None],
            torch.tensor([0, n], dtype=torch.int32),
            torch.tensor([ctx], dtype=torch.int32),
            torch.tensor([n if any(words) else 0], dtype=torch.int32),
            torch.tensor(words, dtype=torch.int64),
            torch.tensor(positions),
            scale=HD**-0.5,
            **kwargs,
        )


@pytest.mark.parametrize("entry", marked(ENTRIES))
@pytest.mark.parametrize("kwargs", [{}, {"window": 40}, {"sinks": torch.linspace(-2.0, 3.0, HEADS)}], ids=["full", "window", "sinks"])
@pytest.mark.parametrize("ctx", [0, 37, 120])
def test_prefill_decode_chain_and_tree_agree_to_the_bit(entry: tuple[str, Backend, str | None], kwargs: dict, ctx: int) -> None:
    _, backend, variant = entry
    path = Path(ctx + 64, seed=ctx)
    with use(variant):
        prefill = path.run(backend, list(range(path.length)), {}, 0, [0] * path.length, **kwargs)
        for start in range(0, path.length, 23):  # chunks
            rows = list(range(start, min(start + 23, path.length)))
            assert torch.equal(path.run(backend, rows, {}, start, [0] * len(rows), **kwargs), prefill[rows])
        for p in {0, ctx, path.length - 1}:  # decode
            assert torch.equal(path.run(backend, [p], {}, p, [0], **kwargs), prefill[[p]])
        rows = list(range(ctx, ctx + 64))
        assert torch.equal(path.run(backend, rows, {}, ctx, ancestor_words(chain(64)), **kwargs), prefill[rows])


@pytest.mark.parametrize("entry", marked(ENTRIES))
@pytest.mark.parametrize("parents", [star(64), random_tree(64, 1), random_tree(40, 2)], ids=["star", "tree of 64", "tree of 40"])
def test_every_path_of_a_tree_equals_its_own_sequence(entry: tuple[str, Backend, str | None], parents: list[int]) -> None:
    _, backend, variant = entry
    ctx, words, depth = 50, ancestor_words(parents), depths(parents)
    leaves = [i for i in range(len(parents)) if i not in parents]
    for leaf in leaves[:12] + leaves[-1:]:
        nodes = [i for i in range(len(parents)) if words[leaf] >> i & 1]
        path = Path(ctx + len(parents), seed=leaf)
        # the keys of this leaf's ancestors lie at their node slots; slots of all other nodes stay NaN or hold later positions
        places = {ctx + depth[i]: ctx + i for i in nodes}
        taken = set(places.values())
        spare = iter(i for i in range(ctx, ctx + len(parents)) if i not in taken)
        places |= {p: next(spare) for p in range(ctx, path.length) if p not in places}
        with use(variant):
            tree = path.run(backend, [ctx + d for d in depth], places, ctx, words)
            alone = path.run(backend, [ctx + depth[i] for i in nodes], {}, ctx, [0] * len(nodes))
        assert torch.equal(tree[nodes], alone)


@pytest.mark.parametrize("entry", marked(ENTRIES))
def test_a_depth_of_a_tree_alone_has_the_bits_of_the_whole_tree(entry: tuple[str, Backend, str | None]) -> None:
    """A draft head runs one depth at a time over keys it wrote before: the same rows, whoever runs with them."""
    _, backend, variant = entry
    ctx, parents = 50, random_tree(64, 5)
    words, depth = ancestor_words(parents), depths(parents)
    path = Path(ctx + 64, seed=1)
    whole, first = [ctx + d for d in depth], torch.tensor([13], dtype=torch.int32)
    batch = {"cu": torch.tensor([0, 64], dtype=torch.int32), "tree": torch.tensor([64], dtype=torch.int32)}

    def run(nodes: list[int]) -> Tensor:
        k, v = path.kv[:, : ctx + 64].view(2, 1, ctx + 64, KV, HD)
        return at_home(
            backend, path.q[[ctx + i for i in nodes]].contiguous(), k.contiguous(), v.contiguous(), torch.zeros(1, 1, dtype=torch.int32),
            torch.tensor([0, len(nodes)], dtype=torch.int32), torch.tensor([ctx], dtype=torch.int32), batch["tree"],
            torch.tensor([words[i] for i in nodes]), torch.tensor([whole[i] for i in nodes]), scale=HD**-0.5, first=first,
        )  # fmt: skip

    with use(variant):
        together = run(list(range(64)))
        for d in range(max(depth) + 1):
            nodes = [i for i in range(64) if depth[i] == d]
            assert torch.equal(run(nodes), together[nodes])


@pytest.mark.parametrize("entry", marked(implementations("tree_attention")))
def test_keys_before_first_have_no_part(entry: tuple[str, Backend, str | None]) -> None:
    """Against a naive softmax over the visible keys in float64; hidden slots hold NaN."""
    _, backend, variant = entry
    path, first = Path(130, seed=2), 37
    hidden = {p: p for p in range(130)}
    path.kv[:, :first] = 0.0 if backend.name == "matmul" else torch.nan  # the cache's own promise: finite where not visible
    rows = list(range(first, 130, 11))
    with use(variant):
        out = path.run(backend, rows, hidden, 130 - len(rows), [0] * len(rows), first=torch.tensor([first], dtype=torch.int32))
    for row, p in enumerate(rows):
        keys, values = path.kv[:, first : p + 1].double().repeat_interleave(HEADS // KV, dim=2)
        weights = torch.softmax(torch.einsum("hd,lhd->lh", path.q[p].double(), keys) * HD**-0.5, dim=0)
        expected = torch.einsum("lh,lhd->hd", weights, values).flatten()
        assert torch.allclose(out[row].double(), expected, atol=1e-5)


def test_rows_past_the_last_sequence_are_zero() -> None:
    path = Path(3, seed=0)
    for backend in {id(backend): backend for _, backend, _ in implementations("tree_attention")}.values():
        k = torch.zeros(1, BLOCK, KV, HD)
        none = torch.zeros(0, dtype=torch.int32)
        out = at_home(
            backend, path.q, k, k, none.view(0, 1), torch.zeros(1, dtype=torch.int32), none, none, torch.zeros(3, dtype=torch.int64),
            torch.zeros(3, dtype=torch.int64), scale=1.0,
        )  # fmt: skip
        assert torch.equal(out, torch.zeros(3, HEADS * HD)), backend.name
