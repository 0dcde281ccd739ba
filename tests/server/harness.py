"""A real uvicorn server on a loopback port, in a thread, around any engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import uvicorn
from openai import OpenAI

from specdec.metrics import Metrics
from specdec.server.app import create_app
from specdec.server.loop import Engine, EngineLoop
from specdec.server.service import Settings
from tests.server.net import free_socket


@dataclass
class Served:
    """A running server. `client`/`http` talk to it; `engine` is what it serves (None if building failed)."""

    url: str
    loop: EngineLoop
    client: OpenAI
    http: httpx.Client

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def metric(self, name: str, **labels: str) -> float:
        """Value of a sample, 0 when it does not exist yet."""
        return self.loop.metrics.registry.get_sample_value(name, labels) or 0.0


@contextmanager
def served(build: Callable[[], Engine], settings: Settings | None = None, *, wait: bool = True) -> Iterator[Served]:
    """Serve until the block ends. `wait`: until the engine has left its loading state."""
    made: list[EngineLoop] = []
    sock = free_socket()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    ready = threading.Event()

    async def main() -> None:
        loop = EngineLoop(build, Metrics(), max_queue=settings.max_queue if settings else None)
        made.append(loop)
        server = uvicorn.Server(uvicorn.Config(create_app(loop, settings or Settings()), log_config=None, timeout_graceful_shutdown=5))
        servers.append(server)
        task = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started and not task.done():
            await asyncio.sleep(0.005)
        if wait:
            await loop.started.wait()
        ready.set()
        await task

    servers: list[uvicorn.Server] = []
    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(120), "the server did not start"
    key = (settings.api_key if settings else None) or "none"
    try:
        with httpx.Client(base_url=url, timeout=60) as http, OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as client:
            yield Served(url, made[0], client, http)
    finally:
        servers[0].should_exit = True
        thread.join(30)
        sock.close()
