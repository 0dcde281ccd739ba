"""Budgets: what can be committed at all, and fair shares of rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdec.budget import clip, fair_cap
from specdec.types import NO_DRAFT, SpecBudget
from tests.engine.fake_engine import sequence


@given(st.lists(st.integers(0, 63), max_size=8), st.integers(0, 200))
def test_fair_cap_is_the_largest_that_fits(wants: list[int], total: int) -> None:
    cap = fair_cap(wants, total)
    assert sum(min(w, cap) for w in wants) <= total
    assert cap >= max(wants, default=0) or sum(min(w, cap + 1) for w in wants) > total


@given(st.integers(1, 100), st.integers(0, 100), st.integers(0, 100), st.integers(1, 64), st.integers(1, 30), st.integers(1, 30))
def test_clipped_budget_can_be_committed(n: int, depth: int, width: int, prompt: int, new: int, room: int) -> None:
    seq = sequence([0] * prompt, new)
    limit = prompt + room
    budget = clip(SpecBudget("fake", n, depth, width), seq, limit)
    if budget is NO_DRAFT:
        return
    assert 2 <= budget.nodes <= min(n, 64) and 1 <= budget.depth <= min(depth, budget.nodes - 1, seq.remaining - 1)
    assert prompt - 1 + budget.depth < limit
    assert width != 1 or budget.nodes <= budget.depth + 1


def test_no_draft_without_a_drafter_or_room() -> None:
    seq = sequence([0, 1], 1)
    assert clip(SpecBudget("fake", 8, 4, 2), seq, 64) is NO_DRAFT, "one token left: a draft could never be committed"
    assert clip(SpecBudget(None, 8, 4, 2), sequence([0], 9), 64) is NO_DRAFT
