"""Log-probabilities of tokens that are parts of characters, and joining deltas."""

from __future__ import annotations

import math

from specdec.server.responses import Header, Offsets, chat_logprobs, completion_logprobs, join, prompt_logprobs
from specdec.types import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprobs

EURO = "€".encode()  # three bytes, three tokens


class Bytes:
    """Token 0…255 = one byte."""

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")


def entries(raw: bytes) -> list[TokenLogprobs | None]:
    return [TokenLogprobs(b, -1.0, 1, ((b, -1.0), (b ^ 1, -2.0))) for b in raw]


def test_parts_of_characters_stay_apart() -> None:
    body = completion_logprobs(entries(b"a" + EURO + b"b"), Offsets(Bytes(), 10), Bytes())
    assert body is not None
    assert body["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"]
    assert body["text_offset"] == [10, 11, 11, 11, 12]
    assert all(len(top) == 2 for top in body["top_logprobs"])


def test_offsets_go_on_from_delta_to_delta() -> None:
    """Also in the middle of a character, and whatever part of the text has been sent."""
    raw = b"a" + EURO + b"bc"
    whole = Offsets(Bytes()).of(list(raw))
    for cut in range(len(raw) + 1):
        offsets = Offsets(Bytes())
        assert offsets.of(list(raw[:cut])) + offsets.of(list(raw[cut:])) == whole == [0, 1, 1, 1, 2, 3]


def test_chat_bytes_are_the_real_bytes() -> None:
    body = chat_logprobs([e for e in entries(EURO) if e], Bytes())
    assert body is not None and [t["bytes"] for t in body["content"]] == [[0xE2], [0x82], [0xAC]]


def test_the_first_token_of_an_echo_has_no_law() -> None:
    body = completion_logprobs([None, *entries(b"b")], Offsets(Bytes()), Bytes(), first=ord("a"))
    assert body is not None and body["tokens"] == ["a", "b"] and body["token_logprobs"] == [None, -1.0] and body["top_logprobs"][0] is None


def test_masked_tokens_are_finite() -> None:
    body = prompt_logprobs([None, TokenLogprobs(97, -math.inf, 5, ((98, -0.1),))], Bytes())
    assert body is not None and body[0] is None
    assert body[1] == {
        "98": {"logprob": -0.1, "rank": 1, "decoded_token": "b"},
        "97": {"logprob": -9999.0, "rank": 5, "decoded_token": "a"},
    }


def test_join_keeps_choices_apart() -> None:
    def delta(*choices: CompletionOutput, finished: bool = False) -> RequestOutput:
        return RequestOutput("r", None, [1], list(choices), finished, RequestMetrics())

    first = delta(CompletionOutput(1, "x", [5]), CompletionOutput(0, "a", [1]))
    last = delta(CompletionOutput(0, "b", [2], "stop", "b"), CompletionOutput(1, "", [6], "length"), finished=True)
    zero, one = join([first, last])
    assert (zero.text, zero.token_ids, zero.finish_reason, zero.stop_reason) == ("ab", [1, 2], "stop", "b")
    assert (one.text, one.token_ids, one.finish_reason) == ("x", [5, 6], "length")


def test_ids_differ() -> None:
    assert Header("chat.completion", "m", "f").id.startswith("chatcmpl-") and Header("text_completion", "m", "f").id.startswith("cmpl-")
    assert Header("text_completion", "m", "f").id != Header("text_completion", "m", "f").id
