"""`/v1/admin/head`: see, swap and drop the draft heads of the running engine.

Only behind the API key. Without one the routes answer 403: whoever can reach the port could make the server read any directory
of this machine, or fetch any repository, and could take the drafters away. It is not 404, because the remedy is a flag to
start the server with, and that there is such a route is no secret.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from specdec.errors import ConfigError, InvalidRequest, SpecdecError, UnsupportedCheckpoint
from specdec.server.loop import Engine
from specdec.server.service import Service


class AdminClosed(SpecdecError):
    """An administrator's route on a server without an API key."""

    status = 403
    code = "admin_closed"


class HeadBody(BaseModel):
    """head: directory on the server, hub id, or shipped name. method: "eagle3" or "peagle", to be sure that it is of that kind."""

    model_config = ConfigDict(extra="forbid", strict=True)

    head: str = Field(min_length=1)
    method: str | None = None


def router(service: Service) -> APIRouter:
    """The routes, bound to their service."""

    async def closed_without_key() -> None:
        if service.settings.api_key is None:
            raise AdminClosed("draft heads can be changed only on a server with an API key; start it with --api-key KEY")

    routes = APIRouter(dependencies=[Depends(closed_without_key)])
    loading = asyncio.Lock()  # one head in memory at a time beside those in use

    async def change(head: str | None, method: str | None) -> dict[str, Any]:
        async with loading:
            service.loop.check_open()
            heads = service.engine.heads
            try:
                found = await asyncio.to_thread(heads.load, head, method)
                return await service.loop.call(lambda engine: _swapped(engine, found))
            except (ConfigError, UnsupportedCheckpoint) as error:  # the administrator's, not the server's fault
                raise InvalidRequest(error.message, param=error.param or "head") from error

    @routes.get("/v1/admin/head", summary="The draft heads in use, what became of earlier ones, and how drafters do")
    async def show() -> dict[str, Any]:
        service.loop.check_open()
        return await service.loop.call(_state)

    @routes.post("/v1/admin/head", summary="Load a draft head beside running requests and put it in place of the one of its kind")
    async def load(body: HeadBody) -> dict[str, Any]:
        return await change(body.head, body.method)

    @routes.delete("/v1/admin/head", summary="Go without draft heads, or without the one of a method")
    async def drop(method: str | None = None) -> dict[str, Any]:
        return await change(None, method)

    return routes


def _swapped(engine: Engine, found: Any) -> dict[str, Any]:
    engine.swap_heads(found)
    return _state(engine)


def _state(engine: Engine) -> dict[str, Any]:
    health = engine.drafter_health
    return {
        "object": "draft_heads",
        "data": [asdict(info) for info in engine.heads.info()],
        "swaps": health.head_swaps,
        "rollbacks": health.head_rollbacks,
        "collapsed": [name for name, collapsed in health.collapsed.items() if collapsed],
    }
