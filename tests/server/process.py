"""A server process for tests: `python -m tests.server.process PORT [flags]`, and the code that starts and watches one."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

from specdec.config import EngineConfig, SpecConfig
from specdec.errors import UnsupportedCheckpoint
from specdec.server.loop import Engine
from specdec.server.run import run
from specdec.server.service import Settings
from tests.server.fake_engine import FakeEngine
from tests.server.net import GUARD, free_socket

ROOT = Path(__file__).parents[2]


class Slowed:
    """An engine whose every step takes `seconds` longer, after it has scheduled what waits (like the fake engine's)."""

    def __init__(self, engine: Any, seconds: float):
        self._engine = engine
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Any:
        outputs = self._engine.step()
        time.sleep(self._seconds)
        return outputs


def build(args: argparse.Namespace) -> Engine:
    """The engine the command line asks for."""
    if args.engine == "broken":
        raise UnsupportedCheckpoint("model.gguf is truncated; download it again")
    limits: dict[str, Any] = {"max_num_seqs": args.seqs}
    if args.engine == "fake":
        return FakeEngine(EngineConfig(model="fake", speculation=SpecConfig(method="ngram"), **limits), step_seconds=args.step)
    from specdec.llm import LLM
    from tests.harness import checkpoint

    engine = LLM(checkpoint(), speculation="ngram", device="cpu", **limits).engine
    return Slowed(engine, args.step)  # type: ignore[return-value]  # an engine by delegation


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("port", type=int)
    p.add_argument("--engine", choices=("fake", "tiny", "broken"), default="fake")
    p.add_argument("--step", type=float, default=0.0)
    p.add_argument("--seqs", type=int, default=32)
    p.add_argument("--queue", type=int)
    p.add_argument("--drain-timeout", type=float, default=60.0)
    p.add_argument("--access-log", action="store_true")
    p.add_argument("--log-level", default="INFO")
    args = p.parse_args()
    logging.basicConfig(level=args.log_level)
    limits: dict[str, Any] = {"drain_timeout": args.drain_timeout, "access_log": args.access_log}
    return run(lambda: build(args), Settings(max_queue=args.queue), host="127.0.0.1", port=args.port, **limits)


@dataclass
class Process:
    """A running server process."""

    popen: subprocess.Popen[bytes]
    http: httpx.Client

    def wait(self) -> int:
        """The exit code."""
        return self.popen.wait(GUARD)


@contextmanager
def process(*flags: str, ready: bool = True, log: IO[str] | None = None) -> Iterator[Process]:
    """Start a server process; `ready`: wait until it takes requests; `log`: a file for its standard error."""
    sock = free_socket()
    port = sock.getsockname()[1]
    sock.close()
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    popen = subprocess.Popen([sys.executable, "-m", "tests.server.process", str(port), *flags], cwd=ROOT, env=env, stderr=log)
    limits = httpx.Limits(max_connections=20)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=GUARD, limits=limits) as http:
            deadline = time.monotonic() + GUARD
            while ready and not _is_ready(http):
                assert popen.poll() is None and time.monotonic() < deadline, "the server did not start"
                time.sleep(0.05)
            yield Process(popen, http)
    finally:
        if popen.poll() is None:
            popen.kill()
        popen.wait()


def _is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    sys.exit(main())
