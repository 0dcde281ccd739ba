"""Promise 1: speculation never changes the output, under every sampling parameter, for every drafter, chain or tree.

Expected values come from OFF runs of one request alone; everything else must reproduce them. With `deterministic=True`
equality is exact, log-probabilities included; in the default mode a difference is allowed at a near-tie only.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from specdec.config import SamplingParams
from specdec.tokenizer import Tokenizer
from specdec.types import RequestOutput
from tests.harness import BUMPED, SHAPES, P, R, assert_same, assert_same_or_tie, engine, oracle_of, run

TEXT = "the man said that the other one and the next one are in the same place"
SAMPLED = SamplingParams(temperature=0.9, seed=11, max_tokens=20, ignore_eos=True)
HOT = replace(SAMPLED, temperature=2.5, seed=2**64 - 1)


def _stop_in(params: SamplingParams, prompt: list[int] | str, start: int, length: int, **more: object) -> SamplingParams:
    """`params` with a stop string cut out of what the plain run produces at characters start…"""
    text = _alone("stop source", prompt, params).outputs[0].text
    return replace(params, stop=[text[start : start + length], "never to be seen"], **more)


def _token_at(params: SamplingParams, prompt: list[int] | str, index: int) -> int:
    return _alone("token source", prompt, params).outputs[0].token_ids[index]


def _alone(name: str, prompt: list[int] | str, params: SamplingParams, kind: str = "t0") -> RequestOutput:
    return run(engine("off", kind=kind, deterministic=True), {name: (prompt, params)})[name]


@cache
def table() -> dict[str, tuple[list[int] | str, SamplingParams]]:
    """Name of the case -> prompt and parameters. Every field of SamplingParams occurs."""
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    common = _alone("common", R, SAMPLED).outputs[0].token_ids[4]
    letters = replace(HOT, allowed_token_ids=[i for i in range(3, 259) if tokenizer().token_text(i).isalpha() and i < 90])
    few = replace(SAMPLED, allowed_token_ids=list(range(40, 52)))  # so few that tokens come again
    cases: dict[str, tuple[list[int] | str, SamplingParams]] = {
        "greedy": (R, greedy),
        "greedy text": (TEXT, greedy),
        "temperature": (R, SAMPLED),
        "cold": (R, replace(SAMPLED, temperature=0.05)),
        "hot": (P, HOT),
        "negative seed": (P, replace(SAMPLED, seed=-5)),
        "top_k": (R, replace(HOT, top_k=3)),
        "top_k 1": (R, replace(HOT, top_k=1)),
        "top_p": (R, replace(HOT, top_p=0.3)),
        "min_p": (R, replace(HOT, min_p=0.2)),
        "typical_p": (R, replace(HOT, typical_p=0.4)),
        "all truncations": (TEXT, replace(HOT, top_k=40, top_p=0.9, min_p=0.01, typical_p=0.8)),
        "few": (R, few),
        "presence": (R, replace(few, presence_penalty=1.5)),
        "frequency": (R, replace(greedy, frequency_penalty=0.9)),
        "negative penalties": (R, replace(few, frequency_penalty=-1.0, presence_penalty=-0.5)),
        "repetition": (R, replace(few, repetition_penalty=1.4)),
        "repetition below 1": (R, replace(greedy, repetition_penalty=0.7)),
        "logit_bias": (R, replace(SAMPLED, logit_bias={42: 9.0, 17: 8.0, common: -100.0})),
        "bad_words": (R, replace(SAMPLED, bad_words=["the", "a b", *_words(SAMPLED, R)])),
        "bad words of several tokens": (P, replace(letters, bad_words=_runs(letters, P))),
        "allowed": (P, replace(HOT, allowed_token_ids=[7, 8, 9, 10, 42, 17])),
        "allowed, history": (P, replace(HOT, allowed_token_ids=list(range(8)), repetition_penalty=1.3, presence_penalty=1.0)),
        "min_tokens": (P, replace(HOT, allowed_token_ids=[1, 2, 3], ignore_eos=False, min_tokens=6)),
        "min_tokens against a strong end": (P, replace(SAMPLED, logit_bias={2: 100.0}, ignore_eos=False, min_tokens=7)),
        "eos": (P, replace(HOT, allowed_token_ids=[1, 2, 3, 4, 5, 6], ignore_eos=False)),
        "ignore_eos": (P, replace(HOT, allowed_token_ids=[1, 2, 3], skip_special_tokens=False)),
        "eos shown": (
            P,
            replace(HOT, allowed_token_ids=[1, 2, 40], ignore_eos=False, include_stop_str_in_output=True, skip_special_tokens=False),
        ),
        "stop_token_ids": (R, replace(SAMPLED, stop_token_ids=[_token_at(SAMPLED, R, 9)])),
        "stop_token_ids and min_tokens": (R, replace(SAMPLED, stop_token_ids=[_token_at(SAMPLED, R, 2)], min_tokens=5)),
        "stop": (TEXT, _stop_in(SAMPLED, TEXT, 9, 3)),
        "stop included": (TEXT, _stop_in(SAMPLED, TEXT, 9, 3, include_stop_str_in_output=True)),
        "stop and min_tokens": (TEXT, _stop_in(SAMPLED, TEXT, 3, 2, min_tokens=12)),
        "n": (P, replace(HOT, n=3, max_tokens=12)),
        "n greedy with penalties": (R, replace(greedy, n=2, frequency_penalty=0.5, max_tokens=12)),
        "n with stop": (P, replace(HOT, n=3, allowed_token_ids=[30, 40, 50, 60, 70], stop_token_ids=[50])),
        "logprobs": (R, replace(SAMPLED, logprobs=3)),
        "logprobs 0": (R, replace(HOT, logprobs=0)),
        "processed logprobs": (R, replace(HOT, logprobs=4, logprobs_mode="processed", top_k=9, presence_penalty=0.7)),
        "prompt_logprobs": (R, replace(SAMPLED, prompt_logprobs=2)),
        "prompt_logprobs of two": (R, replace(HOT, prompt_logprobs=0, n=2, max_tokens=6)),
        "prediction": (P, replace(greedy, prediction=_alone("future", P, greedy).outputs[0].token_ids)),
        "prediction text": (TEXT, replace(SAMPLED, prediction="the other place is in the same one")),
        "one token": (P, replace(HOT, max_tokens=1)),
        "to the limit": (R, replace(SAMPLED, max_tokens=None, seed=3)),
        "everything": (
            TEXT,
            replace(
                HOT,
                temperature=1.3,
                top_k=60,
                top_p=0.95,
                min_p=0.001,
                presence_penalty=0.3,
                frequency_penalty=0.2,
                repetition_penalty=1.1,
                logit_bias={BUMPED: 3.0, 300: -4.0},
                bad_words=["in"],
                min_tokens=4,
                stop=["zz"],
                stop_token_ids=[77],
                n=2,
                logprobs=2,
                max_tokens=24,
            ),
        ),
    }
    return cases


@cache
def tokenizer() -> Tokenizer:
    return engine().tokenizer


def _runs(params: SamplingParams, prompt: list[int] | str) -> list[str]:
    """Text of two and three consecutive tokens of the plain output that the tokenizer splits in the same way."""
    ids = _alone("runs", prompt, params).outputs[0].token_ids
    runs = [ids[i : i + length] for i, length in ((2, 2), (5, 3), (9, 2), (13, 3), (14, 2), (17, 2))]
    return [text for run in runs if tokenizer().encode(text := tokenizer().decode(run), add_special=False) == run]


def _words(params: SamplingParams, prompt: list[int] | str) -> list[str]:
    """Printable pieces of the plain output, so that banning them matters."""
    text = _alone("words", prompt, params).outputs[0].text
    return [w for w in "".join(c if c.isascii() and c.isalpha() else " " for c in text).split() if len(w) > 1][:3]


@cache
def expected(kind: str = "t0") -> dict[str, RequestOutput]:
    """OFF outputs, each request alone in an engine of its own."""
    return {name: _alone(name, prompt, params, kind) for name, (prompt, params) in table().items()}


def test_table_names_every_field() -> None:
    """A new sampling parameter must come with a case."""
    default = SamplingParams()
    used = {f for _, params in table().values() for f in SamplingParams.__dataclass_fields__ if getattr(params, f) != getattr(default, f)}
    assert set(SamplingParams.__dataclass_fields__) - used == {"speculation"}


def test_cases_do_something() -> None:
    """Stops stop, bans ban, and the constrained runs differ from the plain ones."""
    by_name = expected()
    ids = {name: out.outputs[0].token_ids for name, out in by_name.items()}
    reasons = {name: out.outputs[0].finish_reason for name, out in by_name.items()}
    for name in ("stop_token_ids", "stop", "stop included", "stop_token_ids and min_tokens", "eos"):
        assert reasons[name] == "stop" or "min_tokens" in name, name
    assert by_name["stop"].outputs[0].text + table()["stop"][1].stop_strings[0] == by_name["stop included"].outputs[0].text
    for name in ("presence", "negative penalties", "repetition"):
        assert ids[name] != ids["few"], name
    for name in ("logit_bias", "bad_words"):
        assert ids[name] != ids["temperature"], name
    banned = table()["bad words of several tokens"][1].bad_words or ()
    assert len(banned) > 2 and not any(word in by_name["bad words of several tokens"].outputs[0].text for word in banned)
    assert ids["min_tokens against a strong end"][7:] == [2] and 2 not in ids["min_tokens against a strong end"][:7]
    assert ids["frequency"] != ids["greedy"] != ids["repetition below 1"]
    assert len({tuple(c.token_ids) for c in by_name["n"].outputs}) == 3


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("t0", shape) for shape in SHAPES] + [("two_groups", shape) for shape in ("oracle-tree", "mix-chain", "mix-tree", "ngram-tree")],
)
def test_all_parameters_side_by_side(kind: str, shape: str) -> None:
    """Every case at once in one engine: neighbours with other parameters, queueing, prefix hits, and a drafter."""
    outputs = expected(kind)
    target = engine(SHAPES[shape], kind=kind, oracle=oracle_of(outputs), deterministic=True, max_num_batched_tokens=96)
    for name, found in run(target, table()).items():
        try:
            assert_same(found, outputs[name], tolerance=0)
        except AssertionError as err:
            raise AssertionError(f"case {name!r}: {err}") from err


@pytest.mark.parametrize(
    "name",
    [
        "greedy",
        "temperature",
        "top_p",
        "typical_p",
        "presence",
        "frequency",
        "repetition",
        "logit_bias",
        "bad_words",
        "min_tokens",
        "eos",
        "stop",
        "stop included",
        "n",
        "n with stop",
        "processed logprobs",
        "prompt_logprobs of two",
        "everything",
    ],
)
@pytest.mark.parametrize("shape", ["mix-chain", "mix-tree"])
def test_one_parameter_alone(name: str, shape: str) -> None:
    """The same alone: no neighbour hides or causes a difference, and drafts are both accepted and rejected."""
    outputs = expected()
    target = engine(SHAPES[shape], oracle=oracle_of(outputs), deterministic=True)
    found = run(target, {name: table()[name]})[name]
    assert_same(found, outputs[name], tolerance=0)
    assert found.metrics.drafted > found.metrics.accepted > 0


@pytest.mark.parametrize(("kind", "shape"), [("t0", "mix-tree"), ("t0", "ngram-chain"), ("two_groups", "oracle-tree")])
def test_default_mode_differs_at_near_ties_only(kind: str, shape: str) -> None:
    """Not deterministic: the same runs, with the near-tie rule, and few ties at that."""
    outputs = {name: run(engine("off", kind=kind), {name: request})[name] for name, request in table().items()}
    target = engine(SHAPES[shape], kind=kind, oracle=oracle_of(outputs))
    found = run(target, table())
    ties = sum(assert_same_or_tie(found[name], outputs[name], table()[name], kind) for name in table())
    assert ties <= 2


@pytest.mark.parametrize("shape", ["oracle-chain", "oracle-tree"])
def test_oracle_is_accepted_whole(shape: str) -> None:
    """With the right drafts a step settles depth + 1 tokens, whatever the parameters: acceptance is not bought by luck."""
    outputs = expected()
    depth = SHAPES[shape].depth
    for name in ("greedy", "hot", "everything", "presence"):
        target = engine(SHAPES[shape], oracle=oracle_of(outputs), deterministic=True)
        found = run(target, {name: table()[name]})[name]
        if shape == "oracle-chain":
            assert found.metrics.accepted == found.metrics.drafted
        for choice in outputs[name].outputs:
            assert found.metrics.steps <= len(found.outputs) * (2 + -(-len(choice.token_ids) // (depth + 1)) + depth)
        assert found.metrics.generated / found.metrics.steps > depth / 2
