"""Pure ASGI middleware (nothing that hides disconnects): API key and body size."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.metrics import Metrics
from specdec.server.errors import error_body

DISCARD_BYTES, DISCARD_SECONDS = 64 << 20, 10.0


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


class ApiKey:
    """401 for `/v1` without `Authorization: Bearer KEY`. Probes and metrics stay open."""

    def __init__(self, app: ASGIApp, key: str, metrics: Metrics):
        self.app = app
        self.key = key.encode()
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1"):
            return await self.app(scope, receive, send)
        scheme, _, given = _header(scope, b"authorization").partition(b" ")
        # Compared in constant time, whatever the scheme, so that the key cannot be guessed byte by byte.
        if hmac.compare_digest(given.strip(), self.key) and scheme.lower() == b"bearer":
            return await self.app(scope, receive, send)
        self.metrics.rejected.labels("unauthorized").inc()
        message = "send the server's API key as 'Authorization: Bearer KEY'"
        headers = {"WWW-Authenticate": "Bearer"}
        await JSONResponse(error_body(401, message, code="invalid_api_key"), 401, headers)(scope, receive, send)


class BodyLimit:
    """413 for bodies of more than `limit` bytes, announced or found while reading.

    The connection is closed after that answer, but not before the client has had its time to read it: closing a socket with unread
    data resets the connection, and the reset overtakes the answer (RFC 9112 §9.6). So what the client still sends is read and
    thrown away, up to DISCARD_BYTES and for DISCARD_SECONDS.
    """

    def __init__(self, app: ASGIApp, limit: int, metrics: Metrics):
        self.app = app
        self.limit = limit
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        announced = _header(scope, b"content-length")
        if not announced.isdigit() or int(announced) <= self.limit:
            return await self._watch(scope, receive, send)
        self.metrics.rejected.labels("request_too_large").inc()
        body: Any = error_body(413, self._message(), code="request_too_large")
        await JSONResponse(body, 413, {"Connection": "close"})(scope, receive, _lingering(receive, send))

    async def _watch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application; its next `receive` fails once the body is too large, and its answer to that is the last."""
        read, reply = 0, send

        async def counted() -> Message:
            nonlocal read, reply
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.limit:
                self.metrics.rejected.labels("request_too_large").inc()
                reply = _lingering(receive, send) if message["more_body"] else send
                raise HTTPException(413, self._message(), {"Connection": "close"})
            return message

        async def answered(message: Message) -> None:
            await reply(message)

        await self.app(scope, counted, answered)

    def _message(self) -> str:
        return f"the body is larger than {self.limit} bytes; send less, or raise --max-body-bytes"


def _lingering(receive: Receive, send: Send) -> Send:
    """`send` that lets the client finish before the response, and with it the connection, ends."""

    async def lingering(message: Message) -> None:
        if message["type"] != "http.response.body" or message.get("more_body", False):
            return await send(message)
        await send({**message, "more_body": True})  # its length is in the headers: the client has all of it now
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_discard(receive), DISCARD_SECONDS)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return lingering


async def _discard(receive: Receive) -> None:
    """Read until the body ends, the client leaves, or DISCARD_BYTES are read."""
    read = 0
    while read < DISCARD_BYTES:
        message = await receive()
        read += len(message.get("body", b""))
        if not message.get("more_body", False):
            return
