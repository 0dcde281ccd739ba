"""The server around the real engine with the tiny target T0: what the fake engine cannot show."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.llm import LLM
from tests.harness import P, R, checkpoint
from tests.server.harness import Served, served
from tests.server.net import until
from tests.server.test_disconnect import send

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def tiny() -> Iterator[Served]:
    options: dict[str, Any] = {"speculation": "ngram", "device": "cpu", "max_num_seqs": 4, "kv_cache_bytes": 1 << 20, "deterministic": True}
    with served(lambda: LLM(checkpoint(), **options).engine) as server:
        yield server


def complete(server: Served, **fields: Any) -> dict[str, Any]:
    """A text completion with token ids; greedy, 32 tokens after P, unless told otherwise."""
    body = {"prompt": P, "max_tokens": 32, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | fields
    answer = server.http.post(TEXT, json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def streamed(server: Served, **fields: Any) -> tuple[list[str], list[str]]:
    """(texts, finish reasons) per choice of the same request as a stream."""
    n = fields.get("n", 1)
    texts, reasons = [""] * n, [""] * n
    for chunk in server.client.completions.create(
        model="t0", prompt=P, max_tokens=32, temperature=0, stream=True, extra_body={"ignore_eos": True} | fields
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    return texts, reasons


def test_the_model_card_shows_resolved_dtypes(tiny: Served) -> None:
    engine = tiny.loop.engine
    assert engine is not None and engine.config.dtype == engine.config.kv_dtype == "auto"
    (card,) = tiny.http.get("/v1/models").json()["data"]
    assert (card["dtype"], card["kv_dtype"], card["quantization"]) == ("float32", "float32", None) and card == tiny.http.get(
        "/v1/models/t0"
    ).json()


def test_stream_and_whole_agree(tiny: Served) -> None:
    for fields in ({}, {"n": 3, "temperature": 0.8, "seed": 5}):
        whole = complete(tiny, **fields)
        texts, reasons = streamed(tiny, **fields)
        assert texts == [c["text"] for c in whole["choices"]] and reasons == [c["finish_reason"] for c in whole["choices"]]
        assert whole["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in whole["choices"]) == 32 * len(texts)


@pytest.mark.parametrize("stop", [None, ["th", "xx", "o"], ["e", "i"]], ids=str)
def test_streamed_logprobs_join_to_the_whole(tiny: Served, stop: list[str] | None) -> None:
    """Text offsets too, where text is held back for a stop string, and characters are split over deltas."""
    for seed in range(3):
        fields = {
            "n": 3,
            "temperature": 1.0,
            "seed": seed,
            "stop": stop,
            "min_tokens": 8,
            "echo": seed == 1,
            "logprobs": 2,
            "ignore_eos": True,
        }
        whole = complete(tiny, **fields)
        ask: dict[str, Any] = {"model": "t0", "prompt": P, "max_tokens": 32, "stream": True, "extra_body": {"ignore_eos": True} | fields}
        found: list[dict[str, list[Any]]] = [{"tokens": [], "text_offset": []} for _ in range(3)]
        for chunk in tiny.client.completions.create(**ask):
            for choice in chunk.choices:
                for name, values in found[choice.index].items():
                    values += getattr(choice.logprobs, name) or []
        for choice, parts in zip(whole["choices"], found, strict=True):
            assert parts == {name: choice["logprobs"][name] for name in parts}


def test_speculation_is_counted_and_changes_nothing(tiny: Served) -> None:
    on, off = complete(tiny, prompt=R, max_tokens=100), complete(tiny, prompt=R, max_tokens=100, speculation={"method": "off"})
    assert on["choices"][0]["token_ids"] == off["choices"][0]["token_ids"]
    details = off["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0


def test_a_prediction_changes_nothing(tiny: Served) -> None:
    plain = complete(tiny, max_tokens=48)
    predicted = complete(tiny, max_tokens=48, prediction={"type": "content", "content": plain["choices"][0]["text"]})
    assert predicted["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]


def test_chat_is_the_templated_completion(tiny: Served) -> None:
    chat: Any = tiny.client.chat.completions.create(
        model="t0", messages=[{"role": "user", "content": "hi"}], max_tokens=8, temperature=0, extra_body={"return_token_ids": True}
    )
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    same = complete(tiny, prompt=text, max_tokens=8, ignore_eos=False)
    assert chat.prompt_token_ids == same["choices"][0]["prompt_token_ids"]
    assert chat.choices[0].token_ids == same["choices"][0]["token_ids"]


@pytest.mark.parametrize("first", range(1, 9))
def test_bc04_a_stop_string_never_leaks(tiny: Served, first: int) -> None:
    """Five characters out of the produced text, from token `first` on."""
    text = complete(tiny, max_tokens=24)["choices"][0]["text"]
    stop = text[first : first + 5]
    expected = text[: text.index(stop)]
    whole = complete(tiny, max_tokens=24, stop=["never produced", stop])["choices"][0]
    assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == (expected, "stop", stop)
    assert streamed(tiny, stop=[stop]) == ([expected], ["stop"])
    assert streamed(tiny, stop=[stop], include_stop_str_in_output=True) == ([expected + stop], ["stop"])


def test_bc02_stop_before_the_token_limit(tiny: Served) -> None:
    ids = complete(tiny)["choices"][0]["token_ids"]
    stop = complete(tiny, stop_token_ids=[ids[2]], max_tokens=5)
    where = ids.index(ids[2])
    assert stop["choices"][0]["token_ids"] == ids[: where + 1] and stop["choices"][0]["finish_reason"] == "stop"
    assert stop["usage"]["completion_tokens"] == where + 1
    late = next(i for i in range(5, 32) if ids[i] not in ids[:5])
    length = complete(tiny, stop_token_ids=[ids[late]], max_tokens=5)["choices"][0]
    assert length["token_ids"] == ids[:5] and length["finish_reason"] == "length"


def test_bc18_prompts_next_to_the_context_limit() -> None:
    with served(lambda: LLM(checkpoint(), speculation="ngram", device="cpu", max_model_len=64).engine) as server:
        for length in (56, 60, 62, 63):
            prompt = [i % 500 for i in range(length)]
            on = complete(server, prompt=prompt)
            assert len(on["choices"][0]["token_ids"]) == min(32, 64 - length) and on["choices"][0]["finish_reason"] == "length"
            assert on["choices"] == complete(server, prompt=prompt, speculation="off")["choices"]
        for length in (64, 65, 500):
            answer = server.http.post(TEXT, json={"prompt": [i % 500 for i in range(length)]})
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
        assert server.http.get("/health").status_code == 200


def test_echo_scores_agree_with_generation(tiny: Served) -> None:
    """The log-probabilities of produced tokens are the same when they are scored as a prompt."""
    made = complete(tiny, max_tokens=8, logprobs=2)["choices"][0]
    scored = complete(tiny, prompt=P + made["token_ids"], max_tokens=0, echo=True, logprobs=2)
    choice = scored["choices"][0]
    assert scored["usage"]["completion_tokens"] == 0 and choice["token_ids"] == []
    assert choice["logprobs"]["token_logprobs"][0] is None and len(choice["logprobs"]["tokens"]) == len(P) + 8
    assert choice["logprobs"]["token_logprobs"][len(P) :] == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-4)


def test_processed_logprobs_are_those_after_the_masks(tiny: Served) -> None:
    """With two ids allowed, the rest is impossible after the masks, while the raw scores know nothing of them."""
    asks: dict[str, Any] = {"max_tokens": 4, "logprobs": 2, "allowed_token_ids": [5, 9], "temperature": 1.0, "seed": 1}
    raw, processed = (complete(tiny, logprobs_mode=mode, **asks)["choices"][0] for mode in ("raw", "processed"))
    assert raw["token_ids"] == processed["token_ids"]
    for top in processed["logprobs"]["top_logprobs"]:
        assert sum(math.exp(value) for value in top.values()) == pytest.approx(1.0, abs=1e-4)
    assert all(math.exp(value) < 0.5 for value in raw["logprobs"]["token_logprobs"])


def refusal(server: Served, **fields: Any) -> dict[str, Any]:
    """The error object of a text completion that is answered with 400."""
    answer = server.http.post(TEXT, json={"prompt": P, "max_tokens": 8} | fields)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize(("prompt", "bad"), [([-1], -1), ([[1, 2], [512]], 512), ([2**70], 2**70)])
def test_a_token_id_outside_the_vocabulary_is_told_with_the_range(tiny: Served, prompt: Any, bad: int) -> None:
    error = refusal(tiny, prompt=prompt)
    assert (error["message"], error["param"]) == (f"prompt: token id {bad} is outside the vocabulary [0, 512)", "prompt")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"allowed_token_ids": [123, 124], "bad_words": ["x", "y"]}, ("allowed_token_ids", "bad_words")),
        ({"allowed_token_ids": [2], "min_tokens": 1}, ("allowed_token_ids", "min_tokens")),
        ({"allowed_token_ids": [9, 10], "min_tokens": 1, "stop_token_ids": [9, 10]}, ("allowed_token_ids", "min_tokens")),
        ({"allowed_token_ids": [9, 9], "logit_bias": {"9": -100}}, ("allowed_token_ids", "logit_bias")),
        ({"allowed_token_ids": []}, ("allowed_token_ids",)),
        ({"allowed_token_ids": [512, 100_000]}, ("allowed_token_ids", "[0, 512)")),
    ],
)
def test_rules_that_allow_no_token_are_refused_by_name(tiny: Served, fields: dict[str, Any], named: tuple[str, ...]) -> None:
    error = refusal(tiny, **fields)
    assert error["param"] == named[0] and all(name in error["message"] for name in named)


def test_an_output_ends_where_nothing_is_allowed(tiny: Served) -> None:
    """After "x" and "y" in any order, twice the same or both ways, nothing may follow; nothing forbidden is shown for it."""
    rules: dict[str, Any] = {"allowed_token_ids": [123, 124, 123], "bad_words": ["xx", "yy", "xyx", "yxy"], "ignore_eos": True}
    whole = complete(tiny, n=4, temperature=1.0, seed=3, logprobs=1, min_tokens=9, **rules)
    for choice in whole["choices"]:
        assert choice["text"] in ("xy", "yx") and len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == 2
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "nothing_allowed")
    assert streamed(tiny, n=4, temperature=1.0, seed=3, **rules) == ([c["text"] for c in whole["choices"]], ["stop"] * 4)
    doubled = complete(tiny, allowed_token_ids=[123, 123, 124], temperature=1.0, seed=1)["choices"][0]
    once = complete(tiny, allowed_token_ids=[124, 123], temperature=1.0, seed=1)["choices"][0]
    assert doubled["token_ids"] == once["token_ids"] and set(once["token_ids"]) == {123, 124}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_who_leaves_frees_the_blocks(tiny: Served, stream: bool) -> None:
    engine = tiny.loop.engine
    assert engine is not None
    before = tiny.metric("specdec_requests_total", outcome="abort")
    socks = [send(tiny, prompt=P, max_tokens=240, ignore_eos=True, n=2, stream=stream) for _ in range(4)]
    until(lambda: engine.num_running > 0)
    for sock in socks:
        sock.close()
    until(lambda: engine.num_running == 0 and engine.num_waiting == 0 and not tiny.loop._tickets)
    finished = tiny.metric("specdec_requests_total", outcome="abort") - before
    assert finished > 0


def test_many_clients_get_what_each_would_get_alone(tiny: Served) -> None:
    asks = [{"prompt": P[i % 4 :] + P, "temperature": 0.7, "seed": i, "max_tokens": 20} for i in range(10)]
    with ThreadPoolExecutor(10) as pool:
        together = list(pool.map(lambda ask: complete(tiny, **ask)["choices"][0]["token_ids"], asks))
    assert together == [complete(tiny, **ask)["choices"][0]["token_ids"] for ask in asks]


BODIES = st.fixed_dictionaries(
    {"prompt": st.lists(st.integers(0, 511), min_size=1, max_size=40), "max_tokens": st.integers(1, 12), "seed": st.integers(0, 2**64 - 1)},
    optional={
        "temperature": st.sampled_from([0, 0.5, 1.0, 1.5]),
        "top_p": st.floats(0.05, 1.0),
        "top_k": st.integers(-1, 600),
        "min_p": st.floats(0.0, 1.0),
        "typical_p": st.floats(0.05, 1.0),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.1, 3),
        "logit_bias": st.dictionaries(st.integers(0, 511).map(str), st.floats(-100, 100), max_size=4),
        "allowed_token_ids": st.lists(st.integers(0, 511), min_size=1, max_size=8),
        "bad_words": st.lists(st.text("abc d", min_size=1, max_size=4), max_size=2),
        "min_tokens": st.integers(0, 1),
        "stop": st.lists(st.text("abcdefg ", min_size=1, max_size=2), max_size=3),
        "stop_token_ids": st.lists(st.integers(0, 511), max_size=3),
        "n": st.integers(1, 3),
        "logprobs": st.integers(0, 5),
        "echo": st.booleans(),
    },
)


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(body=BODIES)
def test_every_combination_is_served_and_speculation_changes_nothing(tiny: Served, body: dict[str, Any]) -> None:
    on = complete(tiny, **body)
    off = complete(tiny, **body, speculation={"method": "off"})
    assert [c["token_ids"] for c in on["choices"]] == [c["token_ids"] for c in off["choices"]]
    assert [c["text"] for c in on["choices"]] == [c["text"] for c in off["choices"]]
    assert [c["finish_reason"] for c in on["choices"]] == [c["finish_reason"] for c in off["choices"]]


def test_metrics_of_the_real_engine(tiny: Served) -> None:
    ids = complete(tiny, prompt=R, max_tokens=60)["choices"][0]["token_ids"]
    complete(tiny, prompt=R + ids, max_tokens=60)  # the prompt holds its own continuation
    assert tiny.metric("specdec_generation_tokens_total") >= 120
    assert tiny.metric("specdec_prefix_cache_hits_total") > 0
    drafted = tiny.metric("specdec_spec_draft_tokens_total", drafter="ngram")
    accepted = tiny.metric("specdec_spec_accepted_tokens_total", drafter="ngram")
    skipped = sum(s.value for m in tiny.loop.metrics.skipped.collect() for s in m.samples if s.name.endswith("_total"))
    assert 0 <= accepted <= drafted and drafted + skipped > 0
    assert tiny.metric("specdec_requests_running") == 0


def test_a_megabyte_of_text_is_refused(tiny: Served) -> None:
    answer = tiny.http.post(TEXT, json={"prompt": "lorem ipsum dolor " * 60_000})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
