"""Coming and going: aborts in every state, more requests than seats, and that everything held is given back."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from specdec.config import SamplingParams
from specdec.engine import Engine
from specdec.sequence import Status
from tests.harness import GREEDY, SHAPES, Log, P, R, assert_same, check_idle, drain, engine, oracle_of, run, tree

LONG = replace(GREEDY, max_tokens=60)


def status(target: Engine, request_id: str) -> list[Status]:
    return [seq.status for seq in target._requests[request_id].sequences]


def abort(target: Engine, request_id: str) -> None:
    """Abort, and check that nothing is held for the request from that moment on."""
    sequences = target._requests[request_id].sequences
    target.abort(request_id)
    target.scheduler.check()
    assert all(seq.finished and not any(seq.block_tables) and seq.request_slot == -1 for seq in sequences)
    assert not any(seq in target.scheduler.running for seq in sequences)


def last_of(target: Engine, request_id: str) -> str:
    """Finish reason in the final output, which comes with the next step."""
    (output,) = [o for o in target.step() if o.request_id == request_id]
    assert output.finished
    reasons = {c.finish_reason for c in output.outputs}
    assert len(reasons) == 1
    return str(reasons.pop())


def test_abort_while_waiting() -> None:
    target = engine(max_num_seqs=1)
    target.add_request("running", P, GREEDY)
    target.add_request("waiting", P, GREEDY)
    target.step()
    assert status(target, "waiting") == [Status.WAITING]
    abort(target, "waiting")
    assert last_of(target, "waiting") == "abort"
    drain(target, Log())


def test_abort_before_any_step() -> None:
    target = engine()
    target.add_request("r", P, GREEDY)
    abort(target, "r")
    assert target.has_work(), "the final output is still to be collected"
    assert last_of(target, "r") == "abort"
    check_idle(target)


def test_abort_while_prefilling() -> None:
    target = engine(max_num_batched_tokens=5)
    target.add_request("r", R, GREEDY)
    target.step()
    target.step()
    assert target._requests["r"].sequences[0].num_computed == 10
    abort(target, "r")
    assert last_of(target, "r") == "abort"
    check_idle(target)


@pytest.mark.parametrize("shape", ["oracle-tree", "ngram-tree", "suffix-tree", "mix-chain"])
def test_abort_while_decoding_with_drafts(shape: str) -> None:
    """The neighbour that stays says what it says alone."""
    expected = run(engine(deterministic=True), {"stays": (R, LONG), "goes": (P, LONG)})
    target = engine(SHAPES[shape], oracle=oracle_of(expected), deterministic=True)
    for name, prompt in (("stays", R), ("goes", P)):
        target.add_request(name, prompt, LONG)
    log = Log()
    for _ in range(4):
        for delta in target.step():
            log.deltas.setdefault(delta.request_id, []).append(delta)
    abort(target, "goes")
    outputs = drain(target, log)
    assert outputs["goes"].outputs[0].finish_reason == "abort"
    produced = outputs["goes"].outputs[0].token_ids
    assert produced == expected["goes"].outputs[0].token_ids[: len(produced)] and produced
    assert_same(outputs["stays"], expected["stays"], tolerance=0)


def test_abort_while_preempted() -> None:
    target = engine(num_kv_blocks=26, max_model_len=80)
    target.add_request("old", P, LONG)
    target.add_request("young", R, replace(GREEDY, max_tokens=30))
    while status(target, "young") != [Status.PREEMPTED]:
        target.step()
    abort(target, "young")
    assert last_of(target, "young") == "abort"
    drain(target, Log())


def test_abort_one_of_several_choices_finished() -> None:
    """Choices that ended keep their reason, the others are aborted; each is told once."""
    params = SamplingParams(
        temperature=2.0, seed=1, n=4, max_tokens=40, ignore_eos=True, allowed_token_ids=[30, 40, 50, 60], stop_token_ids=[50]
    )
    target, log = engine(), Log()
    target.add_request("r", P, params)
    while not any(seq.finished for seq in target._requests["r"].sequences):
        for delta in target.step():
            log.deltas.setdefault("r", []).append(delta)
    early = {seq.choice for seq in target._requests["r"].sequences if seq.finished}
    abort(target, "r")
    found = drain(target, log)["r"]
    assert {c.index: c.finish_reason for c in found.outputs} == {i: "stop" if i in early else "abort" for i in range(4)}


def test_abort_while_forks_wait_for_the_prompt() -> None:
    target = engine(max_num_batched_tokens=10)
    target.add_request("r", R, replace(GREEDY, n=3))
    target.step()
    assert status(target, "r") == [Status.RUNNING, Status.WAITING, Status.WAITING]
    abort(target, "r")
    assert last_of(target, "r") == "abort"
    check_idle(target)


def test_abort_twice_or_unknown() -> None:
    target = engine()
    target.abort("nobody")
    target.add_request("r", P, GREEDY)
    target.step()
    target.abort("r")
    target.abort("r")
    outputs = target.step()
    assert [o.request_id for o in outputs] == ["r"] and target.step() == []
    target.abort("r")
    assert target.step() == [] and not target.has_work()
    assert run(target, {"r": (P, GREEDY)})["r"].finished


def test_text_held_back_comes_with_the_abort() -> None:
    """Characters withheld for a possible stop string are the client's once no more will come."""
    plain = run(engine(), {"r": (R, GREEDY)})["r"].outputs[0]
    target, text, ids = engine(), "", []
    target.add_request("r", R, replace(GREEDY, stop=[plain.text + "and more"]))
    for _ in range(10):
        for delta in target.step():
            text += delta.outputs[0].text
            ids += delta.outputs[0].token_ids
    assert text == "" and ids
    target.abort("r")
    (final,) = target.step()
    assert final.outputs[0].text == target.tokenizer.decode(ids)


def test_close_aborts_everything() -> None:
    target = engine(max_num_seqs=2)
    for i in range(5):
        target.add_request(str(i), P, GREEDY)
    target.step()
    target.close()
    assert not target.has_work()
    check_idle(target)


@pytest.mark.parametrize("shape", ["off", "mix-tree"])
def test_more_requests_than_seats(shape: str) -> None:
    """Forty requests on three seats: all served, in order of arrival, never more than three at once."""
    requests = {f"r{i}": ([i, *P], replace(GREEDY, max_tokens=5)) for i in range(40)}
    known = run(engine(deterministic=True, max_num_seqs=40), requests)
    target = engine("off" if shape == "off" else SHAPES[shape], oracle=oracle_of(known), deterministic=True, max_num_seqs=3)
    step, busiest = target.step, 0

    def counted() -> object:
        nonlocal busiest
        busiest = max(busiest, target.num_running)
        return step()

    target.step = counted  # type: ignore[method-assign, assignment]
    found = run(target, requests)
    assert busiest == 3
    for name in requests:
        assert_same(found[name], known[name], tolerance=0)
    starts = [found[f"r{i}"].metrics.first_scheduled for i in range(40)]
    assert starts == sorted(starts)


@pytest.mark.parametrize("kind", ["t0", "two_groups"])
@pytest.mark.parametrize("seed", range(4))
def test_random_comings_and_goings(kind: str, seed: int) -> None:
    """Arrivals, aborts and steps in any order on a small pool; survivors equal OFF, nothing leaks."""
    rng = random.Random(seed)
    params = [replace(LONG, max_tokens=rng.randint(1, 25), temperature=1.0, seed=i, n=rng.choice([1, 1, 3])) for i in range(14)]
    requests = {f"r{i}": ([rng.randrange(500) for _ in range(rng.randint(1, 40))], p) for i, p in enumerate(params)}
    known = run(engine(kind=kind, deterministic=True), requests)
    target = engine(
        tree("mix"),
        kind=kind,
        oracle=oracle_of(known),
        deterministic=True,
        num_kv_blocks=34,
        max_model_len=70,
        max_num_seqs=4,
        max_num_batched_tokens=20,
    )
    waiting, log, aborted = list(requests), Log(), set()
    while waiting or target.has_work():
        if waiting and rng.random() < 0.4:
            name = waiting.pop(0)
            target.add_request(name, *requests[name])
        if target._requests and rng.random() < 0.08:
            name = rng.choice(list(target._requests))
            aborted.add(name)
            target.abort(name)
        for delta in target.step():
            log.deltas.setdefault(delta.request_id, []).append(delta)
        target.scheduler.check()
    outputs = drain(target, log)
    assert set(outputs) == set(requests)
    for name, output in outputs.items():
        if name not in aborted:
            assert_same(output, known[name], tolerance=0)
