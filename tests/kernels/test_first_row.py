"""op(x[:1]) == op(x)[:1], bit for bit, of every op in deterministic mode: through the dispatch, on the CPU and on a card, and by the Triton
kernels that a card would run, interpreted where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import ops
from specdec.kernels.case import Case
from specdec.kernels.int4_linear.weight import Int4Weight
from specdec.kernels.moe_experts.weight import Experts
from specdec.rows import RowInfo
from specdec.spec.tree import tree_from_lists
from tests.kernels.device import DEVICE, on
from tests.kernels.draft_cases import Store
from tests.kernels.matrix import ALL_CASES, cases, copy, first_rows, tensors

Args = tuple[Any, ...]
MOST_CASES = 4  # of an op, interpreted; the matrix has all of those whose rows are arguments


def attention(args: Args) -> Args:
    """The first row of the first sequence alone."""
    q, k, v, table, _, ctx, tree_len, words, positions = args
    return q[:1], k, v, table[:1], torch.tensor([0, 1], dtype=torch.int32), ctx[:1], tree_len[:1], words[:1], positions[:1]


def stack(args: Args) -> Args:
    x, layers, batch, *rest = args
    return x[:1], layers, _first_of(batch), *rest


def _first_of(batch: Any) -> Any:
    """Of a batch: its first row."""
    fields = {name: getattr(batch, name)[:1] for name in ("input_ids", "positions", "ctx_lens", "tree_len", "tree_mask")}
    return replace(
        batch,
        **fields,
        cu_query=torch.tensor([0, 1], dtype=torch.int32),
        block_tables=batch.block_tables[:, :1].contiguous(),
        slot_mapping=batch.slot_mapping[:, :1].contiguous(),
        logit_rows=torch.zeros(1, dtype=torch.int64),
        first_key=None if batch.first_key is None else batch.first_key[:1],
    )


def walk(args: Args) -> Args:
    """The first tree alone."""
    following, agrees, rows, sampling, *forced = args
    tree, count = rows.tree, int(rows.counts[0])
    tokens, parents = (field[0, :count].tolist() for field in (tree.tokens, tree.parents))
    alone = RowInfo(tree_from_lists([(tokens, parents, None)]), rows.request_slots[:1], rows.device)
    return following[:count], None if agrees is None else agrees[:count], alone, sampling, *forced


def moves(args: Args) -> Args:
    k, v, src, dst = args
    return k, v, src[:1], dst[:1]


def layout(args: Args) -> Args:
    """The first tree alone."""
    tokens, depth, count, lengths, slots, tables, block = args
    return tokens[:1], depth[:1], count[:1], lengths, slots[:1], tables[:, :1].contiguous(), block


def compacted(args: Args) -> Args:
    """The first path alone."""
    path, accepted, committed, lengths, slots, tables, block = args
    return path[:1], accepted[:1], committed[:1], lengths, slots[:1], tables[:, :1].contiguous(), block


def pairs(args: Args) -> Args:
    """The first sequence alone."""
    said, along, committed, count, path, taps, roots, columns = args
    return said, along, committed[:1], count[:1], path[:1], taps, roots[:1], columns


def padded(args: Args) -> Args:
    """The first row of the first sequence alone."""
    own, (ids, positions, words, slots, contexts, trees, ends, tables, *first) = args
    per_sequence = contexts[:1], trees[:1], torch.tensor([0, 1], dtype=ends.dtype), tables[:, :1].contiguous()
    return own, (ids[:1], positions[:1], words[:1], slots[:, :1].contiguous(), *per_sequence, *(field[:1] for field in first))


def laid_out(args: Args) -> Args:
    """The first sequence alone."""
    return args[0][:1].contiguous(), *args[1:]


FIRST: dict[str, Callable[[Args], Args]] = {
    "tree_attention": attention,
    "prefill_attention": attention,
    "decoder_stack": stack,
    "draft_pass": stack,
    "tree_walk": walk,
    "move_kv": moves,
    "tree_layout": layout,
    "compaction_slots": compacted,
    "gather_pairs": pairs,
    "pad_batch": padded,
    "draft_layout": laid_out,
}


def several(op: str, found: list[Case]) -> Iterator[Case]:
    """Of the op's cases those of more than one row, or tree, or slot."""
    for case in found:
        if op not in FIRST:
            count = case.args[case.row_args[0]].shape[0] if case.row_args else 0
        elif op == "tree_walk":
            count = len(case.args[2].counts)
        else:
            count = len(case.args[1][4] if op == "pad_batch" else case.args[2 if op in ("move_kv", "gather_pairs") else 0])
        if count > 1 and (not op.endswith("attention") or int(case.args[4][1]) > 0):
            yield case


def written(op: str, result: Any, args: Args) -> list[Tensor]:
    """What the call says of its first row: the first entry of each result; of ops that write, what is at the first place written."""
    if op == "move_kv":
        k, v, _, dst = args
        return [cache.flatten(0, 1)[dst[0]] for cache in (*k, *v)]
    if op == "tree_walk":  # a batch is as wide as its deepest tree
        committed, num_committed, path, num_accepted, finish, rows = result
        count, accepted = int(num_committed[0]), int(num_accepted[0])
        return [committed[0, :count], num_committed[0], path[0, :accepted], num_accepted[0], finish[0], rows[0, :count]]
    if op == "tree_layout":
        nodes = args[0].shape[1]
        return [result.input_ids[:nodes], result.positions[:nodes], result.slot_mapping[:, :nodes], result.ctx_lens[:1]]
    if op == "compaction_slots":
        return [side[:, : args[0].shape[1]] for side in result]
    if op == "gather_pairs":
        return [args[0][:1], args[1][:1]]
    if op == "pad_batch":
        own, width = args[0], args[1][7].shape[2]
        return [*(own[i][:1] for i in (0, 1, 2, 4, 5, *range(8, len(own)))), own[3][:, :1], own[7][:, :1, :width]]
    if op == "draft_layout":  # what there is of every depth or pass has those first
        return [t[:, :1] if name in ("drawn", "positions", "slots") else t[:1] for name, t in result._asdict().items()]
    found = [t[:1] for t in tensors(result)]
    if op in ("decoder_stack", "draft_pass"):
        batch, caches = args[2], args[3].pairs if isinstance(args[3], Store) else args[3]
        groups = args[4] if len(args) > 4 else [0] * len(caches)
        places = [int(batch.slot_mapping[g, 0]) for g in groups]
        found += [side.flatten(0, 1)[place] for pair, place in zip(caches, places, strict=True) for side in pair]
    return found


def called(op: str, args: Args, kwargs: dict[str, Any], device: str) -> list[Tensor]:
    own = tuple(_as_loaded(value) for value in on(device, _copied(args)))
    result = ops.TABLE.ops[op](*own, **on(device, kwargs))
    return on("cpu", written(op, result, own))


def _as_loaded(value: Any) -> Any:
    """A weight in the order that the kernels of its device read."""
    if isinstance(value, Int4Weight):
        return ops.prepare_int4(value)
    return ops.prepare_experts(value) if isinstance(value, Experts) else value


def _copied(args: Args) -> Args:
    return tuple(Store(copy(a.pairs)) if isinstance(a, Store) else copy(a) for a in args)


def check(op: str, device: str, found: list[Case], most: int | None = None) -> None:
    count = 0
    for case in islice(several(op, found), most):
        alone = FIRST[op](case.args) if op in FIRST else first_rows(case, 1)
        narrow = case.kwargs | {name: value[:1] for name, value in case.kwargs.items() if name == "first" and value is not None}
        whole, first = called(op, case.args, case.kwargs, device), called(op, alone, narrow, device)
        assert len(whole) == len(first) > 0
        for w, f in zip(whole, first, strict=True):
            assert w.dtype == f.dtype and torch.equal(w.nan_to_num(nan=7e7), f.nan_to_num(nan=7e7)), case.name
        count += 1
    assert count > 0, f"{op}: no case with more than one row"


ON_THE_CPU = {"decoder_stack", "draft_pass", "tiled_linear", "tiled_embedding"}  # their cases hold weights that lie there


@pytest.mark.parametrize("op", list(ops.TABLE.ops))
def test_by_the_dispatch(op: str) -> None:
    device = "cpu" if op in ON_THE_CPU else DEVICE
    with ops.deterministic(device):
        check(op, device, list(ALL_CASES[op]()))


@contextmanager
def interpreted() -> Iterator[dict[str, str]]:
    """Every op by its Triton kernel of fixed order, those made of ops by their reference. Yields the names chosen."""
    chosen = {}
    with ExitStack() as stack:
        for name, op in ops.TABLE.ops.items():
            own = [b.name for b in op.backends if b.missing is None and b.fixed_order and b.name in ("triton", "triton_fixed")]
            if own or name in ("decoder_stack", "draft_pass"):
                chosen[name] = own[0] if own else "reference"
                stack.enter_context(ops.override(name, chosen[name]))
        yield chosen


TRITON = [op for op in ops.TABLE.ops if op not in ("tiled_linear", "tiled_embedding")]


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cpu" or ops.WHY_NO_TRITON is not None, reason="interpreted; on a card the dispatch takes these kernels")
@pytest.mark.parametrize("op", TRITON)
def test_by_the_kernels_of_a_card_interpreted(op: str) -> None:
    with interpreted() as chosen:
        backend = ops.TABLE.ops[op].find(chosen[op]) if op in chosen else None
        check(op, "cpu", cases(op, backend), MOST_CASES)
