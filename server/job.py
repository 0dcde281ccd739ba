"""`Job`: one HTTP request's prompts on their way through the engine loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from specdec.config import SamplingParams
from specdec.errors import SpecdecError
from specdec.metrics import Emission
from specdec.types import RequestOutput

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Ticket:
    """One prompt in flight. `position`: its place among the prompts of its job."""

    job: Job
    position: int
    request_id: str
    prompt: list[int]
    emission: Emission = field(default_factory=Emission)
    done: bool = False


class Call(Generic[T]):
    """Work for the engine thread between two steps; `answer` gets its result or error, on whatever thread."""

    def __init__(self, work: Callable[[Any], T]):
        self.answer: Future[T] = Future()
        self._work = work

    def run(self, engine: Any) -> None:
        """On the engine thread. An error is the caller's; the engine goes on."""
        if not self.answer.set_running_or_notify_cancel():  # the client left meanwhile
            return
        try:
            self.answer.set_result(self._work(engine))
        except Exception as error:
            self.answer.set_exception(error)

    def refuse(self, error: Exception) -> None:
        """There is no engine any more to run it."""
        if not self.answer.done():
            self.answer.set_exception(error)


class Job:
    """The prompts of one HTTP request: admitted whole or not at all, aborted together. Belongs to the event loop."""

    def __init__(self, request_id: str, prompts: list[list[int]], params: SamplingParams):
        many = len(prompts) > 1
        self.tickets = [Ticket(self, i, f"{request_id}-{i}" if many else request_id, prompt) for i, prompt in enumerate(prompts)]
        self.params = params
        self.arrival = time.monotonic()
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.outputs: asyncio.Queue[tuple[int, RequestOutput] | SpecdecError] = asyncio.Queue()

    @property
    def num_sequences(self) -> int:
        """Prompts × choices."""
        return len(self.tickets) * self.params.n

    async def deltas(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(position of the prompt, delta) until every prompt is finished; raises the error that ended the job otherwise."""
        left = len(self.tickets)
        while left:
            item = await self.outputs.get()
            if isinstance(item, SpecdecError):
                raise item
            left -= item[1].finished
            yield item
