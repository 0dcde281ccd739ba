"""Run the application under uvicorn: start-up log, drain on SIGTERM, exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn

from specdec.errors import ConfigError
from specdec.metrics import Metrics
from specdec.server.app import create_app
from specdec.server.listen import listen
from specdec.server.loop import Engine, EngineLoop, State
from specdec.server.service import Settings, dtypes

log = logging.getLogger("specdec.server")
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the first signal must drain before anything closes."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    build: Callable[[], Engine], settings: Settings, sockets: list[socket.socket], *, url: str, drain_timeout: float, access_log: bool
) -> int:
    """Serve on listening sockets until told to stop; the exit code.

    First SIGTERM or SIGINT: refuse new work, finish what was accepted (at most `drain_timeout` seconds), return 0. Second:
    exit at once. Returns 1 when the model cannot be loaded.
    """
    loop = EngineLoop(build, Metrics(), max_queue=settings.max_queue)
    server = _server(loop, settings, access_log)
    stop = asyncio.Event()
    signals = 0

    def on_signal(number: int) -> None:
        nonlocal signals
        signals += 1
        if signals > 1 or loop.state is State.LOADING:
            log.warning("%s: exiting at once", signal.Signals(number).name)
            _exit(0 if signals == 1 else 128 + number)
        log.info("%s: draining; a second signal exits at once", signal.Signals(number).name)
        stop.set()

    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    watch = asyncio.create_task(_watch(loop, server, stop, drain_timeout, url))
    try:
        await server.serve(sockets=sockets)
    except SystemExit:  # the application could not start; uvicorn has logged why
        return 1
    finally:
        watch.cancel()
    code = 0 if server.started and stop.is_set() and loop.error is None else 1
    if loop.thread_alive:  # inside a step that does not end; the interpreter must not be torn down under it
        _exit(code)
    return code


def _server(loop: EngineLoop, settings: Settings, access_log: bool) -> _Server:
    """uvicorn around the application; its own start and stop messages are replaced by ours."""
    app = create_app(loop, settings)
    config = uvicorn.Config(app, log_config=None, log_level="warning", access_log=access_log, timeout_graceful_shutdown=10)
    if access_log:  # uvicorn sets one level for all its loggers; requests are logged at INFO
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    return _Server(config)


async def _watch(loop: EngineLoop, server: uvicorn.Server, stop: asyncio.Event, drain_timeout: float, url: str) -> None:
    """Log the start, then wait for the signal and end the server once everything accepted is finished."""
    log.info("loading the model; probes answer at %s/health and /ready", url)
    await loop.started.wait()
    if loop.state is State.DEAD:
        server.should_exit = True
        return
    _log_start(loop, url)
    await stop.wait()
    loop.drain()
    try:
        await asyncio.wait_for(loop.drained.wait(), drain_timeout)
    except asyncio.TimeoutError:
        log.warning("drain timeout: aborting what is left")
        loop.abort_all()
    server.should_exit = True


def _log_start(loop: EngineLoop, url: str) -> None:
    engine = loop.engine
    assert engine is not None
    c = engine.config
    log.info("model %s (%s), context %d tokens, %d sequences at a time", engine.model_name, c.model, engine.max_model_len, c.max_num_seqs)
    log.info("dtype %s, kv %s, weights %s, deterministic %s", *dtypes(engine), engine.quantization or "plain", c.deterministic)
    log.info("speculation %s, policy %s, verify %s", c.speculation.method, c.speculation.policy, c.speculation.verify)
    log.info("ready: %s/v1  (probes: /health /ready, metrics: /metrics)", url)


def _exit(code: int) -> None:
    """Leave without waiting for the engine thread, which may be inside a download or a long step."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(build: Callable[[], Engine], settings: Settings, *, host: str, port: int, drain_timeout: float, access_log: bool = False) -> int:
    """Take the port, then `serve` on a new event loop. Exit code 1, with nothing loaded, when the port cannot be had."""
    try:
        sockets = listen(host, port)
    except ConfigError as error:
        log.critical("%s", error)
        return 1
    url = f"http://{f'[{host}]' if ':' in host else host}:{sockets[0].getsockname()[1]}"
    try:
        return asyncio.run(serve(build, settings, sockets, url=url, drain_timeout=drain_timeout, access_log=access_log))
    finally:
        for sock in sockets:
            sock.close()
