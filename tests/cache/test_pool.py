"""BlockPool against a dict model, and its rules one by one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specdec.cache.pool import NULL_BLOCK, BlockPool
from specdec.errors import ConfigError, OutOfBlocks


class PoolMachine(RuleBasedStateMachine):
    """The model: `held` block -> references, `keys` hash -> block, `content` block -> what was last written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.held: dict[int, int] = {}
        self.keys: dict[bytes, int] = {}
        self.content: dict[int, object] = {}
        self.idle: list[int] = []  # cached and unheld, in the order they became so

    def _take(self, block: int) -> None:
        self.held[block] = self.held.get(block, 0) + 1
        if block in self.idle:
            self.idle.remove(block)

    @rule(n=st.integers(0, 10))
    def allocate(self, n: int) -> None:
        before = self.pool.num_free
        if n > before:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(n)
            assert self.pool.num_free == before
            return
        plain = 8 - len(self.held) - len(self.idle)
        evicted = self.idle[: max(0, n - plain)]
        blocks = self.pool.allocate(n)
        assert len(set(blocks)) == n and NULL_BLOCK not in blocks and not set(blocks) & set(self.held)
        assert set(evicted) <= set(blocks), "the least recently used cached blocks go first, and only when no free one is left"
        assert set(blocks) & set(self.idle) == set(evicted)
        self.keys = {k: b for k, b in self.keys.items() if b not in evicted}
        for block in blocks:
            self._take(block)
            self.content[block] = object()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True, min_size=1))
        self.pool.free([NULL_BLOCK, *blocks])
        for block in reversed(blocks):
            self.held[block] -= 1
            if self.held[block] == 0:
                del self.held[block]
                if block in self.keys.values():
                    self.idle.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=st.integers(0, 12))
    def register(self, data: st.DataObject, key: int) -> None:
        block, name = data.draw(st.sampled_from(sorted(self.held))), bytes([key])
        known = name in self.keys or block in self.keys.values()
        assert self.pool.register(block, name) == (self.keys.get(name) == block if known else True)
        if not known:
            self.keys[name] = block

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.keys)))
        block = self.pool.lookup(key)
        assert block == self.keys[key]
        self.pool.incref([block, NULL_BLOCK])
        self._take(block)

    @rule()
    def drop(self) -> None:
        self.pool.drop_cached()
        self.keys.clear()
        self.idle.clear()

    @invariant()
    def agrees(self) -> None:
        self.pool.check(dict(sorted(self.held.items())))
        assert self.pool.num_free == 8 - len(self.held) and self.pool.num_cached == len(self.idle)
        for key in range(13):
            assert self.pool.lookup(bytes([key])) == self.keys.get(bytes([key]))
        assert self.pool.usage == pytest.approx(len(self.held) / 8)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_tail_is_evicted_before_the_head() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for i, block in enumerate(blocks):
        pool.register(block, bytes([i]))
    pool.free(blocks)
    assert [pool.allocate(1) for _ in range(3)] == [[blocks[2]], [blocks[1]], [blocks[0]]]


def test_generation_changes_with_every_new_owner_only() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    first = pool.generation[block]
    pool.register(block, b"k")
    pool.free([block])
    pool.incref([block])
    assert pool.generation[block] == first
    pool.free([block])
    assert pool.allocate(1) == [block] and pool.generation[block] != first


def test_misuse_is_noticed() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.free([block])
    with pytest.raises(AssertionError, match="twice"):
        pool.free([block])
    with pytest.raises(AssertionError, match="undefined"):
        pool.incref([block])
    with pytest.raises(AssertionError, match="not held"):
        pool.register(block, b"k")
    with pytest.raises(AssertionError, match="counted from the tables"):
        pool.check({block: 1})
    with pytest.raises(ConfigError, match="null block"):
        BlockPool(1)
