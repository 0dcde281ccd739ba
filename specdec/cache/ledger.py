"""`Ledger`: the pools' free blocks, as they would be after the decisions taken so far in a plan.

The scheduler decides first and applies later; the ledger follows the reference counts exactly, so that a plan it let pass
cannot run out of blocks. It starts from the state `apply` creates first: all lookahead beyond `num_computed` given back.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from specdec.cache.pool import NULL_BLOCK, BlockPool
from specdec.cache.prefix import Reuse
from specdec.cache.sizing import blocks_for

if TYPE_CHECKING:
    from specdec.sequence import Sequence


class Ledger:
    """Touches neither pools nor sequences. All groups' tables have one length, hence one number of new blocks."""

    def __init__(self, pools: Seq[BlockPool], block_size: int, running: Iterable[Sequence]):
        self.pools = pools
        self.block_size = block_size
        self.free = [pool.num_free for pool in pools]
        self._refs: list[dict[int, int]] = [{} for _ in pools]  # block -> references, where they changed
        self._length: dict[Sequence, int] = {}  # blocks per table
        for seq in running:
            self._length[seq] = kept = blocks_for(seq.num_computed, block_size)
            self._give(len(seq.block_tables[0]) - kept)

    def _give(self, n: int) -> None:
        for g in range(len(self.free)):
            self.free[g] += n

    def __contains__(self, seq: object) -> bool:
        """The sequence runs and is not preempted."""
        return seq in self._length

    def length(self, seq: Sequence) -> int:
        """Blocks in each of the sequence's tables so far."""
        return self._length[seq]

    def reach(self, seq: Sequence) -> int:
        """Slots the sequence could have if it took every free block."""
        return (self._length[seq] + min(self.free)) * self.block_size

    def charge(self, seq: Sequence, num_slots: int) -> bool:
        """Lengthen the table to `num_slots` slots; False, changing nothing, when blocks are short."""
        new = blocks_for(num_slots, self.block_size) - self._length[seq]
        if new > min(self.free):
            return False
        if new > 0:
            self._give(-new)
            self._length[seq] += new
        return True

    def release(self, seq: Sequence) -> None:
        """The sequence is preempted: what it was charged and what only it holds comes back."""
        kept = blocks_for(seq.num_computed, self.block_size)
        self._give(self._length.pop(seq) - kept)
        for g, pool in enumerate(self.pools):
            for block in seq.block_tables[g][:kept]:
                if block != NULL_BLOCK:
                    self._refs[g][block] = refs = self._refs[g].get(block, pool.refs(block)) - 1
                    self.free[g] += refs == 0

    def cost(self, reuse: Reuse) -> list[int]:
        """Per group, the blocks that sharing `reuse` takes out of the free ones (cached, held by nobody)."""
        return [
            sum(b != NULL_BLOCK and self._refs[g].get(b, pool.refs(b)) == 0 for b in reuse.blocks[g]) for g, pool in enumerate(self.pools)
        ]

    def adopt(self, seq: Sequence, reuse: Reuse) -> None:
        """The sequence is admitted and shares these blocks."""
        for g, n in enumerate(self.cost(reuse)):
            self.free[g] -= n
            for block in reuse.blocks[g]:
                self._refs[g][block] = self._refs[g].get(block, self.pools[g].refs(block)) + 1
        self._length[seq] = len(reuse.blocks[0])
