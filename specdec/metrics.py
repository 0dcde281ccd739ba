"""Prometheus metrics of one server: counters from `StepStats` and finished requests, gauges read at scrape.

Names: prefix `specdec_`, base units, no colons, counters end in `_total`. Everything a dashboard adds up over replicas is a
counter. Each `Metrics` owns its registry, so several engines can live in one process. Times are seconds on the monotonic
clock. Thread-safe: the engine thread writes, any thread renders.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from specdec.spec.watch import DrafterHealth
from specdec.types import RequestOutput, StepStats

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TINY = (0.0001, 0.00025, 0.0005, *SHORT[:11])  # one draft or one verification
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OUTCOMES = ("stop", "length", "abort", "error")
STATES = ("active", "warm", "dormant", "collapsed")


class Gauges(Protocol):
    """What the engine is asked for at each scrape; cheap reads, safe from another thread."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def oldest_wait_seconds(self) -> float: ...
    @property
    def kv_usage(self) -> float: ...
    @property
    def prefix_queries(self) -> int: ...
    @property
    def prefix_hits(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def drafter_health(self) -> DrafterHealth: ...


@dataclass(slots=True)
class Emission:
    """When a request last handed out tokens, per choice; kept by the owner of the request, updated by `observe_output`."""

    scheduled: bool = False
    last: dict[int, float] = field(default_factory=dict)


class _AtScrape:
    """Collector that reads the engine's gauges; reports nothing before an engine is attached."""

    def __init__(self) -> None:
        self.engine: Gauges | None = None
        self.oldest_inbox: Callable[[], float] = lambda: 0.0
        self.inbox_depth: Callable[[], int] = lambda: 0

    def collect(self) -> Iterator[Metric]:
        engine = self.engine
        oldest = max(self.oldest_inbox(), engine.oldest_wait_seconds if engine else 0.0)
        depth = self.inbox_depth() + (engine.num_waiting if engine else 0)
        yield GaugeMetricFamily("specdec_queue_oldest_age_seconds", "Age of the oldest request that waits to be scheduled", oldest)
        yield GaugeMetricFamily("specdec_queue_depth", "Requests that wait to be scheduled", depth)
        if engine is None:
            return
        yield GaugeMetricFamily("specdec_requests_running", "Sequences that own a request slot", engine.num_running)
        yield GaugeMetricFamily("specdec_kv_usage_ratio", "Share of KV blocks in use", engine.kv_usage)
        yield CounterMetricFamily("specdec_prefix_cache_queries", "Prompt tokens looked up in the prefix cache", engine.prefix_queries)
        yield CounterMetricFamily("specdec_prefix_cache_hits", "Prompt tokens found in the prefix cache", engine.prefix_hits)
        yield CounterMetricFamily("specdec_preemptions", "Sequences that lost their KV blocks and were recomputed", engine.preemptions)
        yield from _health(engine.drafter_health)


def _health(health: DrafterHealth) -> Iterator[Metric]:
    alarms = CounterMetricFamily("specdec_drafter_alarms", "Collapses of a drafter's acceptance", labels=("drafter",))
    collapsed = GaugeMetricFamily("specdec_drafter_collapsed", "1 from an alarm to the recovery, else 0", labels=("drafter",))
    for drafter, now in health.collapsed.items():
        alarms.add_metric((drafter,), health.alarms.get(drafter, 0))
        collapsed.add_metric((drafter,), now)
    yield from (alarms, collapsed)
    yield CounterMetricFamily("specdec_head_swaps", "Draft heads loaded or dropped while running", health.head_swaps)
    yield CounterMetricFamily("specdec_head_rollbacks", "New draft heads that gave way to the old one again", health.head_rollbacks)


class Metrics:
    """All metrics of architecture §5. `info` becomes the labels of `specdec_info`."""

    def __init__(self, info: dict[str, str] | None = None):
        self.registry = CollectorRegistry()
        self.at_scrape = _AtScrape()
        self.registry.register(self.at_scrape)  # type: ignore[arg-type]  # a collector by shape
        self._requests()
        self._speculation()
        if info:
            self.set_info(info)

    def _requests(self) -> None:
        def hist(name: str, text: str, buckets: tuple[float, ...] = SHORT) -> Histogram:
            return Histogram(f"specdec_{name}", text, buckets=buckets, registry=self.registry)

        def count(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"specdec_{name}", text, labels, registry=self.registry)

        self.queue_wait = hist("queue_wait_seconds", "Arrival to first scheduled")
        self.ttft = hist("time_to_first_token_seconds", "Arrival to first token")
        self.inter_token = hist("inter_token_seconds", "Time per output token after the first; a step's gap is shared by its tokens", TINY)
        self.e2e = hist("e2e_seconds", "Arrival to last token")
        self.requests = count("requests_total", "Finished requests", "outcome")
        self.rejected = count("rejected_total", "Requests refused before admission", "reason")
        self.prompt_tokens = count("prompt_tokens_total", "Prompt tokens of requests that were scheduled")
        self.generation_tokens = count("generation_tokens_total", "Tokens handed out")
        for outcome in OUTCOMES:
            self.requests.labels(outcome)

    def _speculation(self) -> None:
        def count(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"specdec_{name}", text, labels, registry=self.registry)

        self.spec_steps = count("spec_steps_total", "Drafts verified: one per sequence and step", "drafter")
        self.draft_tokens = count("spec_draft_tokens_total", "Draft tokens verified", "drafter")
        self.accepted_tokens = count("spec_accepted_tokens_total", "Draft tokens accepted", "drafter")
        self.accepted_position = count("spec_accepted_position_total", "Drafts accepted at this depth (1 = first)", "drafter", "position")
        self.skipped = count("spec_skipped_total", "Sequences that decoded a step without a draft", "reason")
        self.waited = count("spec_waited_total", "Steps that drafted, or came behind one that did, and waited for its verdict", "reason")
        self.draft_seconds = Histogram("specdec_draft_seconds", "Drafting, per step", buckets=TINY, registry=self.registry)
        self.verify_seconds = Histogram("specdec_verify_seconds", "Verification, per step", buckets=TINY, registry=self.registry)
        self.gain = Gauge(
            "specdec_speculation_gain_ratio",
            "Tokens per second over the estimate for plain decoding, last step that knew",
            registry=self.registry,
        )
        self.gain.set(1.0)
        self.drafter_state = Gauge("specdec_drafter_state", "Sequences per drafter and state", ("drafter", "state"), registry=self.registry)

    def set_info(self, info: dict[str, str]) -> None:
        """Publish configuration as the labels of a gauge that is always 1."""
        Gauge("specdec_info", "Model and engine", tuple(info), registry=self.registry).labels(**info).set(1)

    def observe_step(self, stats: StepStats) -> None:
        """Count one step. An observer for `Engine.observers`."""
        if stats.drafts or stats.drafted:
            self.draft_seconds.observe(stats.draft_seconds)
            self.verify_seconds.observe(stats.verify_seconds)
        for counter, per_drafter in (
            (self.spec_steps, stats.drafts),
            (self.draft_tokens, stats.drafted),
            (self.accepted_tokens, stats.accepted),
        ):
            for drafter, amount in per_drafter.items():
                counter.labels(drafter).inc(amount)
        for drafter, accepted in stats.accepted_position.items():
            for i, amount in enumerate(accepted):
                self.accepted_position.labels(drafter, str(i + 1)).inc(amount)
        for reason, amount in stats.skipped.items():
            self.skipped.labels(reason).inc(amount)
        if stats.waited is not None:
            self.waited.labels(stats.waited).inc()
        for drafter, states in stats.drafter_states.items():
            for state in STATES:
                self.drafter_state.labels(drafter, state).set(states.get(state, 0))
        if stats.gain is not None:
            self.gain.set(stats.gain)

    def observe_output(self, output: RequestOutput, emission: Emission, now: float | None = None) -> None:
        """Count one delta of a request: queue wait and prompt once, tokens, gaps per choice, the end when it is the last."""
        now = time.monotonic() if now is None else now
        metrics = output.metrics
        if not emission.scheduled and metrics.queue_wait is not None:
            emission.scheduled = True
            self.queue_wait.observe(metrics.queue_wait)
            self.prompt_tokens.inc(metrics.prompt_tokens)
        for choice in output.outputs:
            num = len(choice.token_ids)
            if num == 0:
                continue
            if not emission.last:
                self.ttft.observe(now - metrics.arrival)
            last = emission.last.get(choice.index)
            if last is not None:
                for _ in range(num):
                    self.inter_token.observe((now - last) / num)
            emission.last[choice.index] = now
            self.generation_tokens.inc(num)
        if output.finished:
            self.e2e.observe(now - metrics.arrival)
            self.requests.labels(_outcome(output)).inc()

    def render(self) -> bytes:
        """The text exposition of everything; serve it as `CONTENT_TYPE`."""
        return generate_latest(self.registry)


def _outcome(output: RequestOutput) -> str:
    """One word for a whole request: the reason of the last delta's first choice."""
    reason = output.outputs[0].finish_reason if output.outputs else None
    return reason if reason in OUTCOMES else "error"
