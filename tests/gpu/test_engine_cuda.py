"""The engine on a CUDA device, with the backends that it takes there: the same promises as on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec.config import SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.overlap import Flight
from specdec.spec.shared import Choice
from tests.harness import GREEDY, SHAPES, Log, P, R, engine, oracle_of, run
from tests.spec import heads

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

REQUESTS = {
    "greedy": (P, GREEDY),
    "repetitive": (R, GREEDY),
    "sampled": (P, SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=11, max_tokens=32, ignore_eos=True)),
    "penalised": (P, SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, seed=5, max_tokens=32, ignore_eos=True)),
    "dead ends": (
        R,
        SamplingParams(
            temperature=0.9,
            top_p=0.9,
            seed=7,
            allowed_token_ids=[123, 124, 125],
            max_tokens=12,
            bad_words=["xx", "yy", "zzz", "xz", "xyx", "zxy", "yzx", "zy"],
        ),
    ),
}


@pytest.mark.parametrize("kind", ["t0", "two_groups"])
@pytest.mark.parametrize("shape", SHAPES)
def test_identity_with_speculation_off(kind: str, shape: str) -> None:
    """float32 and deterministic=True: the same tokens with every drafter, chain and tree, greedy and sampled."""
    options = {"kind": kind, "device": "cuda", "dtype": "float32", "deterministic": True, "kv_cache_bytes": 1 << 26}
    off = run(engine(**options), REQUESTS)
    on = run(engine(SHAPES[shape], oracle=oracle_of(off), **options), REQUESTS)
    for name in REQUESTS:
        assert on[name].outputs[0].token_ids == off[name].outputs[0].token_ids, name


def test_cuda_agrees_with_the_cpu() -> None:
    """Same noise, same tokens on both devices (float32, tiny model without near-ties on this path)."""
    cpu = run(engine(), REQUESTS)
    cuda = run(engine(device="cuda", dtype="float32", kv_cache_bytes=1 << 26), REQUESTS)
    for name in REQUESTS:
        assert cuda[name].outputs[0].token_ids == cpu[name].outputs[0].token_ids, name
        assert cuda[name].outputs[0].stop_reason == cpu[name].outputs[0].stop_reason, name


@pytest.mark.parametrize("method", ["eagle3", "peagle"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_heads_on_the_card_change_no_token(method: str, eager: bool) -> None:
    """Recorded or launched one by one, a head's drafts only say which rows there are."""
    options = {"device": "cuda", "dtype": "float32", "deterministic": True, "kv_cache_bytes": 1 << 26}
    off, log = run(engine(**options), REQUESTS), Log()
    on = run(engine(heads.tree(method), enforce_eager=eager, **options), REQUESTS, log=log)
    assert log.drafted > 0
    for name in REQUESTS:
        assert on[name].outputs[0].token_ids == off[name].outputs[0].token_ids, name


@pytest.mark.parametrize("kind", ["t0", "two_groups"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_the_host_one_step_behind(kind: str, eager: bool) -> None:
    """The same tokens as with the host in step, and most steps are begun before the verdict of the one before is read."""
    options = {"kind": kind, "device": "cuda", "dtype": "float32", "deterministic": True, "kv_cache_bytes": 1 << 26, "enforce_eager": eager}
    requests = REQUESTS | {f"{name} again": REQUESTS[name] for name in ("greedy", "sampled")}
    waits, behind = engine(overlap=False, **options), engine(**options)
    assert behind.overlap
    found, follow, followed = run(waits, requests), behind.launcher.follow, []

    def counted(flight: object) -> object:
        followed.append(follow(flight))
        return followed[-1]

    behind.launcher.follow = counted
    other = run(behind, requests)
    other |= {"alone": run(behind, {"alone": REQUESTS["sampled"]})["alone"]}
    assert any(flight is not None for flight in followed)
    for name in requests:
        assert other[name].outputs[0].token_ids == found[name].outputs[0].token_ids, name
    assert other["alone"].outputs[0].token_ids == found["sampled"].outputs[0].token_ids


@pytest.mark.parametrize("method", ["eagle3", "peagle"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_recorded_drafts_change_no_token(method: str, temperature: float) -> None:
    """Requests that are no more than a temperature, whose drafts are one replay. A step behind another drafts what it may not need, so none
    is here."""
    options = {"device": "cuda", "dtype": "float32", "deterministic": True, "kv_cache_bytes": 1 << 26, "overlap": False}
    params = SamplingParams(temperature=temperature, seed=11, ignore_eos=True)
    requests = {f"r{n}": ([n, *P], replace(params, max_tokens=n)) for n in (18, 24, 30)}
    off, logs = run(engine(**options), requests), (Log(), Log())
    for eager, log in zip((True, False), logs, strict=True):
        on = run(engine(heads.tree(method, 24, 4, 5), enforce_eager=eager, **options), requests, log=log)
        for name in requests:
            assert on[name].outputs[0].token_ids == off[name].outputs[0].token_ids, name
    assert logs[1].drafted == logs[0].drafted > 0
    assert abs(logs[1].accepted - logs[0].accepted) <= 2


BEHIND = {
    "eagle3 chain": heads.chain("eagle3", 3),
    "eagle3 tree": heads.tree("eagle3", 24, 4, 5),
    "peagle chain": heads.chain("peagle", 3),
    "following tree": heads.tree("peagle", head=heads.random_head("peagle", transition=24)),
}


@pytest.mark.parametrize("shape", BEHIND.values(), ids=BEHIND)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("verify", ["coupled", "synthetic"])
def test_heads_draft_one_step_behind(shape: SpecConfig, temperature: float, verify: str) -> None:
    """Step for step the drafts and verdicts of the plain loop, until a request nears its end; most steps begin before the last verdict."""
    spec = shape if verify == "coupled" else replace(shape, verify=verify, synthetic_acceptance=(0.8, 0.6, 0.4))
    options = {"device": "cuda", "dtype": "float32", "deterministic": True, "kv_cache_bytes": 1 << 26}
    params = SamplingParams(temperature=temperature, seed=11, ignore_eos=True)
    requests = {f"r{n}": ([n, *P], replace(params, max_tokens=n)) for n in (40, 50, 60)}
    waits, behind = engine(spec, overlap=False, **options), engine(spec, **options)
    counts = followed(behind)
    found = [run(target, requests, trace=True) for target in (waits, behind)]
    assert sum(counts) > 5
    far = min(len(output.outputs[0].token_ids) for output in found[0].values()) - 6 * spec.depth  # all have room so far
    for name in requests:
        if verify == "coupled":
            assert found[1][name].outputs[0].token_ids == found[0][name].outputs[0].token_ids, name
        told = [
            [(step.tokens, step.parents, step.path, step.committed) for step in outputs[name].trace.steps if step.position < len(P) + far]
            for outputs in found
        ]
        assert told[1] == told[0], name


def followed(target: Engine) -> list[bool]:
    """Of each step behind one in which heads drafted, from now on: was it begun before that one's verdict was known?"""
    counts, follow = [], target.behind.follow

    def counted(*args: Any) -> Any:
        found = follow(*args)
        counts.append(isinstance(found, Flight))
        return found

    target.behind.follow = counted
    return counts


@pytest.mark.parametrize("method", ["eagle3", "peagle"])
@pytest.mark.parametrize("width", [1, 2])
def test_the_auto_policy_goes_ahead(method: str, width: int) -> None:
    """Whatever it chooses by what it measures: the same tokens, requests of any length, and steps that follow each other."""
    head = heads.knowing_head(method)
    spec = SpecConfig(method=method, head=head, nodes=8, depth=4, width=width)
    options = {"device": "cuda", "dtype": "float32", "deterministic": True, "kv_cache_bytes": 1 << 26, "kind": "last"}
    requests = {f"r{n}": ([n, *P], replace(GREEDY, max_tokens=n)) for n in range(20, 110, 6)}
    off, target = engine("off", **options), engine(spec, **options)
    target.policy.shared._rated = lambda name, shape, *rest: Choice(name, shape, 1e9)  # every shape pays alike
    counts, found = followed(target), [run(off, requests), run(target, requests)]
    for name in requests:
        assert found[1][name].outputs[0].token_ids == found[0][name].outputs[0].token_ids, name
    assert sum(counts) > 0.8 * len(counts) > 4


@pytest.mark.parametrize("shape", BEHIND.values(), ids=BEHIND)
@pytest.mark.parametrize("verify", ["coupled", "synthetic"])
def test_a_step_is_begun_without_waiting(shape: SpecConfig, verify: str) -> None:
    """Once its shape is recorded, nothing in it makes the host wait for the device."""
    spec = shape if verify == "coupled" else replace(shape, verify=verify, synthetic_acceptance=(0.8, 0.6, 0.4))
    target = engine(spec, device="cuda", dtype="bfloat16", kv_cache_bytes=1 << 26)
    calls, follow = [], target.behind.follow

    def watched(*args: Any) -> Any:
        calls.append(1)
        torch.cuda.set_sync_debug_mode("default" if len(calls) < 3 else "error")
        try:
            return follow(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    target.behind.follow = watched
    run(target, {"a": (P, SamplingParams(temperature=0.9, seed=1, max_tokens=100, ignore_eos=True))})
    assert len(calls) > 10
