"""Scheduler: its policy, one example each. Every `FakeEngine.step` checks the invariants on the way."""

from __future__ import annotations

import pytest

from specdec.config import SamplingParams
from specdec.errors import InvalidRequest, QueueFull, RequestTooLong
from specdec.sequence import Sequence, Status
from specdec.types import SpecBudget
from tests.engine.fake_engine import FULL, SLIDING, FakeEngine, sequence


def rows(plan) -> dict[Sequence, int]:
    return {s.seq: s.num_new for s in plan.scheduled}


def nodes(plan) -> dict[Sequence, int]:
    return {s.seq: s.budget.nodes for s in plan.scheduled}


# Policy


def test_long_prompt_is_computed_in_chunks_beside_decoding() -> None:
    engine = FakeEngine(groups=(FULL,), rows=8, blocks=40)
    short, long = sequence([1, 0, 1], 20), sequence([0] * 30, 4)
    engine.add(short)
    engine.step()
    engine.add(long)
    chunks = [rows(engine.step()) for _ in range(5)]
    assert [c[short] for c in chunks] == [1] * 5
    assert [c[long] for c in chunks] == [7, 7, 7, 7, 2]
    assert long.num_output == 1


def test_admission_is_in_order_of_arrival_even_if_a_later_one_would_fit() -> None:
    engine = FakeEngine(groups=(FULL,), blocks=11, rows=64)
    running, big, small = sequence([1] * 12, 8), sequence([0] * 30, 4), sequence([1, 0], 4)
    engine.add(running)
    engine.step()
    engine.add(big, small)
    engine.step()
    assert engine.scheduler.running == (running,) and engine.scheduler.queue_depth == 2
    engine.drain()


def test_drafts_shrink_evenly_and_leave_prompts_half_of_the_rows() -> None:
    engine = FakeEngine(groups=(FULL,), blocks=100, rows=24, seqs=3)
    a, b = sequence([1, 0, 0], 40), sequence([0, 1, 0], 40)
    engine.add(a, b)
    engine.step()
    wish = {a: SpecBudget("fake", 16, 15, 2), b: SpecBudget("fake", 16, 15, 2)}
    assert nodes(engine.scheduler.plan(wish)) == {a: 12, b: 12}, "24 rows, two roots"
    prompt = sequence([1] * 40, 4)
    engine.add(prompt)
    plan = engine.scheduler.plan(wish)
    assert nodes(plan) == {a: 6, b: 6, prompt: 1} and rows(plan)[prompt] == 12


def test_drafts_go_before_anybody_is_preempted() -> None:
    engine = FakeEngine(groups=(FULL,), blocks=5, rows=64, seqs=2)
    a, b = sequence([1, 0, 0], 4), sequence([0, 1, 0], 4)
    engine.add(a, b)
    engine.step()
    wish = {a: SpecBudget("fake", 9, 8, 8), b: SpecBudget("fake", 9, 8, 8)}
    plan = engine.scheduler.plan(wish)
    assert rows(plan) == {a: 1, b: 1} and not plan.preempted
    assert sum(nodes(plan).values()) < 18, "four blocks of four slots do not hold two trees of nine"
    assert engine.drain() > 0


def test_drafts_do_not_delay_an_admission() -> None:
    """Eight blocks: a holds one and wants sixteen slots of lookahead, b needs five and one to spare."""
    engine = FakeEngine(groups=(FULL,), blocks=9, rows=64, seqs=2)
    a, b = sequence([1, 0], 20), sequence([0] * 20, 4)
    engine.add(a)
    engine.step()
    engine.add(b)
    plan = engine.step({a: SpecBudget("fake", 16, 15, 1)})
    assert plan.admitted == (b,) and 1 < nodes(plan)[a] < 16
    engine.drain()


def test_lookahead_of_one_is_taken_back_for_another() -> None:
    """a's tree leaves it with blocks beyond its tokens; b gets them when it needs one and nothing else is free."""
    engine = FakeEngine(groups=(FULL,), blocks=5, rows=64, seqs=2)
    a = sequence([1, 0, 0], 12)
    engine.add(a)
    engine.step()
    engine.scheduler.apply(engine.scheduler.plan({a: SpecBudget("fake", 13, 12, 1)}))
    assert len(a.block_tables[0]) == 4 and engine.pools[0].num_free == 0
    b = sequence([0, 1, 0, 1], 2)
    engine.add(b)
    assert set(rows(engine.scheduler.plan())) == {a, b}


def test_youngest_is_preempted_and_comes_back_first() -> None:
    engine = FakeEngine(groups=(FULL,), blocks=7, rows=64, seqs=2, prefix=False)
    old, young, late = sequence([1] * 6, 14), sequence([0] * 6, 14), sequence([1], 2)
    engine.add(old, young)
    seen = []
    while young.status is not Status.PREEMPTED:
        seen.append(engine.step())
        assert len(seen) < 20
    assert seen[-1].preempted == (young,) and old.status is Status.RUNNING
    assert young.request_slot == -1 and young.num_computed == 0 and young.num_output > 0
    kept = list(young.tokens)
    engine.add(late)
    while young.status is Status.PREEMPTED:
        assert late.status is Status.WAITING
        engine.step()
    assert young.tokens[: len(kept)] == kept
    engine.drain()
    assert engine.scheduler.preemptions >= 1


def test_preempted_sequence_resumes_from_the_prefix_cache_inside_its_own_output() -> None:
    engine = FakeEngine(groups=(FULL,), blocks=40, rows=64)
    seq = sequence([1, 0, 1, 1, 0], 20)
    engine.add(seq)
    for _ in range(8):
        engine.step()
    computed = seq.num_computed
    engine.scheduler._preempt(seq)
    plan = engine.step()
    assert plan.admitted == (seq,) and rows(plan)[seq] == len(seq.tokens) - 1 - computed // 4 * 4
    assert computed // 4 * 4 > seq.num_prompt
    engine.drain()


def test_prefix_hit_is_counted_and_leaves_one_row() -> None:
    engine = FakeEngine(rows=64)
    prompt = [1, 0, 0, 1, 1, 0, 1, 0]
    first, second = sequence(prompt, 2), sequence(prompt, 2)
    engine.add(first)
    engine.drain()
    engine.add(second)
    plan = engine.step()
    assert rows(plan) == {second: 4}, "a whole block is recomputed rather than no row at all"
    assert second.metrics.cached_tokens == 4 and (engine.scheduler.prefix_queries, engine.scheduler.prefix_hits) == (16, 4)
    engine.drain()


def test_prompt_logprobs_bypass_the_prefix_cache() -> None:
    engine = FakeEngine(rows=64)
    first, second = sequence([1] * 12, 2), sequence([1] * 12, 2)
    second.params = SamplingParams(prompt_logprobs=0)
    engine.add(first)
    engine.drain()
    engine.add(second)
    assert rows(engine.step()) == {second: 12}


# Choices of one request


def fork_family(prompt: list[int], n: int, new: int = 6) -> list[Sequence]:
    parent = sequence(prompt, new)
    return [parent, *(sequence(prompt, new, choice=i, fork_of=parent) for i in range(1, n))]


@pytest.mark.parametrize("length", [1, 4, 5, 7, 9])
@pytest.mark.parametrize("prefix", [True, False])
def test_choices_share_one_prefill(length: int, prefix: bool) -> None:
    engine = FakeEngine(rows=64, seqs=4, prefix=prefix)
    family = fork_family([i % 2 for i in range(length)], 3)
    engine.add(*family)
    assert rows(engine.step()) == {family[0]: length}
    plan = engine.step()
    assert rows(plan) == dict.fromkeys(family, 1), "siblings recompute the last prompt token only"
    whole = (length - 1) // 4
    for g, pool in enumerate(engine.pools):
        shared = family[0].block_tables[g][:whole]
        assert all(s.block_tables[g][:whole] == shared for s in family)
        assert all(pool.refs(b) == 3 for b in shared)
        tails = {s.block_tables[g][whole] for s in family}
        assert len(tails) == 3, "everybody writes to a tail block of its own"
    engine.drain()


def test_sibling_of_a_finished_choice_is_prefilled_like_anyone() -> None:
    engine = FakeEngine(rows=64, seqs=1)
    family = fork_family([1, 0, 1, 1, 0], 2, new=3)
    engine.add(*family)
    while family[0].status is not Status.FINISHED:
        engine.step()
    assert rows(engine.step()) == {family[1]: 1}, "the prompt's first block comes out of the prefix cache"
    engine.drain()


def test_late_fork_falls_back_when_the_window_has_passed_the_prompt() -> None:
    """The sliding group of the first choice gave the prompt's blocks back long ago, and somebody else took them."""
    engine = FakeEngine(groups=(FULL, SLIDING), rows=64, seqs=2, blocks=60, length=200, prefix=False)
    family = fork_family([1, 0, 1, 1, 0], 2, new=100)
    engine.add(family[0], sequence([1, 1], 90), family[1])
    while family[1].status is Status.WAITING:
        plan = engine.step()
    assert family[0].status is Status.RUNNING and family[0].block_tables[1][0] == 0
    assert rows(plan)[family[1]] == 5
    engine.drain()


def test_choices_wait_without_blocking_others() -> None:
    engine = FakeEngine(groups=(FULL,), rows=4, seqs=3, blocks=40)
    family, other = fork_family([1] * 12, 2), sequence([0, 0], 2)
    engine.add(*family, other)
    engine.step()
    assert family[1].status is Status.WAITING
    for _ in range(3):
        engine.step()
    assert other.status is not Status.WAITING
    engine.drain()


# Edges


def test_what_can_never_run_is_refused() -> None:
    engine = FakeEngine(groups=(FULL,), blocks=9, length=64)
    with pytest.raises(RequestTooLong, match=r"64 prompt tokens.*max_model_len=64") as error:
        engine.add(sequence([1] * 64, 1))
    assert error.value.param == "prompt"
    with pytest.raises(RequestTooLong, match="max_model_len=64"):
        engine.add(sequence([1] * 60, 5))
    with pytest.raises(RequestTooLong, match=r"30 prompt tokens and up to 4 new ones need 9 KV blocks.*has 8") as error:
        engine.add(sequence([1], 1), sequence([1] * 30, 4))
    assert error.value.param == "max_tokens"
    with pytest.raises(InvalidRequest, match="empty"):
        engine.add(sequence([], 1))
    assert not engine.scheduler.has_work, "all or none"
    engine.add(sequence([1] * 30, 3))
    engine.drain()


def test_sequence_fills_max_model_len_exactly() -> None:
    engine = FakeEngine(rows=64, length=32)
    seq = sequence([1] * 5, 27)
    engine.add(seq)
    engine.drain(lambda s: SpecBudget("fake", 64, 63, 8))
    assert len(seq.tokens) == 32 and seq.finish_reason == "length"
    assert engine.scheduler.tables.width == (32 + 64) // 4


def test_bounded_queue() -> None:
    engine = FakeEngine(seqs=1, max_queue=1)
    engine.add(sequence([1], 8))
    engine.step()
    engine.add(sequence([1], 2))
    with pytest.raises(QueueFull, match="max_queue 1"):
        engine.add(sequence([1], 2))
    assert engine.scheduler.queue_depth == 1
    engine.drain()


def test_abort_in_every_state_frees_everything() -> None:
    engine = FakeEngine(groups=(FULL,), blocks=40, rows=8, seqs=2)
    seqs = [sequence([1] * 3, 9), sequence([0] * 20, 4), sequence([1, 0], 4), sequence([0, 1], 4)]
    engine.add(*seqs)
    engine.step()
    assert [s.status for s in seqs] == [Status.RUNNING] * 2 + [Status.WAITING] * 2
    engine.scheduler._preempt(seqs[1])
    for seq in seqs:
        engine.scheduler.abort(seq)
        engine.scheduler.abort(seq)
        assert seq.finish_reason == "abort" and seq.request_slot == -1
    engine.check_empty()


def test_gauges() -> None:
    engine = FakeEngine(groups=(FULL,), seqs=1, blocks=9)
    assert engine.scheduler.oldest_waiting_age() == 0.0
    first, second = sequence([1] * 8, 4), sequence([1], 4)
    first.arrival, second.arrival = 10.0, 12.0
    engine.add(first, second)
    assert engine.scheduler.oldest_waiting_age(now=15.0) == 5.0
    engine.step()
    assert engine.scheduler.oldest_waiting_age(now=15.0) == 3.0 and engine.scheduler.kv_usage == pytest.approx(2 / 8)
    assert (engine.scheduler.num_running, engine.scheduler.queue_depth) == (1, 1)
