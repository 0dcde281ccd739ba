"""`BlockTables`: which block holds which positions of each running sequence, on the host and as device-ready rows.

All groups' tables of a sequence have the same length; positions a sliding window has passed are null blocks. The int32
tensor `[G, max_num_seqs, M]`, indexed by request slot, mirrors the lists and is updated only where they change, so building
a batch never costs O(context). M covers `max_model_len` plus a tree of 64 in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import torch

from specdec.cache.pool import NULL_BLOCK, BlockPool
from specdec.cache.prefix import Reuse, first_visible
from specdec.cache.sizing import blocks_for
from specdec.config import MAX_NODES
from specdec.errors import OutOfBlocks
from specdec.kernels.tree_layout.reference import device_slots as device_slots
from specdec.types import KVGroup

if TYPE_CHECKING:
    from specdec.sequence import Sequence

Copy = tuple[int, int, int]  # group, source block, destination block


def flat_slots(tables: np.ndarray, request_slots: Seq[int] | np.ndarray, cells: Seq[int] | np.ndarray, block_size: int) -> np.ndarray:
    """[G, n] i64 flat slots of cells (places counted from the start of a sequence) of the sequences in these request slots; -1 for cells
    below 0. tables [G, S, M] i32."""
    places = np.asarray(cells, dtype=np.int64)
    block, offset = np.divmod(places, block_size)
    # indexing by two lists lays several groups out column by column; kernels read each group's row as it lies
    slots = np.ascontiguousarray(tables[:, np.asarray(request_slots, dtype=np.int64), block], dtype=np.int64) * block_size + offset
    slots[:, places < 0] = -1
    return slots


class BlockTables:
    """The only place that takes blocks from the pools and gives them back."""

    def __init__(self, groups: Seq[KVGroup], pools: Seq[BlockPool], block_size: int, max_num_seqs: int, max_model_len: int):
        self.groups = tuple(groups)
        self.pools = tuple(pools)
        self.block_size = block_size
        self.width = blocks_for(max_model_len + MAX_NODES, block_size)
        self.tensor = torch.zeros((len(self.groups), max_num_seqs, self.width), dtype=torch.int32)  # [G, S, M]
        self._rows = self.tensor.numpy()  # the same memory; element writes are an order cheaper than through torch

    def open(self, seq: Sequence, reuse: Reuse) -> None:
        """Start a table from existing KV: shares `reuse.blocks`. The sequence owns a request slot and no blocks."""
        seq.block_tables = [list(blocks) for blocks in reuse.blocks]
        for g, pool in enumerate(self.pools):
            pool.incref(reuse.blocks[g])
            self._rows[g, seq.request_slot, : len(reuse.blocks[g])] = reuse.blocks[g]

    def fork(self, parent: Sequence, num_tokens: int) -> Reuse | None:
        """Reuse of the first `num_tokens` computed tokens of a running sequence. Whole blocks are shared; a partial tail block
        is copied, since both sides will write to it. None when a sliding group has already given up a block it needs."""
        whole, stop = num_tokens // self.block_size, blocks_for(num_tokens, self.block_size)
        blocks, tail = [], []
        for g, group in enumerate(self.groups):
            table = parent.block_tables[g]
            first = min(first_visible(group, num_tokens - 1) // self.block_size, whole)  # the last token may have to run again
            if NULL_BLOCK in table[first:stop]:
                return None
            blocks.append((NULL_BLOCK,) * first + tuple(table[first:whole]))
            tail.extend(table[whole:stop])
        return Reuse(num_tokens, tuple(blocks), tuple(tail))

    def trim(self, seq: Sequence, num_slots: int) -> None:
        """Give back the blocks beyond `num_slots` slots: lookahead the next step does not need."""
        keep = blocks_for(num_slots, self.block_size)
        for g, pool in enumerate(self.pools):
            table = seq.block_tables[g]
            if len(table) > keep:
                pool.free(table[keep:])
                self._rows[g, seq.request_slot, keep : len(table)] = NULL_BLOCK
                del table[keep:]

    def reserve(self, seq: Sequence, num_slots: int) -> None:
        """Lengthen the table to `num_slots` slots. Raises OutOfBlocks, changing nothing, when a group cannot."""
        want, have = blocks_for(num_slots, self.block_size), len(seq.block_tables[0])
        if want <= have:
            return
        for pool in self.pools:
            if pool.num_free < want - have:
                raise OutOfBlocks(f"KV group {pool.name!r}: {want - have} blocks wanted, {pool.num_free} free", param="num_kv_blocks")
        for g, pool in enumerate(self.pools):
            blocks = pool.allocate(want - have)
            seq.block_tables[g].extend(blocks)
            self._rows[g, seq.request_slot, have:want] = blocks

    def expire(self, seq: Sequence) -> None:
        """Null the blocks that no later query of `seq` can see, keeping 64 slots of slack for nodes in flight."""
        for g, group in enumerate(self.groups):
            if group.window is None:
                continue
            table = seq.block_tables[g]
            end = start = first_visible(group, max(0, seq.num_computed - MAX_NODES)) // self.block_size
            while start > 0 and table[start - 1] != NULL_BLOCK:  # what lies further back was nulled before
                start -= 1
            if start < end:
                self.pools[g].free(table[start:end])
                self._rows[g, seq.request_slot, start:end] = NULL_BLOCK
                table[start:end] = [NULL_BLOCK] * (end - start)

    def close(self, seq: Sequence) -> None:
        """Give everything back."""
        self.trim(seq, 0)
        seq.block_tables = []

    def check(self, seqs: Iterable[Sequence]) -> None:
        """Verify pools against tables, and the rows against the lists. AssertionError with details."""
        seqs = list(seqs)
        for g, pool in enumerate(self.pools):
            held = Counter(b for s in seqs for b in s.block_tables[g] if b != NULL_BLOCK)
            pool.check(dict(sorted(held.items())))
            for s in seqs:
                table = s.block_tables[g]
                row = self._rows[g, s.request_slot]
                assert row[: len(table)].tolist() == table and not row[len(table) :].any(), (
                    f"{s.request_id}: row and table of {pool.name} differ"
                )
                for block in table[s.num_computed // self.block_size :]:
                    writable = pool.refs(block) == 1 and not pool.is_cached(block)
                    assert writable, f"{s.request_id}: block {block} of {pool.name} may be written while shared or cached"
