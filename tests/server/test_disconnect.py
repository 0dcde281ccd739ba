"""A client who leaves frees its request: streaming, whole bodies, queued, and before the first token."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from specdec.config import EngineConfig
from specdec.server.service import Settings
from tests.server.fake_engine import FakeEngine
from tests.server.harness import Served, served
from tests.server.net import GUARD, until


class Gate:
    """Holds the engine before each step until it is opened, or let through for a number of steps."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._open = threading.Event()
        self.waiting = threading.Event()

    def __call__(self) -> None:
        self.waiting.set()
        while not self._open.is_set() and not self._permits.acquire(timeout=0.002):
            pass
        self.waiting.clear()

    def let(self, steps: int) -> None:
        for _ in range(steps):
            self._permits.release()

    def step_until(self, condition: Callable[[], Any]) -> None:
        """One step at a time until the condition comes true."""

        def check() -> Any:
            done = condition()
            if not done and self.waiting.is_set():
                self.let(1)
            return done

        until(check)

    def open(self) -> None:
        self._open.set()


@contextmanager
def gated(seqs: int = 1, max_queue: int | None = None) -> Iterator[tuple[Served, FakeEngine, Gate]]:
    """A server whose engine runs `seqs` sequences and only steps when the gate lets it. Warm-up passes freely."""
    gate = Gate()
    engine = FakeEngine(EngineConfig(model="fake", max_num_seqs=seqs))
    with served(lambda: engine, Settings(max_queue=max_queue)) as server:
        engine.gate = gate
        try:
            yield server, engine, gate
        finally:
            gate.open()


def send(server: Served, **fields: Any) -> socket.socket:
    """Post a completion over a bare socket, which can be closed at any moment."""
    body = json.dumps({"prompt": "abc", "max_tokens": 1000} | fields).encode()
    sock = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def is_free(server: Served, engine: FakeEngine) -> bool:
    return engine.num_running == 0 and engine.num_waiting == 0 and not server.loop._tickets


@pytest.mark.parametrize("stream", [True, False])
def test_while_generating(stream: bool) -> None:
    with gated() as (server, engine, gate):
        sock = send(server, stream=stream)
        gate.step_until(lambda: engine.num_running == 1)
        if stream:
            received = b""
            while b"data: " not in received:
                received += sock.recv(1 << 16)
        sock.close()
        until(lambda: not server.loop._tickets)
        gate.step_until(lambda: is_free(server, engine))
        assert len(engine.aborted) == 1
        assert server.metric("specdec_requests_total", outcome="abort") == 1


@pytest.mark.parametrize("stream", [True, False])
def test_while_queued(stream: bool) -> None:
    """The second request waits behind the first, which must not be disturbed."""
    with gated() as (server, engine, gate):
        first = send(server, max_tokens=4000)
        gate.step_until(lambda: engine.num_running == 1)
        second = send(server, stream=stream)
        gate.step_until(lambda: engine.num_waiting == 1)
        second.close()
        gate.step_until(lambda: engine.num_waiting == 0)
        assert engine.num_running == 1 and len(engine.aborted) == 1
        gate.open()
        first.settimeout(GUARD)
        assert b"200 OK" in first.recv(1 << 16)
        until(lambda: is_free(server, engine))
        assert len(engine.aborted) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_before_the_engine_has_seen_it(stream: bool) -> None:
    """The engine is inside a step (a long prefill of somebody else) when the request comes and goes."""
    with gated(seqs=2) as (server, engine, gate):
        first = send(server, max_tokens=10)
        until(lambda: gate.waiting.is_set())
        second = send(server, stream=stream)
        until(lambda: len(server.loop._pending) == 1)
        assert server.metric("specdec_queue_depth") >= 1
        second.close()
        until(lambda: len(server.loop._tickets) == 1)
        gate.open()
        first.settimeout(GUARD)
        assert b"200 OK" in first.recv(1 << 16)
        until(lambda: is_free(server, engine))
        assert engine.aborted and server.metric("specdec_requests_total", outcome="length") == 1


def test_all_prompts_of_one_request_are_freed() -> None:
    with gated(seqs=2) as (server, engine, gate):
        sock = send(server, prompt=["abc", "def", "ghi"], n=2)
        gate.step_until(lambda: engine.num_running == 2 and engine.num_waiting == 1)
        sock.close()
        until(lambda: not server.loop._tickets)
        gate.open()
        until(lambda: is_free(server, engine))
        assert len(engine.aborted) == 3


def test_closing_the_clients_stream() -> None:
    with gated() as (server, engine, gate):
        stream = server.client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x"}], stream=True)
        gate.let(4)
        assert next(iter(stream)).choices
        stream.close()
        gate.step_until(lambda: is_free(server, engine))
        assert len(engine.aborted) == 1
