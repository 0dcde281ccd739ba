"""What is refused, with which error, and that a refusal leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec import boot
from specdec.cache.sizing import host_memory
from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.errors import ConfigError, InvalidRequest, QueueFull, RequestTooLong, SpecdecError
from specdec.models.load import find_checkpoint
from tests.harness import GREEDY, VOCAB, P, chain, checkpoint, engine, run


def refused(target: Any, prompt: Any, params: SamplingParams = GREEDY, error: type[SpecdecError] = InvalidRequest) -> SpecdecError:
    """The error of adding this request; asserts that the engine is as idle as before."""
    with pytest.raises(error) as caught:
        target.add_request("bad", prompt, params)
    assert not target.has_work() and target.step() == []
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    "prompt",
    [[], "", [VOCAB], [-1], [3, 10**9], [2**70], [1.5, 2], [True, 3], ["a"], [None], [[1]], b"ab", 5, None, {"a": 1}, {1, 2}],
    ids=repr,
)
def test_bad_prompts(prompt: Any) -> None:
    assert refused(engine(), prompt).param == "prompt"


def test_lone_surrogates() -> None:
    assert refused(engine(), "ab\ud800").param == "prompt"


@pytest.mark.parametrize("prompt", [[4, 5], (4, 5), range(4, 6)], ids=repr)
def test_any_sequence_of_ids(prompt: Any) -> None:
    assert run(engine(), {"r": (prompt, GREEDY)})["r"].prompt_token_ids == [4, 5]


@pytest.mark.parametrize("length", [128, 129, 5000])
def test_too_long(length: int) -> None:
    error = refused(engine(), [1] * length, error=RequestTooLong)
    assert error.code == "context_length_exceeded" and "128" in error.message


def test_longest_prompt() -> None:
    output = run(engine(), {"r": ([1] * 127, GREEDY)})["r"]
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (1, "length")


def test_what_can_never_fit_the_pool() -> None:
    """A pool smaller than the request is an error on arrival, not a request that waits for ever."""
    target = engine(num_kv_blocks=12, max_model_len=None)
    assert target.max_model_len <= 48
    refused(target, [1] * 60, error=RequestTooLong)


def test_pool_beyond_the_memory_of_the_machine() -> None:
    with pytest.raises(ConfigError, match=r"the device has \d+: lower it") as caught:
        engine(num_kv_blocks=2**31 - 1)
    assert caught.value.param == "num_kv_blocks"


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "prediction"])
def test_ids_outside_the_vocabulary(field: str) -> None:
    assert refused(engine(), P, SamplingParams(**{field: [VOCAB]})).param == field


def test_biased_id_outside_the_vocabulary() -> None:
    assert refused(engine(), P, SamplingParams(logit_bias={VOCAB: 1.0})).param == "logit_bias"


def test_duplicate_id() -> None:
    """Refused while the first one runs, whose output is not touched; free again afterwards."""
    target = engine()
    target.add_request("r", P, GREEDY)
    target.step()
    with pytest.raises(InvalidRequest) as caught:
        target.add_request("r", [1, 2], GREEDY)
    assert caught.value.param == "request_id"
    while target.has_work():
        target.step()
    assert run(target, {"r": (P, GREEDY)})["r"].finished


@pytest.mark.parametrize(
    ("override", "param"),
    [
        ({"method": "medusa"}, "speculation.method"),
        ({"method": "ngram"}, "speculation.method"),  # known, but this engine was started without it
        ({"metod": "off"}, "speculation"),
        ({"nodes": 0}, "speculation.nodes"),
        ({"nodes": 65}, "speculation.nodes"),
        ({"depth": "4"}, "speculation.depth"),
        ({"width": True}, "speculation.width"),
        ("medusa", "speculation.method"),
        ([], "speculation"),
    ],
    ids=repr,
)
def test_bad_speculation_override(override: Any, param: str) -> None:
    target = engine(chain("oracle"), oracle=lambda seq: ())
    error = refused(target, P, SamplingParams(speculation=override))
    assert error.param == param
    if param == "speculation.method":
        assert "oracle" in error.message and "off" in error.message, "the allowed names are listed"


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "n": [0, 129, 1.5, True, "2", None],
        "temperature": [-0.1, float("nan"), float("inf"), 101, "hot", None, True],
        "top_k": [-2, 1.5, 2**31],
        "top_p": [0, 1.1, -1, float("nan")],
        "min_p": [-0.1, 1.1],
        "typical_p": [0, 2],
        "presence_penalty": [-2.1, 2.1, float("nan")],
        "frequency_penalty": [-2.1, 2.1],
        "repetition_penalty": [0, -1, float("inf"), 1e-38, 1e-300, 0.009],
        "logit_bias": [{-1: 1.0}, {"5": 1.0}, {5: 101}, {5: float("nan")}, [5], {5.0: 1.0}],
        "bad_words": ["abc", [""], [5], 5],
        "allowed_token_ids": [[], [-1], ["a"], 5, "ab"],
        "min_tokens": [-1, 1.5],
        "max_tokens": [0, -1, 1.5, True],
        "stop": ["", [""], 5, [5], [None]],
        "stop_token_ids": [[-1], [1.5], 5, "ab", [True]],
        "seed": [1.5, 2**64, -(2**63) - 1, "a"],
        "logprobs": [-1, 101, 1.5, True],
        "prompt_logprobs": [-1, 101],
        "logprobs_mode": ["cooked", None],
        "prediction": [5, ["a"], [1.5], [-1]],
    }.items(),
)
def test_bad_sampling_parameters(field: str, values: list[Any]) -> None:
    """A value that cannot be meant is a typed error that names the field, at construction."""
    for value in values:
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field, f"{field}={value!r}"


def test_method_name_for_speculation() -> None:
    assert SamplingParams(speculation="off") == SamplingParams(speculation={"method": "off"})


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "model": [None, 5, "", ["m"]],
        "speculation": [None, "ngram", {}],
        "gpu_memory_utilization": ["a", 0, 1.1, True, None],
        "max_queue": ["a", -1, 1.5, True],
        "max_num_seqs": [True, 0, 10**9, "8", None],
        "max_num_batched_tokens": [0, 2**40],
        "block_size": [0, 2**30],
        "num_kv_blocks": [0, 2**40, "many"],
        "kv_cache_bytes": [0, 2**70, None],
        "max_model_len": [0, 1, 1.5],
        "tensor_parallel_size": [0, 2, "a"],
        "seed": ["a", None, 2**64],
        "load_format": ["fast", 5, []],
        **{key: ["yes", 1, None] for key in ("deterministic", "enable_prefix_caching", "trace")},
        **{key: [5, None] for key in ("device", "dtype", "kv_dtype")},
        "quantization": [5, True],
        "act_dtype": ["int8", 8, None, []],
    }.items(),
)
def test_bad_engine_settings(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError) as caught:
            EngineConfig(**{field: value})
        assert caught.value.param == field and field in caught.value.message, f"{field}={value!r}"


def test_least_model_len() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        EngineConfig(max_model_len=1)
    assert EngineConfig(max_model_len=2).max_model_len == 2


@pytest.mark.parametrize(
    ("method", "fields", "param"),
    [
        ("ngram", {"head": "x"}, "head"),
        ("ngram", {"model": "x"}, "model"),
        ("auto", {"model": "x"}, "model"),
        ("off", {"corpus": "x"}, "corpus"),
        ("draft_model", {"corpus": "x"}, "corpus"),
        ("ngram", {"mix_p": 0.5}, "mix_p"),
        ("draft_model", {"model": ""}, "model"),
        ("ngram", {"corpus": 5}, "corpus"),
        ("mix", {"mix_p": "a"}, "mix_p"),
    ],
)
def test_fields_that_the_method_ignores(method: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SpecConfig(method=method, **fields)
    assert caught.value.param == param and param in caught.value.message


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("eagle3", {"head": "x", "draft_quantization": "int8"}),
        ("auto", {"head": "x"}),
        ("draft_model", {"model": "x"}),
        ("auto", {"corpus": "x"}),
        ("mix", {"mix_p": 0.5}),
        ("off", {"mix_p": 0.7}),
    ],
)
def test_fields_that_the_method_uses(method: str, fields: dict[str, Any]) -> None:
    made = SpecConfig(method=method, **fields)
    assert {name: getattr(made, name) for name in fields} == fields


def test_min_tokens_beyond_max_tokens() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert caught.value.param == "min_tokens"


def test_cuda_memory_is_what_bounds_the_blocks_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card smaller than the host: what was asked for is judged against the card, and errors name the settings that count there."""
    model, card = find_checkpoint(checkpoint()).config, torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 21))
    fits = EngineConfig(checkpoint(), num_kv_blocks=64)
    assert boot._pool_size(fits, model, torch.float32, card, 0).num_blocks == (64,)
    assert host_memory() > 1 << 30
    with pytest.raises(ConfigError, match=r"the device has 1048576: lower it to at most \d+") as caught:
        boot._pool_size(EngineConfig(checkpoint(), num_kv_blocks=100_000), model, torch.float32, card, 0)
    assert caught.value.param == "num_kv_blocks"
    with pytest.raises(ConfigError, match=r"bytes that gpu_memory_utilization leaves it; raise it until \d+ are left") as caught:
        boot._pool_size(EngineConfig(checkpoint(), gpu_memory_utilization=0.5, max_model_len=200), model, torch.float32, card, 0)
    assert caught.value.param == "gpu_memory_utilization"


def test_choices_need_room_together() -> None:
    """The server's rule for the prompts of a request holds for the choices of one, too: see `admission.check_room`."""
    target = engine(max_num_seqs=1, max_queue=2)
    rule = r"but at most 3 are held at a time \(1 that can run \+ max_queue 2\)"
    with pytest.raises(InvalidRequest, match=rf"^the request needs 6 sequences \(prompts × n\), {rule}; send fewer") as caught:
        target.add_request("six", P, replace(GREEDY, n=6))
    assert caught.value.param == "n" and not target.has_work()
    target.add_request("one", P, GREEDY)
    with pytest.raises(QueueFull, match=f"^0 sequences are running and 1 waiting, the request needs 3, {rule}; try again later"):
        target.add_request("three", P, replace(GREEDY, n=3))
    target.step()
    target.add_request("two", P, replace(GREEDY, n=2))
    with pytest.raises(QueueFull, match=f"^1 sequences are running and 2 waiting, the request needs 1, {rule}"):
        target.add_request("late", P, GREEDY)


def test_numbers_that_python_will_not_print_are_refused_like_others() -> None:
    """Python raises a bare ValueError when asked to spell out more than 4,300 digits."""
    for make, param in (
        (lambda: SamplingParams(seed=10**5000), "seed"),
        (lambda: SamplingParams(temperature=10**5000), "temperature"),
        (lambda: engine().add_request("r", [10**5000], GREEDY), "prompt"),
        (lambda: engine().add_request("r", P, replace(GREEDY, speculation={"nodes": 10**5000})), "speculation.nodes"),
    ):
        with pytest.raises(InvalidRequest, match="one of thousands of digits") as caught:
            make()
        assert caught.value.param == param


def test_queue_full() -> None:
    """`max_queue` waiting sequences beside the running ones; the refused request leaves no trace."""
    target = engine(max_num_seqs=1, max_queue=2)
    for i in range(3):
        target.add_request(str(i), P, GREEDY)
    with pytest.raises(QueueFull) as caught:
        target.add_request("late", P, GREEDY)
    assert caught.value.status == 429 and caught.value.retry_after > 0
    done = set()
    while target.has_work():
        done |= {output.request_id for output in target.step() if output.finished}
    assert done == {"0", "1", "2"}
    assert run(target, {"late": (P, GREEDY)})["late"].finished
