"""The suffix drafter: votes of all occurrences, draft length by match length, memory of past outputs."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.spec.index import SEPARATOR
from specdec.spec.suffix import LENGTH_BONUS, LENGTH_FACTOR, PastOutputs, SuffixDrafter
from specdec.spec.tree import check_tree
from tests.spec.drafting import context, decode, lists, paths, sequence, share


def draft(seq, nodes=16, depth=15, width=1, drafter=None):
    drafter = drafter or SuffixDrafter(context())
    return drafter.propose((share(seq, nodes, depth, width, "suffix"),), None)


def test_the_most_frequent_continuation_wins_over_the_newest():
    text = [1, 2, 10, 99, 1, 2, 10, 98, 1, 2, 10, 97, 1, 2, 20, 96, 1, 2]
    assert lists(draft(sequence(text), depth=1))[0][1:] == [10]


def test_tree_orders_branches_by_votes():
    text = [1, 2, 10, 3, 1, 2, 10, 4, 1, 2, 20, 5, 1, 2, 20, 6, 1, 2, 20, 7, 1, 2]
    tree = draft(sequence(text), depth=1, width=3)
    assert lists(tree)[0][1:] == [20, 10]
    assert tree.score[0, 1] > tree.score[0, 2]


def test_voters_that_disagree_leave():
    """After the branch on the first token only its own voters speak."""
    text = [1, 2, 10, 11, 12, 70, 1, 2, 20, 21, 22, 71, 1, 2, 10, 11, 12, 72, 1, 2]
    assert paths(draft(sequence(text), nodes=9, depth=3, width=2)) >= {(10, 11, 12)}
    assert lists(draft(sequence(text), nodes=9, depth=3))[0][1:] == [10, 11, 12]


def test_longer_matches_draft_longer():
    rng = random.Random(1)
    base = [rng.randrange(900) for _ in range(100)]
    short = draft(sequence([*base, 901, *base[10:12]]), nodes=64, depth=60)
    long = draft(sequence([*base, 901, *base[10:22]]), nodes=64, depth=60)
    assert int(short.num_nodes[0]) - 1 <= LENGTH_FACTOR * 2 + LENGTH_BONUS
    assert int(long.num_nodes[0]) - 1 == LENGTH_FACTOR * 12 + LENGTH_BONUS


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.integers(2, 20), st.integers(1, 4))
def test_trees_are_valid_and_follow_the_text(tokens, nodes, width):
    """Every drafted path, appended to the last two tokens, occurs in the text or runs on periodically."""
    tree = draft(sequence(tokens), nodes, nodes - 1, width)
    check_tree(tree, vocab_size=1000)
    assert int(tree.num_nodes[0]) <= nodes
    pairs = set(itertools.pairwise(tokens))
    for path in paths(tree):
        whole = [tokens[-1], *path]
        for pair in itertools.pairwise(whole):
            assert pair in pairs or pair == (tokens[-1], whole[1])  # cyclic continuation repeats drafted text


def test_scores_fall_along_paths_and_stay_above_the_floor():
    rng = random.Random(2)
    tree = draft(sequence([rng.randrange(5) for _ in range(300)]), nodes=32, depth=20, width=3)
    _, parents = lists(tree)
    score = tree.score[0].tolist()
    assert all(0.04 < score[i] <= score[p] for i, p in enumerate(parents) if i)


def test_past_outputs_help_a_new_sequence():
    rng = random.Random(4)
    answer = [rng.randrange(900) for _ in range(60)]
    drafter = SuffixDrafter(context())
    first = sequence([1, 2, 3])
    alone = decode(drafter, first, answer)
    first.finish_reason = "stop"
    drafter.reset(first)
    again = decode(drafter, sequence([7, 8, 9]), answer)
    assert len(again) < len(alone) / 3
    aborted = sequence([1, 2], answer)
    aborted.finish_reason = "abort"
    other = SuffixDrafter(context())
    draft(aborted, drafter=other)
    other.reset(aborted)
    assert other.past.indexes() == []


def test_memory_is_bounded_first_in_first_out():
    past = PastOutputs(SuffixDrafter(context()).new_index, capacity=100)
    for i in range(50):
        past.add([1000 + i] * 9)
        assert sum(len(index.tokens) for index in past.indexes()) <= 2 * 110
    kept = {t for index in past.indexes() for t in index.tokens} - {SEPARATOR}
    assert max(kept) == 1049 and min(kept) >= 1049 - 22


def test_end_tokens_and_vocabulary_bound_the_draft():
    text = [1, 2, 3, 50, 4, 1, 2]
    assert lists(draft(sequence(text, end_ids=[50])))[0][1:] == [3, 50]
    assert lists(draft(sequence(text), drafter=SuffixDrafter(context(vocab_size=50))))[0][1:] == [3]


def test_prediction_is_followed_from_the_first_token():
    prediction = tuple(range(200, 240))
    steps = decode(SuffixDrafter(context()), sequence([1, 2, 3], prediction=prediction), list(prediction), nodes=16, depth=15)
    assert len(steps) <= 4
