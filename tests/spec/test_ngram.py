"""The n-gram drafter and its index, against brute force over the whole text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import ConfigError
from specdec.spec.index import SEPARATOR, TokenIndex, spread_levels
from specdec.spec.ngram import NgramDrafter
from tests.spec.drafting import context, decode, lists, paths, sequence, share

SMALL = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def brute_longest(tokens: list[int], low: int, high: int) -> tuple[int, int] | None:
    """(length, end) of the longest earlier occurrence of the newest tokens, capped at `high`; the newest among equals."""
    best = None
    for end in range(len(tokens) - 1):
        length = 0
        while length < high and length <= end and tokens[end - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length >= low and (best is None or length >= best[0]):
            best = (length, end)
    return best


def brute_draft(tokens: list[int], low: int, high: int, depth: int) -> list[int]:
    found = brute_longest(tokens, low, high)
    if found is None:
        return []
    text = list(tokens)
    for i in range(depth):
        text.append(text[found[1] + 1 + i])
    return text[len(tokens) :]


@settings(max_examples=300, deadline=None)
@given(SMALL, st.integers(1, 3), st.integers(0, 4), st.integers(1, 9))
def test_chain_equals_brute_force(tokens, low, extra, depth):
    """Longest match first, newest among equals, never the suffix itself, cyclic continuation."""
    drafter = NgramDrafter(context(ngram_min=low, ngram_max=low + extra))
    tree = drafter.propose((share(sequence(tokens), nodes=64, depth=depth),), None)
    assert lists(tree)[0] == [tokens[-1], *brute_draft(tokens, low, low + extra, depth)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=400), st.lists(st.integers(1, 200), max_size=6))
def test_index_is_the_same_however_it_grew(tokens, cuts):
    """Bulk and single insertions build the same chains; levels too long for the text find nothing."""
    levels = (1, 2, 5, 9)
    step, one = TokenIndex(levels, tokens, keep_first=True), TokenIndex(levels, tokens, keep_first=True)
    end = 0
    for cut in [*cuts, len(tokens)]:
        end = min(len(tokens), end + cut)
        step.update(end)
    step.update(len(tokens))
    for i in range(len(tokens) + 1):
        one.update(i)
    assert step._newest == one._newest
    assert step._previous == one._previous
    assert step._oldest == one._oldest


@settings(max_examples=100, deadline=None)
@given(SMALL)
def test_matches_are_real_and_not_the_suffix(tokens):
    """Every match reports its true length, is an earlier end, and none of the wanted level is missed."""
    index = TokenIndex((2, 4), tokens)
    index.update(len(tokens) - 1)
    found = index.matches(tokens, limit=1000, longest=8)
    ends = {end for _, end in found}
    for length, end in found:
        assert end < len(tokens) - 1
        assert tokens[end + 1 - length : end + 1] == tokens[len(tokens) - length :]
    wanted = {e for e in range(1, len(tokens) - 1) if tokens[e - 1 : e + 1] == tokens[-2:]}
    assert ends == wanted


def test_spread_levels_cover_both_ends():
    assert spread_levels(2, 5) == (2, 3, 4, 5)
    assert spread_levels(3, 3) == (3,)
    wide = spread_levels(1, 64)
    assert wide[0] == 1 and wide[-1] == 64 and len(wide) <= 6 and list(wide) == sorted(set(wide))


def test_no_match_is_the_root_alone():
    drafter = NgramDrafter(context())
    tree = drafter.propose((share(sequence([1, 2, 3, 4])), share(sequence([1, 2, 9, 1, 2]))), None)
    assert tree.num_nodes.tolist()[0] == 1
    assert lists(tree, 1)[0][:3] == [2, 9, 1]


def test_tree_holds_distinct_continuations_best_path_first():
    text = [1, 2, 10, 11, 1, 2, 20, 21, 1, 2, 30, 31, 1, 2]
    tree = NgramDrafter(context()).propose((share(sequence(text), nodes=12, depth=2, width=3),), None)
    assert paths(tree) == {(30, 31), (20, 21), (10, 11)}
    assert lists(tree)[0][1:3] == [30, 31]
    tokens, parents = lists(tree)
    assert all(p < i for i, p in enumerate(parents))
    assert len({(p, t) for p, t in zip(parents, tokens, strict=True)}) == len(tokens)


@pytest.mark.parametrize(("nodes", "depth", "width"), [(2, 1, 1), (5, 9, 1), (7, 3, 2), (64, 63, 4)])
def test_budget_is_never_exceeded(nodes, depth, width):
    rng = random.Random(1)
    drafter = NgramDrafter(context(ngram_min=1))
    for _ in range(50):
        seq = sequence([rng.randrange(4) for _ in range(60)])
        tree = drafter.propose((share(seq, nodes, depth, width),), None)
        tokens, parents = lists(tree)
        assert len(tokens) <= nodes
        assert int(tree.depth[0].max()) <= depth
        assert max(parents.count(i) for i in range(len(tokens))) <= width


def test_draft_stays_inside_the_remaining_tokens():
    seq = sequence([1, 2, 3, 1, 2, 3, 1, 2], max_total=11)
    tree = NgramDrafter(context()).propose((share(seq),), None)
    assert lists(tree)[0][1:] == [3, 1]  # three tokens remain, the last one is never drafted


def test_draft_ends_with_an_end_token():
    seq = sequence([1, 2, 3, 50, 4, 1, 2], end_ids=[50])
    assert lists(NgramDrafter(context()).propose((share(seq),), None))[0] == [2, 3, 50]


def test_ids_outside_the_vocabulary_are_not_drafted():
    seq = sequence([1, 2, 3, 900, 4, 1, 2])
    assert lists(NgramDrafter(context(vocab_size=500)).propose((share(seq),), None))[0] == [2, 3]


def test_oldest_first_takes_the_first_occurrence():
    text = [1, 2, 10, 1, 2, 20, 1, 2, 30, 1, 2]
    tree = NgramDrafter(context(), oldest_first=True).propose((share(sequence(text), depth=1),), None)
    assert lists(tree)[0] == [2, 10]


def test_prediction_is_a_source_and_comes_first():
    prediction = tuple(range(100, 120))
    drafter = NgramDrafter(context())
    seq = sequence([1, 2, 3], prediction=prediction)
    tree = drafter.propose((share(seq, depth=4),), None)
    assert lists(tree)[0][1:] == [100, 101, 102, 103]
    assert decode(drafter, seq, [*range(100, 108), 500, *range(110, 120)])[0] == 8


def test_corpus_is_a_source(tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_text("abcdefgh")
    drafter = NgramDrafter(context(corpus=str(file), tokenize=lambda text: [ord(c) for c in text]))
    tree = drafter.propose((share(sequence([5, ord("c"), ord("d")]), depth=3),), None)
    assert lists(tree)[0][1:] == [ord(c) for c in "efg"]


def test_corpus_errors_name_the_field(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read") as err:
        NgramDrafter(context(corpus=str(tmp_path / "missing"), tokenize=lambda _: []))
    assert err.value.param == "corpus"
    with pytest.raises(ConfigError, match="tokenizer"):
        NgramDrafter(context(corpus="x"))


def test_separator_ends_a_continuation():
    index = TokenIndex((2,))
    index.extend([1, 2, 3])
    index.extend([1, 2, 4, 5], separate=True)
    assert index.tokens[3] == SEPARATOR
    assert [index.continuation(p, 5, cyclic=False) for _, p in index.matches([9, 1, 2], 8, 8)] == [[4, 5], [3]]


def test_scores_learn_from_verdicts():
    """After many rejected first tokens the drafter claims little; after many accepted ones, much."""
    rng = random.Random(0)
    low, high = NgramDrafter(context(ngram_min=1)), NgramDrafter(context(ngram_min=1))
    noise = [rng.randrange(8) for _ in range(600)]
    decode(low, sequence(noise[:50]), noise[50:])
    period = [3, 1, 4, 1, 5, 9, 2, 6] * 60
    decode(high, sequence(period[:50]), period[50:])
    probe = share(sequence([7, 7, 2, 2, 7, 7]), depth=1)
    assert low.propose((probe,), None).score[0, 1] < 0.5
    periodic = share(sequence(period), depth=1)
    assert high.propose((periodic,), None).score[0, 1] > 0.97


def test_copying_is_drafted_in_long_runs():
    rng = random.Random(3)
    text = [rng.randrange(900) for _ in range(300)]
    drafter = NgramDrafter(context())
    steps = decode(drafter, sequence([*text, 5, 6], text[:3]), text[3:], nodes=32, depth=31)
    assert len(steps) <= 12


def test_reset_forgets_and_rebuilds():
    drafter = NgramDrafter(context())
    seq = sequence([1, 2, 3, 1, 2])
    first = lists(drafter.propose((share(seq),), None))
    drafter.reset(seq)
    assert not drafter._states
    assert lists(drafter.propose((share(seq),), None)) == first
