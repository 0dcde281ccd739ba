"""Rejection and block verification emit exactly the target's law: by exact enumeration of drafts and coins.

Enumeration runs the real walks. A coin near 0 accepts whatever can be accepted, one near 1 rejects whatever can be rejected, so
the 2^(N-1) patterns of such coins visit every branch; the walk reports the rate of each coin it read, which gives the branch its
probability. Patterns that differ in coins that were not read are the same branch and share its weight.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from specdec.spec import rejection
from tests.spec.trees import path_to

V = 3
TINY = 1e-15  # as a coin: below every rate that is not 0; 1 - TINY is above every rate that is not 1


class World:
    """Random target and draft laws [V] of every path, float64, some tokens impossible."""

    def __init__(self, seed: int, *, holes: bool = False, close: float | None = None):
        self.seed, self.holes, self.close = seed, holes, close

    def _law(self, path: tuple[int, ...], salt: int) -> Tensor:
        key = self.seed * 100 + salt
        for token in path:
            key = key * 7 + token + 1
        gen = torch.Generator().manual_seed(key)
        logits = torch.randn(V, generator=gen, dtype=torch.float64) * 1.5
        if self.holes:
            logits[int(torch.randint(V, (), generator=gen))] = -math.inf
        return logits.log_softmax(-1)

    def target(self, path: tuple[int, ...]) -> Tensor:
        return self._law(path, 1)

    def draft(self, path: tuple[int, ...]) -> Tensor:
        if self.close is not None:
            return (self.target(path) + self.close * self._law(path, 2)).log_softmax(-1)
        return self._law(path, 2)


@dataclass
class Drafts:
    """All outcomes of drawing one tree shape: tokens [B, N], their probabilities, and laws after each node."""

    tokens: Tensor
    weight: Tensor  # [B] f64
    target: Tensor  # [B, N, V]
    draft: Tensor  # [B, N, V]


def draw_all(world: World, parents: list[int], *, replacement: bool) -> Drafts:
    """Every assignment of tokens to nodes 1 … N-1, children of a node drawn in order, with or without replacement."""
    tokens, weight, target, draft = [], [], [], []
    for own in itertools.product(range(V), repeat=len(parents) - 1):
        node_tokens = [0, *own]
        paths = [tuple(node_tokens[i] for i in path_to(parents, node)[1:]) for node in range(len(parents))]
        chance = 1.0
        left = {node: world.draft(paths[node]).exp() for node in range(len(parents))}
        for node in range(1, len(parents)):
            law = left[parents[node]]
            chance *= float(law[node_tokens[node]] / law.sum()) if law.sum() > 0 else 0.0
            if not replacement:
                law[node_tokens[node]] = 0.0
        if chance > 0:
            tokens.append(node_tokens)
            weight.append(chance)
            target.append(torch.stack([world.target(path) for path in paths]))
            draft.append(torch.stack([world.draft(path) for path in paths]))
    result = Drafts(torch.tensor(tokens), torch.tensor(weight, dtype=torch.float64), torch.stack(target), torch.stack(draft))
    assert result.weight.sum().item() == pytest.approx(1.0, abs=1e-12)
    return result


def coin_patterns(width: int) -> Iterator[Tensor]:
    for pattern in itertools.product((TINY, 1 - TINY), repeat=width - 1):
        yield torch.tensor([0.5, *pattern], dtype=torch.float64)


def emitted_law(world: World, drafts: Drafts, parents: list[int], outcomes: list[tuple[Tensor, rejection.Outcome]], length: int) -> Tensor:
    """Joint law [V] * length of the first `length` tokens: accepted run, next token, then the target's own draws."""
    joint = torch.zeros([V] * length, dtype=torch.float64)
    for coins, outcome in outcomes:
        read = ~outcome.rates.isnan()
        chance = torch.where(coins < 0.5, outcome.rates, 1 - outcome.rates)[:, 1:]
        weight = drafts.weight * torch.where(read[:, 1:], chance, 0.5).prod(dim=1)
        for b in range(len(weight)):
            if weight[b] == 0:
                continue
            run = [int(drafts.tokens[b, i]) for i in range(1, len(parents)) if outcome.accepted[b, i]]
            for token in range(V):
                _spread(world, joint, [*run, token], float(weight[b] * outcome.law[b, token].exp()))
    return joint


def _spread(world: World, joint: Tensor, run: list[int], weight: float) -> None:
    if weight == 0 or len(run) == joint.dim():
        joint[tuple(run)] += weight
        return
    law = world.target(tuple(run)).exp()
    for token in range(V):
        _spread(world, joint, [*run, token], weight * float(law[token]))


def target_law(world: World, length: int) -> Tensor:
    joint = torch.zeros([V] * length, dtype=torch.float64)
    _spread(world, joint, [], 1.0)
    return joint


def run_walk(mode: str, drafts: Drafts, parents: list[int], *, point: bool, replacement: bool) -> list[tuple[Tensor, rejection.Outcome]]:
    count, width = drafts.tokens.shape
    each, nodes = torch.arange(count), torch.full((count,), width)

    def target(node: Tensor) -> Tensor:
        return drafts.target[each, node]

    def draft(node: Tensor) -> Tensor:
        return drafts.draft[each, node]

    outcomes = []
    for pattern in coin_patterns(width):
        coins = pattern.expand(count, width)
        law = None if point else draft
        if mode == "block":
            outcomes.append((coins, rejection.walk_block(drafts.tokens, nodes, target, law, coins)))
        else:
            shape = torch.tensor(parents).expand(count, width)
            outcomes.append((coins, rejection.walk_tree(drafts.tokens, shape, nodes, target, law, coins, replacement=replacement)))
    return outcomes


def check_exact(mode: str, world: World, parents: list[int], *, point: bool = False, replacement: bool = False) -> Tensor:
    """The emitted joint law equals the target's within 1e-12; returns the law of the number of accepted drafts."""
    depth = max(len(path_to(parents, i)) for i in range(len(parents))) - 1
    drafts = draw_all(world, parents, replacement=replacement)
    if point:  # deterministic drafts: each outcome is a drafter of its own, and must be exact by itself
        drafts.weight = drafts.weight.new_ones(1)
        drafts.tokens, drafts.target, drafts.draft = drafts.tokens[-1:], drafts.target[-1:], drafts.draft[-1:]
    outcomes = run_walk(mode, drafts, parents, point=point, replacement=replacement)
    emitted = emitted_law(world, drafts, parents, outcomes, depth + 1)
    assert (emitted - target_law(world, depth + 1)).abs().max().item() < 1e-12
    lengths = torch.zeros(depth + 1, dtype=torch.float64)
    for coins, outcome in outcomes:
        chance = torch.where(coins < 0.5, outcome.rates, 1 - outcome.rates)[:, 1:]
        weight = drafts.weight * torch.where(outcome.rates[:, 1:].isnan(), 0.5, chance).prod(dim=1)
        lengths.index_add_(0, outcome.accepted.sum(dim=1) - 1, weight)
    return lengths


CHAIN = [-1, 0, 1]
TREES = [CHAIN, [-1, 0, 0], [-1, 0, 1, 0], [-1, 0, 0, 1, 1], [-1, 0, 1, 1, 0, 4]]
WORLDS = [World(1), World(2), World(3, holes=True), World(4, holes=True), World(5, close=1e-9), World(6, close=0.0)]


@pytest.mark.parametrize("world", WORLDS, ids=range(len(WORLDS)))
@pytest.mark.parametrize("parents", TREES, ids=str)
def test_rejection_is_exact_without_replacement(world: World, parents: list[int]) -> None:
    check_exact("rejection", world, parents)


@pytest.mark.parametrize("world", WORLDS, ids=range(len(WORLDS)))
@pytest.mark.parametrize("parents", [[-1, 0, 0], [-1, 0, 0, 0], [-1, 0, 0, 1, 1]], ids=str)
def test_rejection_is_exact_with_replacement(world: World, parents: list[int]) -> None:
    check_exact("rejection", world, parents, replacement=True)


@pytest.mark.parametrize("world", WORLDS[:4], ids=range(4))
@pytest.mark.parametrize("parents", TREES, ids=str)
def test_rejection_is_exact_for_point_masses(world: World, parents: list[int]) -> None:
    check_exact("rejection", world, parents, point=True)


@pytest.mark.parametrize("world", WORLDS, ids=range(len(WORLDS)))
@pytest.mark.parametrize("drafts", [1, 2, 3])
@pytest.mark.parametrize("point", [False, True])
def test_block_is_exact(world: World, drafts: int, point: bool) -> None:
    check_exact("block", world, [*range(-1, drafts)], point=point)


@pytest.mark.parametrize("world", WORLDS[:4], ids=range(4))
def test_block_accepts_at_least_as_much_as_rejection(world: World) -> None:
    parents = [-1, 0, 1, 2]
    block, plain = check_exact("block", world, parents), check_exact("rejection", world, parents)
    mean = torch.arange(4, dtype=torch.float64)
    assert (block @ mean) >= (plain @ mean) - 1e-12


def test_rejection_of_one_draft_accepts_with_the_overlap_of_the_laws() -> None:
    world = WORLDS[0]
    overlap = torch.minimum(world.target(()).exp(), world.draft(()).exp()).sum().item()
    assert check_exact("rejection", world, [-1, 0])[1].item() == pytest.approx(overlap, abs=1e-12)


def test_a_wrong_sibling_order_would_be_noticed() -> None:
    """The enumeration has teeth: sorting the drawn children by probability, as EAGLE-2 may for point masses, changes the law."""
    world, parents = World(1), [-1, 0, 0]
    drafts = draw_all(world, parents, replacement=False)
    order = drafts.draft[:, 0].gather(1, drafts.tokens[:, 1:]).argsort(dim=1, descending=True)
    drafts.tokens[:, 1:] = drafts.tokens[:, 1:].gather(1, order)
    for node in (1, 2):
        paths = [(int(t),) for t in drafts.tokens[:, node]]
        drafts.target[:, node] = torch.stack([world.target(path) for path in paths])
    outcomes = run_walk("rejection", drafts, parents, point=False, replacement=False)
    emitted = emitted_law(world, drafts, parents, outcomes, 2)
    assert (emitted - target_law(world, 2)).abs().max().item() > 1e-3


def test_impossible_and_vanishing_laws() -> None:
    """q = 0 rejects, p = q leaves no residual and falls back to p, differences of 1e-13 survive."""
    p = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log()
    token = torch.tensor([0])
    q = torch.tensor([[0.0, 0.5, 0.5]], dtype=torch.float64).log()
    assert rejection.accept_rate(p, q, token).item() == 0.0
    assert rejection.accept_rate(p, q, token + 2).item() == 0.0
    assert torch.equal(rejection.residual(p, p).exp(), p.exp())
    nearly = torch.tensor([[0.5 - 1e-13, 0.5 + 1e-13, 0.0]], dtype=torch.float64).log()
    assert rejection.residual(p, nearly)[0].exp().tolist() == [1.0, 0.0, 0.0]
    assert rejection.without(torch.tensor([[0.0, -math.inf]]), torch.tensor([0])).isneginf().all()
