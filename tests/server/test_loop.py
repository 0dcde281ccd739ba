"""The engine loop: loading, crashes, admission of groups, draining; and that the event loop never waits for the engine."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from specdec.config import EngineConfig, SamplingParams
from specdec.errors import UnsupportedCheckpoint
from specdec.server.service import Settings
from tests.server.fake_engine import FakeEngine, FakeTokenizer
from tests.server.harness import Served, served
from tests.server.net import until
from tests.server.test_disconnect import gated, send

TEXT = "/v1/completions"


class Broken(FakeEngine):
    """Fails in the step that should produce token number `after`; or in add_request, for prompts that start with z."""

    after = 10**9

    def step(self) -> list[Any]:
        if any(len(p) >= self.after for r in self._running for p in r.produced):
            raise RuntimeError("the device is lost")
        return super().step()

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams, *, arrival: float | None = None) -> None:
        super().add_request(request_id, prompt, params, arrival=arrival)
        if prompt[0] == 25:
            self.abort(request_id)
            raise KeyError("a bug")


def test_probes_while_loading() -> None:
    go = threading.Event()

    def build() -> FakeEngine:
        go.wait(60)
        return FakeEngine()

    with served(build, wait=False) as server:
        assert server.http.get("/health").status_code == 200
        asked = (server.http.get("/ready"), server.http.post(TEXT, json={"prompt": "a"}), server.http.get("/v1/models"))
        for answer in (*asked, server.http.get("/v1/models/fake")):
            assert answer.status_code == 503 and int(answer.headers["Retry-After"]) >= 1
            assert answer.json()["error"]["code"] == "not_ready"
        assert server.http.get("/metrics").status_code == 200
        go.set()
        until(lambda: server.http.get("/ready").status_code == 200)
        assert server.http.post(TEXT, json={"prompt": "a"}).status_code == 200


def test_a_model_that_cannot_be_loaded() -> None:
    def build() -> FakeEngine:
        raise UnsupportedCheckpoint("model.gguf is truncated")

    with served(build) as server:
        assert server.http.get("/health").status_code == 500
        assert server.http.get("/ready").status_code == 503
        answer = server.http.post(TEXT, json={"prompt": "a"})
        assert answer.status_code == 500 and "truncated" in answer.json()["error"]["message"]


def test_an_engine_that_crashes_answers_everybody() -> None:
    engine = Broken(EngineConfig(model="fake", max_num_seqs=2))
    with served(lambda: engine) as server:
        engine.after = 5
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: server.http.post(TEXT, json={"prompt": "abc", "max_tokens": 50}), range(4)))
        assert [a.status_code for a in answers] == [500] * 4
        assert all(a.json()["error"]["code"] == "engine_dead" for a in answers)
        assert server.http.get("/health").status_code == 500 and server.http.get("/ready").status_code == 503
        assert server.http.post(TEXT, json={"prompt": "a"}).status_code == 500
        assert engine.closed


def test_a_crash_inside_a_stream_is_its_last_event() -> None:
    engine = Broken()
    with served(lambda: engine) as server:
        engine.after = 5
        seen = 0
        with pytest.raises(openai.APIError, match="device is lost"):
            for _ in server.client.completions.create(model="fake", prompt="abc", max_tokens=50, stream=True):
                seen += 1
        assert seen > 0
        engine.after = 10**9


def test_a_bug_in_one_admission_leaves_the_others_alone() -> None:
    with served(Broken) as server:
        answer = server.http.post(TEXT, json={"prompt": "zzz"})
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
        assert server.http.post(TEXT, json={"prompt": "abc"}).status_code == 200


def test_prompts_of_one_request_are_admitted_whole_or_not_at_all() -> None:
    with gated(max_queue=2) as (server, engine, gate), ThreadPoolExecutor(3) as pool:

        def post(**fields: Any) -> Future[httpx.Response]:
            return pool.submit(lambda: server.http.post(TEXT, json={"max_tokens": 2} | fields))

        def answer(**fields: Any) -> httpx.Response:
            asked = post(**fields)
            gate.step_until(asked.done)
            return asked.result()

        first = post(prompt="a", max_tokens=4000)
        gate.step_until(lambda: engine.num_running == 1)
        bad = answer(prompt=[[1], [999]])
        assert bad.status_code == 400 and bad.json()["error"]["param"] == "prompt"
        assert engine.num_waiting == 0 and len(engine.aborted) == 1
        second = post(prompt="b")
        gate.step_until(lambda: engine.num_waiting == 1)
        for fields in ({"prompt": ["c", "d"]}, {"prompt": "c", "n": 2}):
            full = answer(**fields)
            assert full.status_code == 429 and int(full.headers["Retry-After"]) >= 1
            assert full.json()["error"]["code"] == "queue_full"
        assert engine.num_waiting == 1 and len(engine.aborted) == 1  # nothing of what was refused had been added
        gate.open()
        assert first.result(60).status_code == second.result(60).status_code == 200


@pytest.mark.parametrize("fields", [{"prompt": ["x"] * 9}, {"prompt": "x", "n": 9}, {"prompt": ["x", "y", "z"], "n": 3}])
def test_what_can_run_and_what_may_wait_bound_a_job_together(fields: dict[str, Any]) -> None:
    """Nine sequences: as many as are ever held are served, however few of them run; one more could never be."""
    for max_queue, status in ((5, 200), (4, 400)):
        engine = FakeEngine(EngineConfig(model="fake", max_num_seqs=4))
        with served(lambda engine=engine: engine, Settings(max_queue=max_queue)) as server:  # type: ignore[misc]
            answer = server.http.post(TEXT, json=fields | {"max_tokens": 2})
            assert answer.status_code == status, answer.text
            if status == 200:
                assert len(answer.json()["choices"]) == 9
            else:
                rule = "needs 9 sequences (prompts × n), but at most 8 are held at a time (4 that can run + max_queue 4)"
                assert rule in answer.json()["error"]["message"] and answer.json()["error"]["code"] == "invalid_request"


def test_a_full_queue_tells_its_numbers() -> None:
    with gated(seqs=2, max_queue=3) as (server, engine, gate), ThreadPoolExecutor(4) as pool:
        fields = [{"prompt": "a", "n": 2}, {"prompt": "b"}, {"prompt": ["c", "d"]}]
        asked = []
        for i, field in enumerate(fields):
            asked.append(pool.submit(lambda field=field: server.http.post(TEXT, json=field | {"max_tokens": 4000})))  # type: ignore[misc]
            gate.step_until(lambda i=i: len(server.loop._live) == (1, 2, 4)[i])  # type: ignore[misc]
        held = engine.num_running + engine.num_waiting
        assert held == 4  # requests to this engine, which takes n choices for one
        late = pool.submit(lambda: server.http.post(TEXT, json={"prompt": "e", "n": 2}))
        gate.step_until(late.done)
        message = late.result().json()["error"]["message"]
        assert late.result().status_code == 429 and message.startswith("2 sequences are running and 2 waiting, the request needs 2, but at")
        assert "at most 5 are held at a time (2 that can run + max_queue 3)" in message
        gate.open()
        assert {f.result(60).status_code for f in asked} == {200}


@pytest.mark.parametrize(("max_queue", "status"), [(0, 429), (1, 200), (None, 200)])
def test_a_busy_engine_lets_as_many_wait_as_told(max_queue: int | None, status: int) -> None:
    with gated(max_queue=max_queue) as (server, engine, gate), ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: server.http.post(TEXT, json={"prompt": "a", "max_tokens": 4000}))
        gate.step_until(lambda: engine.num_running == 1)
        second = pool.submit(lambda: server.http.post(TEXT, json={"prompt": "b", "max_tokens": 1}))
        gate.step_until(lambda: second.done() or engine.num_waiting == 1)
        gate.open()
        assert second.result(60).status_code == status and first.result(60).status_code == 200


def test_probes_answer_while_the_engine_is_inside_a_step() -> None:
    with gated() as (server, _, gate):
        sock = send(server, max_tokens=3)
        until(gate.waiting.is_set)
        for path in ("/health", "/ready", "/metrics", "/v1/models"):
            assert server.http.get(path).status_code == 200
        assert gate.waiting.is_set()  # nothing has moved meanwhile
        gate.open()
        assert b"200 OK" in sock.recv(1 << 16)


def test_others_are_served_while_a_long_text_is_tokenised() -> None:
    inside, go = threading.Event(), threading.Event()

    class Slow(FakeTokenizer):
        def encode(self, text: str, *, add_special: bool = True) -> list[int]:
            if text.startswith("slow"):
                inside.set()
                assert go.wait(60)
            return super().encode(text, add_special=add_special)

    engine = FakeEngine()
    engine.tokenizer = Slow()
    with served(lambda: engine) as server, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(lambda: server.http.post(TEXT, json={"prompt": "slow", "max_tokens": 2}))
        assert inside.wait(60)
        assert server.http.get("/health").status_code == 200
        assert server.http.post(TEXT, json={"prompt": "abc", "max_tokens": 2}).status_code == 200
        assert not slow.done()
        go.set()
        assert slow.result(60).status_code == 200


def test_queue_age_rises_before_the_engine_sees_the_request() -> None:
    """A hung engine is when the gauge matters most."""
    with gated() as (server, _, gate):
        first = send(server, max_tokens=3)
        until(gate.waiting.is_set)
        second = send(server, max_tokens=3)
        until(lambda: server.metric("specdec_queue_depth") == 2)
        ages = [server.metric("specdec_queue_oldest_age_seconds") for _ in range(5)]
        assert ages == sorted(set(ages)) and server.metric("specdec_queue_depth") == 2
        gate.open()
        until(lambda: server.metric("specdec_requests_total", outcome="length") == 2)
        assert server.metric("specdec_queue_oldest_age_seconds") == 0
        assert first.recv(1 << 16) and second.recv(1 << 16)


def test_drain_refuses_new_work_and_finishes_the_rest() -> None:
    with gated() as (server, _, gate), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: server.http.post(TEXT, json={"prompt": "abc", "max_tokens": 30}))
        until(gate.waiting.is_set)
        on_loop(server, server.loop.drain)
        assert server.http.get("/health").status_code == 200
        for refused in (server.http.get("/ready"), server.http.post(TEXT, json={"prompt": "a"})):
            assert refused.status_code == 503 and int(refused.headers["Retry-After"]) >= 1
            assert refused.json()["error"]["code"] == "draining"
        assert not server.loop.drained.is_set()
        gate.open()
        done: httpx.Response = answer.result(60)
        assert done.status_code == 200 and done.json()["usage"]["completion_tokens"] == 30
        until(server.loop.drained.is_set)


def test_a_drain_that_takes_too_long_ends_with_an_error() -> None:
    with gated() as (server, engine, gate), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: server.http.post(TEXT, json={"prompt": "abc", "max_tokens": 30}))
        until(gate.waiting.is_set)
        on_loop(server, server.loop.drain)
        on_loop(server, server.loop.abort_all)
        assert answer.result(60).status_code == 503
        assert server.loop.drained.is_set()
        gate.open()
        until(lambda: engine.aborted)


def on_loop(server: Served, call: Any) -> None:
    """Run `call` on the server's event loop and wait for it."""
    done = threading.Event()
    assert server.loop._loop is not None
    server.loop._loop.call_soon_threadsafe(lambda: (call(), done.set()))
    assert done.wait(60)
