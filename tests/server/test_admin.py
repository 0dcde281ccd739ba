"""Draft heads over HTTP: who may, what it answers, and what the requests that run meanwhile notice (nothing)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from specdec.llm import LLM
from specdec.server.service import Settings
from tests.harness import P, R, checkpoint
from tests.server.fake_engine import FakeEngine
from tests.server.harness import Served, served
from tests.server.net import until
from tests.spec.heads import chain, knowing_head, random_head, tree

KEY = "secret"
PATH = "/v1/admin/head"
OPTIONS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "kv_cache_bytes": 1 << 22, "deterministic": True}


def request(server: Served, verb: str, body: Any = None, *, key: str | None = KEY, **params: str) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return server.http.request(verb, PATH, headers=headers, params=params, json=body)


def error(answer: httpx.Response) -> tuple[int, str, str | None]:
    body = answer.json()["error"]
    return answer.status_code, body["code"], body["param"]


@pytest.fixture(scope="module")
def tiny() -> Iterator[Served]:
    with served(lambda: LLM(checkpoint(), speculation=tree("eagle3"), **OPTIONS).engine, Settings(api_key=KEY)) as server:
        yield server


def complete(server: Served, **fields: Any) -> list[int]:
    body = {"prompt": P, "max_tokens": 48, "temperature": 0.8, "seed": 4, "ignore_eos": True, "return_token_ids": True} | fields
    answer = server.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def test_without_a_key_the_routes_are_closed_and_say_why() -> None:
    with served(FakeEngine) as server:
        for method in ("GET", "POST", "DELETE"):
            answer = request(server, method, {"head": "x"}, key=None)
            assert error(answer) == (403, "admin_closed", None) and "--api-key" in answer.json()["error"]["message"]
            assert request(server, method, {"nonsense": 1}, key="guess").status_code == 403
        assert server.metric("specdec_rejected_total", reason="admin_closed") == 6


@pytest.mark.parametrize("key", [None, "wrong", "secret2"])
def test_with_a_key_it_must_be_sent(tiny: Served, key: str | None) -> None:
    for method in ("GET", "POST", "DELETE"):
        assert error(request(tiny, method, {"head": random_head()}, key=key))[:2] == (401, "invalid_api_key")


def test_swap_show_and_drop(tiny: Served) -> None:
    expected = complete(tiny, speculation="off")
    before = request(tiny, "GET").json()
    assert [h["method"] for h in before["data"]] == ["eagle3"] and before["collapsed"] == []
    answer = request(tiny, "POST", {"head": random_head(taps=(2,)), "method": "eagle3"})
    assert answer.status_code == 200 and answer.json() == request(tiny, "GET").json()
    (head,) = answer.json()["data"]
    assert head["taps"] == [2] and head["on_trial"] and head["epoch"] != before["data"][0]["epoch"]
    assert answer.json()["swaps"] == before["swaps"] + 1 == tiny.metric("specdec_head_swaps_total")
    assert complete(tiny) == expected
    assert request(tiny, "DELETE", method="eagle3").json()["data"] == []
    assert complete(tiny) == expected
    assert request(tiny, "POST", {"head": random_head()}).json()["data"][0]["epoch"] == before["data"][0]["epoch"]


def test_what_cannot_be_loaded_is_refused_and_changes_nothing(tiny: Served, tmp_path: Any) -> None:
    before = request(tiny, "GET").json()
    (tmp_path / "config.json").write_text("{}")
    cases: list[tuple[Any, tuple[int, str, str | None]]] = [
        ({"head": str(tmp_path / "nowhere")}, (404, "model_not_found", "head")),
        ({"head": str(tmp_path)}, (400, "invalid_request", "head")),
        ({"head": random_head("peagle")}, (400, "invalid_request", "method")),
        ({"head": random_head(), "method": "peagle"}, (400, "invalid_request", "method")),
        ({"head": random_head(), "method": "ngram"}, (400, "invalid_request", "method")),
        ({"head": None}, (400, "invalid_request", "head")),
        ({"head": ""}, (400, "invalid_request", "head")),
        ({"head": 7}, (400, "invalid_request", "head")),
        ({"path": random_head()}, (400, "invalid_request", "head")),
        ({"head": random_head(), "force": True}, (400, "invalid_request", "force")),
        (None, (400, "invalid_request", None)),
    ]
    for body, expected in cases:
        assert error(request(tiny, "POST", body)) == expected, body
    assert error(request(tiny, "DELETE", method="ngram")) == (400, "invalid_request", "method")
    assert request(tiny, "GET").json() == before


def test_streams_go_on_over_swaps_with_the_same_text(tiny: Served) -> None:
    """Two streams of the real client while heads of other taps and KV shapes come and go."""
    asks: list[dict[str, Any]] = [{"prompt": R, "seed": 1}, {"prompt": P, "seed": 2}]
    expected = [complete(tiny, max_tokens=150, speculation="off", **ask) for ask in asks]
    found: list[list[int]] = [[], []]

    def stream(i: int) -> None:
        body = {"ignore_eos": True, "return_token_ids": True}
        fields: dict[str, Any] = {"model": "t0", "max_tokens": 150, "temperature": 0.8, "stream": True, "extra_body": body} | asks[i]
        for chunk in tiny.client.completions.create(**fields):
            found[i] += [token for choice in chunk.choices for token in choice.token_ids]  # type: ignore[attr-defined]

    threads = [threading.Thread(target=stream, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: all(found))
    swaps = 0
    while any(thread.is_alive() for thread in threads) or swaps == 0:
        head = random_head(taps=(2,), num_kv_heads=4, num_layers=2) if swaps % 2 == 0 else random_head()
        assert request(tiny, "POST", {"head": head}).status_code == 200
        swaps += 1
    for thread in threads:
        thread.join()
    assert found == expected


def test_a_slow_load_blocks_nobody(tiny: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a head is being read, requests are admitted and finish, and probes answer; the swap comes when it is done."""
    engine = tiny.loop.engine
    assert engine is not None
    load, entered, release = engine.heads.load, threading.Event(), threading.Event()

    def slow(path: str | None, method: str | None = None) -> Any:
        entered.set()
        assert release.wait(60)
        return load(path, method)

    monkeypatch.setattr(engine.heads, "load", slow)
    swaps, answers = engine.heads.swaps, list[httpx.Response]()
    post = threading.Thread(target=lambda: answers.append(request(tiny, "POST", {"head": random_head(taps=(2,))})))
    post.start()
    assert entered.wait(60)
    try:
        assert len(complete(tiny)) == 48 and tiny.http.get("/health").status_code == 200
        assert request(tiny, "GET").json()["swaps"] == swaps and not answers
    finally:
        release.set()
        post.join()
    assert answers[0].json()["swaps"] == swaps + 1


def test_a_worse_head_goes_back_and_the_metrics_say_so() -> None:
    speculation = chain("eagle3", head=knowing_head())
    with served(lambda: LLM(checkpoint("last"), speculation=speculation, **OPTIONS).engine, Settings(api_key=KEY)) as server:
        for seed in range(4):
            complete(server, seed=seed)
        epoch = request(server, "GET").json()["data"][0]["epoch"]
        (head,) = request(server, "POST", {"head": random_head(kind="last")}).json()["data"]
        assert head["epoch"] != epoch
        for seed in range(4):
            complete(server, seed=seed)
        state = request(server, "GET").json()
        assert [(h["epoch"], h["on_trial"]) for h in state["data"]] == [(epoch, False)]
        assert (state["swaps"], state["rollbacks"]) == (1, 1)
        assert (server.metric("specdec_head_swaps_total"), server.metric("specdec_head_rollbacks_total")) == (1, 1)


def test_an_engine_without_room_for_a_head_refuses() -> None:
    with served(lambda: LLM(checkpoint(), speculation="ngram", **OPTIONS).engine, Settings(api_key=KEY)) as server:
        assert error(request(server, "POST", {"head": random_head()})) == (400, "invalid_request", "speculation")
        assert request(server, "GET").json()["data"] == []


def test_an_engine_that_dies_answers_calls_that_wait() -> None:
    entered, release = threading.Event(), threading.Event()

    def gate() -> None:
        entered.set()
        assert release.wait(60)
        raise RuntimeError("the engine broke")

    engine = FakeEngine(gate=lambda: None)
    with served(lambda: engine, Settings(api_key=KEY)) as server:
        engine.gate = gate
        answers: list[httpx.Response] = []
        asks = [
            threading.Thread(
                target=lambda: server.http.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": f"Bearer {KEY}"})
            ),
            threading.Thread(target=lambda: answers.append(request(server, "GET"))),
        ]
        asks[0].start()
        assert entered.wait(60)
        asks[1].start()
        until(lambda: server.loop._calls)
        release.set()
        for thread in asks:
            thread.join()
        assert error(answers[0]) == (500, "engine_dead", None)
