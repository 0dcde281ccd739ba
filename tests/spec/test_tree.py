"""Draft trees: words, builders, merge, trim, and what `check_tree` refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import SpecdecError
from specdec.spec.tree import HostTree, ancestor_words, chain, check_tree, host_words, merge, root_only, tree_from_lists, trim
from specdec.types import DraftTree
from tests.spec.trees import host_trees, long_tensor, path_to

VOCAB = 9


def _bits(word: int) -> list[int]:
    return [i for i in range(64) if (word >> i) & 1]


@settings(max_examples=60, deadline=None)
@given(st.lists(host_trees(vocab=VOCAB, max_nodes=20), min_size=1, max_size=4))
def test_words_name_exactly_the_path(trees: list[HostTree]) -> None:
    tree = tree_from_lists(trees)
    check_tree(tree, vocab_size=VOCAB)
    words = ancestor_words(tree)
    for b, (tokens, parents, _) in enumerate(trees):
        assert tree.num_nodes[b] == len(tokens)
        for i in range(tree.tokens.shape[1]):
            expected = path_to(list(parents), i) if i < len(tokens) else []
            assert _bits(int(words[b, i])) == expected
            assert int(tree.depth[b, i]) == max(len(expected) - 1, 0)


def test_words_of_the_64_deep_chain_and_the_63_leaf_star() -> None:
    deep = chain([1], [list(range(63))])
    star = tree_from_lists([([1, *range(63)], [-1] + [0] * 63, None)])
    for i in range(64):
        assert _bits(int(ancestor_words(deep)[0, i])) == list(range(i + 1))
        assert _bits(int(ancestor_words(star)[0, i])) == ([0] if i == 0 else [0, i])
    for tree in (deep, star):
        assert host_words(tree.parents[0].tolist()) == ancestor_words(tree)[0].tolist()
    assert int(ancestor_words(deep)[0, 63]) == -1
    assert int(ancestor_words(star)[0, 63]) == -(2**63) + 1


def test_root_only_and_chain() -> None:
    roots = root_only([4, 5])
    assert roots.tokens.tolist() == [[4], [5]] and roots.parents.tolist() == [[-1], [-1]] and roots.num_nodes.tolist() == [1, 1]
    tree = chain([4, 5], [[7, 8], []], [[0.5, 0.25], []], ["a", None])
    assert tree.tokens.tolist() == [[4, 7, 8], [5, 0, 0]]
    assert tree.parents.tolist() == [[-1, 0, 1], [-1, 0, 0]]
    assert tree.score is not None and tree.score.tolist() == [[1.0, 0.5, 0.25], [1.0, 0.0, 0.0]]
    assert root_only([]).tokens.shape == (0, 1)
    check_tree(tree, vocab_size=VOCAB)


def test_merge_puts_every_tree_in_its_place() -> None:
    drafts = chain([1, 2], [[3, 4], [5]], [[0.9, 0.8], [0.7]], ["x", "x"])
    merged = merge([root_only([6, 7]), drafts], [[0, 3], [2, 1]])
    assert merged.tokens.tolist() == [[6, 0, 0], [2, 5, 0], [1, 3, 4], [7, 0, 0]]
    assert merged.parents.tolist() == [[-1, 0, 0], [-1, 0, 0], [-1, 0, 1], [-1, 0, 0]]
    assert merged.num_nodes.tolist() == [1, 2, 3, 1]
    assert merged.drafters == (None, "x", "x", None)
    assert merged.score is not None and merged.score[:, 0].tolist() == [1.0] * 4
    check_tree(merged, vocab_size=VOCAB)
    assert merge([root_only([]), drafts], [[], [0, 1]]) is drafts


def test_merge_marks_point_masses_beside_a_law() -> None:
    law = replace(chain([1], [[3]]), log_q=torch.zeros(1, 2, VOCAB))
    merged = merge([law, chain([2], [[4, 5]])], [[1], [0]])
    assert merged.log_q is not None
    assert torch.isneginf(merged.log_q[0]).all() and (merged.log_q[1, :2] == 0).all()


@settings(max_examples=40, deadline=None)
@given(host_trees(vocab=VOCAB), st.integers(1, 12))
def test_trim_keeps_a_prefix(host: HostTree, nodes: int) -> None:
    tree = trim(tree_from_lists([host], ["x"]), long_tensor([nodes]))
    kept = min(nodes, len(host[0]))
    check_tree(tree, vocab_size=VOCAB)
    assert tree.tokens.tolist() == [list(host[0][:kept])]
    assert tree.drafters == (("x",) if kept > 1 else (None,))


def _broken(**changes: torch.Tensor) -> DraftTree:
    return replace(tree_from_lists([([1, 2, 3], [-1, 0, 0], None)]), **changes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", [[1, 2, VOCAB]]),
        ("tokens", [[1, 2, 2]]),
        ("parents", [[-1, 0, 2]]),
        ("parents", [[0, 0, 0]]),
        ("depth", [[0, 1, 2]]),
        ("num_nodes", [0]),
        ("num_nodes", [2]),
    ],
)
def test_check_tree_names_the_broken_field(field: str, value: list) -> None:
    with pytest.raises(SpecdecError) as caught:
        check_tree(_broken(**{field: torch.tensor(value)}), vocab_size=VOCAB)
    assert caught.value.param == (field if field != "depth" else "parents")
