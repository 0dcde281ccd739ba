"""`PrefixCache`: find the KV of a sequence's beginning by content.

hash_i = H(hash_{i-1}, token ids of block i), hash_{-1} = H(namespace): a hash names the whole prefix up to and including
its block, so equal hashes mean equal KV. The namespace holds whatever else the content depends on (model fingerprint, KV
dtype, salt). Only full blocks of committed, compacted tokens are registered. Source: reference §9.1–9.2.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from specdec.cache.pool import NULL_BLOCK, BlockPool
from specdec.types import KVGroup

if TYPE_CHECKING:
    from specdec.sequence import Sequence

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Reuse:
    """KV that exists already for the first `num_tokens` tokens of a sequence.

    blocks: per group, the `num_tokens // block_size` leading blocks to share, null where the group's window has passed.
    tail: per group, the block whose first `num_tokens % block_size` slots have to be *copied* (forks only), else empty.
    """

    num_tokens: int
    blocks: tuple[tuple[int, ...], ...]
    tail: tuple[int, ...] = ()


def first_visible(group: KVGroup, position: int) -> int:
    """Smallest key position that a query at `position` sees in this group."""
    return 0 if group.window is None else max(0, position - group.window + 1)


class PrefixCache:
    """Content-addressed view of the pools of all groups. `enabled` False: nothing is found, nothing registered."""

    def __init__(self, groups: Seq[KVGroup], pools: Seq[BlockPool], block_size: int, *, namespace: bytes = b"", enabled: bool = True):
        self.groups = tuple(groups)
        self.pools = tuple(pools)
        self.block_size = block_size
        self.enabled = enabled
        self._root = blake2b(namespace, digest_size=DIGEST_BYTES).digest()

    def extend_hashes(self, seq: Sequence) -> None:
        """Bring `seq.block_hashes` up to all full blocks of `seq.tokens`; costs only the blocks not hashed yet."""
        if not self.enabled:
            return
        size, hashes = self.block_size, seq.block_hashes
        last = hashes[-1] if hashes else self._root
        for i in range(len(hashes), len(seq.tokens) // size):
            last = blake2b(last + array("q", seq.tokens[i * size : (i + 1) * size]).tobytes(), digest_size=DIGEST_BYTES).digest()
            hashes.append(last)

    def match(self, seq: Sequence) -> Reuse:
        """Longest reusable prefix of `seq`, at most `len(tokens) - 1` tokens (one row must run to yield a token). Pure.

        Full groups need every block; a sliding group only those that the next query's window reaches, older ones become
        null blocks. The answer is the longest length good for all groups, a multiple of the block size.
        """
        limit = min((len(seq.tokens) - 1) // self.block_size, len(seq.block_hashes)) if self.enabled else 0
        keys = seq.block_hashes
        for group, pool in zip(self.groups, self.pools, strict=True):
            if group.window is None:
                limit = next((i for i in range(limit) if pool.lookup(keys[i]) is None), limit)
        while limit > 0:
            shorter = min(self._fit(g, seq, limit) for g in range(len(self.groups)))
            if shorter == limit:
                break
            limit = shorter
        return Reuse(limit * self.block_size, tuple(self._blocks(g, seq, limit) for g in range(len(self.groups))))

    def _first_block(self, g: int, num_blocks: int) -> int:
        """First block a hit of `num_blocks` needs in group g, its last token included: that may have to run again."""
        return first_visible(self.groups[g], num_blocks * self.block_size - 1) // self.block_size

    def _fit(self, g: int, seq: Sequence, limit: int) -> int:
        """`limit` if group g has every block that a hit of `limit` blocks needs, else the next smaller candidate."""
        for i in range(limit - 1, self._first_block(g, limit) - 1, -1):
            if self.pools[g].lookup(seq.block_hashes[i]) is None:
                return i
        return limit

    def _blocks(self, g: int, seq: Sequence, num_blocks: int) -> tuple[int, ...]:
        first = min(self._first_block(g, num_blocks), num_blocks)
        found = [self.pools[g].lookup(seq.block_hashes[i]) for i in range(first, num_blocks)]
        return (NULL_BLOCK,) * first + tuple(NULL_BLOCK if b is None else b for b in found)

    def register(self, seq: Sequence) -> None:
        """Offer the blocks that became full and committed since the last call (`seq.num_hashed_cached` remembers)."""
        full = min(seq.num_computed, len(seq.tokens)) // self.block_size
        if not self.enabled or full <= seq.num_hashed_cached:
            return
        self.extend_hashes(seq)
        for g, pool in enumerate(self.pools):
            for i in range(seq.num_hashed_cached, full):
                if seq.block_tables[g][i] != NULL_BLOCK:
                    pool.register(seq.block_tables[g][i], seq.block_hashes[i])
        seq.num_hashed_cached = full
