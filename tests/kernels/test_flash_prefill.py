"""How we call flash-attn: over stand-ins that do what its documentation says, in plain PyTorch. The package itself: `test_matrix.py`, on a
card that has it."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import ops
from specdec.kernels.case import Case
from specdec.kernels.cases import CASES
from specdec.kernels.inputs import Rows, attention_batch
from specdec.kernels.prefill_attention import flash
from specdec.kernels.prefill_attention.flash import Package
from specdec.kernels.registry import Backend, Registry
from specdec.kernels.tolerances import TOLERANCE
from specdec.kernels.tree_attention import reference
from tests.harness import GREEDY, SHAPES, P, R, assert_same, engine, run
from tests.kernels.matrix import poisoned


def _dense(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """q [n, nh, hd], k and v [m, nkv, hd]: row i sees key j iff i + m - n - left <= j <= i + m - n + right, and causal means right = 0."""
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    left, right = window_size
    row, key = torch.arange(n)[:, None] + m - n, torch.arange(m)
    seen = (key <= row) if causal else torch.ones(n, m, dtype=torch.bool)
    if left >= 0:
        seen = seen & (key >= row - left)
    if right >= 0:
        seen = seen & (key <= row + right)
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->nhm", q.float(), k) * softmax_scale
    return torch.einsum("nhm,mhd->nhd", scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1), v).to(q.dtype)


def _paged(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, lengths: Tensor, table: Tensor, **options: Any) -> Tensor:
    """Every sequence by itself; rows of none as memory was."""
    assert cu.dtype == lengths.dtype == table.dtype == torch.int32 and table.shape[0] == len(lengths) == len(cu) - 1
    out = torch.full_like(q, torch.nan)
    for b, length in enumerate(lengths.tolist()):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        pages = table[b, : -(-length // k.shape[1])].long()
        own = [cache[pages].flatten(0, 1)[:length] for cache in (k, v)]
        out[rows] = _dense(q[rows], *own, **options)
    return out


def with_kvcache(
    q: Tensor, k: Tensor, v: Tensor, *, cache_seqlens: Tensor, page_table: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, **options: Any
) -> Tensor:
    """As version 3's."""
    assert int(cu_seqlens_q.diff().max() if len(cu_seqlens_q) > 1 else 0) <= max_seqlen_q
    return _paged(q, k, v, cu_seqlens_q, cache_seqlens, page_table, **options)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *, block_table: Tensor, **options: Any
) -> Tensor:
    """As version 2's, with a table."""
    assert k.shape[1] % 256 == 0 and cu_k[0] == 0
    assert int(cu_k.diff().max() if len(cu_k) > 1 else 0) <= max_k == block_table.shape[1] * k.shape[1]
    assert int(cu_q.diff().max() if len(cu_q) > 1 else 0) <= max_q
    return _paged(q, k, v, cu_q, cu_k.diff(), block_table, **options)


PACKAGES = (Package(3, with_kvcache), Package(2, varlen))


def _taken(package: Package) -> list[Case]:
    reasons = ((case, package.rejects(*case.args, **case.kwargs)) for case in CASES["prefill_attention"]())
    return [case for case, reason in reasons if reason is None or reason.startswith("few rows:")]


@pytest.mark.parametrize("package", PACKAGES, ids=["3", "2"])
def test_our_arguments_mean_what_the_op_says(package: Package) -> None:
    names = []
    for case in _taken(package):
        with poisoned():
            found = package.prefill_attention(*case.args, **case.kwargs)
        expected = reference.tree_attention(*case.args, **case.kwargs)
        scale = expected.abs().max().item() if expected.numel() else 1.0
        torch.testing.assert_close(
            found, expected, rtol=0, atol=TOLERANCE["prefill_attention"] * scale, msg=lambda m, n=case.name: f"{n}: {m}"
        )
        names.append(case.name)
    left = {case.name for case in CASES["prefill_attention"]()} - set(names)
    assert left == ({"sinks"} if package.version == 3 else {"sinks", "head 128, blocks of 24"})


def test_small_blocks_are_copied_in_the_order_of_the_table() -> None:
    k = torch.arange(6 * 16.0).view(6, 16, 1, 1)
    table = torch.tensor([[5, 0, 2], [1, 4, 3]], dtype=torch.int32)
    pages, _, own = flash.gathered(k, k, table)
    assert pages.shape == (2, 256, 1, 1) and own.tolist() == [[0], [1]]
    for b in range(2):
        assert torch.equal(pages[b, :48].view(3, 16), k[table[b].long()].view(3, 16))


@pytest.mark.parametrize("package", PACKAGES, ids=["3", "2"])
def test_what_it_does_not_take_it_names(package: Package) -> None:
    def reason(rows: list[Rows], block: int = 16, hd: int = 64, **options: Any) -> str | None:
        batch = {n: t.bfloat16() if t.is_floating_point() else t for n, t in attention_batch(rows, 4, 2, hd, block).items()}
        return package.rejects(*batch.values(), scale=0.125, **options)

    assert reason([Rows(0, 300)]) is None and reason([Rows(0, 300)], window=100) is None
    assert "sinks" in str(reason([Rows(0, 300)], sinks=torch.zeros(4)))
    assert "hidden" in str(reason([Rows(0, 300)], first=torch.zeros(1, dtype=torch.int32)))
    assert "head size" in str(reason([Rows(0, 300)], hd=20))
    assert "few rows" in str(reason([Rows(5)]))
    assert "few rows" in str(reason([Rows(0, 300)] + [Rows(9)] * 30))  # most only decode
    assert package.rejects(*attention_batch([Rows(0, 300)], 4, 2, 64, 16).values(), scale=0.125) is not None  # float32
    long = reason([Rows(12000, 300)])  # 12,300 keys to copy for 300 rows
    assert long is None if package.version == 3 else "to copy" in str(long)
    assert reason([Rows(12000, 300)], block=256) is None


def test_the_backend_is_preferred_explained_and_steps_back_for_an_override(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.kernels import table

    named = table._flash_backend(PACKAGES[0], None)
    own = Registry()
    tree = own.op("tree_attention")
    tree.add(Backend("plain", lambda *args, **kwargs: "tree"))
    own.op("prefill_attention").add(replace(named, devices=("cpu",)))
    own.op("prefill_attention").add(Backend("tree_attention", tree))
    batch = {n: t.bfloat16() if t.is_floating_point() else t for n, t in attention_batch([Rows(0, 300)], 4, 2, 64, 16).items()}
    call = tuple(batch.values())
    assert own.explain("cpu")["prefill_attention"] == "flash"
    assert torch.is_tensor(own.op("prefill_attention")(*call, scale=0.125))
    with own.override("tree_attention", "plain"):
        assert own.op("prefill_attention")(*call, scale=0.125) == "tree"
    with own.deterministic("cpu"):
        assert own.op("prefill_attention")(*call, scale=0.125) == "tree"
    assert table._flash_backend(None, "flash-attn is not installed").missing == "flash-attn is not installed"


@pytest.mark.parametrize(
    ("capability", "installed", "version"), [((9, 0), (2, 3), 3), ((8, 0), (2, 3), 2), ((9, 0), (2,), 2), ((8, 0), (3,), None)]
)
def test_the_newest_version_made_for_the_card_is_taken(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], installed: tuple[int, ...], version: int | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    there = [flash.FUNCTIONS[known][0] for known in installed]
    monkeypatch.setattr(flash, "find_spec", lambda name: name if name in there else None)
    for module, function in flash.FUNCTIONS.values():
        fake = types.ModuleType(module)
        setattr(fake, function, varlen)
        monkeypatch.setitem(sys.modules, module, fake)
    package, reason = flash.load()
    assert (None if package is None else package.version) == version and (package is None) == (reason is not None)


def test_a_package_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(flash, "find_spec", lambda name: None)
    assert flash.load() == (None, "flash-attn is not installed")
    monkeypatch.setattr(flash, "find_spec", lambda name: name if name == "flash_attn" else None)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    assert "flash_attn not usable" in str(flash.load()[1])


def test_the_op_is_tree_attention_where_the_host_knows_of_no_tree() -> None:
    batch = attention_batch([Rows(40, 7), Rows(0, 3)], 6, 2, 32, 16)
    args = tuple(batch.values())
    assert torch.equal(ops.prefill_attention(*args, scale=0.2), ops.tree_attention(*args, scale=0.2))


@pytest.mark.parametrize("kind", ["t0", "two_groups"])
@pytest.mark.parametrize("package", PACKAGES, ids=["3", "2"])
def test_an_engine_prefills_in_chunks_and_behind_hits_with_it_and_runs_trees_without(
    package: Package, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step without a tree goes through it; the text is the other kernels'."""
    requests, seen = {"a": (R, GREEDY), "b": (R[:40] + P, GREEDY), "again": (R, GREEDY)}, []
    options = {"kind": kind, "max_num_batched_tokens": 24}
    expected = run(engine(SHAPES["ngram-tree"], **options), requests)

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(len(args[0]))
        assert not args[6].any() and kwargs["first"] is None
        return package.prefill_attention(*args, **kwargs)

    op = ops.TABLE.ops["prefill_attention"]
    monkeypatch.setattr(op, "usable", {**op.usable, "cpu": [Backend("flash", noted, ("cpu",), fixed_order=False), *op.usable["cpu"]]})
    with ops.override("decoder_stack", "reference"):
        target = engine(SHAPES["ngram-tree"], **options)
        found = run(target, requests)
        for name in requests:
            assert_same(found[name], expected[name])
        assert 24 in seen and found["again"].metrics.accepted > 0
        calls, again = len(seen), run(target, {"later": (R, GREEDY)})["later"]
    assert again.metrics.cached_tokens > 0 and len(seen) > calls
    assert_same(again, expected["a"])
