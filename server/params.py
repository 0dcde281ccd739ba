"""From a request body to what the engine takes: `SamplingParams`, chat messages, prompts."""

from __future__ import annotations

import re
from typing import Any

from specdec.config import SamplingParams
from specdec.errors import InvalidRequest
from specdec.server.protocol import ChatRequest, CompletionRequest, Generation, TextPart

_SHARED = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "seed",
    "prompt_logprobs",
    "logprobs_mode",
)  # fields of the same name and meaning in SamplingParams


def chat_params(body: ChatRequest) -> SamplingParams:
    """Sampling parameters of a chat request. Without a token limit the answer may fill the context."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise InvalidRequest("max_tokens and max_completion_tokens differ; send one of them", param="max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return SamplingParams(**_shared(body), max_tokens=limit, logprobs=(body.top_logprobs or 0) if body.logprobs else None)


def completion_params(body: CompletionRequest) -> SamplingParams:
    """Sampling parameters of a text completion.

    `max_tokens: 0` with echo scores the prompt: one token is computed and dropped, since the engine produces at least one.
    """
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("best_of is not supported; leave it out or set it equal to n", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens must be at least 1, or 0 together with echo", param="max_tokens")
    shared = _shared(body)
    if body.echo and body.logprobs is not None:
        shared["prompt_logprobs"] = max(body.logprobs, shared.get("prompt_logprobs", 0))
    return SamplingParams(**shared, max_tokens=16 if body.max_tokens is None else max(1, body.max_tokens), logprobs=body.logprobs)


def _shared(body: Generation) -> dict[str, Any]:
    """Keyword arguments for the fields present in the body."""
    fields = {name: value for name in _SHARED if (value := getattr(body, name)) is not None}
    if body.logit_bias is not None:
        fields["logit_bias"] = _logit_bias(body.logit_bias)
    if body.speculation is not None:
        fields["speculation"] = {"method": body.speculation} if isinstance(body.speculation, str) else _without_nulls(body.speculation)
    if body.prediction is not None:
        fields["prediction"] = plain_text(body.prediction.content)
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed; set stream to false", param="prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    return fields


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    """JSON keys are strings; the ids are decimal, without sign, blanks or leading zeros, so that no two keys mean one token."""
    for key in bias:
        if not re.fullmatch(r"0|[1-9][0-9]{0,8}", key):
            raise InvalidRequest(f"logit_bias: {key[:40]!a} is not a token id", param="logit_bias")
    return {int(key): value for key, value in bias.items()}


def plain_text(content: str | list[TextPart] | None) -> str:
    """The text of a message: a string, the concatenation of its parts, or nothing."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def template_messages(body: ChatRequest) -> list[dict[str, str]]:
    """Messages for the chat template; the developer role is the system role of newer clients."""
    for i, message in enumerate(body.messages):
        if message.content is None and message.role != "assistant":
            raise InvalidRequest(f"messages[{i}].content is missing", param=f"messages[{i}].content")
    roles = {"developer": "system"}
    return [{"role": roles.get(m.role, m.role), "content": plain_text(m.content)} for m in body.messages]


def prompts(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a completion request, one entry each."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is an empty list; send at least one prompt", param="prompt")
    if isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]  # the model guarantees list[int]
    return list(prompt)  # type: ignore[arg-type]
