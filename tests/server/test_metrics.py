"""The metrics of the public contract: names, types, and values that follow from what was served."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specdec.metrics import Emission, Metrics
from specdec.types import CompletionOutput, RequestMetrics, RequestOutput, StepStats
from tests.server.fake_engine import FakeEngine
from tests.server.harness import served

HISTOGRAMS = ("queue_wait_seconds", "time_to_first_token_seconds", "inter_token_seconds", "e2e_seconds", "draft_seconds", "verify_seconds")
COUNTERS = (
    "requests",
    "rejected",
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "preemptions",
    "spec_steps",
    "spec_draft_tokens",
    "spec_accepted_tokens",
    "spec_accepted_position",
    "spec_skipped",
    "spec_waited",
    "drafter_alarms",
    "head_swaps",
    "head_rollbacks",
)
GAUGES = (
    "queue_oldest_age_seconds",
    "queue_depth",
    "requests_running",
    "kv_usage_ratio",
    "speculation_gain_ratio",
    "drafter_state",
    "drafter_collapsed",
)


def test_names_and_types() -> None:
    with served(FakeEngine) as server:
        text = server.http.get("/metrics").text
    families = {f.name: f.type for f in text_string_to_metric_families(text)}
    for kind, names in (("histogram", HISTOGRAMS), ("counter", COUNTERS), ("gauge", GAUGES)):
        for name in names:
            assert families[f"specdec_{name}"] == kind
    for name in re.findall(r"^(\w[^{ ]*)[{ ]", text, re.M):
        assert re.fullmatch(r"specdec_[a-z0-9_]+", name)


def test_the_health_of_drafters_is_read_at_scrape() -> None:
    with served(FakeEngine) as server:
        assert [server.metric("specdec_drafter_collapsed", drafter=d) for d in ("ngram", "suffix")] == [1, 0]
        assert [server.metric("specdec_drafter_alarms_total", drafter=d) for d in ("ngram", "suffix")] == [2, 0]
        assert (server.metric("specdec_head_swaps_total"), server.metric("specdec_head_rollbacks_total")) == (3, 1)


def test_queue_wait_has_millisecond_buckets() -> None:
    assert Metrics().registry.get_sample_value("specdec_queue_wait_seconds_bucket", {"le": "0.001"}) == 0


def test_values_of_a_served_request() -> None:
    with served(FakeEngine) as server:
        server.client.completions.create(model="fake", prompt="abcde", max_tokens=7, n=2)
        server.client.completions.create(model="fake", prompt="abc", max_tokens=4, stop=None, extra_body={"speculation": "off"})
        assert server.metric("specdec_prompt_tokens_total") == 8
        assert server.metric("specdec_generation_tokens_total") == 18
        assert server.metric("specdec_requests_total", outcome="length") == 2
        for name in ("queue_wait", "time_to_first_token", "e2e"):
            assert server.metric(f"specdec_{name}_seconds_count") == 2
        assert server.metric("specdec_inter_token_seconds_count") == 18 - 3  # every token but the first of each choice
        # steps 2 and 4 of the first request drafted two tokens, of which one was accepted
        assert server.metric("specdec_spec_steps_total", drafter="ngram") == 2
        assert server.metric("specdec_spec_draft_tokens_total", drafter="ngram") == 4
        assert server.metric("specdec_spec_accepted_tokens_total", drafter="ngram") == 2
        assert server.metric("specdec_spec_accepted_position_total", drafter="ngram", position="1") == 2


def test_step_statistics() -> None:
    metrics = Metrics({"model": "m"})
    stats = StepStats(0, 3, 9, 3, 100, draft_seconds=0.002, verify_seconds=0.003, gain=1.7)
    stats.drafts, stats.drafted, stats.accepted = {"ngram": 2}, {"ngram": 6}, {"ngram": 3}
    stats.accepted_position = {"ngram": [2, 1]}
    stats.skipped = {"dormant": 1}
    stats.waited = "budget"
    stats.drafter_states = {"ngram": {"active": 2, "dormant": 1}}
    metrics.observe_step(stats)
    stats.drafter_states = {"ngram": {"warm": 3}}
    metrics.observe_step(stats)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"specdec_{name}", labels)

    assert value("info", model="m") == 1
    assert value("spec_steps_total", drafter="ngram") == 4
    assert [value("spec_accepted_position_total", drafter="ngram", position=p) for p in "12"] == [4, 2]
    assert value("spec_skipped_total", reason="dormant") == 2
    assert value("spec_waited_total", reason="budget") == 2
    assert [value("drafter_state", drafter="ngram", state=s) for s in ("active", "warm", "dormant")] == [0, 3, 0]
    assert value("speculation_gain_ratio") == 1.7
    assert value("draft_seconds_sum") == pytest.approx(0.004) and value("verify_seconds_count") == 2


def test_a_plain_step_is_no_draft_step() -> None:
    metrics = Metrics()
    metrics.observe_step(StepStats(0, 1, 1, 1, 10, draft_seconds=0.5))
    assert metrics.registry.get_sample_value("specdec_draft_seconds_count") == 0


def test_a_gap_is_shared_by_the_tokens_of_a_step() -> None:
    """Three tokens 0.6 s after the last are three gaps of 0.2 s, not one of 0.6."""
    metrics, emission = Metrics(), Emission()
    facts = RequestMetrics(arrival=10.0, first_scheduled=10.5, prompt_tokens=4)

    def delta(ids: list[int], finish: str | None = None) -> RequestOutput:
        return RequestOutput("r", None, [1] * 4, [CompletionOutput(0, "", ids, finish)], finish is not None, facts)

    metrics.observe_output(delta([1]), emission, now=11.0)
    metrics.observe_output(delta([2, 3, 4], "stop"), emission, now=11.6)

    def value(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"specdec_{name}")

    assert value("inter_token_seconds_count") == 3 and value("inter_token_seconds_sum") == pytest.approx(0.6)
    assert value("queue_wait_seconds_sum") == pytest.approx(0.5) and value("queue_wait_seconds_count") == 1
    assert value("time_to_first_token_seconds_sum") == pytest.approx(1.0)
    assert value("e2e_seconds_sum") == pytest.approx(1.6)
