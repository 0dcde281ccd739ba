"""`LLM`: input forms, order, errors, streams that run side by side."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from specdec import LLM
from specdec.config import SamplingParams
from specdec.errors import ConfigError, InvalidRequest
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


@pytest.mark.parametrize(
    "form", [tuple, np.array, torch.tensor, lambda p: [np.int32(i) for i in p], lambda p: [torch.tensor(i) for i in p]]
)
def test_forms_of_ids(llm: LLM, form: Callable[[list[int]], Any]) -> None:
    expected = ids(llm.generate([P, R], SHORT))
    assert ids(llm.generate(form(P), SHORT)) == expected[:1]
    assert ids(llm.generate([form(P), form(R)], SHORT)) == expected
    assert [t for d in llm.stream(form(P), SHORT) for t in d.outputs[0].token_ids] == expected[0]
    assert llm.generate(form(P), SHORT)[0].prompt_token_ids == P


@pytest.mark.parametrize("prompts", [np.array([1.5]), torch.tensor([[1.0]]), np.array([]), np.array([True]), np.array(5)], ids=repr)
def test_arrays_that_are_no_ids(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate(prompts, SHORT)


@pytest.mark.parametrize("params", [{"temperature": 0}, [{"temperature": 0}], "greedy", 5], ids=repr)
def test_params_of_another_kind(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"SamplingParams|sampling parameters") as caught:
        llm.generate([P], params)
    assert caught.value.param == "params" and not llm.engine.has_work()
    assert ids(llm.generate([P], (SHORT,))) == ids(llm.generate([P], [SHORT]))


def test_unknown_argument() -> None:
    with pytest.raises(ConfigError, match=r"'max_model_length'.*max_model_len,") as caught:
        LLM(checkpoint(), max_model_length=5)
    assert caught.value.param == "max_model_length"


@pytest.mark.parametrize(
    "messages",
    [
        "hello",
        [],
        None,
        [[]],
        ["hello"],
        [{"role": 5, "content": "x"}],
        [{"content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": "x"}, "y"],
    ],
    ids=repr,
)
def test_bad_messages(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.chat(messages, SHORT)
    assert (caught.value.param or "").startswith("messages")


def test_text_parts_are_joined(llm: LLM) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    (joined,) = llm.chat([{"role": "user", "content": parts}], SHORT)
    assert joined.prompt_token_ids == llm.chat([{"role": "user", "content": "hello"}], SHORT)[0].prompt_token_ids


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


@pytest.mark.parametrize(("prompt", "params"), [([], SHORT), ([10**6], SHORT), (P, {"temperature": 0}), (5, SHORT), (P * 99, SHORT)])
def test_a_bad_stream_is_refused_at_the_call(llm: LLM, prompt: Any, params: Any) -> None:
    with pytest.raises(InvalidRequest):
        llm.stream(prompt, params)
    assert not llm.engine.has_work() and not llm._inbox


def test_a_stream_let_go_of_before_its_first_delta_is_aborted(llm: LLM) -> None:
    stream = llm.stream(P, GREEDY)
    assert llm.engine.num_waiting == 1
    del stream
    gc.collect()
    assert not llm.engine.has_work() and not llm._inbox


def test_a_finished_stream_stays_finished(llm: LLM) -> None:
    stream = llm.stream(P, SHORT)
    assert list(stream) and list(stream) == []
    stream.close()
    assert not llm.engine.has_work() and not llm._inbox


def test_closing_a_stream_leaves_the_other(llm: LLM) -> None:
    (expected,) = ids(llm.generate(R, GREEDY))
    first, second = llm.stream(P, GREEDY), llm.stream(R, GREEDY)
    next(first)
    found = list(next(second).outputs[0].token_ids)
    first.close()
    for delta in second:
        found += delta.outputs[0].token_ids
    assert found == expected


def test_threads_get_their_own_outputs(llm: LLM) -> None:
    """Four threads, generating and streaming at once, several times: everyone finds what one thread alone finds."""
    prompts = [P, R, [7], [3, 1, 4, 1, 5]]
    params = SamplingParams(temperature=0.9, seed=11, max_tokens=24, ignore_eos=True)
    expected = ids(llm.generate(prompts, params))
    found: list[list[list[int]]] = [[] for _ in prompts]
    errors: list[BaseException] = []
    together = threading.Barrier(len(prompts))

    def work(i: int) -> None:
        try:
            together.wait(timeout=60)
            for _ in range(3):
                found[i] += ids(llm.generate([prompts[i]], params))
                found[i].append([t for delta in llm.stream(prompts[i], params) for t in delta.outputs[0].token_ids])
        except BaseException as err:
            errors.append(err)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not errors and not any(thread.is_alive() for thread in threads)
    assert found == [[one] * 6 for one in expected]


def test_a_waiting_thread_comes_next(llm: LLM) -> None:
    """A thread that steps all the time does not keep another out: who waits is in the engine before the next step."""
    running: list[int] = []
    llm.engine.observers.append(lambda stats: running.append(stats.num_seqs))
    first = llm.stream(P, GREEDY)
    next(first)
    other = threading.Thread(target=lambda: llm.generate([R], SHORT), daemon=True)
    step = llm.engine.step

    def slow() -> Any:
        if not other.ident:
            other.start()
            assert any(waits() for _ in range(20_000)), "the other thread never queues up"
        return step()

    def waits() -> bool:
        if not llm._next.acquire(blocking=False):
            return True
        llm._next.release()
        time.sleep(0.001)
        return False

    llm.engine.step = slow  # type: ignore[method-assign]
    steps = len(running) + 1
    for _ in first:
        pass
    other.join(timeout=60)
    assert not other.is_alive() and running[steps] == 2


def test_a_stream_forgotten_during_a_step_ends_after_it(llm: LLM) -> None:
    """The collector may run anywhere; closing a stream inside a step must not pull requests from under it."""
    expected = ids(llm.generate([R], GREEDY))
    loose: list[Any] = [llm.stream(P, GREEDY)]
    next(loose[0])
    forward = llm.engine.runner.forward

    def collecting(batch: Any) -> Any:
        loose.clear()  # the last reference: the stream is closed here
        return forward(batch)

    llm.engine.runner.forward = collecting  # type: ignore[method-assign]
    assert ids(llm.generate([R], GREEDY)) == expected
    assert not llm.engine.has_work()


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
