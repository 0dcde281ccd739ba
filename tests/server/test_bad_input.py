"""Bad input: a 4xx in OpenAI's error shape that names the field, and the server goes on."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from specdec.server import middleware
from specdec.server.service import Settings
from tests.server.fake_engine import FakeEngine
from tests.server.harness import Served, served
from tests.server.net import GUARD

HELLO = [{"role": "user", "content": "hi"}]
JSON = {"Content-Type": "application/json"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def refused(answer: httpx.Response, status: int = 400, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Check the shape; the error object."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    return error


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
        (CHAT, {"messages": HELLO, "temperature": -1}, "temperature"),
        (CHAT, {"messages": HELLO, "temperature": "hot"}, "temperature"),
        (CHAT, {"messages": HELLO, "temperature": 10**400}, "temperature"),
        (CHAT, {"messages": HELLO, "top_p": 0}, "top_p"),
        (CHAT, {"messages": HELLO, "top_k": 2**40}, "top_k"),
        (CHAT, {"messages": HELLO, "n": 0}, "n"),
        (CHAT, {"messages": HELLO, "n": 100000}, "n"),
        (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": HELLO, "max_tokens": 2**80}, "max_tokens"),
        (CHAT, {"messages": HELLO, "max_tokens": 1.5}, "max_tokens"),
        (CHAT, {"messages": HELLO, "min_tokens": 5, "max_tokens": 3}, "min_tokens"),
        (CHAT, {"messages": HELLO, "seed": 2**70}, "seed"),
        (CHAT, {"messages": HELLO, "stop": [""]}, "stop"),
        (CHAT, {"messages": HELLO, "stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        (CHAT, {"messages": HELLO, "logit_bias": {"x": 1}}, "logit_bias"),
        (CHAT, {"messages": HELLO, "logit_bias": {"1": 1000}}, "logit_bias"),
        (CHAT, {"messages": HELLO, "logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "logprobs": 3}, "logprobs"),
        (CHAT, {"messages": HELLO, "logprobs_mode": "cooked"}, "logprobs_mode"),
        (CHAT, {"messages": HELLO, "do_sample": False}, "do_sample"),
        (TEXT, {"prompt": "a", "mirostat_mode": 2}, "mirostat_mode"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format.type"),
        (CHAT, {"messages": HELLO, "guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"messages": HELLO, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT, {"messages": HELLO, "speculation": {"method": "magic"}}, "speculation.method"),
        (CHAT, {"messages": HELLO, "speculation": {"trees": 3}}, "speculation"),
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": ["a", 1]}, "prompt"),
        (TEXT, {"prompt": [512]}, "prompt"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"),
        (TEXT, {"prompt": "a", "best_of": 3}, "best_of"),
        (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (TEXT, {"prompt": "a", "logprobs": True}, "logprobs"),
    ],
)
def test_the_field_is_named(fake: Served, path: str, fields: dict[str, Any], param: str) -> None:
    refused(fake.http.post(path, json=fields), param=param)


@pytest.mark.parametrize("prompt", [[1, True], [2.5], {"a": 1}, [[1], "a"]], ids=repr)
def test_a_field_of_several_forms_tells_what_each_of_them_misses(fake: Served, prompt: Any) -> None:
    message = refused(fake.http.post(TEXT, json={"prompt": prompt}), param="prompt")["message"]
    assert message.startswith("prompt: Input should be a valid string, or ")
    alone = refused(fake.http.post(TEXT, json={"prompt": "a", "temperature": -1, "top_p": 7}), param="temperature")["message"]
    assert alone == "temperature: Input should be greater than or equal to 0"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "x" * 1000])
def test_parts_that_are_not_text_are_refused_by_name(fake: Served, kind: str) -> None:
    parts = [{"type": "text", "text": "what is this?"}, {"type": kind, kind: {"url": "data:,"}}]
    message = refused(fake.http.post(CHAT, json={"messages": [{"role": "user", "content": parts}]}), param="messages[0].content")["message"]
    assert message == f"messages[0].content: this model takes text only; parts of type {kind[:40]!r} are not supported"


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_structured_output_is_refused_by_name(fake: Served, kind: str) -> None:
    for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"})):
        asked = body | {"response_format": {"type": kind, "json_schema": {"name": "x", "schema": {}}}}
        message = refused(fake.http.post(path, json=asked), param="response_format.type")["message"]
        assert message.startswith(f"response_format.type: structured output is not supported yet (type {kind!r})")


def test_what_the_json_parser_gives_up_on(fake: Served) -> None:
    for body, named in (
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "a number that is too large"),
        (b'{"prompt": ' + b"[" * 100_000, "nested too deep"),
        (b'{"prompt": ' + b'{"a": ' * 100_000, "nested too deep"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}", "less than 18446744073709551616"),
    ):
        error = fake.http.post(TEXT, content=body, headers=JSON).json()["error"]
        assert named in error["message"] and ("UTF-8" in error["message"]) == (named == "UTF-8")


def test_unknown_speculation_names_list_the_allowed_ones(fake: Served) -> None:
    error = refused(fake.http.post(TEXT, json={"prompt": "a", "speculation": {"tres": 1}}), param="speculation")
    assert "nodes" in error["message"] and "method" in error["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1, 2]", b"null", b'"text"', b"\xff\xfe\x00", b'{"prompt": "\xff"}', b"[" * 100_000, b'{"n": ' + b"9" * 6000 + b"}"],
)
def test_bodies_that_are_not_json(fake: Served, body: bytes) -> None:
    refused(fake.http.post(TEXT, content=body, headers=JSON))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite(fake: Served, number: str) -> None:
    refused(fake.http.post(TEXT, content=f'{{"prompt": "a", "temperature": {number}}}', headers=JSON), param="temperature")


@pytest.mark.parametrize("field", ["prompt", "stop", "model"])
def test_lone_surrogates(fake: Served, field: str) -> None:
    body = {"prompt": "a"} | {field: "\ud800"}
    refused(fake.http.post(TEXT, content=json.dumps(body), headers=JSON), param=field)


def test_lone_surrogate_in_a_field_name(fake: Served) -> None:
    refused(fake.http.post(TEXT, content=b'{"prompt": "a", "\\ud800": 1}', headers=JSON))


def test_a_missing_content_type_is_explained(fake: Served) -> None:
    assert "application/json" in refused(fake.http.post(TEXT, content=b'{"prompt": "a"}'))["message"]


def test_context_length(fake: Served) -> None:
    refused(fake.http.post(TEXT, json={"prompt": "a" * 5000}), param="prompt", code="context_length_exceeded")


def test_a_megabyte_of_prompt(fake: Served) -> None:
    refused(fake.http.post(TEXT, json={"prompt": "word " * 200_000}), param="prompt", code="context_length_exceeded")
    refused(fake.http.post(TEXT, json={"prompt": [1] * 500_000}), param="prompt", code="context_length_exceeded")


def test_stream_errors_are_statuses_not_events(fake: Served) -> None:
    refused(fake.http.post(TEXT, json={"prompt": "a" * 5000, "stream": True}), param="prompt")


def test_paths_and_methods(fake: Served) -> None:
    refused(fake.http.get("/v1/nothing"), 404, code="not_found")
    answer = fake.http.get(CHAT)
    refused(answer, 405, code="method_not_allowed")
    assert answer.headers["Allow"] == "POST"


def test_models_that_are_not_served(fake: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        fake.client.completions.create(model="gpt-17", prompt="a")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    refused(fake.http.get("/v1/models/nope"), 404, param="model", code="model_not_found")


def test_refusals_are_counted(fake: Served) -> None:
    before = fake.metric("specdec_rejected_total", reason="context_length_exceeded")
    fake.http.post(TEXT, json={"prompt": "a" * 5000})
    assert fake.metric("specdec_rejected_total", reason="context_length_exceeded") == before + 1


def test_bodies_over_the_limit() -> None:
    with served(FakeEngine, Settings(max_body_bytes=10_000)) as server:
        refused(server.http.post(TEXT, json={"prompt": "a" * 20_000}), 413, code="request_too_large")

        def chunks() -> Any:
            yield b'{"prompt": "'
            for _ in range(100):
                yield b"a" * 1000
            yield b'"}'

        refused(server.http.post(TEXT, content=chunks(), headers=JSON), 413, code="request_too_large")
        assert server.http.post(TEXT, json={"prompt": "a" * 3000}).status_code == 200


BIG = 17 << 20  # more than sockets buffer


def pieces(size: int) -> Iterator[bytes]:
    yield b'{"prompt": "'
    for _ in range(size >> 16):
        yield b"a" * (1 << 16)
    yield b'"}'


@pytest.mark.parametrize("chunked", [True, False])
def test_the_413_is_read_by_a_client_that_sends_on(fake: Served, chunked: bool) -> None:
    """It comes while most of the body is still to be sent."""
    content = pieces(BIG) if chunked else b"".join(pieces(BIG))
    error = refused(fake.http.post(TEXT, content=content, headers=JSON), 413, code="request_too_large")
    assert "--max-body-bytes" in error["message"]
    assert fake.http.post(TEXT, json={"prompt": "a", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    "flags", [["-H", "Transfer-Encoding: chunked"], ["-H", "Transfer-Encoding: chunked", "-H", "Expect:"], ["-H", "Expect:"]]
)
def test_curl_reads_the_413(fake: Served, flags: list[str], tmp_path: Path) -> None:
    curl = shutil.which("curl")
    assert curl is not None, "this test needs curl"
    file = tmp_path / "body"
    file.write_bytes(b"".join(pieces(BIG)))
    command = [curl, "-sS", "--max-time", "60", "-H", "Content-Type: application/json", *flags, "--data-binary", f"@{file}"]
    done = subprocess.run([*command, "-w", "\n%{http_code}", fake.url + TEXT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    body, status = done.stdout.rsplit("\n", 1)
    assert status == "413" and json.loads(body)["error"]["code"] == "request_too_large"


def test_a_body_without_end_is_not_read_for_ever(fake: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is thrown away is bounded in bytes, and in time for a client that sends nothing more."""
    monkeypatch.setattr(middleware, "DISCARD_BYTES", 1 << 20)
    monkeypatch.setattr(middleware, "DISCARD_SECONDS", 0.2)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for silent in (True, False):
        with socket.create_connection(("127.0.0.1", fake.port)) as sock:
            sock.settimeout(GUARD)
            sock.sendall(head + b"Content-Length: 99999999999\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                while not silent:
                    sock.sendall(b"a" * (1 << 16))
                received = b""
                while piece := sock.recv(1 << 16):
                    received += piece
                assert received.startswith(b"HTTP/1.1 413") and b"request_too_large" in received
    assert fake.http.get("/health").status_code == 200


def test_api_key() -> None:
    with served(FakeEngine, Settings(api_key="sesame")) as server:
        assert server.client.completions.create(model="fake", prompt="a").choices
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic sesame"},
            {"Authorization": "Bearer \xff".encode("latin-1")},
        ):
            refused(server.http.post(TEXT, json={"prompt": "a"}, headers=headers), 401, code="invalid_api_key")  # type: ignore[arg-type]
        assert server.http.get("/v1/models").status_code == 401
        for path in ("/health", "/ready", "/metrics"):
            assert server.http.get(path).status_code == 200


def test_strict_mode_refuses_unknown_fields() -> None:
    with served(FakeEngine, Settings(strict=True)) as server:
        refused(server.http.post(TEXT, json={"prompt": "a", "brand_new": 1}), param="brand_new")
        assert server.http.post(TEXT, json={"prompt": "a", "brand_new": None, "user": "me"}).status_code == 200


def test_served_model_names() -> None:
    with served(FakeEngine, Settings(model_names=("one", "two"))) as server:
        assert [m.id for m in server.client.models.list().data] == ["one", "two"]
        assert server.client.completions.create(model="two", prompt="a").model == "two"
        assert server.http.post(TEXT, json={"prompt": "a"}).json()["model"] == "one"
        refused(server.http.post(TEXT, json={"prompt": "a", "model": "fake"}), 404, param="model")
