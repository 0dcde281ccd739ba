"""KV tensors: layers, moves, block copies, companions; and pool sizes."""

from __future__ import annotations

import pytest
import torch

from specdec.cache.kv import KVCache
from specdec.cache.pool import BlockPool
from specdec.cache.sizing import block_bytes, blocks_for, least_blocks, peak_blocks, size_pool
from specdec.errors import ConfigError
from specdec.types import KVGroup

FULL = KVGroup("full", num_layers=2, num_kv_heads=2, head_dim=4)
SLIDING = KVGroup("sliding", num_layers=1, num_kv_heads=1, head_dim=8, window=8)


def cache() -> KVCache:
    return KVCache([FULL, SLIDING], [6, 5], 4, dtype=torch.float32, device="cpu", layer_group=[0, 1, 0], layer_in_group=[0, 0, 1])


def fill(kv: KVCache) -> None:
    for i in range(3):
        for tensor in kv.layer(i):
            tensor.copy_(torch.arange(tensor.numel(), dtype=tensor.dtype).view_as(tensor) + 1000 * i)


def test_layers_map_to_their_groups() -> None:
    kv = cache()
    assert [kv.group_of(i) for i in range(3)] == [0, 1, 0]
    assert [tuple(kv.layer(i)[0].shape) for i in range(3)] == [(6, 4, 2, 4), (5, 4, 1, 8), (6, 4, 2, 4)]
    assert all(t.is_contiguous() and not t.any() for i in range(3) for t in kv.layer(i))
    kv.layer(2)[0].fill_(1.0)
    assert not kv.layer(0)[0].any(), "layers do not overlap"
    assert kv.nbytes == 2 * 4 * (6 * 4 * 2 * 4 * 2 + 5 * 4 * 8)


def test_default_maps_follow_the_groups() -> None:
    kv = KVCache([FULL, SLIDING], [6, 5], 4, dtype=torch.float16, device="cpu")
    assert [kv.group_of(i) for i in range(3)] == [0, 0, 1] and kv.layer(2)[1].shape == (5, 4, 1, 8)


def test_move_reads_everything_before_it_writes() -> None:
    """A chain of overlapping moves, as compaction produces: 5 → 4, 6 → 5, 9 → 6."""
    kv = cache()
    fill(kv)
    before = {i: [t.clone() for t in kv.layer(i)] for i in range(3)}
    kv.move(0, torch.tensor([5, 6, 9]), torch.tensor([4, 5, 6]))
    for i in (0, 2):
        for now, old in zip(kv.layer(i), before[i], strict=True):
            expected = old.flatten(0, 1).clone()
            expected[[4, 5, 6]] = old.flatten(0, 1)[[5, 6, 9]]
            assert torch.equal(now.flatten(0, 1), expected)
    assert all(torch.equal(a, b) for a, b in zip(kv.layer(1), before[1], strict=True)), "the other group is untouched"


def test_copy_blocks_takes_companions_along() -> None:
    kv, pool = cache(), BlockPool(6)
    draft = kv.attach("draft", pool, num_layers=1, num_kv_heads=1, head_dim=2)
    fill(kv)
    draft.layer(0)[0].copy_(torch.arange(48.0).view(6, 4, 1, 2))
    src, dst = pool.allocate(2)
    draft.mark([src], "head-a")
    kv.copy_blocks(0, [(src, dst)])
    kv.copy_blocks(0, [])
    for tensor in (*kv.layer(0), *kv.layer(2), draft.layer(0)[0]):
        assert torch.equal(tensor[dst], tensor[src])
    assert draft.valid(dst, "head-a")
    with pytest.raises(ConfigError, match="attached already"):
        kv.attach("draft", pool, 1, 1, 2)


def test_companion_content_is_valid_for_one_drafter_and_one_owner() -> None:
    kv, pool = cache(), BlockPool(2)
    draft = kv.attach("draft", pool, 1, 1, 2)
    (block,) = pool.allocate(1)
    assert not draft.valid(block, "head-a")
    draft.mark([block], "head-a")
    assert draft.valid(block, "head-a") and not draft.valid(block, "head-b")
    pool.free([block])
    pool.allocate(1)
    assert not draft.valid(block, "head-a"), "the block was handed out again"


def test_least_blocks_of_a_window_is_independent_of_length() -> None:
    assert least_blocks(FULL, 100, 4) == 25
    assert least_blocks(SLIDING, 1000, 4) == least_blocks(SLIDING, 10_000, 4) == blocks_for(8 + 64, 4) + 1
    assert least_blocks(SLIDING, 10, 4) == 3
    assert peak_blocks(FULL, 100, 4, 512) == blocks_for(164, 4)
    assert peak_blocks(SLIDING, 10_000, 4, 512) == blocks_for(8 + 64 + 512, 4) + 1


def size(budget: int, length: int, seqs: int = 4, **options: object):
    return size_pool([FULL, SLIDING], 4, torch.float32, budget, length, seqs, max_num_batched_tokens=16, **options)


def spent(blocks: tuple[int, ...]) -> int:
    return sum(n * block_bytes(g, 4, torch.float32) for n, g in zip(blocks, (FULL, SLIDING), strict=True))


@pytest.mark.parametrize("budget", [40_000, 100_000, 300_000])
def test_pool_fills_the_budget_and_no_more(budget: int) -> None:
    found = size(budget, 4096)
    assert spent(found.num_blocks) <= budget
    one_block_each = sum(4 * block_bytes(g, 4, torch.float32) for g in (FULL, SLIDING))
    assert spent(found.num_blocks) > budget - one_block_each, "less than one more block per sequence is left over"
    for group, n in zip((FULL, SLIDING), found.num_blocks, strict=True):
        assert n - 1 >= least_blocks(group, found.max_model_len, 4), "one sequence of the limit fits"


def test_pool_is_bounded_by_what_the_sequences_can_use() -> None:
    found = size(1 << 40, 256)
    assert found.max_model_len == 256
    assert found.num_blocks == (1 + 4 * blocks_for(256 + 64, 4), 1 + 4 * (blocks_for(8 + 64 + 64, 4) + 1))


def test_limit_is_lowered_unless_it_was_asked_for() -> None:
    found = size(40_000, 4096)
    assert 2 <= found.max_model_len < 4096
    with pytest.raises(ConfigError, match=rf"max_model_len=4096.*raise it to \d+ or lower max_model_len to {found.max_model_len}") as error:
        size(40_000, 4096, explicit_len=True)
    assert error.value.param == "kv_cache_bytes"
    assert size(40_000, found.max_model_len, explicit_len=True).max_model_len == found.max_model_len
    with pytest.raises(ConfigError, match="does not fit kv_cache_bytes=100"):
        size(100, 4096)


def test_given_number_of_blocks() -> None:
    assert size(0, 4096, num_kv_blocks=11) == size(1 << 30, 40, num_kv_blocks=11)
    assert size(0, 4096, num_kv_blocks=11).num_blocks == (11, 11) and size(0, 4096, num_kv_blocks=11).max_model_len == 40
    with pytest.raises(ConfigError, match="num_kv_blocks=11; raise it to 12 or lower max_model_len to 40") as error:
        size(0, 41, num_kv_blocks=11, explicit_len=True)
    assert error.value.param == "num_kv_blocks"


def test_companions_count() -> None:
    without, with_ = size(100_000, 4096), size(100_000, 4096, companion_bytes=block_bytes(FULL, 4, torch.float32))
    assert with_.num_blocks[0] < without.num_blocks[0]
