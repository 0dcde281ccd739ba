"""Promise 1 under the scheduler: neighbours, chunk sizes, preemption, prefix hits and limits on the batch change nothing.

All comparisons are exact, against OFF alone, in deterministic engines.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.config import SamplingParams
from specdec.types import RequestOutput
from tests.harness import SHAPES, VOCAB, Log, P, R, assert_same, engine, oracle_of, run

Request = tuple[list[int] | str, SamplingParams]


@cache
def crowd() -> dict[str, Request]:
    """Twelve requests: shared prefixes, prompts of 1 to 60 tokens, greedy and sampled, penalties, n, logprobs."""
    rng = random.Random(5)
    base = SamplingParams(temperature=1.2, max_tokens=18, ignore_eos=True)
    few = list(range(100, 130))
    extras: list[dict[str, object]] = [
        {},
        {"temperature": 0},
        {"n": 2},
        {"presence_penalty": 1.0, "allowed_token_ids": few},
        {"repetition_penalty": 1.3, "allowed_token_ids": few},
        {"top_k": 5, "logprobs": 2},
        {"top_p": 0.5, "prompt_logprobs": 1},
        {"n": 3, "allowed_token_ids": few, "stop_token_ids": [105]},
        {"temperature": 0, "frequency_penalty": 0.8},
        {"bad_words": ["in"], "min_tokens": 5},
        {"logit_bias": {7: 6.0}, "max_tokens": 30},
        {"min_p": 0.05, "max_tokens": 1},
    ]
    prompts: list[list[int]] = [
        R,
        R,
        R[:20],
        [*R, *P[:5]],
        [9],
        [*P, 8, 8],
        R,
        [rng.randrange(VOCAB) for _ in range(60)],
        P,
        P,
        [4] * 33,
        R[:7],
    ]
    return {f"c{i}": (prompt, replace(base, seed=i, **extra)) for i, (prompt, extra) in enumerate(zip(prompts, extras, strict=True))}


@cache
def alone(kind: str) -> dict[str, RequestOutput]:
    return {name: run(engine(kind=kind, deterministic=True), {name: request})[name] for name, request in crowd().items()}


def check(kind: str, shape: str, **options: object) -> Log:
    """Serve the crowd with this drafter and these limits; everything equals `alone`."""
    expected, log = alone(kind), Log()
    speculation = "off" if shape == "off" else SHAPES[shape]
    target = engine(speculation, kind=kind, oracle=oracle_of(expected), deterministic=True, **options)
    for name, found in run(target, crowd(), log=log).items():
        try:
            assert_same(found, expected[name], tolerance=0)
        except AssertionError as err:
            raise AssertionError(f"{name}: {err}") from err
    assert log.committed == sum(len(c.token_ids) for out in expected.values() for c in out.outputs)
    return log


@pytest.mark.parametrize("rows", [1, 3, 7, 16, 64, 512])
@pytest.mark.parametrize("shape", ["off", "mix-tree"])
def test_chunk_sizes(shape: str, rows: int) -> None:
    """`max_num_batched_tokens` from one row a step to everything at once."""
    check("t0", shape, max_num_batched_tokens=rows)


@pytest.mark.parametrize("rows", [3, 16])
@pytest.mark.parametrize("shape", ["oracle-tree", "ngram-chain", "draft-chain"])
def test_chunk_sizes_with_a_sliding_group(shape: str, rows: int) -> None:
    check("two_groups", shape, max_num_batched_tokens=rows)


@pytest.mark.parametrize("seats", [1, 2, 5, 32])
def test_batch_width(seats: int) -> None:
    """`max_num_seqs` decides who runs beside whom, and nothing else."""
    check("t0", "mix-tree", max_num_seqs=seats)


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_block_size(block_size: int) -> None:
    """Where block borders fall is invisible, also to trees that span several blocks."""
    check("t0", "oracle-tree", block_size=block_size)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("t0", "off"),
        ("t0", "mix-tree"),
        ("t0", "oracle-chain"),
        ("t0", "suffix-tree"),
        ("t0", "draft-chain"),
        ("two_groups", "mix-tree"),
        ("two_groups", "oracle-chain"),
    ],
)
@pytest.mark.parametrize("caching", [True, False])
def test_preemption(kind: str, shape: str, caching: bool) -> None:
    """A pool so small that sequences lose their blocks on the way, with and without a prefix cache to find them again."""
    log = check(kind, shape, num_kv_blocks=31, max_model_len=80, enable_prefix_caching=caching)
    assert log.preempted > 0


@pytest.mark.parametrize("kind", ["t0", "two_groups"])
@pytest.mark.parametrize("shape", ["off", "mix-tree", "wrong-tree", "draft-tree"])
def test_second_run_hits_the_prefix_cache(kind: str, shape: str) -> None:
    """KV written by drafts, compacted and cached is as good as any other: the second run reads it and says the same."""
    expected = alone(kind)
    speculation = "off" if shape == "off" else SHAPES[shape]
    target = engine(speculation, kind=kind, oracle=oracle_of(expected), deterministic=True)
    run(target, crowd())
    hits = target.prefix_hits
    for name, found in run(target, crowd()).items():
        assert_same(found, expected[name], tolerance=0)
    assert target.prefix_hits > hits


@pytest.mark.parametrize("kind", ["t0", "two_groups"])
def test_output_as_the_next_prompt(kind: str) -> None:
    """A conversation: prompt and answer come back as a prompt, so blocks filled by accepted tree nodes are reused."""
    params = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)
    plain = engine(kind=kind, deterministic=True)
    first = run(plain, {"turn": (P, params)})
    longer = [*P, *first["turn"].outputs[0].token_ids, 11, 12]
    fresh = run(engine(kind=kind, deterministic=True), {"turn": (longer, params)})["turn"]
    target = engine(SHAPES["oracle-tree"], kind=kind, oracle=oracle_of(first), deterministic=True)
    run(target, {"turn": (P, params)})
    found = run(target, {"turn": (longer, params)})["turn"]
    assert_same(found, fresh, tolerance=0)
    assert found.metrics.cached_tokens >= len(P) + 16


@pytest.mark.parametrize("shape", ["mix-tree", "ngram-chain"])
def test_late_arrivals(shape: str) -> None:
    """Requests join and leave while others decode."""
    expected = alone("t0")
    target = engine(SHAPES[shape], oracle=oracle_of(expected), deterministic=True, max_num_batched_tokens=24)
    waiting, parts, step = list(crowd().items()), {}, 0
    while waiting or target.has_work():
        if waiting and step % 3 == 0:
            name, (prompt, params) = waiting.pop()
            target.add_request(name, prompt, params)
        for delta in target.step():
            parts.setdefault(delta.request_id, []).append(delta)
        target.scheduler.check()
        step += 1
    for name, deltas in parts.items():
        ids = {c.index: c.token_ids for c in expected[name].outputs}
        for index, whole in ids.items():
            assert [t for d in deltas for c in d.outputs if c.index == index for t in c.token_ids] == whole, name


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(["t0", "two_groups"]),
    shape=st.sampled_from(["off", *SHAPES]),
    rows=st.integers(1, 40),
    seats=st.integers(1, 9),
    block_size=st.sampled_from([1, 3, 4, 8]),
    slack=st.integers(0, 30),
    caching=st.booleans(),
    names=st.sets(st.sampled_from([f"c{i}" for i in range(12)]), min_size=1, max_size=6),
)
def test_any_limits(kind: str, shape: str, rows: int, seats: int, block_size: int, slack: int, caching: bool, names: set[str]) -> None:
    """Any combination of limits, from a pool that barely holds one sequence upwards."""
    expected = alone(kind)
    speculation = "off" if shape == "off" else SHAPES[shape]
    target = engine(
        speculation,
        kind=kind,
        oracle=oracle_of(expected),
        deterministic=True,
        max_num_batched_tokens=rows,
        max_num_seqs=seats,
        block_size=block_size,
        max_model_len=80,
        num_kv_blocks=2 + -(-(80 if kind == "t0" else 100) // block_size) + slack,
        enable_prefix_caching=caching,
    )
    for name, found in run(target, {name: crowd()[name] for name in sorted(names)}).items():
        assert_same(found, expected[name], tolerance=0)
