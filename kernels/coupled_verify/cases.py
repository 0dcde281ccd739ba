"""Cases of `coupled_verify`: rows that share keys as the nodes of a tree do, in any order, greedy rows between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from specdec.kernels.case import Case, randn


def _keys(rows: int, depths: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two sequences row by row, with seeds that use both words; nodes of `depths` depths in no order."""
    index = torch.arange(rows)
    return index % 2 * 0x1234567_89ABCDEF - (1 << 61), index * 5 % depths + 1000, index % 2


def _case(name: str, logits: Tensor, noisy: Tensor | None, *, depths: int = 3, lse: bool = False) -> Case:
    """Every row has a request slot of its own, the first row the last of them. noisy: by row."""
    rows = logits.shape[0]
    seeds, positions, choices = _keys(rows, depths)
    depth = torch.arange(rows) % 2
    table = torch.linspace(0.3, 1.7, max(rows, 1))[:rows], seeds, positions - depth, choices, noisy
    slots = torch.arange(rows).flip(0)
    tables = (None if values is None else torch.cat((values.flip(0), values[:1])) for values in table)  # one slot that nobody has
    return Case(name, (logits, slots, depth, *tables, 0), {"lse": lse}, (0, 1, 2))


def _cases() -> Iterator[Case]:
    shapes = ((0, 10, 1.0), (1, 1, 1.0), (1, 49152, 3.0), (3, 49152, 2.0), (5, 63, 1.0), (9, 65, 0.0), (70, 130, 0.1))
    for rows, vocab, scale in shapes:
        logits = randn(rows, vocab, scale=scale)
        some = torch.arange(rows) % 3 != 2
        yield _case(f"{rows}x{vocab}~{scale}", logits, some)
        yield _case(f"{rows}x{vocab}~{scale}, nobody samples, lse", logits, None, lse=True)
        yield _case(f"{rows}x{vocab}~{scale}, one depth, lse", logits, some, depths=1, lse=True)
    for vocab in (128256, 151936, 201088):  # Llama 3, Qwen3, gpt-oss
        yield _case(f"1x{vocab}", randn(1, vocab, scale=3.0), torch.ones(1, dtype=torch.bool), lse=True)
    odd = randn(7, 200)
    odd[0] = -torch.inf
    odd[1, 7:] = -torch.inf
    odd[2, 3:190] = torch.nan
    odd[3, [50, 60]] = torch.inf
    odd[4] = torch.nan
    odd[5, ::2] = -torch.inf
    odd[6] *= 1e30
    for noisy in (torch.ones(7, dtype=torch.bool), None):
        yield _case(f"masks, NaN, infinity: {'greedy' if noisy is None else 'noise'}", odd, noisy, lse=True)


CASES: dict[str, Callable[[], Iterator[Case]]] = {"coupled_verify": _cases}
