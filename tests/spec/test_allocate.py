"""`allocate` against brute force over all cuts, and its bounds."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.spec.allocate import MIN_GAIN, MIN_SCORE, Candidate, allocate, plain_seconds, subtree
from tests.spec.simulator import LineCost

RATES = st.lists(st.floats(0.05, 0.99), min_size=0, max_size=4)


class JaggedCost(LineCost):
    """Steps at some row counts, as kernels with tiles have."""

    def base(self, rows: int, batch: int) -> float:
        return 1.0 + 0.4 * (rows > 3) + 0.7 * (rows > 6) + 0.01 * rows


def chains(rates: list[list[float]]) -> list[list[float]]:
    return [list(itertools.accumulate([1.0, *r], lambda a, b: a * b)) for r in rates]


@settings(max_examples=300, deadline=None)
@given(st.lists(RATES, min_size=1, max_size=3))
def test_best_cut_equals_brute_force_on_chains(rates):
    scores, cost = chains(rates), JaggedCost()
    chosen = allocate([Candidate(s, 0, 1e9) for s in scores], cost)
    batch = len(scores)

    def rate(lengths: tuple[int, ...]) -> float:
        expected = batch + sum(sum(s[1 : n + 1]) for s, n in zip(scores, lengths, strict=True))
        return expected / cost.base(batch + sum(lengths), batch)

    usable = [[n for n in range(len(s)) if n == 0 or s[n] >= MIN_SCORE] for s in scores]
    best = max(rate(lengths) for lengths in itertools.product(*usable))
    got = rate(tuple(len(k) - 1 for k in chosen.kept))
    assert got >= best / MIN_GAIN - 1e-12
    assert all(k == list(range(len(k))) for k in chosen.kept)


def test_nothing_is_kept_where_rows_cost_more_than_tokens():
    chosen = allocate([Candidate([1.0, 0.9, 0.8], 10, 1e9)] * 4, LineCost(first=1.0, per_row=1.0))
    assert chosen.kept == [[0]] * 4 and chosen.extra == [0.0] * 4


def test_headroom_bounds_each_sequence_alone():
    cost = LineCost(first=1.0, per_row=0.1)
    chosen = allocate([Candidate([1.0] * 9, 0, 0.25), Candidate([1.0] * 9, 0, 1e9), Candidate([1.0] * 9, 0, 0.0)], cost)
    assert [len(k) - 1 for k in chosen.kept] == [2, 8, 0]
    assert chosen.extra[0] <= 0.25


def test_long_contexts_make_nodes_dear():
    cost = LineCost(first=1.0, per_row=0.05, per_key=1e-3)
    near, far = Candidate([1.0, 0.5, 0.4], 10, 1e9), Candidate([1.0, 0.5, 0.4], 4000, 1e9)
    assert allocate([near], cost).kept == [[0, 1, 2]]
    assert allocate([far], cost).kept == [[0]]
    assert plain_seconds([10, 4000], cost) > plain_seconds([10, 10], cost)


def test_unlikely_nodes_are_dropped_even_if_free():
    chosen = allocate([Candidate([1.0, 0.5, 0.02], 0, 1e9)], LineCost(first=1.0, per_row=0.0))
    assert chosen.kept == [[0, 1]]


def test_prefill_rows_make_drafts_cheap():
    class Flat(LineCost):
        def base(self, rows: int, batch: int) -> float:
            return max(rows, 32) / 32

    one = [Candidate([1.0, 0.3], 0, 1e9)]
    assert allocate(one, Flat()).kept == [[0, 1]]
    assert allocate(one, Flat(), other_rows=31).kept == [[0, 1]]
    assert allocate(one, Flat(), other_rows=31).extra[0] > 0.0


def test_subtree_renumbers_and_keeps_order():
    assert subtree([5, 6, 7, 8, 9], [-1, 0, 1, 0, 3], [1.0, 0.9, 0.2, 0.8, 0.7], [0, 1, 3, 4]) == (
        [5, 6, 8, 9],
        [-1, 0, 0, 2],
        [1.0, 0.9, 0.8, 0.7],
    )
