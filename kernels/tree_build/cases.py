"""Cases of `tree_build`: pools as a beam grows them, and shapes no beam has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from specdec.kernels.case import Case
from specdec.kernels.inputs import grown_pool


def _case(name: str, pool: tuple[Tensor, Tensor, Tensor], nodes: list[int], width: int, deepest: int) -> Case:
    batch = pool[0].shape[0]
    wanted = torch.tensor([nodes[b % len(nodes)] for b in range(batch)], dtype=torch.int64)
    return Case(name, (*pool, torch.arange(batch) + 7, wanted, width, deepest), row_args=(0, 1, 2, 3, 4))


def _cases() -> Iterator[Case]:
    for i, (batch, depth, width, beam) in enumerate(((1, 1, 1, 1), (3, 4, 4, 4), (1, 8, 10, 10), (2, 6, 3, 2))):
        pool = grown_pool(batch, depth, width, beam, i)
        for nodes in ([64, 33, 5], [1, 2, 17]):
            yield _case(f"{batch}x{depth} deep, {width} wide, {nodes} nodes", pool, nodes, max(nodes), depth)
    yield _case("no sequences", grown_pool(0, 2, 3, 3, 0), [8], 8, 2)
    yield _case("narrower than the budget", grown_pool(2, 3, 4, 4, 5), [60], 9, 3)
    tokens, _, scores = grown_pool(2, 1, 63, 1, 6, hopeless=0.0)
    yield _case("star of 64", (tokens, torch.full_like(tokens, -1), scores), [64], 64, 1)
    falling = torch.linspace(1.0, 0.5, 70).expand(2, -1).contiguous()
    chain = torch.arange(-1, 69).expand(2, -1).contiguous()
    yield _case("chain of 64", (chain + 5, chain, falling), [64, 40], 64, 63)
    yield _case("nothing can be right", (chain + 5, chain, falling * 0), [64], 64, 63)
    yield _case("ties", (chain + 5, (chain - 1).div(3, rounding_mode="floor").clamp(min=-1), falling * 0 + 0.5), [30, 64], 64, 6)
    orphans = torch.where(torch.arange(70) % 5 == 3, 0.0, falling)
    yield _case("what hangs on what cannot be right", (chain + 5, (chain - 1).clamp(min=-1), orphans), [64], 64, 63)
    rising = (chain + 5, chain.div(2, rounding_mode="floor"), falling.flip(1).contiguous())
    yield _case("children ahead of their parents", rising, [64, 20], 64, 8)


CASES: dict[str, Callable[[], Iterator[Case]]] = {"tree_build": _cases}
