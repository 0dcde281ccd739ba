"""Pure ASGI middleware (nothing that hides disconnects): API key and body size."""

from __future__ import annotations

import hmac
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.metrics import Metrics
from specdec.server.errors import error_body


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
    """413 for bodies of more than `limit` bytes, announced or found while reading."""

    def __init__(self, app: ASGIApp, limit: int, metrics: Metrics):
        self.app = app
        self.limit = limit
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        announced = _header(scope, b"content-length")
        if announced.isdigit() and int(announced) > self.limit:
            self.metrics.rejected.labels("request_too_large").inc()
            body: Any = error_body(413, self._message(), code="request_too_large")
            return await JSONResponse(body, 413, {"Connection": "close"})(scope, receive, send)
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.limit:
                self.metrics.rejected.labels("request_too_large").inc()
                raise HTTPException(413, self._message(), {"Connection": "close"})
            return message

        await self.app(scope, counted, send)

    def _message(self) -> str:
        return f"the body is larger than {self.limit} bytes; send less, or raise --max-body-bytes"
