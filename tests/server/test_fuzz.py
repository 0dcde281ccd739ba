"""Fuzz the HTTP surface from its own OpenAPI schema: never a 5xx, only documented answers, and errors in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from tests.server.fake_engine import FakeEngine
from tests.server.harness import Served, served

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(lambda: FakeEngine(max_model_len=256)) as running:
        yield running


@pytest.fixture(scope="module")
def api(server: Served) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


OPERATIONS = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/v1/admin/head"),
    ("POST", "/v1/admin/head"),
    ("DELETE", "/v1/admin/head"),
)


@pytest.mark.parametrize("mode", [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE], ids=lambda m: m.value)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_documented_answers_only(server: Served, api: Any, method: str, path: str, mode: schemathesis.GenerationMode) -> None:
    """Bodies that fit the schema, and bodies that break it."""
    operation = api[path][method]
    if mode is schemathesis.GenerationMode.NEGATIVE and not operation.body:
        return check(server, operation.Case(path_parameters={"model": "../%ff"}))  # no schema to break

    @given(operation.as_strategy(generation_mode=mode))
    @settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    def run(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            case.body.pop("model", None)  # a random name would end every request at 404
        check(server, case)

    run()


def check(server: Served, case: schemathesis.Case) -> None:
    answer = case.call(base_url=server.url)
    case.validate_response(answer, checks=CHECKS)
    if answer.status_code >= 400:
        assert set(answer.json()) == {"error"} and set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_every_operation_is_fuzzed(server: Served, api: Any) -> None:
    assert {(op.method.upper(), op.path) for op in (r.ok() for r in api.get_all_operations())} == set(OPERATIONS)


def test_the_schema_documents_the_bodies(server: Served) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    assert set(paths) >= {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ready", "/metrics"}
    for path in ("/v1/chat/completions", "/v1/completions"):
        operation = paths[path]["post"]
        assert "application/json" in operation["requestBody"]["content"] and "422" not in operation["responses"]


def test_the_server_lives_on(server: Served) -> None:
    """Runs after the fuzzing in file order; on its own it checks a fresh server."""
    assert server.http.get("/health").status_code == 200
    assert server.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3}).json()["usage"]["completion_tokens"] == 3
