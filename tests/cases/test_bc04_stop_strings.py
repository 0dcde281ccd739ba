"""BC-04: stop strings that are split over draft boundaries."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.config import SamplingParams
from specdec.types import RequestOutput
from tests.harness import Log, P, assert_same, chain, engine, oracle_of, run, tree

# text of ASCII letters only: tokens of one or two letters, so that characters and tokens can be counted
LETTERS = SamplingParams(temperature=1.5, seed=4, max_tokens=24, ignore_eos=True)
SHAPES = {"chain": chain("oracle"), "tree": tree("oracle"), "mix": tree("mix")}


def letters() -> list[int]:
    """Ids of tokens that are one or two ASCII letters."""
    tokenizer = engine().tokenizer
    return [i for i in range(tokenizer.vocab_size) if (t := tokenizer.decode([i])).isascii() and t.isalpha() and len(t) < 3]


PLAIN = replace(LETTERS, allowed_token_ids=letters())


def off(**changes: object) -> RequestOutput:
    return run(engine(), {"r": (P, replace(PLAIN, **changes))})["r"]


def on(shape: str, known: RequestOutput, log: Log | None = None, **changes: object) -> RequestOutput:
    target = engine(SHAPES[shape], oracle=oracle_of({"r": known}))
    return run(target, {"r": (P, replace(PLAIN, **changes))}, log=log)["r"]


def spans(output: RequestOutput) -> list[tuple[int, int]]:
    """Begin and end of each token in the text."""
    tokenizer, at, result = engine().tokenizer, 0, []
    for token in output.outputs[0].token_ids:
        size = len(tokenizer.decode([token]))
        result.append((at, at + size))
        at += size
    assert at == len(output.outputs[0].text)
    return result


def piece(output: RequestOutput, i: int) -> str:
    """Five characters that begin inside token i and end inside token i + 2 or later."""
    start = spans(output)[i][1] - 1
    return output.outputs[0].text[start : start + 5]


def assert_never_streamed(log: Log, stops: list[str], expected: str) -> None:
    """Every prefix of the stream is a prefix of the final text, and holds no stop string."""
    text = ""
    for delta in log.deltas["r"]:
        text += "".join(c.text for c in delta.outputs)
        assert expected.startswith(text)
        assert not any(stop in text for stop in stops)
    assert text == expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("i", range(1, 9))
def test_bc04_split_stop(shape: str, i: int) -> None:
    plain = off()
    stop = piece(plain, i)
    at = plain.outputs[0].text.find(stop)
    expected, log = off(stop=stop), Log()
    found = on(shape, plain, log, stop=[stop])
    assert_same(found, expected)
    assert found.outputs[0].text == plain.outputs[0].text[:at]
    assert (found.outputs[0].finish_reason, found.outputs[0].stop_reason) == ("stop", stop)
    assert_never_streamed(log, [stop], plain.outputs[0].text[:at])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("i", range(1, 9))
def test_bc04_included_once(shape: str, i: int) -> None:
    plain = off()
    stop = piece(plain, i)
    at = plain.outputs[0].text.find(stop)
    changes = {"stop": [stop], "include_stop_str_in_output": True}
    found = on(shape, plain, **changes)
    assert_same(found, off(**changes))
    assert found.outputs[0].text == plain.outputs[0].text[: at + len(stop)]
    assert found.outputs[0].text.count(stop) == 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("late", "early"), [(9, 2), (5, 3), (4, 3), (8, 7)])
def test_bc04_the_earliest_of_two(shape: str, late: int, early: int) -> None:
    """The stop that is listed last occurs first, perhaps in the same step."""
    plain = off()
    stops = [piece(plain, late), piece(plain, early)]
    at = min(plain.outputs[0].text.find(stop) for stop in stops)
    log = Log()
    found = on(shape, plain, log, stop=stops)
    assert_same(found, off(stop=stops))
    assert found.outputs[0].text == plain.outputs[0].text[:at]
    assert_never_streamed(log, stops, plain.outputs[0].text[:at])


@pytest.mark.parametrize("shape", SHAPES)
def test_bc04_nothing_is_lost_when_the_stop_never_comes(shape: str) -> None:
    """Text held back because it looked like the beginning of a stop string is handed out in the end."""
    plain, log = off(), Log()
    text = plain.outputs[0].text
    stops = [text[k : k + 3] + "\x00" for k in range(0, len(text), 3)] + [text[-1] + "\x00"]
    found = on(shape, plain, log, stop=stops)
    assert_same(found, plain)
    assert_never_streamed(log, stops, text)


@pytest.mark.parametrize("shape", SHAPES)
def test_bc04_stop_string_and_limit_in_one_step(shape: str) -> None:
    """A stop string completed by the last allowed token is a stop; one token less and it is a length."""
    plain = off()
    stop = piece(plain, 4)
    end = plain.outputs[0].text.find(stop) + len(stop)
    last = next(i for i, (_, stop_at) in enumerate(spans(plain)) if stop_at >= end)
    for tokens, reason in ((last + 1, "stop"), (last, "length")):
        found = on(shape, plain, stop=stop, max_tokens=tokens)
        assert_same(found, off(stop=stop, max_tokens=tokens))
        assert (found.outputs[0].finish_reason, len(found.outputs[0].token_ids)) == (reason, tokens)
