"""Request bodies to `SamplingParams`: every field arrives, null means absent, and nothing is silently dropped."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from specdec.config import SamplingParams
from specdec.errors import InvalidRequest
from specdec.server.params import chat_params, completion_params, prompts, template_messages
from specdec.server.protocol import ALWAYS_ASK, OFF_AT_ZERO, UNSUPPORTED, ChatRequest, CompletionRequest, check_extras

HELLO = [{"role": "user", "content": "hi"}]
SAME_NAME: dict[str, Any] = {
    "n": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "typical_p": 0.8,
    "presence_penalty": 0.3,
    "frequency_penalty": -0.4,
    "repetition_penalty": 1.2,
    "bad_words": ["no"],
    "allowed_token_ids": [1, 2, 3],
    "min_tokens": 2,
    "max_tokens": 9,
    "stop": ["x", "y"],
    "stop_token_ids": [4],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "seed": 11,
    "prompt_logprobs": 2,
    "logprobs_mode": "processed",
}
OTHER: dict[str, tuple[Any, Any]] = {
    "logit_bias": ({"5": -100, "6": 1.5}, {5: -100, 6: 1.5}),
    "prediction": ({"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
    "speculation": ({"method": "ngram", "nodes": 8, "depth": None}, {"method": "ngram", "nodes": 8}),
}


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": HELLO, **fields})


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "hi", **fields})


def test_every_sampling_field_can_be_sent() -> None:
    reachable = set(SAME_NAME) | set(OTHER) | {"logprobs"}
    assert {f.name for f in dataclasses.fields(SamplingParams)} == reachable


@pytest.mark.parametrize("name", [*SAME_NAME, *OTHER])
def test_field_arrives(name: str) -> None:
    sent, expected = OTHER.get(name, (SAME_NAME.get(name), SAME_NAME.get(name)))
    for params in (chat_params(chat(**{name: sent})), completion_params(completion(**{name: sent}))):
        assert getattr(params, name) == expected
        assert getattr(SamplingParams(), name) != expected


@pytest.mark.parametrize("name", [*SAME_NAME, *OTHER, "logprobs", "stream_options", "response_format", "max_completion_tokens", "tools"])
def test_null_means_absent(name: str) -> None:
    body = chat(**{name: None})
    assert chat_params(body) == chat_params(chat())
    assert check_extras(body, strict=True) == []


def test_defaults() -> None:
    assert chat_params(chat()) == SamplingParams(max_tokens=None)
    assert completion_params(completion()) == SamplingParams(max_tokens=16)


def test_token_limits_of_chat() -> None:
    assert chat_params(chat(max_completion_tokens=5)).max_tokens == 5
    assert chat_params(chat(max_completion_tokens=5, max_tokens=5)).max_tokens == 5
    with pytest.raises(InvalidRequest) as caught:
        chat_params(chat(max_completion_tokens=5, max_tokens=6))
    assert caught.value.param == "max_tokens"


def test_logprobs_of_chat_and_completions() -> None:
    assert chat_params(chat(logprobs=True)).logprobs == 0
    assert chat_params(chat(logprobs=True, top_logprobs=3)).logprobs == 3
    assert chat_params(chat(logprobs=False)).logprobs is None
    assert completion_params(completion(logprobs=4)).logprobs == 4
    assert completion_params(completion(logprobs=2, echo=True)).prompt_logprobs == 2
    with pytest.raises(InvalidRequest):
        chat_params(chat(top_logprobs=3))


def test_speculation_as_a_word() -> None:
    assert chat_params(chat(speculation="off")).speculation == {"method": "off"}


def test_prompt_forms() -> None:
    assert prompts(completion(prompt="a")) == ["a"]
    assert prompts(completion(prompt=["a", "b"])) == ["a", "b"]
    assert prompts(completion(prompt=[1, 2])) == [[1, 2]]
    assert prompts(completion(prompt=[[1], [2, 3]])) == [[1], [2, 3]]


def test_messages_for_the_template() -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    body = chat(
        messages=[{"role": "developer", "content": "d"}, {"role": "assistant", "content": None}, {"role": "user", "content": parts}]
    )
    assert template_messages(body) == [
        {"role": "system", "content": "d"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "xy"},
    ]


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_unsupported_fields_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_extras(chat(**{name: {"some": "value"}}), strict=False)
    assert caught.value.param == name and name in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"do_sample": False},
        {"do_sample": True},
        {"samplers": []},
        {"spaces_between_special_tokens": False},
        {"max_new_tokens": 0},
        {"num_beams": 1},
        {"mirostat_mode": 2},
        {"mirostat_tau": 0},
        {"dry_sequence_breakers": ["x"]},
        {"dynatemp_exponent": 1.0},
        {"tfs_z": 0},
        {"penalty_alpha": 0.6},
        {"watermark": True},
    ],
)
def test_values_that_change_the_tokens_are_refused(fields: dict[str, Any]) -> None:
    for strict in (False, True):
        with pytest.raises(InvalidRequest) as caught:
            check_extras(completion(**fields), strict=strict)
        assert [caught.value.param] == list(fields)


@pytest.mark.parametrize("name", sorted(ALWAYS_ASK | OFF_AT_ZERO))
def test_zero_passes_only_where_it_switches_off(name: str) -> None:
    assert name in UNSUPPORTED
    if name in ALWAYS_ASK:
        with pytest.raises(InvalidRequest):
            check_extras(chat(**{name: 0}), strict=False)
    else:
        assert check_extras(chat(**{name: 0}), strict=True) == []


def test_fields_that_do_not_choose_tokens_are_ignored_by_name() -> None:
    assert check_extras(chat(reasoning_effort="low", verbosity="low"), strict=False) == ["reasoning_effort", "verbosity"]


@pytest.mark.parametrize("fields", [{"tools": []}, {"tool_choice": "none"}, {"use_beam_search": False}, {"user": "me", "store": True}])
def test_fields_that_ask_for_nothing_pass(fields: dict[str, Any]) -> None:
    assert check_extras(chat(**fields), strict=True) == []


def test_unknown_fields_are_named_or_refused() -> None:
    body = chat(brand_new=1, messages=[{"role": "user", "content": "x", "weight": 2}], stream=True, stream_options={"odd": 1})
    assert check_extras(body, strict=False) == ["brand_new", "stream_options.odd", "messages[0].weight"]
    with pytest.raises(InvalidRequest) as caught:
        check_extras(body, strict=True)
    assert caught.value.param == "brand_new"


def test_tool_calls_in_the_history_are_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_extras(chat(messages=[{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]), strict=False)
    assert caught.value.param == "messages[0].tool_calls"
