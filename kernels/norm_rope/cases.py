"""Cases of head norms with RoPE and the KV write: shapes of Qwen3, and those of no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from specdec.kernels.case import Case, randn


def _cases() -> Iterator[Case]:
    for rows, heads, kv, hd, slots in (
        (1, 16, 8, 128, [0]),
        (4, 32, 4, 128, [79, -1, 0, 33]),  # last slot of the last block, no write, first slot
        (3, 4, 4, 6, [-1, -1, -1]),
        (0, 2, 1, 16, []),
        (5, 6, 2, 80, [4, 3, 2, 1, 0]),
    ):
        table = randn(100, hd // 2, seed=1)
        positions = torch.arange(rows) * 7 % 100
        caches = randn(5, 16, kv, hd, seed=2), randn(5, 16, kv, hd, seed=3)
        qkv = randn(rows, (heads + 2 * kv) * hd, scale=4.0)
        if rows > 2:
            qkv[2] = 0.0
        weights = randn(hd, seed=4), randn(hd, seed=5)
        args = (qkv, *weights, 1e-6, positions, table.cos(), table.sin(), *caches, torch.tensor(slots, dtype=torch.int64))
        yield Case(f"{rows}x{heads}/{kv}x{hd}", args, row_args=(0, 4, 9))
    odd = randn(3, 6 * 16)
    odd[0, 3], odd[1, 20], odd[2] = torch.nan, torch.inf, 0.0
    table, place = randn(100, 8, seed=1), torch.arange(3)
    caches = randn(5, 16, 2, 16, seed=2), randn(5, 16, 2, 16, seed=3)
    rotation = place, table.cos(), table.sin(), *caches, place
    yield Case("NaN, infinity, zeros", (odd, randn(16), randn(16), 1e-6, *rotation), row_args=(0, 4, 9))


CASES: dict[str, Callable[[], Iterator[Case]]] = {"norm_rope_write_kv": _cases}
