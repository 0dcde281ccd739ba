"""`tree_build` and the host: the same trees as `rerank`, `ancestor_words` and `RowInfo.path_tokens`, from the same candidates."""

from __future__ import annotations

import pytest
import torch

from specdec import ops
from specdec.kernels.inputs import grown_pool
from specdec.rows import RowInfo
from specdec.spec.growth import Layer, rerank
from specdec.spec.tree import ancestor_words, check_tree, tree_from_lists
from tests.kernels.device import at_home
from tests.kernels.matrix import names

BACKENDS = names("tree_build")


def _layers(pool: tuple[torch.Tensor, ...], depth: int, width: int, beam: int) -> list[Layer]:
    """The pool as `growth` holds it: per depth, parents counted within the depth before."""
    layers, start, before = [], 0, 0
    for d in range(depth):
        size = width if d == 0 else width * min(beam, before)
        tokens, parents, scores = (part[:, start : start + size] for part in pool)
        above = torch.zeros_like(parents) if d == 0 else parents - (start - before)
        layers.append(Layer(list(range(len(tokens))), tokens, above, scores, torch.zeros_like(tokens)))
        start, before = start + size, size
    return layers


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("depth", "width", "beam"), [(1, 5, 1), (3, 4, 4), (6, 8, 6), (8, 10, 10), (12, 1, 1)])
def test_the_tree_is_the_hosts(backend: str, depth: int, width: int, beam: int) -> None:
    batch, nodes, roots = 5, [64, 1, 12, 33, 2], [3, 1, 4, 1, 5]
    pool = grown_pool(batch, depth, width, beam, seed=depth)
    drafts = rerank(_layers(pool, depth, width, beam), roots, nodes)
    tree = tree_from_lists([(d.tokens, d.parents, d.scores) for d in drafts])
    built = at_home(ops.TABLE.ops["tree_build"].find(backend), *pool, torch.tensor(roots), torch.tensor(nodes), 64, depth)
    n = tree.tokens.shape[1]
    assert torch.equal(built.num_nodes, tree.num_nodes)
    inside = torch.arange(n) < tree.num_nodes[:, None]
    columns = (built.tokens, tree.tokens, -1), (built.parents, tree.parents, 0), (built.depth, tree.depth, 1)
    for own, hosts, filler in (*columns, (built.words, ancestor_words(tree), 1), (built.score, tree.score, 0)):
        assert torch.equal(own[:, :n], torch.where(inside, hosts, filler)) and (own[:, n:] == filler).all()
    rows = RowInfo(tree, list(range(batch)), torch.device("cpu"))
    flat = built.paths[rows.seq, rows.node]
    assert torch.equal(flat[:, : rows.max_depth], rows.path_tokens) and (flat[:, rows.max_depth :] == -1).all()
    check_tree(tree, vocab_size=200)
    draws = built.places[:, 1:]
    assert torch.equal(torch.where(draws > 0, pool[0].gather(1, draws.clamp(min=0)), 0), torch.where(draws > 0, built.tokens[:, 1:], 0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_worked_example_of_eagle_2(backend: str) -> None:
    """Width 2, one expansion, four nodes (log-probabilities -0.1, -2.5; -0.3, -1.5; -0.2, -3): root, A, A1, A2."""
    scores = torch.tensor([[-0.1, -2.5, -0.4, -1.6, -2.7, -5.5]]).exp()
    parents = torch.tensor([[-1, -1, 0, 0, 1, 1]])
    pool = torch.arange(10, 16)[None], parents, scores
    built = at_home(ops.TABLE.ops["tree_build"].find(backend), *pool, torch.tensor([9]), torch.tensor([4]), 4, 2)
    assert built.tokens.tolist() == [[9, 10, 12, 13]] and built.parents.tolist() == [[-1, 0, 1, 1]]
    assert built.depth.tolist() == [[0, 1, 2, 2]] and built.words.tolist() == [[0b0001, 0b0011, 0b0111, 0b1011]]
    assert built.paths.tolist() == [[[-1, -1], [10, -1], [10, 12], [10, 13]]] and built.places.tolist() == [[-1, 0, 2, 3]]
