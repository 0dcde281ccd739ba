"""Every failure in the shape of OpenAI: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from specdec.errors import Draining, QueueFull, SpecdecError
from specdec.metrics import Metrics
from specdec.server.loop import NotReady
from specdec.server.protocol import REFUSED

TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
RETRY_SECONDS = 2.0  # while loading or draining: another replica, or this one in a moment


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON object for one error."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": printable(message), "type": kind, "param": printable(param) if param else None, "code": code}}


def printable(text: str) -> str:
    """Lone surrogates escaped, so that any message can be sent as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def error_response(error: SpecdecError) -> JSONResponse:
    """The HTTP answer to a typed error; says when to come back where that helps."""
    headers = {}
    if isinstance(error, QueueFull):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    elif isinstance(error, (Draining, NotReady)):
        headers["Retry-After"] = str(math.ceil(RETRY_SECONDS))
    return JSONResponse(error_body(error.status, error.message, param=error.param, code=error.code), error.status, headers)


def error_event(error: SpecdecError) -> bytes:
    """An error inside a stream, as its last event."""
    body = error_body(error.status, error.message, param=error.param, code=error.code)
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def validation_message(error: RequestValidationError) -> tuple[str, str | None]:
    """(message, param) for the first field with a finding. The path stops where it would name a branch of a union; what the
    other branches miss is listed too."""
    first, *others = error.errors()
    if first["type"] == "json_invalid":
        return f"the body is not valid JSON: {first.get('ctx', {}).get('error', 'cannot be parsed')}", None
    if len(first["loc"]) == 1:
        return f"the body must be a JSON object, sent as Content-Type: application/json ({first['msg']})", None
    path, named = "", 1  # named: leading parts of `loc` that the path stands for, "body" included
    for part in first["loc"][1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "dict"):
            path += f".{part}" if path else part
        else:
            break
        named += 1
    same = [e for e in (first, *others) if e["loc"][:named] == first["loc"][:named]]
    wanted = dict.fromkeys(e["msg"] for e in [e for e in same if e["type"] == REFUSED] or same)
    return f"{path}: {', or '.join(list(wanted)[:4])}", path or None


def unreadable(cause: BaseException | None) -> str:
    """What is wrong with a body that the JSON parser gave up on with an error other than its own."""
    if isinstance(cause, RecursionError):
        return "the body is nested too deep; no request needs more than a few levels of lists and objects"
    if isinstance(cause, ValueError) and not isinstance(cause, UnicodeError):  # of these it lets only int's pass
        return f"the body holds a number that is too large, one of more than {sys.get_int_max_str_digits()} digits"
    return "the body cannot be read; send UTF-8 encoded JSON"


def install(app: FastAPI, metrics: Metrics) -> None:
    """Register the handlers on `app`; refusals are counted by code."""

    @app.exception_handler(SpecdecError)
    async def on_typed(request: Request, error: SpecdecError) -> JSONResponse:
        metrics.rejected.labels(error.code).inc()
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        message, param = validation_message(error)
        metrics.rejected.labels("invalid_request").inc()
        return JSONResponse(error_body(400, message, param=param, code="invalid_request"), 400)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        status = error.status_code
        message = {404: f"no such path: {request.url.path}", 405: f"{request.method} is not allowed on {request.url.path}"}.get(status)
        if status == 400:
            message = unreadable(error.__cause__)
            metrics.rejected.labels("invalid_request").inc()
        body = error_body(status, message or str(error.detail), code=CODES.get(status, "invalid_request"))
        return JSONResponse(body, status, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(500, f"internal error: {type(error).__name__}", code="internal_error"), 500)
