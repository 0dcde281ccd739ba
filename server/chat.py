"""`/v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from specdec.server.params import chat_params, template_messages
from specdec.server.protocol import ChatRequest
from specdec.server.responses import Header, Json, Vocabulary, chat_logprobs, join, prompt_logprobs
from specdec.server.service import Service
from specdec.server.streaming import OPENAPI_200
from specdec.types import CompletionOutput, RequestOutput


class ChatAnswer:
    """Chat completion objects and chunks."""

    scores_only = False

    def __init__(self, header: Header, body: ChatRequest, vocabulary: Vocabulary):
        self.header = header
        self._vocabulary = vocabulary
        self._ids = bool(body.return_token_ids)
        self._started: set[int] = set()

    def deltas(self, position: int, output: RequestOutput) -> list[Json]:
        choices = []
        for choice in output.outputs:
            if not (choice.text or choice.finish_reason or (choice.token_ids and (self._ids or choice.logprobs is not None))):
                continue
            delta: Json = {"content": choice.text}
            if choice.index not in self._started:
                self._started.add(choice.index)
                delta = {"role": "assistant"} | delta
            choices.append(self._choice(choice) | {"delta": delta})
        return choices

    def whole(self, position: int, deltas: list[RequestOutput]) -> list[Json]:
        return [self._choice(c) | {"message": {"role": "assistant", "content": c.text, "refusal": None}} for c in join(deltas)]

    def extras(self, outputs: list[RequestOutput]) -> Json:
        extras: Json = {}
        if outputs[0].prompt_logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs(outputs[0].prompt_logprobs, self._vocabulary)
        if self._ids:
            extras["prompt_token_ids"] = outputs[0].prompt_token_ids
        return extras

    def _choice(self, choice: CompletionOutput) -> Json:
        body: Json = {
            "index": choice.index,
            "logprobs": chat_logprobs(choice.logprobs, self._vocabulary),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        return body | {"token_ids": choice.token_ids} if self._ids else body


def router(service: Service) -> APIRouter:
    """The route, bound to its service."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions", summary="Answer a conversation", responses=OPENAPI_200)
    async def chat(body: ChatRequest, request: Request) -> Response:
        header, headers = service.open(body, "chat.completion")
        params = chat_params(body)
        messages = template_messages(body)
        tokenizer = service.engine.tokenizer
        opening = body.add_generation_prompt is not False
        prompt = await service.in_pool(lambda: tokenizer.apply_chat_template(messages, add_generation_prompt=opening))
        return await service.respond(request, body, ChatAnswer(header, body, tokenizer), headers, [prompt], params)

    return routes
