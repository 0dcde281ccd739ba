"""Answers that notice a client who leaves: server-sent events, and whole bodies computed under watch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec.errors import SpecdecError
from specdec.server.errors import error_event

T = TypeVar("T")
CLIENT_GONE = 499  # nobody reads it; it only shows in access logs


class ClientGone(Exception):
    """The client closed the connection before the answer was ready."""


async def _until_gone(receive: Receive) -> None:
    """Return when the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises ClientGone as soon as the client leaves."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)  # `work` has released what it held


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace") + b"\n\n"


OPENAPI_200: dict[int | str, dict[str, Any]] = {
    200: {"description": "The whole answer, or with stream: true its chunks", "content": {"application/json": {}, "text/event-stream": {}}}
}
DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends the events of `events`; calls `close` at the end, also when the client leaves before the first event.

    A typed error becomes the last event, without [DONE].
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], headers: dict[str, str], close: Callable[[], None]):
        self.events = events
        self.close = close
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"} | headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        except ClientGone:
            return
        finally:
            self.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for chunk in self.events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except SpecdecError as error:
            await send({"type": "http.response.body", "body": error_event(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def answer(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """A response computed under watch."""
    try:
        return await while_connected(request.receive, work)
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
