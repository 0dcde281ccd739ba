"""`BlockPool`: ids, reference counts and eviction order of one KV group's blocks. Every operation is O(1) per block.

A block is *held* (reference count > 0), *free* (count 0, content worthless) or *cached* (count 0, but its content is a
full block known by hash and may be taken again). `allocate` uses free blocks first, then evicts cached ones, least
recently used first. Block 0 is the null block: it stands for window-expired positions, is never handed out or counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from specdec.errors import ConfigError, OutOfBlocks

NULL_BLOCK = 0


class BlockPool:
    """Blocks `1 … num_blocks - 1` of one group. Not thread-safe: one engine thread owns it.

    `generation[b]` counts how often block b was handed out for new content: whoever keeps facts about a block's content
    (companions, see `cache/kv.py`) remembers the generation and thereby learns that the content is gone.
    """

    def __init__(self, num_blocks: int, name: str = "full"):
        if num_blocks < 2:
            raise ConfigError(f"KV group {name!r} needs at least 2 blocks (one is the null block), got {num_blocks}", param="num_kv_blocks")
        self.name = name
        self.num_blocks = num_blocks
        self.generation = [0] * num_blocks
        self._refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack: what was freed last is warm in the CPU's caches
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def capacity(self) -> int:
        """Blocks that can be handed out at all: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks `allocate` could return now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Unheld blocks whose content can still be found by hash."""
        return len(self._cached)

    @property
    def usage(self) -> float:
        """Held blocks / capacity, in [0, 1]. Cached blocks count as unused."""
        return 1.0 - self.num_free / self.capacity

    def refs(self, block: int) -> int:
        return self._refs[block]

    def is_cached(self, block: int) -> bool:
        """True when the block's content is known by a hash, held or not."""
        return self._hash_of[block] is not None

    def allocate(self, n: int) -> list[int]:
        """`n` blocks with reference count 1 and undefined content. Raises OutOfBlocks, changing nothing, when fewer are left."""
        if n > self.num_free:
            raise OutOfBlocks(f"KV group {self.name!r}: {n} blocks wanted, {self.num_free} of {self.capacity} free", param="num_kv_blocks")
        out = []
        for _ in range(n):
            if self._free:
                block = self._free.pop()
            else:
                block, _none = self._cached.popitem(last=False)
                self._forget(block)
            self._refs[block] = 1
            self.generation[block] += 1
            out.append(block)
        return out

    def incref(self, blocks: Iterable[int]) -> None:
        """One more reference to each block, held or cached; null blocks are passed over."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self._refs[block] == 0:
                if block not in self._cached:
                    raise AssertionError(f"{self.name}: block {block} is free, its content is undefined")
                del self._cached[block]
            self._refs[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block, given in table order. The tail goes first and is therefore evicted first:
        a prefix without its tail is still useful, a tail without its prefix is not. Null blocks are passed over."""
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            if self._refs[block] <= 0:
                raise AssertionError(f"{self.name}: block {block} was freed twice")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._hash_of[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def register(self, block: int, key: bytes) -> bool:
        """Make the full content of a held block findable by `key`. False, changing nothing, when another block has that content."""
        if self._refs[block] <= 0:
            raise AssertionError(f"{self.name}: block {block} is not held, it cannot be registered")
        if key in self._block_of or self._hash_of[block] is not None:
            return self._block_of.get(key) == block
        self._block_of[key] = block
        self._hash_of[block] = key
        return True

    def lookup(self, key: bytes) -> int | None:
        """The block, held or cached, whose content has this hash."""
        return self._block_of.get(key)

    def drop_cached(self) -> None:
        """Forget every hash: from now on nothing is found, and all unheld blocks are plain free ones."""
        for block in list(self._block_of.values()):
            self._forget(block)
        self._free.extend(self._cached)
        self._cached.clear()

    def _forget(self, block: int) -> None:
        key = self._hash_of[block]
        if key is not None:
            del self._block_of[key]
            self._hash_of[block] = None

    def check(self, expected_refs: dict[int, int] | None = None) -> None:
        """Verify the invariants, and the reference counts against those the caller counted. AssertionError with details."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), f"{self.name}: a block is twice in the free stack"
        assert not free & cached, f"{self.name}: blocks {free & cached} are free and cached"
        assert NULL_BLOCK not in free | cached and self._refs[NULL_BLOCK] == 0, f"{self.name}: the null block is in use"
        for block in range(1, self.num_blocks):
            unheld = block in free or block in cached
            assert (self._refs[block] == 0) == unheld, f"{self.name}: block {block} has {self._refs[block]} references, unheld={unheld}"
            key = self._hash_of[block]
            assert key is None or self._block_of.get(key) == block, f"{self.name}: block {block} and its hash disagree"
            assert not (block in free and key is not None), f"{self.name}: free block {block} still has a hash"
            assert not (block in cached and key is None), f"{self.name}: cached block {block} has no hash"
        assert len(self._block_of) == sum(h is not None for h in self._hash_of), f"{self.name}: a hash names no block"
        if expected_refs is not None:
            held = {b: r for b, r in enumerate(self._refs) if r}
            assert held == expected_refs, f"{self.name}: references held {held}, counted from the tables {expected_refs}"
