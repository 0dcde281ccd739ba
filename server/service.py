"""`Service`: what every handler needs, and the path from prompts to a streamed or whole response."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from fastapi.responses import JSONResponse, Response
from starlette.requests import Request

from specdec.config import SamplingParams
from specdec.errors import ModelNotFound
from specdec.metrics import Metrics
from specdec.server.job import Job
from specdec.server.loop import Engine, EngineLoop, NotReady
from specdec.server.protocol import Generation, check_extras
from specdec.server.responses import Header, Json, Usage
from specdec.server.streaming import DONE, EventStream, answer, event
from specdec.types import RequestOutput
from specdec.version import __version__

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """Choices of the HTTP layer. `model_names` empty = the engine's own name; the first is the one reported.

    max_queue: unfinished sequences held beyond those that can run; None = any number.
    """

    model_names: tuple[str, ...] = ()
    api_key: str | None = None
    strict: bool = False
    max_body_bytes: int = 16 << 20
    max_queue: int | None = None


class Answer(Protocol):
    """The shape of one kind of response."""

    header: Header
    scores_only: bool

    def deltas(self, position: int, output: RequestOutput) -> list[Json]:
        """Choices of the chunks for one delta; empty when there is nothing to show yet."""
        ...

    def whole(self, position: int, deltas: list[RequestOutput]) -> list[Json]:
        """Finished choices of the prompt at `position`."""
        ...

    def extras(self, outputs: list[RequestOutput]) -> Json:
        """Further top-level fields of a whole response; `outputs` holds the last delta of each prompt."""
        ...


def dtypes(engine: Engine) -> tuple[str, str]:
    """(activation dtype, KV dtype) as resolved at load, e.g. ("bfloat16", "bfloat16"); the config may say "auto"."""
    activation, kv = (str(dtype).removeprefix("torch.") for dtype in (engine.runner.model.dtype, engine.kv.dtype))
    return activation, kv


def _header_safe(name: str) -> str:
    """A field name as it may stand in a header: as it is when plain, else quoted with escapes."""
    return name if re.fullmatch(r"[\w.\[\]-]+", name, re.ASCII) else ascii(name)


@dataclass(slots=True)
class Service:
    """Context of all handlers."""

    loop: EngineLoop
    settings: Settings
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    # Tokenising megabytes takes a second; two threads keep the event loop and the engine thread free of it.
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "specdec-tokenize"))

    @property
    def engine(self) -> Engine:
        """The engine, once it is built; else the typed error that says why there is none."""
        if self.loop.engine is None:
            self.loop.check_open()
            raise NotReady("the model is still loading; try again in a moment")
        return self.loop.engine

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.settings.model_names or (self.engine.model_name,)

    @property
    def fingerprint(self) -> str:
        """Changes with what can change the text: version, model, numeric settings."""
        engine = self.engine
        c = engine.config
        device = str(engine.runner.device)
        facts = (__version__, engine.model_name, c.model, device, *dtypes(engine), c.quantization, c.act_dtype, c.deterministic)
        return "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:12]

    def check_model(self, name: str | None) -> str:
        """The model name to report. ModelNotFound for a name that is not served.

        Without --served-model-name the path or id the model was started with is a name too.
        """
        if name and not self.settings.model_names and name == self.engine.config.model:
            return name
        if name and name not in self.model_names:
            raise ModelNotFound(f"the model {name[:200]!a} is not served here; use {self.model_names[0]!r}", param="model")
        return name or self.model_names[0]

    async def in_pool(self, work: Callable[[], T]) -> T:
        """Run host work that would block the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)

    def open(self, body: Generation, kind: str) -> tuple[Header, dict[str, str]]:
        """Checks shared by both kinds of completion; the response header and the HTTP headers."""
        self.loop.check_open()
        header = Header(kind, self.check_model(body.model), self.fingerprint)
        ignored = check_extras(body, strict=self.settings.strict)
        headers = {"X-Request-Id": header.id}
        if ignored:
            headers["X-Specdec-Ignored"] = ", ".join(_header_safe(name[:80]) for name in ignored[:20])
        return header, headers

    async def respond(
        self, request: Request, body: Generation, form: Answer, headers: dict[str, str], prompts: list[list[int]], params: SamplingParams
    ) -> Response:
        """Admit the prompts, then stream or collect. Every error before the first token is an HTTP status, not an event."""
        if isinstance(params.prediction, str):
            text = params.prediction
            params = replace(params, prediction=await self.in_pool(lambda: self.engine.tokenizer.encode(text, add_special=False)))
        job = Job(form.header.id, prompts, params)
        start = self._stream(job, body, form, headers) if body.stream else self._collect(job, form, headers)
        return await answer(request, start)

    async def _stream(self, job: Job, body: Generation, form: Answer, headers: dict[str, str]) -> Response:
        await self.loop.submit(job)
        return EventStream(self._events(job, body, form), headers, close=lambda: self.loop.abort(job))

    async def _collect(self, job: Job, form: Answer, headers: dict[str, str]) -> Response:
        await self.loop.submit(job)
        usage = Usage(form.scores_only)
        parts: list[list[RequestOutput]] = [[] for _ in job.tickets]
        try:
            async for position, output in job.deltas():
                parts[position].append(output)
                usage.add(output)
        finally:
            self.loop.abort(job)
        choices = [choice for position, deltas in enumerate(parts) for choice in form.whole(position, deltas)]
        extras = form.extras([deltas[-1] for deltas in parts])
        return JSONResponse(form.header.body(choices) | {"usage": usage.json()} | extras, headers=headers)

    async def _events(self, job: Job, body: Generation, form: Answer) -> AsyncIterator[bytes]:
        options = body.stream_options
        final = bool(options and options.include_usage)
        continuous = bool(options and options.continuous_usage_stats)
        usage = Usage(form.scores_only)
        async for position, output in job.deltas():
            usage.add(output)
            choices = form.deltas(position, output)
            if choices:
                chunk: dict[str, Any] = form.header.body(choices, chunk=True)
                if final or continuous:
                    chunk["usage"] = usage.json() if continuous else None
                yield event(chunk)
        if final:
            yield event(form.header.body([], chunk=True) | {"usage": usage.json()})
        yield DONE
