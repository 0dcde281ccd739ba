"""`/v1/completions`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from specdec.server.params import completion_params, prompts
from specdec.server.protocol import CompletionRequest
from specdec.server.responses import Header, Json, Offsets, Vocabulary, completion_logprobs, join, prompt_logprobs
from specdec.server.service import Service
from specdec.server.streaming import OPENAPI_200
from specdec.types import CompletionOutput, RequestOutput, TokenLogprobs


class CompletionAnswer:
    """Text completion objects. `echoes`: the text to put before every choice of each prompt, None without echo."""

    def __init__(self, header: Header, body: CompletionRequest, echoes: list[str] | None, vocabulary: Vocabulary):
        self.header = header
        self.scores_only = body.max_tokens == 0
        self._body = body
        self._n = body.n or 1
        self._echoes = echoes
        self._vocabulary = vocabulary
        self._offsets: dict[tuple[int, int], Offsets] = {}  # by (position, choice), of those that have been sent something

    def deltas(self, position: int, output: RequestOutput) -> list[Json]:
        choices = []
        for choice in output.outputs:
            key = (position, choice.index)
            offsets = self._offsets.get(key) or Offsets(self._vocabulary)
            body = self._choice(position, choice, output, offsets, first=key not in self._offsets)
            if body["text"] or body["finish_reason"] or (choice.token_ids and (self._body.return_token_ids or choice.logprobs is not None)):
                self._offsets[key] = offsets
                choices.append(body)
        return choices

    def whole(self, position: int, deltas: list[RequestOutput]) -> list[Json]:
        choices = [self._choice(position, c, deltas[-1], Offsets(self._vocabulary), first=True) for c in join(deltas)]
        if self._body.prompt_logprobs is not None:
            shown = prompt_logprobs(deltas[-1].prompt_logprobs, self._vocabulary)
            choices = [c | {"prompt_logprobs": shown} for c in choices]
        return choices

    def extras(self, outputs: list[RequestOutput]) -> Json:
        return {}

    def _choice(self, position: int, choice: CompletionOutput, output: RequestOutput, offsets: Offsets, *, first: bool) -> Json:
        """One choice; its first part carries the echo."""
        text, ids, entries = choice.text, choice.token_ids, choice.logprobs
        if self.scores_only:
            text, ids, entries = "", [], None if entries is None else []
        logprobs: list[TokenLogprobs | None] | None = None if entries is None else list(entries)
        echo = self._echoes[position] if first and self._echoes is not None else ""
        leading = None
        if first and self._echoes is not None and logprobs is not None:
            logprobs = list(output.prompt_logprobs or ()) + logprobs
            leading = output.prompt_token_ids[0]
        body: Json = {
            "index": position * self._n + choice.index,
            "text": echo + text,
            "logprobs": completion_logprobs(logprobs, offsets, self._vocabulary, leading),
            "finish_reason": "length" if self.scores_only else choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._body.return_token_ids:
            body["token_ids"] = ids
            if first:
                body["prompt_token_ids"] = output.prompt_token_ids
        return body


def _tokenize(tokenizer: Any, texts: list[str | list[int]], echo: bool) -> tuple[list[list[int]], list[str] | None]:
    """Token ids of each prompt, and the texts to echo."""
    ids = [tokenizer.encode(p) if isinstance(p, str) else p for p in texts]
    if not echo:
        return ids, None
    return ids, [p if isinstance(p, str) else tokenizer.decode(p, skip_special_tokens=False) for p in texts]


def router(service: Service) -> APIRouter:
    """The route, bound to its service."""
    routes = APIRouter()

    @routes.post("/v1/completions", summary="Continue a text", responses=OPENAPI_200)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        header, headers = service.open(body, "text_completion")
        params = completion_params(body)
        tokenizer = service.engine.tokenizer
        given = prompts(body)
        ids, echoes = await service.in_pool(lambda: _tokenize(tokenizer, given, bool(body.echo)))
        form = CompletionAnswer(header, body, echoes, tokenizer)
        return await service.respond(request, body, form, headers, ids, params)

    return routes
