"""Draft heads that are swapped under running requests: outputs stay, taps and KV follow, bad ones change nothing, worse ones go back."""

from __future__ import annotations

import gc
import json
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.config import SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.errors import ConfigError, InvalidRequest, ModelNotFound, SpecdecError, UnsupportedCheckpoint
from specdec.llm import LLM
from specdec.models.head_fingerprint import measure
from specdec.spec.policy import SpecPolicy
from specdec.spec.watch import VERIFIED
from specdec.types import RequestOutput
from tests.harness import GREEDY, P, R, assert_same, check_idle, checkpoint, engine, join, run
from tests.spec.heads import chain, knowing_head, random_head, target, tree
from tests.spec.simulator import LineCost
from tests.tiny_heads import tiny_head, write_head

REQUESTS = {
    "greedy": (R, replace(GREEDY, max_tokens=32)),
    "sampled": (P, SamplingParams(temperature=0.8, seed=3, max_tokens=32, ignore_eos=True)),
    "penalties": (P[:3], SamplingParams(temperature=0.7, seed=5, frequency_penalty=0.6, max_tokens=24, ignore_eos=True)),
    "two": (R[:21], SamplingParams(n=2, temperature=1, seed=6, max_tokens=24, logprobs=1, ignore_eos=True)),
}


@cache
def plain() -> dict[str, RequestOutput]:
    """The requests without speculation."""
    return run(engine(deterministic=True), REQUESTS)


def swap(served: Engine, path: str | None, method: str | None = None) -> None:
    served.heads.apply(served.heads.load(path, method), served.policy)


def played(served: Engine, event: Callable[[int], None]) -> dict[str, RequestOutput]:
    """All requests at once; `event` is told the number of the step before it runs."""
    deltas: dict[str, list[RequestOutput]] = {}
    for name, request in REQUESTS.items():
        served.add_request(name, *request)
    step = 0
    while served.has_work():
        event(step)
        for delta in served.step():
            deltas.setdefault(delta.request_id, []).append(delta)
        served.scheduler.check()
        step += 1
    check_idle(served)
    return {name: join(parts) for name, parts in deltas.items()}


def other_head(method: str = "eagle3", **flags: Any) -> str:
    return random_head(method, **({"taps": (2,), "num_kv_heads": 4, "num_layers": 2} | flags))


# -- outputs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 20}, {"num_kv_blocks": 40, "max_model_len": 96}], ids=["", "chunks", "pool"]
)
@pytest.mark.parametrize("shape", ["chain", "TREE", "auto"])
@pytest.mark.parametrize("method", ["eagle3", "peagle"])
def test_swaps_under_running_requests_change_no_output(method: str, shape: str, options: dict[str, int]) -> None:
    """Another head every five steps: other taps, other KV shape, back, none, and again."""
    expected = plain()
    speculation = chain(method) if shape == "chain" else tree(method)
    served = engine(replace(speculation, policy="auto" if shape == "auto" else "fixed"), deterministic=True, **options)
    paths = [other_head(method), random_head(method), None]

    def event(step: int) -> None:
        if step % 5 == 3:
            swap(served, paths[step // 5 % 3])
            assert served.runner.taps == ((), (2,), (0, 1, 2))[(step // 5 % 3 + 1) % 3]

    for _ in range(2):  # the second time with prefix hits on blocks of all epochs
        found = played(served, event)
        for name in REQUESTS:
            assert_same(found[name], expected[name], tolerance=0)
    assert served.heads.swaps > 6 and served.drafter_health.head_swaps == served.heads.swaps


def test_auto_takes_both_kinds_and_each_reads_its_own_taps() -> None:
    """An engine that began without a head: EAGLE-3 joins, then P-EAGLE with other taps, both draft what they draft alone."""
    served = engine("auto", deterministic=True, enable_prefix_caching=False)
    assert list(served.proposers) == ["suffix", "ngram"] and served.runner.taps == () and served.heads.info() == []
    swap(served, other_head())
    swap(served, random_head("peagle", taps=(0, 1)), "peagle")
    assert list(served.proposers) == ["eagle3", "peagle", "suffix", "ngram"] and served.runner.taps == (0, 1, 2)
    assert [(info.method, info.taps, info.on_trial) for info in served.heads.info()] == [("eagle3", (2,), False), ("peagle", (0, 1), False)]
    expected = plain()
    for method, head in (("eagle3", other_head()), ("peagle", random_head("peagle", taps=(0, 1)))):
        served.policy = SpecPolicy(chain(method), served.proposers, None)
        wanted = {name: (prompt, replace(params, speculation=method)) for name, (prompt, params) in REQUESTS.items()}
        found = run(served, wanted, trace=True)
        alone = run(engine(chain(method, head=head), deterministic=True), wanted, trace=True)
        for name in wanted:
            assert_same(found[name], expected[name], tolerance=0)
        for mine, its in zip(found["greedy"].trace.steps, alone["greedy"].trace.steps, strict=True):
            assert mine.tokens == its.tokens[: len(mine.tokens)]  # an engine under policy="auto" gives up hopeless depths early
            assert len(mine.tokens) > 1 or len(its.tokens) == 1
    swap(served, None, "eagle3")
    assert list(served.proposers) == ["peagle", "suffix", "ngram"] and served.runner.taps == (0, 1)
    swap(served, None)
    assert list(served.proposers) == ["suffix", "ngram"] and served.runner.taps == ()


def test_a_new_head_drafts_what_it_would_have_drafted_from_there() -> None:
    """After the swap the drafts of a new request are those of an engine that never had another head, prefix hits or not."""
    served = engine(chain("eagle3"), deterministic=True)
    run(served, {"r": (R + P, GREEDY)})
    swap(served, other_head())
    alone = engine(chain("eagle3", head=other_head()), deterministic=True)
    assert served.kv.nbytes == alone.kv.nbytes
    fresh = [400, *P, *R]
    found, expected = (run(e, {"r": (fresh, GREEDY)}, trace=True)["r"] for e in (served, alone))
    assert [s.tokens for s in found.trace.steps] == [s.tokens for s in expected.trace.steps]
    hit = run(served, {"hit": (R + P, GREEDY)})["hit"]
    assert hit.metrics.cached_tokens == 52  # the target's KV is found, the old head's is not used: see first below
    served.add_request("again", [*R, *P, 5], GREEDY)
    served.step()
    (progress,) = served.proposers["eagle3"]._runner._progress.values()
    assert progress.first > 50
    served.close()


def test_the_old_head_and_its_kv_are_freed_once_the_new_one_has_passed() -> None:
    """Weights stay for the trial; nothing else does, and nothing at all after it."""
    served = engine(chain("eagle3", head=knowing_head()), kind="last", deterministic=True)
    run(served, {"r": (R, GREEDY)})
    drafter = served.proposers["eagle3"]
    old, head, store = weakref.ref(drafter), weakref.ref(drafter.head), weakref.ref(drafter._runner._companion)
    del drafter
    swap(served, knowing_head())
    gc.collect()
    assert old() is None and store() is None and head() is not None
    while served.heads.info()[0].on_trial:
        run(served, {"r": (R, replace(GREEDY, max_tokens=60))})
    gc.collect()
    assert head() is None and (served.heads.swaps, served.heads.rollbacks) == (1, 0)


# -- what is refused ---------------------------------------------------------------------------------------------------------


def damaged(tmp_path: Path, kind: str) -> str:
    config, tensors = tiny_head("eagle3", target().config)
    path = write_head(tmp_path / kind, "speculators", config, tensors)
    if kind == "nan":
        weights = load_file(path / "model.safetensors")
        weights["fc.weight"][3, 3] = float("nan")
        save_file(weights, path / "model.safetensors")
    elif kind == "hidden":
        text = json.loads((path / "config.json").read_text())
        text["transformer_layer_config"]["hidden_size"] = 32
        (path / "config.json").write_text(json.dumps(text))
    elif kind == "cut":
        data = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    elif kind == "foreign":
        path = write_head(tmp_path / "foreign2", "speculators", config, tensors, fingerprint=measure(target("last").model, config.taps))
    return str(path)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("nan", UnsupportedCheckpoint),
        ("hidden", UnsupportedCheckpoint),
        ("cut", UnsupportedCheckpoint),
        ("foreign", UnsupportedCheckpoint),
        ("missing", ModelNotFound),
        ("peagle", ConfigError),
    ],
)
def test_a_bad_head_leaves_everything_as_it_was(kind: str, error: type[SpecdecError], tmp_path: Path) -> None:
    path = {"missing": str(tmp_path / "nowhere"), "peagle": random_head("peagle")}.get(kind) or damaged(tmp_path, kind)
    served = engine(chain("eagle3"), deterministic=True)
    alone = run(engine(chain("eagle3"), deterministic=True), {"r": (R, GREEDY)}, trace=True)["r"]
    served.add_request("r", R, GREEDY, trace=True)
    deltas, before = [], (served.proposers["eagle3"], served.kv.nbytes, served.runner.taps, served.heads.info())
    for _ in range(6):
        deltas += served.step()
    with pytest.raises(error):
        served.heads.load(path)
    assert (served.proposers["eagle3"], served.kv.nbytes, served.runner.taps, served.heads.info()) == before
    while served.has_work():
        deltas += served.step()
    found = join(deltas)
    assert [s.tokens for s in found.trace.steps] == [s.tokens for s in alone.trace.steps]
    assert served.heads.swaps == 0


@pytest.mark.parametrize(
    ("speculation", "method"), [("off", None), ("ngram", "eagle3"), ("auto", "ngram"), (chain("eagle3"), "peagle"), ("auto", "nothing")]
)
def test_engines_that_take_no_such_head_say_so(speculation: Any, method: str | None) -> None:
    served = engine(speculation)
    for path in (random_head(), None):
        with pytest.raises(ConfigError) as caught:
            served.heads.load(path, method)
        assert caught.value.param in ("speculation", "method")


def test_no_memory_for_the_new_kv_brings_the_old_head_back(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain()
    served = engine(chain("eagle3"), deterministic=True)
    epoch, attach = served.proposers["eagle3"].head.epoch, served.kv.attach

    def refuse(name: str, pool: Any, layers: int, *rest: Any, **options: Any) -> Any:
        if layers == 2:
            raise torch.OutOfMemoryError("no memory")
        return attach(name, pool, layers, *rest, **options)

    monkeypatch.setattr(served.kv, "attach", refuse)

    def event(step: int) -> None:
        if step == 7:
            with pytest.raises(ConfigError, match="no memory"):
                swap(served, other_head())

    found = played(served, event)
    for name in REQUESTS:
        assert_same(found[name], expected[name], tolerance=0)
    assert served.proposers["eagle3"].head.epoch == epoch and served.heads.swaps == 0 and not served.heads.info()[0].on_trial


# -- rolling back --------------------------------------------------------------------------------------------------------------


def waves(count: int, first: int = 0) -> list[dict[str, tuple[list[int], SamplingParams]]]:
    params = [SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=40, ignore_eos=True) for i in range(4)]
    return [{f"{first + w}-{i}": ([first + w, i, *P], p) for i, p in enumerate(params)} for w in range(count)]


@pytest.mark.parametrize("policy", ["auto", "fixed"])
def test_a_useless_head_after_a_knowing_one_goes_back(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    config = SpecConfig(method="eagle3", head=knowing_head(), nodes=5, depth=4, width=1, policy="fixed")
    served, off = engine(config, kind="last", deterministic=True), engine(kind="last", deterministic=True)
    if policy == "auto":
        served.policy = SpecPolicy(replace(config, policy="auto"), served.proposers, LineCost())
        price_drafts(served)
    epoch, accepted = served.heads.info()[0].epoch, []
    run(served, waves(1)[0])
    swap(served, random_head(kind="last"))
    assert served.heads.info()[0].on_trial and served.heads.info()[0].epoch != epoch
    for wave in waves(7, 1):
        found = run(served, wave)
        for name, output in run(off, wave).items():
            assert_same(found[name], output, tolerance=0)
        accepted.append(sum(o.metrics.accepted for o in found.values()))
    assert (served.heads.swaps, served.heads.rollbacks) == (1, 1) and served.drafter_health.head_rollbacks == 1
    assert served.heads.info()[0].epoch == epoch and not served.heads.info()[0].on_trial
    assert served.runner.taps == (2,) and accepted[-1] > 60
    assert [r.levelno for r in caplog.records if "clearly worse" in r.message] == [logging.WARNING]


def price_drafts(served: Engine) -> None:
    """Drafting costs what LineCost knows of, not what this machine takes for it."""
    drafted = served.policy.drafted
    served.policy.owes = lambda name, seq: 0.0  # type: ignore[method-assign]
    served.policy.drafted = lambda name, seconds, num_seqs: drafted(name, 1e-4, num_seqs)  # type: ignore[method-assign]


def test_a_head_as_good_stays_and_is_the_one_to_come_back_to() -> None:
    served = engine(chain("eagle3", head=knowing_head()), kind="last", deterministic=True)
    run(served, waves(1)[0])
    swap(served, knowing_head())
    for wave in waves(1 + VERIFIED // 28, 1):  # each request takes 8 steps, 7 of which draft
        run(served, wave)
    assert not served.heads.info()[0].on_trial and served.heads.rollbacks == 0


def test_two_swaps_in_a_row_come_back_to_the_verified_head() -> None:
    served = engine(chain("eagle3", head=knowing_head()), kind="last", deterministic=True)
    run(served, waves(1)[0])
    epoch = served.heads.info()[0].epoch
    swap(served, random_head(kind="last"))
    swap(served, random_head(kind="last", taps=(0, 2)))
    for wave in waves(2, 1):
        run(served, wave)
    assert served.heads.info()[0].epoch == epoch and (served.heads.swaps, served.heads.rollbacks) == (2, 1)


# -- LLM ------------------------------------------------------------------------------------------------------------------------


def test_llm_swaps_in_the_middle_of_a_stream() -> None:
    options: dict[str, Any] = {"device": "cpu", "deterministic": True, "max_model_len": 128, "kv_cache_bytes": 1 << 22}
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=48, ignore_eos=True)
    expected = LLM(checkpoint(), speculation="off", **options).generate([R], params)[0].outputs[0]
    llm, ids, text = LLM(checkpoint(), speculation=chain("eagle3"), **options), [], ""
    for i, delta in enumerate(llm.stream(R, params)):
        ids += delta.outputs[0].token_ids
        text += delta.outputs[0].text
        if i == 5:
            (info,) = llm.load_head(Path(other_head()))
            assert info.method == "eagle3" and info.taps == (2,) and info.on_trial
        if i == 12:
            assert llm.load_head(None) == []
    assert (ids, text) == (expected.token_ids, expected.text)
    with pytest.raises(ModelNotFound):
        llm.load_head("/nowhere/at/all")
    llm.engine.observers.append(lambda stats: llm.load_head(None))
    with pytest.raises(InvalidRequest, match="inside a step"):
        llm.generate([P], params)


def test_llm_swaps_from_another_thread_while_it_generates() -> None:
    options: dict[str, Any] = {"device": "cpu", "deterministic": True, "max_model_len": 128, "kv_cache_bytes": 1 << 22}
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=60, ignore_eos=True)
    expected = [o.outputs[0].token_ids for o in LLM(checkpoint(), speculation="off", **options).generate([R, P, R[:5]], params)]
    llm, done, errors = LLM(checkpoint(), speculation=chain("eagle3"), **options), threading.Event(), []

    def keep_swapping() -> None:
        try:
            while not done.is_set():
                llm.load_head(other_head())
                llm.load_head(random_head())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=keep_swapping)
    thread.start()
    try:
        for _ in range(3):
            assert [o.outputs[0].token_ids for o in llm.generate([R, P, R[:5]], params)] == expected
    finally:
        done.set()
        thread.join()
    assert not errors and llm.engine.heads.swaps > 2
