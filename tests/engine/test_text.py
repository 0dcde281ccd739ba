"""Text as it is streamed: characters over token boundaries, stop strings, special tokens. Compared with brute force."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.config import SamplingParams
from specdec.output import OutputText
from specdec.tokenizer import Tokenizer
from tests.harness import SHAPES, Log, P, assert_same, engine, oracle_of, run
from tests.tiny import EOS

BYTES = SamplingParams(temperature=3.0, seed=2, max_tokens=40, ignore_eos=True)


@cache
def tokenizer() -> Tokenizer:
    return engine().tokenizer


@cache
def byte_ids(text: str) -> list[int]:
    """Ids of the single-byte tokens that the UTF-8 bytes of `text` need."""
    by_byte = {tokenizer().token_bytes(i): i for i in range(tokenizer().vocab_size) if len(tokenizer().token_bytes(i)) == 1}
    return [by_byte[bytes([b])] for b in text.encode()]


def texts(log: Log) -> list[str]:
    """What the stream said after each delta of request "r"."""
    so_far, result = "", []
    for delta in log.deltas["r"]:
        so_far += "".join(c.text for c in delta.outputs)
        result.append(so_far)
    return result


@pytest.mark.parametrize("shape", ["off", "oracle-chain", "mix-tree"])
@pytest.mark.parametrize("word", ["é", "日本", "🙂x", "aé日🙂"])
def test_characters_over_token_boundaries(shape: str, word: str) -> None:
    """Only the bytes of `word`, in any order: whole characters, broken ones, and an unfinished end."""
    params = replace(BYTES, allowed_token_ids=sorted(set(byte_ids(word))))
    expected = run(engine(deterministic=True), {"r": (P, params)})
    target, log = engine("off" if shape == "off" else SHAPES[shape], oracle=oracle_of(expected), deterministic=True), Log()
    found = run(target, {"r": (P, params)}, log=log)["r"]
    assert_same(found, expected["r"])
    whole = b"".join(tokenizer().token_bytes(i) for i in found.outputs[0].token_ids).decode("utf-8", errors="replace")
    assert found.outputs[0].text == whole
    assert all(whole.startswith(text) for text in texts(log)), "a delta showed half a character"


def test_a_character_is_shown_with_its_last_byte() -> None:
    """Forced byte by byte, the emoji appears once, whole, and no replacement character before it."""
    out, ids, shown = OutputText(tokenizer(), P, SamplingParams()), byte_ids("a🙂b"), []
    for token in ids:
        out.push(token)
        shown.append(out.take())
    out.close()
    assert [*shown, out.take()] == ["a", "", "", "", "🙂", "b", ""]


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(skip: bool) -> None:
    """Hidden or shown as asked; the end token that ends the text is shown only with the stop."""
    params = SamplingParams(temperature=0, max_tokens=8, skip_special_tokens=skip, logit_bias={EOS: 100.0}, min_tokens=3)
    output = run(engine(), {"r": (P, params)})["r"].outputs[0]
    assert output.token_ids[-1] == EOS and len(output.token_ids) == 4 and output.finish_reason == "stop"
    assert output.text == tokenizer().decode(output.token_ids[:-1])
    shown = run(engine(), {"r": (P, replace(params, include_stop_str_in_output=True))})["r"].outputs[0]
    assert shown.text == tokenizer().decode(output.token_ids, skip_special_tokens=skip)


def brute_force(ids: list[int], stops: list[str], *, include: bool, min_tokens: int) -> tuple[str, int, str | None]:
    """(text, tokens used, stop string) by looking at the whole text after every token, the slow and obvious way."""
    ignored = 0  # characters produced before min_tokens cannot take part in a stop
    for count in range(1, len(ids) + 1):
        final = count == len(ids)
        raw = b"".join(tokenizer().token_bytes(i) for i in ids[:count])
        text = raw.decode("utf-8", errors="replace")
        while not final and text.endswith("\ufffd") and raw.decode("utf-8", errors="ignore") == text.rstrip("\ufffd") and _unfinished(raw):
            text = text[:-1]
        if count < min_tokens:
            ignored = len(text)
            continue
        hits = [(text.find(stop, ignored), i, stop) for i, stop in enumerate(stops) if text.find(stop, ignored) >= 0]
        if hits:
            at, _, stop = min(hits)
            return text[: at + len(stop)] if include else text[:at], count, stop
    return b"".join(tokenizer().token_bytes(i) for i in ids).decode("utf-8", errors="replace"), len(ids), None


def _unfinished(raw: bytes) -> bool:
    """The bytes end inside a character that could still be completed."""
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return len(decoder.decode(raw)) < len(raw.decode("utf-8", errors="replace"))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    ids=st.lists(st.sampled_from([*byte_ids("abaé"), *byte_ids("日"), 270, 300, 301, 350]), min_size=1, max_size=12),
    stops=st.lists(st.text(alphabet="abé日", min_size=1, max_size=4), min_size=0, max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_stop_strings_against_brute_force(ids: list[int], stops: list[str], include: bool, min_tokens: int) -> None:
    """Text, tokens used and the stop found; and nothing is ever shown that is not in the end."""
    params = SamplingParams(stop=stops or None, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=100)
    out, shown, used = OutputText(tokenizer(), P, params), [""], 0
    for token in ids:
        used += 1
        stopped = out.push(token)
        shown.append(shown[-1] + out.take())
        if stopped:
            break
    else:
        out.close()
    shown.append(shown[-1] + out.take())
    text, tokens, stop = brute_force(ids, stops, include=include, min_tokens=min_tokens)
    assert (shown[-1], used, out.stop_string) == (text, tokens, stop)
    assert all(text.startswith(part) for part in shown)
