"""What every drafter promises, and the test drafters ORACLE, WRONG, MIX."""

from __future__ import annotations

import pytest

from specdec.config import TEST_METHODS
from specdec.errors import ConfigError
from specdec.spec.proposer import Proposer, create_for, registered
from specdec.spec.testing import coin, oracle_from
from tests.spec.drafting import context, decode, lists, paths, sequence, share

FUTURE = [(7 * i + i * i) % 97 for i in range(40)]


def knows(seq):
    return FUTURE[seq.num_output :]


def drafter(name: str, **changes):
    return create_for(context(method=name, oracle=knows, **changes))[name]


@pytest.mark.parametrize("name", ["ngram", "suffix", *TEST_METHODS])
def test_is_a_proposer(name):
    made = drafter(name)
    assert isinstance(made, Proposer)
    assert made.name == name and name in registered()


def test_auto_is_the_portfolio_of_host_drafters_and_off_is_none():
    assert list(create_for(context(method="auto"))) == ["suffix", "ngram"]  # the usual best first
    assert create_for(context(method="off")) == {}


def test_oracle_is_always_right():
    assert decode(drafter("oracle"), sequence([1, 2, 3]), FUTURE, nodes=5, depth=4) == [4] * 8


def test_wrong_is_always_wrong():
    assert set(decode(drafter("wrong"), sequence([1, 2, 3]), FUTURE, nodes=5, depth=4)) == {0}
    tree = drafter("wrong", vocab_size=97).propose((share(sequence([1, 2]), depth=4),), None)
    assert lists(tree)[0][1:] == [(t + 1) % 97 for t in FUTURE[:4]]


def test_mix_is_deterministic_and_between():
    runs = [decode(drafter("mix", mix_p=0.7), sequence([1, 2, 3]), FUTURE, nodes=5, depth=4) for _ in range(2)]
    assert runs[0] == runs[1]
    assert 0 < sum(runs[0]) < 32
    tree = drafter("mix", mix_p=0.7).propose((share(sequence([1, 2, 3]), nodes=41, depth=38),), None)
    right = [t == f for t, f in zip(lists(tree)[0][1:], FUTURE, strict=False)]
    assert right == [coin(7, 3 + i) < 0.7 for i in range(len(right))]


def test_coin_is_uniform():
    values = [coin(s, p) for s in range(20) for p in range(200)]
    assert abs(sum(values) / len(values) - 0.5) < 0.02
    assert all(0 <= v < 1 for v in values)


@pytest.mark.parametrize("name", TEST_METHODS)
def test_tree_has_branches_times_depth(name):
    """TREE of the cases: three branches of depth 3; the drafter's own chain is one of them, at a changing place."""
    made = drafter(name)
    places = set()
    for extra in range(3):
        seq = sequence([1, 2], FUTURE[:extra])
        tree = made.propose((share(seq, nodes=10, depth=3, width=3),), None)
        tokens, parents = lists(tree)
        assert len(tokens) == 10 and [parents.count(0), max(tree.depth[0].tolist())] == [3, 3]
        assert len(paths(tree)) == 3
        if name == "oracle":
            places.add(next(i for i, p in enumerate(parents) if p == 0 and tokens[i] == FUTURE[extra]))
            assert tuple(FUTURE[extra : extra + 3]) in paths(tree)
    assert name != "oracle" or places == {1, 4, 7}


def test_oracle_sees_no_further_than_it_was_told():
    made = create_for(context(method="oracle", oracle=oracle_from({(1, 2): [5, 6]})))["oracle"]
    assert lists(made.propose((share(sequence([1, 2], [5])),), None))[0] == [5, 6]
    assert lists(made.propose((share(sequence([1, 2], [5, 6])),), None))[0] == [6]
    assert lists(made.propose((share(sequence([9])),), None))[0] == [9]


def test_test_drafters_need_an_oracle():
    with pytest.raises(ConfigError, match="oracle"):
        create_for(context(method="mix"))
