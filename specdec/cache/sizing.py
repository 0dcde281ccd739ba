"""How many KV blocks a sequence needs, and how many a memory budget buys."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specdec.config import MAX_NODES
from specdec.errors import ConfigError
from specdec.types import KVGroup


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Blocks per group (the null block included) and the context limit, in tokens, they were sized for."""

    num_blocks: tuple[int, ...]
    max_model_len: int


def blocks_for(num_slots: int, block_size: int) -> int:
    """Blocks that hold `num_slots` slots."""
    return -(-num_slots // block_size)


def least_blocks(group: KVGroup, num_tokens: int, block_size: int) -> int:
    """Fewest blocks with which a sequence, alone and one row a step, can grow to `num_tokens` computed tokens.

    A sliding group keeps its window and 64 slots in flight, wherever the first of them falls in its block.
    """
    whole = blocks_for(num_tokens, block_size)
    return whole if group.window is None else min(whole, blocks_for(group.window + MAX_NODES, block_size) + 1)


def peak_blocks(group: KVGroup, num_tokens: int, block_size: int, max_num_batched_tokens: int) -> int:
    """Most blocks a sequence of `num_tokens` tokens ever holds, the widest tree or prefill chunk included."""
    whole = blocks_for(num_tokens + MAX_NODES, block_size)
    if group.window is None:
        return whole
    return min(whole, blocks_for(group.window + MAX_NODES + max(MAX_NODES, max_num_batched_tokens), block_size) + 1)


def block_bytes(group: KVGroup, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of all layers of the group."""
    return 2 * group.num_layers * block_size * group.num_kv_heads * group.head_dim * dtype.itemsize


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Largest n in [low, high] with fits(n), for a monotone `fits`; low - 1 when none has it."""
    low -= 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def size_pool(
    groups: Sequence[KVGroup],
    block_size: int,
    dtype: torch.dtype,
    budget_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    *,
    source: str = "kv_cache_bytes",
    max_num_batched_tokens: int = 512,
    explicit_len: bool = False,
    num_kv_blocks: int | None = None,
    memory: int | None = None,
    companion_bytes: int = 0,
) -> PoolSize:
    """Blocks per group for a budget in bytes, at most what `max_num_seqs` sequences of `max_model_len` tokens can use.

    Within the budget the pools are as large as lets `max_num_seqs` equally long sequences be as long as possible, so no
    group runs out much before another; one sequence of `max_model_len` tokens always fits. When it does not, the limit
    is lowered, or ConfigError is raised if it was asked for (`explicit_len`).
    source: the setting that the budget comes from, for that error.
    num_kv_blocks: this many blocks in every group, whatever the budget, but not beyond `memory`, the bytes that the device
    could give at most (None = no limit). companion_bytes: bytes a drafter's companion KV adds to each block of group 0.
    """
    per_block = [block_bytes(g, block_size, dtype) + (companion_bytes if i == 0 else 0) for i, g in enumerate(groups)]

    def blocks(each: int, longest: int) -> tuple[int, ...]:
        """Pool sizes for max_num_seqs sequences of `each` tokens (0 = none), or one of `longest`."""
        many = [max_num_seqs * peak_blocks(g, each, block_size, max_num_batched_tokens) if each else 0 for g in groups]
        return tuple(1 + max(m, least_blocks(g, longest, block_size)) for m, g in zip(many, groups, strict=True))

    def affordable(each: int, longest: int) -> bool:
        sizes = blocks(each, longest)
        if num_kv_blocks is not None:
            return max(sizes) <= num_kv_blocks
        return sum(n * b for n, b in zip(sizes, per_block, strict=True)) <= budget_bytes

    longest = _largest(1, max_model_len, lambda n: affordable(0, n))
    if longest < 2 or (explicit_len and longest < max_model_len):
        raise _too_small(blocks(0, max_model_len), per_block, max_model_len, longest, budget_bytes, num_kv_blocks, source)
    if num_kv_blocks is not None:
        if memory is not None:
            _check_memory(num_kv_blocks, sum(per_block), memory)
        return PoolSize((num_kv_blocks,) * len(groups), longest)
    return PoolSize(blocks(_largest(1, longest, lambda n: affordable(n, longest)), longest), longest)


def host_memory() -> int:
    """Physical memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check_memory(num_blocks: int, bytes_each: int, available: int) -> None:
    if num_blocks * bytes_each > available:
        raise ConfigError(
            f"num_kv_blocks={num_blocks} blocks of {bytes_each} bytes are {num_blocks * bytes_each} bytes of KV; the device has "
            f"{available}: lower it to at most {available // bytes_each}",
            param="num_kv_blocks",
        )


def _too_small(
    sizes: Sequence[int], per_block: list[int], wanted: int, longest: int, budget: int, num_kv_blocks: int | None, source: str
) -> ConfigError:
    name, have, need = source, budget, sum(n * b for n, b in zip(sizes, per_block, strict=True))
    if num_kv_blocks is not None:
        name, have, need = "num_kv_blocks", num_kv_blocks, max(sizes)
    shorter = f" or lower max_model_len to {longest}" if longest > 1 else ""
    place, remedy = f"{name}={have}", f"raise it to {need}"
    if name == "gpu_memory_utilization":  # a share of the card, while sizes are bytes
        place, remedy = f"the {have} bytes that {name} leaves it", f"raise it until {need} are left"
    return ConfigError(f"one sequence of max_model_len={wanted} tokens does not fit {place}; {remedy}{shorter}", param=name)
