"""The compiled lookup and its reference draft the same trees, and their indexes find the same matches."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import ops
from specdec.spec.index import TokenIndex
from specdec.spec.lookup import LookupDrafter, extension
from specdec.spec.ngram import NgramDrafter
from specdec.spec.suffix import SuffixDrafter
from specdec.types import DraftTree, StepPlan
from tests.spec.drafting import NO_FORWARD, context, judge, sequence, share

BACKENDS = (False, True) if ops.compiled() else (False, False)  # without the extension the reference stands alone
FACTORIES: dict[str, Callable[[bool, dict], LookupDrafter]] = {
    "ngram": lambda compiled, fields: NgramDrafter(context(**fields), compiled=compiled),
    "oldest": lambda compiled, fields: NgramDrafter(context(**fields), oldest_first=True, compiled=compiled),
    "suffix": lambda compiled, fields: SuffixDrafter(context(**fields), memory_tokens=60, compiled=compiled),
}


def facts(tree: DraftTree) -> tuple:
    assert tree.score is not None
    return tree.tokens.tolist(), tree.parents.tolist(), tree.depth.tolist(), tree.score.tolist(), tree.drafters


@st.composite
def streams(draw: st.DrawFn) -> list[int]:
    """Random, repetitive, or copied in pieces: what the drafters live on."""
    alphabet = draw(st.integers(1, 6))
    pieces = draw(st.lists(st.lists(st.integers(0, alphabet), min_size=1, max_size=12), min_size=1, max_size=5))
    order = draw(st.lists(st.integers(0, len(pieces) - 1), min_size=1, max_size=14))
    return [token for i in order for token in pieces[i]]


@pytest.mark.parametrize("name", FACTORIES)
@settings(max_examples=120, deadline=None)
@given(data=st.data(), prompt=streams(), future=streams(), prediction=st.one_of(st.just([]), streams()))
def test_same_trees_through_a_whole_life(name, data, prompt, future, prediction):
    """Two sequences with a common prompt (a fork) run in turns, with varying budgets, end tokens, resets and learning."""
    low = data.draw(st.integers(1, 3))
    fields = {"ngram_min": low, "ngram_max": low + data.draw(st.sampled_from([0, 2, 40])), "vocab_size": data.draw(st.integers(3, 9))}
    drafters = [FACTORIES[name](compiled, fields) for compiled in BACKENDS]
    ends = data.draw(st.lists(st.integers(0, 7), max_size=2))
    total = len(prompt) + len(future) + data.draw(st.integers(0, 3))
    forks = [sequence(prompt, max_total=total, end_ids=ends, prediction=tuple(prediction)) for _ in range(2)]
    futures = [future, future[len(future) // 2 :] + future[: len(future) // 2]]
    done = [0, 0]
    for turn in range(8):
        nodes, width = data.draw(st.integers(2, 40)), data.draw(st.integers(1, 4))
        live = [i for i in range(2) if done[i] < len(futures[i])]
        if not live:
            break
        shares = tuple(share(forks[i], nodes, data.draw(st.integers(1, 40)), width, name) for i in live)
        outlooks = [[drafter.outlook(forks[i]) for i in live] for drafter in drafters]
        assert outlooks[0] == outlooks[1]
        trees = [drafter.propose(shares, None) for drafter in drafters]
        assert facts(trees[0]) == facts(trees[1])
        assert all(outlook > 0 or count == 1 for outlook, count in zip(outlooks[0], trees[0].num_nodes.tolist(), strict=True))
        verdict = judge(trees[0], [futures[i][done[i] :] for i in live])
        for i, count in zip(live, verdict.num_accepted.tolist(), strict=True):
            new = futures[i][done[i] : done[i] + count + 1]
            forks[i].append(new, count)
            done[i] += len(new)
        for drafter, tree in zip(drafters, trees, strict=True):
            drafter.observe(StepPlan(shares), tree, NO_FORWARD, verdict)
        assert drafters[0].calibration.rates == drafters[1].calibration.rates
        if turn % 3 == 2:
            forks[0].finish_reason = "stop"  # into the memory of past outputs, and back as a sequence without an index
            for drafter in drafters:
                drafter.reset(forks[0])


@pytest.mark.parametrize("name", FACTORIES)
def test_same_trees_over_corpus_and_long_text(name, tmp_path):
    """Long enough for bulk indexing, table growth and chains longer than the bound on links."""
    rng = random.Random(5)
    text = [rng.randrange(40) for _ in range(3000)] + [rng.randrange(2) for _ in range(3000)]
    file = tmp_path / "corpus.txt"
    file.write_text("".join(chr(65 + t) for t in text[:2000]))
    fields = {"corpus": str(file), "tokenize": lambda words: [ord(c) - 65 for c in words]}
    drafters = [FACTORIES[name](compiled, fields) for compiled in BACKENDS]
    for cut in (10, 700, 2500, 2501, 3100, 4000, 6000):
        seq = sequence(text[:cut] + text[cut // 2 : cut // 2 + 9], max_total=1 << 16)
        trees = [drafter.propose((share(seq, 64, 63, 4, name),), None) for drafter in drafters]
        assert facts(trees[0]) == facts(trees[1])
        assert int(trees[0].num_nodes[0]) > 1


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=5),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.integers(1, 9),
    st.booleans(),
)
def test_same_matches_in_an_index_of_several_texts(texts, probe, limit, oldest_first):
    kinds = [lambda levels: TokenIndex(levels, keep_first=True), extension().TokenIndex if ops.compiled() else TokenIndex]
    found = []
    for make in kinds:
        index = make((1, 2, 5, 9))
        for text in texts:
            index.extend(text, separate=True)
        hits = index.matches(probe, limit, 8, oldest_first=oldest_first and ops.compiled())
        follow = [index.continuation(position, 6, cyclic=cyclic) for _, position in hits for cyclic in (False, True)]
        found.append((list(index.tokens), len(index), [tuple(hit) for hit in hits], follow))
    assert found[0] == found[1]


def test_the_compiled_index_refuses_what_it_cannot_do():
    if not ops.compiled():
        assert BACKENDS == (False, False)
        return
    index = extension().TokenIndex((2,), [1, 2])
    with pytest.raises(IndexError, match="beyond"):
        index.update(3)
    drafter, query = NgramDrafter(context()), (3, 4, 1, (), ())
    assert drafter._compiled is not None
    with pytest.raises(ValueError, match="text of the sequence"):
        drafter._compiled([], query, drafter.calibration.rates)
    with pytest.raises(ValueError, match="rates"):
        drafter._compiled([index], query, drafter.calibration.rates[:5])
