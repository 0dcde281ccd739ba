"""Probes, metrics, and the list of models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from specdec.errors import EngineDead, SpecdecError
from specdec.metrics import CONTENT_TYPE
from specdec.server.errors import error_response
from specdec.server.loop import State
from specdec.server.service import Service, dtypes


class Exposition(Response):
    """Prometheus text format."""

    media_type = CONTENT_TYPE


def router(service: Service) -> APIRouter:
    """The routes, bound to their service."""
    routes = APIRouter()

    @routes.get("/health", summary="The process lives; 500 once the engine has crashed")
    async def health() -> Response:
        if service.loop.state is State.DEAD:
            return error_response(EngineDead(f"the engine stopped: {service.loop.error}; restart the server"))
        return JSONResponse({"status": "ok", "state": service.loop.state.value})

    @routes.get("/ready", summary="Takes requests; 503 while loading or draining")
    async def ready() -> Response:
        try:
            service.loop.check_open()
        except EngineDead as error:
            return JSONResponse({"status": error.code, "state": service.loop.state.value}, 503)
        except SpecdecError as error:
            return error_response(error)
        return JSONResponse({"status": "ready"})

    @routes.get("/metrics", summary="Prometheus metrics", response_class=Exposition)
    async def metrics() -> Response:
        return Exposition(service.metrics.render())

    @routes.get("/v1/models", summary="Models served here")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(service, name) for name in service.model_names]}

    @routes.get("/v1/models/{model:path}", summary="One model")
    async def model(model: str) -> dict[str, Any]:
        return _card(service, service.check_model(model))

    return routes


def _card(service: Service, name: str) -> dict[str, Any]:
    engine = service.engine
    config = engine.config
    dtype, kv_dtype = dtypes(engine)
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "specdec",
        "root": config.model,
        "max_model_len": engine.max_model_len,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "quantization": engine.quantization,
        "deterministic": config.deterministic,
        "speculation": {"method": config.speculation.method, "verify": config.speculation.verify, "policy": config.speculation.policy},
    }
