"""`EngineLoop`: one thread owns the engine; asyncio hands it requests and gets deltas back, and never blocks on it.

Submissions and aborts travel through a thread-safe inbox that the engine thread empties between steps. Outputs travel back
with one `call_soon_threadsafe` per step. Everything named `_engine_*` runs on the engine thread, all else on the event loop.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from specdec.admission import check_room
from specdec.config import EngineConfig, SamplingParams
from specdec.errors import Draining, EngineDead, SpecdecError
from specdec.metrics import Gauges, Metrics
from specdec.server.job import Call, Job, Ticket
from specdec.types import RequestOutput, StepStats

log = logging.getLogger("specdec.server")
T = TypeVar("T")


class Engine(Gauges, Protocol):
    """The part of `specdec.engine.Engine` the server uses."""

    config: EngineConfig
    model_name: str
    quantization: str | None
    max_model_len: int
    vocab_size: int
    tokenizer: Any
    runner: Any  # .device, .model.dtype: where and in what it computes
    kv: Any  # .dtype: what the KV cache holds
    heads: Any  # `specdec.live_heads.LiveHeads`
    observers: list[Callable[[StepStats], None]]

    def add_request(self, request_id: str, prompt: str | list[int], params: SamplingParams, *, arrival: float | None = None) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def swap_heads(self, change: Any) -> None: ...
    def has_work(self) -> bool: ...
    def close(self) -> None: ...


class State(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"  # the engine failed to start, or crashed


class NotReady(SpecdecError):
    """The model is still loading or warming up."""

    status = 503
    code = "not_ready"


class EngineLoop:
    """Runs the engine. `build` is called on the engine thread and may take minutes (download, load, warm-up).

    max_queue: unfinished sequences beyond those that can run before jobs get QueueFull; None = any number. The engine itself is to
    be built without this limit: it sees prompts one by one, while a job is judged whole (see `specdec.admission`).
    """

    def __init__(self, build: Callable[[], Engine], metrics: Metrics, *, max_queue: int | None = None):
        self.metrics = metrics
        self.max_queue = max_queue
        self.state = State.LOADING
        self.engine: Engine | None = None
        self.error: BaseException | None = None  # why the state is DEAD
        self.started = asyncio.Event()  # left LOADING, for better or worse
        self.drained = asyncio.Event()  # DRAINING and nothing left to finish
        self._build = build
        self._inbox: queue.SimpleQueue[Job | Call[Any] | str | None] = queue.SimpleQueue()  # job = add, str = abort, None = stop
        self._calls: set[Call[Any]] = set()  # nobody has answered yet
        self._pending: set[Job] = set()  # in the inbox, not yet answered by the engine
        self._tickets: dict[str, Ticket] = {}
        self._live: dict[str, Ticket] = {}  # engine thread only: what the engine holds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._engine_main, name="specdec-engine", daemon=True)
        metrics.at_scrape.oldest_inbox = self._oldest_pending
        metrics.at_scrape.inbox_depth = lambda: len(self._pending)

    @property
    def thread_alive(self) -> bool:
        """The engine thread has not ended (yet)."""
        return self._thread.is_alive()

    # ---- event loop -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine thread; the running event loop receives its outputs."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def check_open(self) -> None:
        """Raise the typed error when no new work is taken."""
        if self.state is State.LOADING:
            raise NotReady("the model is still loading; try again in a moment")
        if self.state is State.DRAINING:
            raise Draining("the server is shutting down and takes no new requests; use another replica")
        if self.state is State.DEAD:
            raise EngineDead(f"the engine stopped: {self.error}; restart the server")

    async def submit(self, job: Job) -> None:
        """Returns when the engine has taken the whole job.

        Raises Draining, NotReady, EngineDead, or what `Engine.add_request` raised. Cancelling aborts the job.
        """
        self.check_open()
        self._tickets.update((t.request_id, t) for t in job.tickets)
        self._pending.add(job)
        self._inbox.put(job)
        try:
            await job.admitted
        except BaseException:
            self.abort(job)
            raise

    async def call(self, work: Callable[[Any], T]) -> T:
        """What `work` returns or raises on the engine thread, between two steps. Raises as `check_open` where there is no engine."""
        self.check_open()
        self._calls.add(call := Call(work))
        self._inbox.put(call)
        try:
            return await asyncio.wrap_future(call.answer)
        finally:
            self._calls.discard(call)

    def abort(self, job: Job) -> None:
        """Free what the job holds; harmless when it is finished already."""
        for ticket in job.tickets:
            if not ticket.done:
                self._finish(ticket)
                self._inbox.put(ticket.request_id)

    def drain(self) -> None:
        """Take no new work; `drained` is set when the accepted requests are finished."""
        if self.state is not State.DEAD:
            self.state = State.DRAINING
        self._check_drained()

    def abort_all(self) -> None:
        """End every request with a Draining error (the drain took too long)."""
        for job in {t.job for t in self._tickets.values()}:
            job.outputs.put_nowait(Draining("the server stopped before the request was finished; send it again"))
            self.abort(job)

    async def stop(self) -> None:
        """End the engine thread after its present step."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, 30.0)

    def _finish(self, ticket: Ticket) -> None:
        ticket.done = True
        self._tickets.pop(ticket.request_id, None)
        self._check_drained()

    def _check_drained(self) -> None:
        if self.state in (State.DRAINING, State.DEAD) and not self._tickets:
            self.drained.set()

    def _oldest_pending(self) -> float:
        arrivals = [job.arrival for job in self._pending.copy()]
        return time.monotonic() - min(arrivals) if arrivals else 0.0

    def _on_ready(self) -> None:
        if self.state is State.LOADING:
            self.state = State.READY
        self.started.set()

    def _on_dead(self, error: BaseException) -> None:
        self.state, self.error = State.DEAD, error
        self.started.set()
        answer = EngineDead(f"the engine stopped: {error}; restart the server")
        for call in self._calls:
            call.refuse(answer)
        for job in list(self._pending):
            self._on_admitted(job, answer)
        for ticket in list(self._tickets.values()):
            ticket.job.outputs.put_nowait(answer)
            self.metrics.requests.labels("error").inc()
            self._finish(ticket)
        self._check_drained()

    def _on_admitted(self, job: Job, error: Exception | None) -> None:
        self._pending.discard(job)
        if job.admitted.done():  # the client left meanwhile
            return
        if error is None:
            job.admitted.set_result(None)
            return
        for ticket in job.tickets:
            self._finish(ticket)
        job.admitted.set_exception(error)

    def _on_outputs(self, outputs: list[tuple[Ticket, RequestOutput]]) -> None:
        for ticket, output in outputs:
            if not ticket.done:
                ticket.job.outputs.put_nowait((ticket.position, output))
                if output.finished:
                    self._finish(ticket)

    # ---- engine thread ----------------------------------------------------------------------------------------------

    def _engine_post(self, callback: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            log.debug("the event loop is closed; nobody waits for this any more")

    def _engine_main(self) -> None:
        engine = None
        try:
            engine = self._build()
            self.engine = engine
            warm_up(engine)
            engine.observers.append(self.metrics.observe_step)
            self.metrics.at_scrape.engine = engine
            self._engine_post(self._on_ready)
            while self._engine_take(engine):
                if engine.has_work():
                    self._engine_step(engine)
        except BaseException as error:
            log.critical("the engine stopped: %s", error, exc_info=not isinstance(error, SpecdecError))
            self._engine_post(self._on_dead, error)
        finally:
            if engine is not None:
                engine.close()

    def _engine_step(self, engine: Engine) -> None:
        outputs = []
        for output in engine.step():
            ticket = self._live.get(output.request_id)
            if ticket is None:  # aborted
                continue
            self.metrics.observe_output(output, ticket.emission)
            if output.finished:
                del self._live[output.request_id]
            outputs.append((ticket, output))
        if outputs:
            self._engine_post(self._on_outputs, outputs)

    def _engine_take(self, engine: Engine) -> bool:
        """Empty the inbox, waiting only when there is nothing to compute. False = stop."""
        while True:
            try:
                item = self._inbox.get(block=not engine.has_work())
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item, str):
                self._engine_abort(engine, item)
            elif isinstance(item, Call):
                item.run(engine)
            else:
                self._engine_add(engine, item)

    def _engine_abort(self, engine: Engine, request_id: str) -> None:
        if self._live.pop(request_id, None) is not None:
            engine.abort(request_id)
            self.metrics.requests.labels("abort").inc()

    def _engine_add(self, engine: Engine, job: Job) -> None:
        """Hand the job to the engine; on an error take back what it had accepted."""
        error: Exception | None = None
        for i, ticket in enumerate(job.tickets):
            try:
                if i == 0:
                    held = {"running": engine.num_running, "waiting": engine.num_waiting}
                    check_room(engine.config, self.max_queue, job.num_sequences, **held)
                engine.add_request(ticket.request_id, ticket.prompt, job.params, arrival=job.arrival)
                self._live[ticket.request_id] = ticket
            except Exception as err:
                error = err
                if not isinstance(err, SpecdecError):  # a bug met by this request; the others go on
                    log.exception("add_request failed")
                    error = SpecdecError(f"internal error while admitting the request: {type(err).__name__}: {err}")
                for accepted in job.tickets[:i]:
                    self._live.pop(accepted.request_id)
                    engine.abort(accepted.request_id)
                break
        self._engine_post(self._on_admitted, job, error)


def warm_up(engine: Engine) -> None:
    """Run one short request end to end, so that the first user does not pay for lazy initialisation."""
    length = max(1, min(16, engine.max_model_len - 4))
    params = SamplingParams(temperature=0.0, max_tokens=max(1, min(4, engine.max_model_len - length)), ignore_eos=True)
    engine.add_request("warm-up", [i % engine.vocab_size for i in range(length)], params)
    while engine.has_work():
        engine.step()
