"""BC-27: queue full, drain, and queue age. Sources: vllm#24885, #43208; kaito#2216; tt-inference-server#856."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import httpx
import pytest

from tests.server.net import until
from tests.server.process import Process, process

ASK = {
    "prompt": [5, 17, 42, 99, 3, 250, 17, 42],
    "max_tokens": 40,
    "temperature": 0,
    "ignore_eos": True,
    "speculation": {"method": "off"},  # forty steps, whatever the drafter would guess
}
SCRAPE_SECONDS = 0.2


def gauge(text: str, name: str) -> float:
    [value] = [line.split()[1] for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(value)


def settled(text: str) -> bool:
    """One runs and two wait. Before its first step the engine still counts the one that is about to run among the waiting."""
    return gauge(text, "specdec_queue_depth") == 2 and gauge(text, "specdec_requests_running") == 1


def ages_while_both_wait(server: Process) -> list[float]:
    """The oldest-age gauge, scraped every 200 ms from when one request runs and two wait until one of these is scheduled."""
    ages: list[float] = []
    until(lambda: settled(server.http.get("/metrics").text))
    while gauge(text := server.http.get("/metrics").text, "specdec_queue_depth") == 2:
        ages.append(gauge(text, "specdec_queue_oldest_age_seconds"))
        time.sleep(SCRAPE_SECONDS)
    return ages


@pytest.mark.parametrize("engine", ["fake", pytest.param("tiny", marks=pytest.mark.slow)])
def test_bc27_queue_full_drain_and_queue_age(engine: str) -> None:
    with process("--engine", engine, "--seqs", "1", "--queue", "2", "--step", "0.1") as server, ThreadPoolExecutor(5) as pool:
        barrier = threading.Barrier(5)

        def ask() -> httpx.Response:
            barrier.wait()
            return server.http.post("/v1/completions", json=ASK)

        asked = [pool.submit(ask) for _ in range(5)]
        until(lambda: sum(f.done() for f in asked) == 2)  # the two that found the queue full
        ages = ages_while_both_wait(server)
        assert len(ages) > 2 and ages == sorted(set(ages)) and ages[-1] > 0.5

        server.popen.send_signal(signal.SIGTERM)
        until(lambda: server.http.get("/ready").status_code == 503)
        assert server.http.get("/health").status_code == 200
        late = server.http.post("/v1/completions", json=ASK)
        assert late.status_code == 503 and int(late.headers["Retry-After"]) >= 1 and late.json()["error"]["code"] == "draining"

        wait(asked)
        answers = [f.result() for f in asked]
        assert sorted(a.status_code for a in answers) == [200, 200, 200, 429, 429]
        for answer in answers:
            if answer.status_code == 429:
                assert int(answer.headers["Retry-After"]) >= 1
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"} and error["code"] == "queue_full"
            else:
                assert answer.json()["usage"]["completion_tokens"] == 40
                assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
