"""Cases of `tree_walk`: it reads trees and sampling state, so they are built here and not in `specdec.kernels.cases`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from specdec.config import SamplingParams
from specdec.kernels.cases import Case
from specdec.kernels.inputs import chain, random_tree, star
from specdec.rows import RowInfo
from specdec.sampling import SamplingState
from specdec.sequence import Sequence
from specdec.spec.tree import HostTree, tree_from_lists

SLOTS, VOCAB = 6, 5


def state(rng: random.Random) -> SamplingState:
    """Sequences near their limits, with end tokens and least lengths."""
    sampling = SamplingState(SLOTS, VOCAB)
    for slot in range(SLOTS):
        params = SamplingParams(temperature=0, min_tokens=rng.choice([0, 0, 4]))
        tokens = [1] * rng.randint(2, 4)
        ends = frozenset(rng.sample(range(VOCAB), rng.choice([0, 1, 3])))
        sampling.add(Sequence("r", tokens, 2, params, slot * 77, len(tokens) + rng.choice([1, 2, 5, 90]), end_ids=ends, request_slot=slot))
    return sampling


def tree(parents: list[int], rng: random.Random) -> HostTree:
    """Tokens such that siblings differ."""
    tokens, used = [0], set()
    for parent in parents[1:]:
        token = next(t for t in [rng.randrange(VOCAB), *range(99)] if (parent, t) not in used)
        used.add((parent, token))
        tokens.append(token)
    return tokens, parents, None


RATES = torch.tensor([1.0, 0.9, 0.7, 0.8, 0.5], dtype=torch.float64)


def case(
    name: str, shapes: list[list[int]], rng: random.Random, *, follow: float, given: bool = False, forced: tuple[Any, ...] = ()
) -> Case:
    """follow: how often a node's first child drafts what follows it. given: which nodes agree is an argument. forced: the rates at which
    they do, and a purpose."""
    trees = [tree(shape, rng) for shape in shapes]
    rows = RowInfo(tree_from_lists(trees), rng.sample(range(SLOTS), len(trees)), torch.device("cpu"))
    following, agrees = [], []
    for tokens, parents, _ in trees:
        chosen = [
            next((c for c in range(n + 1, len(parents)) if parents[c] == n and rng.random() < follow), 0) for n in range(len(parents))
        ]
        following += [tokens[c] if c else rng.randrange(VOCAB) for c in chosen]
        agrees += [n == 0 or chosen[parents[n]] == n for n in range(len(parents))]
    mask = torch.tensor(agrees, dtype=torch.bool) if given else None
    return Case(name, (torch.tensor(following, dtype=torch.int64), mask, rows, state(rng), *forced))


def walk_cases() -> Iterator[Case]:
    """Roots alone, the 64-deep chain, the 63-leaf star, random trees side by side; nothing, some and everything agreeing."""
    rng = random.Random(0)
    deep, wide = chain(64), star(64)
    for given in (False, True):
        for follow in (0.0, 0.5, 0.9, 1.0):
            for i in range(6):
                shapes = [random_tree(rng.randint(1, 40), i + b) for b in range(rng.randint(1, 4))]
                yield case(f"random trees {i}, {follow}, {given}", [*shapes, [-1]], rng, follow=follow, given=given)
            yield case(f"chain {follow}, {given}", [deep], rng, follow=follow, given=given)
            yield case(f"star {follow}, {given}", [[-1], wide], rng, follow=follow, given=given)
    for i in range(8):
        shapes = [random_tree(rng.randint(1, 40), i + b) for b in range(rng.randint(1, 4))]
        yield case(f"forced {i}", [*shapes, [-1]], rng, follow=0.5, forced=(RATES, 4))
    for name, parents in (("chain", deep), ("star", wide)):
        yield case(f"forced {name}", [parents, [-1]], rng, follow=0.5, forced=(RATES.sqrt(), 4))
    yield case("forced roots", [[-1]] * SLOTS, rng, follow=0.5, forced=(RATES, 4))
    yield case("roots", [[-1]] * SLOTS, rng, follow=0.0)
    yield case("one root", [[-1]], rng, follow=0.0)
