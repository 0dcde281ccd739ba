"""The real `openai` client, sync and async, against a real server around the fake engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.server.harness import Served

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def test_models(fake: Served) -> None:
    [card] = fake.client.models.list().data
    assert card.id == "fake" and card.owned_by == "specdec"
    assert fake.client.models.retrieve("fake").id == "fake"


def test_stream_and_whole_are_the_same_text(fake: Served) -> None:
    ask: dict[str, Any] = {"model": "fake", "messages": HELLO, "max_tokens": 12, "seed": 3, "n": 2}
    whole = fake.client.chat.completions.create(**ask)
    texts, reasons, roles = ["", ""], [None, None], [0, 0]
    ids = set()
    for chunk in fake.client.chat.completions.create(**ask, stream=True):
        ids.add(chunk.id)
        assert chunk.object == "chat.completion.chunk" and chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]  # type: ignore[call-overload]
            roles[choice.index] += choice.delta.role == "assistant"
    assert texts == [c.message.content for c in whole.choices]
    assert len(texts[0]) == 12 and texts[0] != texts[1]
    assert reasons == ["length", "length"] and roles == [1, 1] and len(ids) == 1
    assert whole.object == "chat.completion" and whole.system_fingerprint and whole.choices[0].message.role == "assistant"


def test_usage(fake: Served) -> None:
    ask: dict[str, Any] = {"model": "fake", "messages": HELLO, "max_tokens": 7}
    whole = fake.client.chat.completions.create(**ask).usage
    chunks = list(fake.client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert whole is not None and whole.completion_tokens == 7 and whole.total_tokens == whole.prompt_tokens + 7
    assert chunks[-1].choices == [] and chunks[-1].usage == whole
    assert all(c.usage is None and c.choices for c in chunks[:-1])
    details = whole.completion_tokens_details
    assert details is not None and details.accepted_prediction_tokens == 2 and details.rejected_prediction_tokens == 2
    off = fake.client.chat.completions.create(**ask, extra_body={"speculation": {"method": "off"}})
    assert off.usage is not None and off.usage.completion_tokens_details is not None
    assert off.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_continuous_usage_grows(fake: Served) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(fake.client.completions.create(model="fake", prompt="abc", max_tokens=6, stream=True, stream_options=options))
    counts = [c.usage.completion_tokens for c in chunks if c.usage]
    assert len(counts) == len(chunks) and counts == sorted(counts) and counts[-1] == 6
    assert {c.usage.prompt_tokens for c in chunks if c.usage} == {3}


def test_chat_logprobs(fake: Served) -> None:
    answer = fake.client.chat.completions.create(model="fake", messages=HELLO, max_tokens=5, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None and "".join(t.token for t in content) == answer.choices[0].message.content
    for token in content:
        assert token.logprob == -0.5 and len(token.top_logprobs) == 2
        assert bytes(token.bytes or []).decode() == token.token
    plain = fake.client.chat.completions.create(model="fake", messages=HELLO, max_tokens=5)
    assert plain.choices[0].logprobs is None


@pytest.mark.parametrize("prompt", ["abc", [0, 1, 2], ["abc"], [[0, 1, 2]]])
def test_prompt_forms_agree(fake: Served, prompt: Any) -> None:
    answer = fake.client.completions.create(model="fake", prompt=prompt, max_tokens=4, echo=True)
    reference = fake.client.completions.create(model="fake", prompt="abc", max_tokens=4)
    assert answer.choices[0].text == "abc" + reference.choices[0].text
    assert answer.usage is not None and answer.usage.prompt_tokens == 3


def test_many_prompts_and_choices(fake: Served) -> None:
    ask: dict[str, Any] = {"model": "fake", "prompt": ["abc", "xyz"], "n": 2, "max_tokens": 5}
    whole = fake.client.completions.create(**ask)
    assert [c.index for c in whole.choices] == [0, 1, 2, 3]
    single = [fake.client.completions.create(**ask | {"prompt": p}).choices for p in ("abc", "xyz")]
    assert [c.text for c in whole.choices] == [c.text for pair in single for c in pair]
    assert whole.usage is not None and whole.usage.prompt_tokens == 6 and whole.usage.completion_tokens == 20
    texts = [""] * 4
    for chunk in fake.client.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [c.text for c in whole.choices]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(fake: Served, stream: bool) -> None:
    ask: dict[str, Any] = {"model": "fake", "prompt": "abc", "max_tokens": 3, "echo": True, "logprobs": 1}
    answers = list(fake.client.completions.create(**ask, stream=True)) if stream else [fake.client.completions.create(**ask)]
    parts = [c for a in answers for c in a.choices]
    text = "".join(c.text for c in parts)
    tokens = [t for c in parts for t in (c.logprobs.tokens or [])]  # type: ignore[union-attr]
    logprobs = [t for c in parts for t in (c.logprobs.token_logprobs or [])]  # type: ignore[union-attr]
    offsets = [t for c in parts for t in (c.logprobs.text_offset or [])]  # type: ignore[union-attr]
    assert text.startswith("abc") and "".join(tokens) == text and offsets == list(range(6))
    assert logprobs == [None, -0.5, -0.5, -0.5, -0.5, -0.5]


def test_scoring_without_generation(fake: Served) -> None:
    answer = fake.client.completions.create(model="fake", prompt="abcd", max_tokens=0, echo=True, logprobs=1)
    [choice] = answer.choices
    assert choice.text == "abcd" and choice.logprobs is not None and choice.logprobs.tokens == ["a", "b", "c", "d"]
    assert answer.usage is not None and answer.usage.completion_tokens == 0


def test_vllm_extensions(fake: Served) -> None:
    body: Any = {"prompt_logprobs": 1, "return_token_ids": True, "ignore_eos": True, "top_k": 5}
    answer = fake.client.completions.create(model="fake", prompt="abc", max_tokens=3, extra_body=body)
    choice: Any = answer.choices[0]
    assert choice.prompt_token_ids == [0, 1, 2] and len(choice.token_ids) == 3
    assert choice.prompt_logprobs[0] is None and choice.prompt_logprobs[1]["1"] == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
    stopped: Any = fake.client.completions.create(
        model="fake", prompt="abc", max_tokens=9, extra_body={"stop_token_ids": [choice.token_ids[1]]}
    ).choices[0]
    assert stopped.finish_reason == "stop" and stopped.stop_reason == choice.token_ids[1] and len(stopped.text) == 1


def test_async_client_many_at_once(fake: Served) -> None:
    async def ask(client: AsyncOpenAI, i: int) -> str:
        stream = await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=20, seed=i, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def main() -> list[str]:
        async with AsyncOpenAI(base_url=f"{fake.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(16)))

    texts = asyncio.run(main())
    assert all(len(t) == 20 for t in texts)
    for i in (0, 5):
        alone = fake.client.chat.completions.create(model="fake", messages=HELLO, max_tokens=20, seed=i)
        assert alone.choices[0].message.content == texts[i]


def test_unknown_fields_are_named_in_a_header(fake: Served) -> None:
    answer = fake.http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1, "brand_new": 1, "naïve\n": 2, " ": 3})
    assert answer.status_code == 200 and answer.headers["X-Specdec-Ignored"] == "brand_new, 'na\\xefve\\n', ' '"
    assert answer.headers["X-Request-Id"] == answer.json()["id"]
