"""The cost model: tables, interpolation, online correction, the cache."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.spec.cost import HOPE, PAIRS, ROW_COUNTS, CostModel, CostTable, between, machine_key, measure_costs


def linear(rows: int, context: int) -> float:
    return 7e-3 + 1e-3 * rows + 1e-7 * rows * context


def model() -> CostModel:
    return measure_costs(linear)


def test_reproduces_what_was_measured():
    cost = model()
    for rows, context in ((1, 64), (5, 300), (40, 1024), (64, 10)):
        assert cost.base(rows, 1) + cost.attention(rows, context) == pytest.approx(linear(rows, context), rel=1e-6)


def test_goes_on_beyond_the_table():
    cost = model()
    assert cost.base(200, 8) == pytest.approx(7e-3 + 0.2, rel=1e-3)
    assert cost.base(1000, 32) == pytest.approx(7e-3 + 1.0, rel=1e-3)


@given(st.lists(st.floats(1e-4, 1.0), min_size=7, max_size=7))
def test_more_rows_never_cost_less(seconds):
    table = CostTable(ROW_COUNTS, (64, 1024), seconds, {1: seconds[0], 16: seconds[4]})
    values = [between(table.rows, table.bases, rows) for rows in range(1, 300)]
    assert all(b >= a - 1e-12 for a, b in itertools.pairwise(values))


def test_what_is_learnt_at_one_width_carries_over():
    """Steps cost 2 ms more than the pass alone: first known where they ran, then where drafts run as well."""
    cost = model()
    for _ in range(30):
        cost.observe(1, 1, 0, 10e-3)
    assert cost.base(1, 1) == pytest.approx(10e-3, rel=0.01)
    assert 14e-3 < cost.base(8, 1) < 19e-3
    for _ in range(30):
        cost.observe(8, 1, 0, 17e-3)
        cost.observe(1, 1, 0, 10e-3)
    assert cost.base(8, 1) == pytest.approx(17e-3, rel=0.02)
    assert cost.base(1, 1) == pytest.approx(10e-3, rel=0.02)


def test_a_bucket_seen_in_a_slow_minute_is_not_dear_for_ever():
    cost = model()
    for i in range(40):  # three times slower; drafts run now and then
        cost.observe(1, 1, 0, 3 * 8e-3)
        if i % 8 == 0:
            cost.observe(2, 1, 0, 3 * 9e-3)
    for _ in range(40):  # fast again; only plain steps
        cost.observe(1, 1, 0, 8e-3)
    assert cost.base(1, 1) == pytest.approx(8e-3, rel=0.02)
    assert cost.base(2, 1) == pytest.approx(9e-3, rel=0.1)


def test_unvisited_row_counts_are_hoped_to_be_cheaper():
    """Both ways: wider than what ran, and plain decoding while only drafts ran. What ran is believed."""
    wide, narrow = model(), model()
    for _ in range(30):
        wide.observe(1, 1, 0, 8e-3)
        narrow.observe(8, 1, 0, 15e-3)
    assert wide.base(1, 1) == pytest.approx(8e-3) and narrow.base(8, 1) == pytest.approx(15e-3)
    assert wide.base(16, 1) < 0.9 * 23e-3
    assert narrow.base(1, 1) < 0.9 * 8e-3
    for rows in range(1, 64):
        assert wide.base(rows + 1, 1) >= wide.base(rows, 1) - 1e-12


def test_correction_is_per_bucket_and_robust():
    cost, dice = model(), random.Random(0)
    for i in range(150):
        stutter = 0.5 if i % 5 == 0 else 0.0
        cost.observe(1, 1, 0, 8e-3 + stutter + dice.gauss(0, 1e-4))
        cost.observe(8, 2, 0, 25e-3 + stutter + dice.gauss(0, 1e-4))
    assert cost.base(1, 1) == pytest.approx(8e-3, rel=0.05)
    assert cost.base(8, 2) == pytest.approx(25e-3, rel=0.05)
    assert cost.base(16, 2) > 25e-3


def test_stale_corrections_are_dropped():
    cost = model()
    for _ in range(30):
        cost.observe(8, 1, 0, 1.0)
        cost.observe(1, 1, 0, 8e-3)
    assert cost.base(8, 1) > 0.9
    for _ in range(CostModel.STALE + CostModel.WINDOW):
        cost.observe(1, 1, 0, 8e-3)
    assert cost.base(8, 1) < 15e-3


@pytest.mark.parametrize("factor", [0.03, 0.5, 4.0, 30.0])
def test_a_table_of_the_wrong_scale_is_rescaled(factor):
    """Measured on a busy machine, or with other kernels: the shape stays, the scale follows the steps."""
    cost = measure_costs(lambda rows, context: factor * linear(rows, context))
    for _ in range(30):
        cost.observe(1, 1, 200, linear(1, 200))
    assert cost.base(1, 1) + cost.attention(1, 200) == pytest.approx(linear(1, 200), rel=0.02)
    wide = cost.base(8, 1) + cost.attention(8, 200)
    assert (0.75 + HOPE / 4) * linear(8, 200) * 0.9 < wide < linear(8, 200) * 1.05


def test_bursts_and_drift_do_no_harm():
    """Every seventh timing ten times too slow, and a machine whose speed halves in the middle."""
    calls = itertools.count()

    def measure(rows: int, context: int) -> float:
        n = next(calls)
        return linear(rows, context) * (10 if n % 7 == 3 else 1) * (2 if n > 30 else 1)

    cost = measure_costs(measure)
    for rows in (2, 4, 8, 16, 32):
        assert cost.base(rows, 1) / cost.base(1, 1) == pytest.approx(linear(rows, 0) / linear(1, 0), rel=0.05)


def test_nonsense_observations_are_ignored():
    cost = model()
    before = cost.base(1, 1)
    for rows, batch, seconds in ((0, 0, 1.0), (1, 0, 1.0), (1, 1, 0.0), (1, 1, float("nan"))):
        cost.observe(rows, batch, 0, seconds)
    assert cost.base(1, 1) == before
    for _ in range(30):
        cost.observe(1, 1, 0, 1e-9)
    assert cost.base(1, 1) > 0


def test_table_is_kept_per_machine_and_key(tmp_path):
    calls = []

    def measure(rows: int, context: int) -> float:
        calls.append(rows)
        return linear(rows, context)

    first = measure_costs(measure, cache=tmp_path / "deep", key="a")
    count = len(calls)
    again = measure_costs(measure, cache=tmp_path / "deep", key="a")
    assert len(calls) == count + 1 + 4 * PAIRS and again.base(5, 1) == first.base(5, 1)  # a warm-up and two checks
    measure_costs(measure, cache=tmp_path / "deep", key="b")
    assert len(calls) == 2 * count + 1 + 4 * PAIRS
    assert "torch" in machine_key()


def test_a_table_from_a_busy_machine_is_not_kept(tmp_path, monkeypatch):
    """One that time cut short says nothing of its last rows, and one of unsteady timings little of any."""
    dice = random.Random(0)
    measure_costs(lambda rows, context: linear(rows, context) * dice.choice((1, 3, 3, 3)), cache=tmp_path, key="unsteady")
    clock = itertools.count()
    monkeypatch.setattr("specdec.spec.cost.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    measure_costs(linear, cache=tmp_path, key="slow")
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("rows", [2, 8])
def test_a_kept_table_must_hold_at_two_rows_and_at_eight(tmp_path, rows):
    measure_costs(linear, cache=tmp_path, key="a")

    def other(count: int, context: int) -> float:
        return (2 if count == rows else 1) * linear(count, context)

    assert measure_costs(other, cache=tmp_path, key="a").base(rows, 1) > 1.2 * measure_costs(linear).base(rows, 1)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"format": 99}', '{"format": 1, "rows": [1], "contexts": [0, 1], "seconds": [[-1, 2]]}']
)
def test_unreadable_tables_are_measured_anew(tmp_path, text):
    measure_costs(linear, cache=tmp_path, key="a")
    (file,) = tmp_path.glob("*.json")
    file.write_text(text)
    assert measure_costs(linear, cache=tmp_path, key="a").base(1, 1) == pytest.approx(8e-3)
    assert CostTable.from_json(file.read_text()).rows == ROW_COUNTS


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert measure_costs(linear, cache=blocked / "costs").base(1, 1) > 0


def test_small_models_measure_small():
    seen = []
    measure_costs(lambda rows, context: seen.append((rows, context)) or linear(rows, context), max_rows=5, max_context=3)
    assert {r for r, _ in seen} == {1, 2, 4} and {c for _, c in seen} == {1, 3}


@pytest.mark.parametrize(
    ("rows", "contexts", "near", "far"),
    [
        ((2, 3), (0, 1), [1, 1], {2: 1}),
        ((1, 1), (0, 1), [1, 1], {1: 1}),
        ((1,), (5, 5), [1], {1: 1}),
        ((1,), (0, 1), [1, 1], {1: 1}),
        ((1,), (0, 1), [1], {}),
        ((1,), (0, 1), [1], {1: float("inf")}),
        ((1,), (0, 1), [0], {1: 1}),
    ],
)
def test_bad_tables_are_refused(rows, contexts, near, far):
    with pytest.raises(ValueError):
        CostTable(rows, contexts, near, far)


def test_recorded_passes_cost_what_the_next_size_costs():
    seen = []
    sizes = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    cost = measure_costs(lambda rows, context: seen.append(rows) or linear(rows, context), max_rows=256, sizes=sizes)
    assert max(seen) == 256 and {96, 128, 192} <= set(seen)
    assert cost.base(5, 1) == cost.base(8, 1) > cost.base(4, 1) == cost.base(3, 1)
    assert cost.base(33, 4) == cost.base(48, 4) and cost.base(97, 32) == cost.base(128, 32)
    assert cost.base(300, 32) > cost.base(256, 32)
