"""The parts of the small-op benchmark that need no card: what it calls, what it counts, what it records."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench import kernels_small
from bench.kernels_small import Work, record
from specdec import ops
from specdec.rows import RowInfo

SMALL = (
    *kernels_small.verify_work("cpu", vocab=96),
    *kernels_small.cut_work("cpu", vocab=96),
    *kernels_small.row_work("cpu", rows=(1, 3), hidden=64, inner=96),
    *kernels_small.rope_work("cpu", rows=(1, 3), heads=4, kv=2, hd=16),
    *kernels_small.draft_work("cpu", vocab=64, hidden=32),
    *kernels_small.cache_work("cpu", layers=2, kv=2, hd=16, hidden=64),
    *kernels_small.walk_work("cpu"),
    *kernels_small.layout_work("cpu", width=64, blocks=8),
)


def _bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, RowInfo):
        return _bytes(value.drafted)
    return sum(_bytes(v) for v in value) if isinstance(value, (tuple, list)) else 0


@pytest.mark.parametrize("work", SMALL, ids=lambda w: f"{w.op} {w.shape}")
def test_every_line_is_a_call_of_its_op_and_counts_no_bytes_that_are_not_there(work: Work) -> None:
    """The bytes counted are at most those of arguments and results together (caches and tables are not read whole)."""
    args = work.make(3)
    result = ops.TABLE.ops[work.op].find("reference").fn(*args)
    assert 0 < work.num_bytes <= _bytes(args) + _bytes(result)


def _numbers(args: tuple[object, ...]) -> Iterator[torch.Tensor]:
    """Tensors of more than one number among the arguments and in lists of them."""
    for value in args:
        if isinstance(value, (list, tuple)):
            yield from _numbers(tuple(value))
        elif isinstance(value, torch.Tensor) and value.numel() > 1:
            yield value


def test_seeds_make_arguments_of_their_own() -> None:
    for work in SMALL:
        first, second = (next(_numbers(work.make(seed))) for seed in (1, 2))
        assert not torch.equal(first, second), work.op


def test_a_record_holds_the_ratio_to_the_read() -> None:
    line = record(SMALL[0], "triton", [3e-6, 2e-6, 4e-6], 1.5e-6)
    assert (line["us"], line["us_min"], line["read_us"], line["over_read"], line["replays"]) == (3.0, 2.0, 1.5, 2.0, 3)
    assert line["GB_per_s"] == round(SMALL[0].num_bytes / 3e-6 / 1e9, 1) and line["op"] == "coupled_verify"


def test_the_walk_accepts_a_path_to_its_end() -> None:
    for work in kernels_small.walk_work("cpu"):
        args = work.make(5)
        committed, num_committed, path, num_accepted, finish, _ = ops.tree_walk(*args)
        assert not finish.any() and torch.equal(num_committed, num_accepted + 1)
        parents = [p.tolist() for p in args[2].tree.parents]
        ends = [int(own[count - 1]) for own, count in zip(path, num_accepted.tolist(), strict=True)]
        assert all(end not in own for end, own in zip(ends, parents, strict=True)), "the last node accepted is a leaf"
        assert committed.shape[1] > 4
