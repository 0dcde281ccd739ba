"""PrefixCache: hits are content-addressed, bounded, and good for every group at once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.cache.pool import NULL_BLOCK, BlockPool
from specdec.cache.prefix import PrefixCache, first_visible
from specdec.config import SamplingParams
from specdec.sequence import Sequence
from specdec.types import KVGroup

FULL = KVGroup("full", 1, 1, 4)
SLIDING = KVGroup("sliding", 1, 1, 4, window=6)
SIZE = 4


def sequence(tokens: list[int]) -> Sequence:
    return Sequence("r", list(tokens), len(tokens), SamplingParams(), 0, 1000)


def build(groups=(FULL,), namespace: bytes = b"", enabled: bool = True) -> PrefixCache:
    return PrefixCache(groups, [BlockPool(30, g.name) for g in groups], SIZE, namespace=namespace, enabled=enabled)


def compute(cache: PrefixCache, tokens: list[int], computed: int | None = None) -> Sequence:
    """A sequence whose first `computed` tokens have KV and are offered to the cache."""
    seq = sequence(tokens)
    seq.num_computed = len(tokens) if computed is None else computed
    seq.block_tables = [pool.allocate(-(-len(tokens) // SIZE)) for pool in cache.pools]
    cache.register(seq)
    return seq


def look_up(cache: PrefixCache, tokens: list[int]):
    seq = sequence(tokens)
    cache.extend_hashes(seq)
    return cache.match(seq)


def test_hit_ends_at_the_first_different_block_and_leaves_a_token() -> None:
    cache = build()
    tokens = list(range(14))
    seq = compute(cache, tokens)
    table = seq.block_tables[0]
    assert look_up(cache, tokens).blocks == (tuple(table[:3]),), "the partial block is never found"
    assert look_up(cache, tokens[:12]).num_tokens == 8, "12 cached tokens, but one has to run"
    assert look_up(cache, tokens[:13]).num_tokens == 12
    assert look_up(cache, [*tokens[:5], 99, *tokens[6:]]).num_tokens == 4
    assert look_up(cache, [99, *tokens[1:]]).num_tokens == 0
    assert look_up(cache, tokens[4:]).num_tokens == 0, "the same tokens after another beginning are other KV"


def test_only_computed_blocks_are_found() -> None:
    cache = build()
    seq = compute(cache, list(range(16)), computed=7)
    assert look_up(cache, list(range(16))).num_tokens == 4
    seq.num_computed = 13
    cache.register(seq)
    assert look_up(cache, list(range(16))).num_tokens == 12 and seq.num_hashed_cached == 3


def test_namespace_and_switch() -> None:
    a, b, off = build(namespace=b"a"), build(namespace=b"b"), build(enabled=False)
    seqs = [compute(c, list(range(9))) for c in (a, b, off)]
    assert seqs[0].block_hashes[0] != seqs[1].block_hashes[0]
    assert seqs[2].block_hashes == [] and look_up(off, list(range(9))).num_tokens == 0


def test_hashes_are_extended_not_recomputed() -> None:
    cache = build()
    seq = sequence(list(range(7)))
    cache.extend_hashes(seq)
    first = seq.block_hashes[0]
    seq.tokens.extend(range(7, 12))
    cache.extend_hashes(seq)
    assert len(seq.block_hashes) == 3 and seq.block_hashes[0] is first
    other = sequence(list(range(12)))
    cache.extend_hashes(other)
    assert other.block_hashes == seq.block_hashes


def test_equal_content_keeps_the_first_block() -> None:
    cache = build()
    first, second = compute(cache, list(range(8))), compute(cache, list(range(8)))
    assert look_up(cache, list(range(9))).blocks == (tuple(first.block_tables[0]),)
    assert not any(cache.pools[0].is_cached(b) for b in second.block_tables[0])
    cache.pools[0].check()


def test_sliding_group_needs_only_its_window() -> None:
    """Window 6: after a hit of 16 tokens the next query sees keys 11…, i.e. blocks 2 and 3."""
    cache = build((FULL, SLIDING))
    tokens = list(range(17))
    seq = compute(cache, tokens)
    evict(cache.pools[1], seq, 1)
    hit = look_up(cache, tokens)
    assert hit.num_tokens == 16 and hit.blocks[1] == (NULL_BLOCK, NULL_BLOCK, *seq.block_tables[1][2:4])
    assert hit.blocks[0] == tuple(seq.block_tables[0][:4])


def test_hit_is_the_longest_good_for_all_groups() -> None:
    """Without sliding block 3 the longest hit is 12 tokens (its window needs blocks 1 and 2); without 1 as well it is 4."""
    cache = build((FULL, SLIDING))
    tokens = list(range(17))
    seq = compute(cache, tokens)
    evict(cache.pools[1], seq, 3)
    assert look_up(cache, tokens).num_tokens == 12
    evict(cache.pools[1], seq, 1)
    assert look_up(cache, tokens).num_tokens == 4


def evict(pool: BlockPool, seq: Sequence, index: int) -> None:
    """Make the pool forget the sequence's block `index`, as reallocation would."""
    pool._forget(seq.block_tables[1][index])


@settings(max_examples=200, deadline=None)
@given(
    kept=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=6, max_size=6),
    window=st.integers(1, 20),
    length=st.integers(1, 27),
)
def test_match_against_brute_force(kept: list[tuple[bool, bool]], window: int, length: int) -> None:
    """Any subset of blocks may have been evicted, in either group: compare with trying every length.

    A hit serves the next position and the last one of its own, which may have to run again.
    """
    groups = (FULL, KVGroup("sliding", 1, 1, 4, window=window))
    cache = build(groups)
    tokens = list(range(27))
    seq = compute(cache, tokens)
    for i, flags in enumerate(kept):
        for g in range(2):
            if not flags[g]:
                cache.pools[g]._forget(seq.block_tables[g][i])

    def good(blocks: int) -> bool:
        end = blocks * SIZE
        return end <= length - 1 and all(kept[p // SIZE][g] for g in range(2) for p in range(first_visible(groups[g], end - 1), end))

    hit = look_up(cache, tokens[:length])
    assert hit.num_tokens == SIZE * max(b for b in range(7) if good(b))
    for g, group in enumerate(groups):
        visible = range(first_visible(group, hit.num_tokens - 1), hit.num_tokens)
        assert all(hit.blocks[g][p // SIZE] == seq.block_tables[g][p // SIZE] for p in visible)
        assert len(hit.blocks[g]) == hit.num_tokens // SIZE and hit.tail == ()
