"""The FastAPI application around one `EngineLoop`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from specdec.server import admin, chat, completions, errors, health
from specdec.server.loop import EngineLoop
from specdec.server.middleware import ApiKey, BodyLimit
from specdec.server.service import Service, Settings
from specdec.version import __version__

ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUSES = {
    400: "Invalid request",
    401: "Wrong API key",
    403: "Not without an API key",
    404: "No such model or path",
    405: "Method not allowed",
    413: "Body too large",
    429: "Queue full; see Retry-After",
    500: "The engine has crashed",
    503: "Loading or draining; see Retry-After",
}


def create_app(loop: EngineLoop, settings: Settings) -> FastAPI:
    """The application. Its lifespan starts the engine thread, and ends it after the last request."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop.start()
        yield
        await loop.stop()
        service.pool.shutdown(wait=False, cancel_futures=True)

    service = Service(loop, settings, loop.metrics)
    error = {"content": {"application/json": {"schema": ERROR_SCHEMA}}}
    app = FastAPI(
        title="specdec",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        responses={status: {"description": text} | error for status, text in _STATUSES.items()},
    )
    for part in (chat, completions, health, admin):
        app.include_router(part.router(service))
    _drop_422(app)
    errors.install(app, loop.metrics)
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes, metrics=loop.metrics)
    if settings.api_key is not None:
        app.add_middleware(ApiKey, key=settings.api_key, metrics=loop.metrics)
    return app


def _drop_422(app: FastAPI) -> None:
    """FastAPI documents 422 for validation errors; here they are 400."""
    original = app.openapi

    def openapi() -> dict[str, object]:
        schema = original()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
