"""Random draft trees for tests, and the brute-force readings of them that the tensor code must match."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st

from specdec.spec.tree import HostTree
from specdec.types import DraftTree


@st.composite
def host_trees(draw: st.DrawFn, *, vocab: int, max_nodes: int = 12, root: int | None = None) -> HostTree:
    """A tree of random shape whose siblings are distinct: attach node i to any earlier node that has a free token."""
    tokens = [draw(st.integers(0, vocab - 1)) if root is None else root]
    parents = [-1]
    taken: set[tuple[int, int]] = set()
    for _ in range(draw(st.integers(0, max_nodes - 1))):
        parent = draw(st.integers(0, len(tokens) - 1))
        token = draw(st.integers(0, vocab - 1))
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return tokens, parents, None


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to `node`, both included."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def walk(tree: DraftTree, b: int, choose: Callable[[list[int]], int]) -> tuple[list[int], list[int]]:
    """The specification of coupled verification: choose a token, descend while a child drafts it.

    `choose(path tokens below the root)` is the target's token after that path. Returns (accepted nodes, all tokens).
    """
    tokens, parents = tree.tokens[b].tolist(), tree.parents[b].tolist()
    node, nodes, emitted = 0, [], []
    while True:
        emitted.append(choose([tokens[i] for i in nodes]))
        below = [i for i in range(1, int(tree.num_nodes[b])) if parents[i] == node and tokens[i] == emitted[-1]]
        if not below:
            return nodes, emitted
        node = below[0]
        nodes.append(node)


def long_tensor(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)
