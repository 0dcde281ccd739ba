"""The host one step behind: the same tokens, statistics and caches as the plain loop, at most one wasted row for a late end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdec.config import ConfigError, EngineConfig, SamplingParams
from specdec.engine import Engine
from tests.harness import GREEDY, SHAPES, Log, P, R, assert_same, drain, engine, oracle_of, run
from tests.spec import heads

SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=11, max_tokens=32, ignore_eos=True)
REQUESTS = {
    "greedy": (P, GREEDY),
    "repetitive": (R, GREEDY),
    "sampled": (P, SAMPLED),
    "three": (P, replace(SAMPLED, n=3, seed=3)),
    "penalised": (P, replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=9)),
    "biased": (R, replace(SAMPLED, logit_bias={5: 4.0, 9: -100}, min_tokens=6, ignore_eos=False)),
    "told": (P, replace(SAMPLED, logprobs=3, max_tokens=5)),
    "short": (R, replace(GREEDY, max_tokens=2)),
    "one": (R, replace(GREEDY, max_tokens=1)),
}
STATISTICS = ("num_seqs", "num_rows", "num_sampling", "context", "committed", "preempted", "drafted", "accepted")


def launches(target: Engine) -> list[int]:
    """Rows of each step given to the device from now on; negative where it followed one in flight."""
    rows: list[int] = []
    launch, follow = target.launcher.launch, target.launcher.follow

    def seen(plan: Any, *rest: Any) -> Any:
        rows.append(plan.num_rows)
        return launch(plan, *rest)

    def followed(flight: Any) -> Any:
        found = follow(flight)
        if found is not None:
            rows[-1] = -rows[-1]
        return found

    target.launcher.launch = seen  # type: ignore[method-assign]
    target.launcher.follow = followed  # type: ignore[method-assign]
    return rows


def watched(target: Engine) -> list[tuple[Any, ...]]:
    """The statistics of every step from now on."""
    seen: list[tuple[Any, ...]] = []
    target.observers.append(lambda stats: seen.append(tuple(getattr(stats, name) for name in STATISTICS)))
    return seen


def cached(target: Engine) -> list[Any]:
    """The hashes that the prefix cache finds, by group, in the order in which they will be lost."""
    return [[pool._hash_of[block] for block in pool._cached] for pool in target.scheduler.pools]


@pytest.mark.parametrize("kind", ["t0", "two_groups"])
@pytest.mark.parametrize("blocks", [None, 40])
def test_same_as_the_plain_loop(kind: str, blocks: int | None) -> None:
    """All kinds of requests together; with 40 blocks they preempt each other."""
    options = {"kind": kind, "deterministic": True} | ({} if blocks is None else {"num_kv_blocks": blocks})
    plain, other = engine(overlap=False, **options), engine(overlap=True, **options)
    rows, logs = launches(other), (Log(), Log())
    expected, found = run(plain, REQUESTS, log=logs[0]), run(other, REQUESTS, log=logs[1])
    for name in REQUESTS:
        assert_same(found[name], expected[name], tolerance=0)
    assert logs[1].committed == logs[0].committed
    assert any(row < 0 for row in rows)
    if blocks is not None:
        assert logs[0].preempted and logs[1].preempted


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, n=3)], ids=["greedy", "sampled", "three"])
def test_same_statistics_and_cache(params: SamplingParams) -> None:
    """Step for step: a wasted row is no part of the statistics."""
    targets = engine(overlap=False), engine(overlap=True)
    seen, requests = [watched(target) for target in targets], {"a": (P, params), "b": (R, replace(params, max_tokens=17))}
    outputs = [run(target, requests) for target in targets]
    for name in requests:
        assert_same(outputs[1][name], outputs[0][name], tolerance=0)
    assert seen[1] == seen[0]
    assert cached(targets[1]) == cached(targets[0]) != [[]]
    again = [run(target, requests) for target in targets]
    assert [o["a"].metrics.cached_tokens for o in again] == [again[0]["a"].metrics.cached_tokens] * 2


def test_what_follows_and_what_waits() -> None:
    """Plain decode rows follow; who reads its own tokens, tells log-probabilities or has a queue behind it waits for the verdict."""
    for name, params, follows in (
        ("greedy", GREEDY, True),
        ("penalised", replace(SAMPLED, frequency_penalty=0.5), False),
        ("bad words", replace(SAMPLED, bad_words=["xyz"]), False),
        ("told", replace(SAMPLED, logprobs=1), False),
    ):
        target = engine(overlap=True)
        rows = launches(target)
        run(target, {name: (P, params)})
        assert any(row < 0 for row in rows) == follows, name
    target = engine(overlap=True, max_num_seqs=1)
    rows = launches(target)
    run(target, {"a": (P, GREEDY), "b": (R, GREEDY)})
    assert sum(row < 0 for row in rows) > 40, "who cannot be admitted keeps nobody waiting"


def test_a_known_end_wastes_nothing() -> None:
    target = engine(overlap=True)
    rows = launches(target)
    run(target, {"a": (P, GREEDY)})
    assert len(rows) == GREEDY.max_tokens


def test_an_end_token_costs_one_row_and_leaks_nothing() -> None:
    free = run(engine(), {"a": (P, GREEDY)})["a"].outputs[0].token_ids
    stop = next(token for token in free[6:] if free.index(token) >= 6)
    at = free.index(stop)
    params = replace(GREEDY, stop_token_ids=[stop])
    target = engine(overlap=True)
    rows = launches(target)
    found = run(target, {"a": (P, params)})["a"]
    assert_same(found, run(engine(overlap=False), {"a": (P, params)})["a"], tolerance=0)
    assert len(found.outputs[0].token_ids) == at + 1 and found.outputs[0].finish_reason == "stop"
    assert len(rows) == at + 2
    assert found.metrics.generated == found.metrics.steps == at + 1


def test_a_stop_string_never_leaks() -> None:
    free = run(engine(), {"a": (P, GREEDY)})["a"].outputs[0].text
    params = replace(GREEDY, stop=[free[9:11]])
    log = Log()
    found = run(engine(overlap=True), {"a": (P, params)}, log=log)["a"]
    assert_same(found, run(engine(overlap=False), {"a": (P, params)})["a"], tolerance=0)
    assert free[9:11] not in "".join(c.text for delta in log.deltas["a"] for c in delta.outputs)


def test_abort_while_in_flight() -> None:
    """The request slot and the blocks go to a new request while the old row is still under way."""
    target = engine(overlap=True, max_num_seqs=2, enable_prefix_caching=False)
    target.add_request("a", P, GREEDY)
    target.add_request("b", R, GREEDY)
    for _ in range(6):
        target.step()
    target.abort("a")
    target.add_request("c", P, SAMPLED)
    outputs = drain(target, Log())
    assert outputs["a"].outputs[0].finish_reason == "abort"
    plain = run(engine(overlap=False), {"b": (R, GREEDY), "c": (P, SAMPLED)})
    assert outputs["c"].outputs[0].token_ids == plain["c"].outputs[0].token_ids
    assert plain["b"].outputs[0].token_ids[-len(outputs["b"].outputs[0].token_ids) :] == outputs["b"].outputs[0].token_ids


def test_abort_of_everybody_then_a_new_request() -> None:
    target = engine(overlap=True)
    target.add_request("a", P, GREEDY)
    for _ in range(5):
        target.step()
    target.abort("a")
    drain(target, Log())
    assert_same(run(target, {"b": (R, SAMPLED)})["b"], run(engine(overlap=False), {"b": (R, SAMPLED)})["b"])


@pytest.mark.parametrize("shape", ["mix-tree", "ngram-chain", "suffix-tree"])
def test_drafts_wait_for_the_verdict(shape: str) -> None:
    off = run(engine(overlap=False, deterministic=True), REQUESTS)
    log = Log()
    on = run(engine(SHAPES[shape], oracle=oracle_of(off), overlap=True, deterministic=True), REQUESTS, log=log)
    assert log.drafted > 0
    for name in REQUESTS:
        assert on[name].outputs[0].token_ids == off[name].outputs[0].token_ids, name


@pytest.mark.parametrize("method", ["eagle3", "peagle"])
def test_heads_keep_their_features(method: str) -> None:
    """A head that is asked again after steps in flight drafts as in the plain loop: no taps are lost or doubled."""
    spec = heads.tree(method)
    requests = {"a": (P, replace(GREEDY, max_tokens=40)), "off": (R, replace(GREEDY, max_tokens=40, speculation={"method": "off"}))}
    logs = Log(), Log()
    found = [run(engine(spec, overlap=on, deterministic=True), requests, log=log) for on, log in zip((False, True), logs, strict=True)]
    assert logs[1].drafted == logs[0].drafted > 0
    assert logs[1].accepted == logs[0].accepted
    for name in requests:
        assert_same(found[1][name], found[0][name], tolerance=0)


def plain_until_it_would_draft(target: Engine) -> None:
    """Steps to where the next step's budgets are known and name a drafter, with nothing in flight; before that, drafts are held back."""
    budget = target.policy.budget
    target.policy.budget = lambda *args: {}  # type: ignore[method-assign]
    for _ in range(5):
        target.step()
    assert target._flight is not None
    target.policy.budget = budget  # type: ignore[method-assign]
    target.step()
    assert target._flight is None and any(b.drafter is not None for b in (target._budgets or {}).values())


def test_a_head_goes_that_the_next_step_was_to_ask() -> None:
    """Budgets that are known already do not outlive the drafter that they name."""
    target = engine(heads.tree("eagle3"), overlap=True, deterministic=True)
    target.add_request("a", P, GREEDY)
    plain_until_it_would_draft(target)
    target.swap_heads(target.heads.load(None))
    log = Log()
    drain(target, log)
    assert log.drafted == 0
    whole = [token for delta in log.deltas["a"] for token in delta.outputs[0].token_ids]
    assert run(engine(overlap=False, deterministic=True), {"a": (P, GREEDY)})["a"].outputs[0].token_ids[-len(whole) :] == whole


def test_heads_come_back_with_nothing_in_flight() -> None:
    """A review may exchange heads and with them the hidden states that passes return: never while a step is under way."""
    target = engine(heads.tree("eagle3"), overlap=True)
    seen: list[bool] = []
    review = target.heads.review

    def watched(policy: Any) -> None:
        seen.append(target._flight is not None or bool(busy))
        review(policy)

    busy: list[int] = []
    follow = target._follow

    def following(flight: Any) -> Any:
        busy.append(1)
        try:
            return follow(flight)
        finally:
            busy.clear()

    target.heads.review = watched  # type: ignore[method-assign]
    target._follow = following  # type: ignore[method-assign]
    target.add_request("a", P, GREEDY)
    plain_until_it_would_draft(target)
    drain(target, Log())
    assert len(seen) > 5 and not any(seen)


def test_config() -> None:
    assert engine().overlap is False, "a CPU has nothing to overlap"
    with pytest.raises(ConfigError, match="overlap"):
        EngineConfig(overlap="yes")  # type: ignore[arg-type]
