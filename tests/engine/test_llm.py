"""`LLM`: input forms, order, errors, streams that run side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specdec import LLM
from specdec.config import SamplingParams
from specdec.errors import InvalidRequest
from specdec.types import RequestOutput
from tests.harness import GREEDY, P, R, chain, check_idle, checkpoint, visible

SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(params=["off", "ngram"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    made = LLM(
        checkpoint(),
        speculation="off" if request.param == "off" else chain("ngram", ngram_min=1),
        device="cpu",
        max_model_len=128,
        deterministic=True,
    )
    yield made
    check_idle(made.engine)
    assert not made.engine.has_work()


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


def test_input_forms(llm: LLM) -> None:
    """Text, ids, or lists of either, mixed; outputs in the order of the prompts."""
    text = "the man"
    known = llm.tokenizer.encode(text)
    one = llm.generate(text, SHORT)
    assert one[0].prompt == text and one[0].prompt_token_ids == known
    assert ids(llm.generate(known, SHORT)) == ids(llm.generate([known], SHORT)) == ids(one)
    many = llm.generate([text, P, text, R], SHORT)
    assert [o.prompt_token_ids for o in many] == [known, P, known, R]
    assert ids(many) == ids(one) + ids(llm.generate(P, SHORT)) + ids(one) + ids(llm.generate(R, SHORT))
    assert [o.prompt for o in many] == [text, None, text, None]


def test_parameters_one_for_all_or_one_each(llm: LLM) -> None:
    each = [SamplingParams(temperature=0, max_tokens=k, ignore_eos=True) for k in (1, 2, 3)]
    assert [len(i) for i in ids(llm.generate([P, P, P], each))] == [1, 2, 3]
    assert [len(i) for i in ids(llm.generate([P, P], SHORT))] == [6, 6]
    assert len(ids(llm.generate(P))[0]) <= 16
    with pytest.raises(InvalidRequest) as caught:
        llm.generate([P, P], each)
    assert caught.value.param == "params"


@pytest.mark.parametrize(
    "prompts", [[], "", [[]], None, 5, [P, ""], [P, [600]], [P, [1] * 200], [["a"]], [1, "a"], ["x", 5], [P, None]], ids=repr
)
def test_bad_prompts_leave_nothing_behind(llm: LLM, prompts: Any) -> None:
    """One bad prompt refuses the call; those before it are withdrawn, and the next call works."""
    with pytest.raises(InvalidRequest):
        llm.generate(prompts, SHORT)
    assert not llm.engine.has_work()
    assert len(ids(llm.generate(P, SHORT))[0]) == 6


def test_chat(llm: LLM) -> None:
    hello = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(hello, SHORT)
    assert one.prompt_token_ids == llm.tokenizer.apply_chat_template(hello, add_generation_prompt=True)
    two = llm.chat([hello, [{"role": "user", "content": "bye"}]], SHORT)
    assert ids(two)[0] == one.outputs[0].token_ids and len(two) == 2


def test_stream_joins_to_the_whole(llm: LLM) -> None:
    (whole,) = llm.generate(R, GREEDY)
    deltas = list(llm.stream(R, GREEDY))
    assert "".join(d.outputs[0].text for d in deltas) == whole.outputs[0].text
    assert [t for d in deltas for t in d.outputs[0].token_ids] == whole.outputs[0].token_ids
    assert [d.finished for d in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].metrics.generated == whole.metrics.generated


def test_streams_side_by_side(llm: LLM) -> None:
    """Two iterators advanced in turn: neither swallows the other's tokens."""
    expected = ids(llm.generate([P, R], GREEDY))
    streams = [llm.stream(P, GREEDY), llm.stream(R, GREEDY)]
    found: list[list[int]] = [[], []]
    open_ = [0, 1]
    for _ in range(200):
        for i in list(open_):
            delta = next(streams[i], None)
            if delta is None:
                open_.remove(i)
            else:
                found[i] += delta.outputs[0].token_ids
        if not open_:
            break
    assert not open_ and found == expected


def test_generate_beside_an_open_stream(llm: LLM) -> None:
    expected = ids(llm.generate([P, R], GREEDY))
    stream = llm.stream(P, GREEDY)
    found = list(next(stream).outputs[0].token_ids)
    assert ids(llm.generate(R, GREEDY)) == [expected[1]]
    for delta in stream:
        found += delta.outputs[0].token_ids
    assert found == expected[0]


def test_closing_a_stream_aborts_it(llm: LLM) -> None:
    stream = llm.stream(P, GREEDY)
    next(stream)
    assert llm.engine.num_running == 1
    stream.close()
    assert llm.engine.num_running == 0 and not llm.engine.has_work()


def test_closing_a_stream_leaves_the_other(llm: LLM) -> None:
    (expected,) = ids(llm.generate(R, GREEDY))
    first, second = llm.stream(P, GREEDY), llm.stream(R, GREEDY)
    next(first)
    found = list(next(second).outputs[0].token_ids)
    first.close()
    for delta in second:
        found += delta.outputs[0].token_ids
    assert found == expected


def test_choices_and_logprobs_are_joined(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=9, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    (output,) = llm.generate(P, params)
    assert [c.index for c in output.outputs] == [0, 1, 2]
    for choice in output.outputs:
        assert [entry.token for entry in choice.logprobs or ()] == choice.token_ids
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(P) and output.prompt_logprobs[0] is None
    assert visible(output) == visible(llm.generate(P, params)[0])


@pytest.mark.parametrize("speculation", ["auto", "off", None, "ngram", "suffix", {"method": "ngram", "nodes": 4}])
def test_forms_of_speculation(speculation: Any) -> None:
    made = LLM(checkpoint(), speculation=speculation, device="cpu", max_model_len=128)
    off = LLM(checkpoint(), speculation="off", device="cpu", max_model_len=128)
    assert ids(made.generate(R, SHORT)) == ids(off.generate(R, SHORT))
