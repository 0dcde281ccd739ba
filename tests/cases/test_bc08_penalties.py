"""BC-08: penalties are as strong with drafts as without, whatever is accepted."""

from __future__ import annotations

import pytest

from specdec.config import SamplingParams
from specdec.types import RequestOutput
from tests.harness import BUMPED, assert_same, chain, engine, oracle_of, run, tree

PROMPT = [BUMPED] * 3
PENALTIES: dict[str, dict[str, float]] = {
    "frequency 0.4": {"frequency_penalty": 0.4},
    "frequency -2": {"frequency_penalty": -2.0},
    "frequency 2": {"frequency_penalty": 2.0},
    "presence 1": {"presence_penalty": 1.0},
    "presence 2": {"presence_penalty": 2.0},
    "repetition 1.3": {"repetition_penalty": 1.3},
    "repetition 3": {"repetition_penalty": 3.0},
    "all": {"frequency_penalty": 0.3, "presence_penalty": 0.5, "repetition_penalty": 1.1},
}
SHAPES = {
    "ORACLE": chain("oracle"),
    "WRONG": chain("wrong"),
    "MIX": chain("mix"),
    "TREE": tree("oracle"),
    "ngram": chain("ngram", ngram_min=1),
}


def off(**penalties: float) -> RequestOutput:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **penalties)
    return run(engine(kind="bump"), {"r": (PROMPT, params)})["r"]


def test_bc08_the_target_repeats_itself() -> None:
    """The premise: without penalties one token, for ever; penalties switch away from it, each at its own position."""
    assert off().outputs[0].token_ids == [BUMPED] * 24
    outputs = {name: tuple(off(**penalties).outputs[0].token_ids) for name, penalties in PENALTIES.items()}
    assert outputs["frequency -2"] != outputs["frequency 2"]
    first_other = {name: next((i for i, t in enumerate(ids) if t != BUMPED), 24) for name, ids in outputs.items()}
    assert 1 < first_other["frequency 0.4"] < 24, "the switch must come after some accumulation"
    assert first_other["frequency 2"] < first_other["frequency 0.4"] < first_other["frequency -2"] == 24


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PENALTIES)
def test_bc08_equals_off(name: str, shape: str) -> None:
    """With the drafter knowing the penalised future, and with one that knows only the unpenalised one."""
    penalties, expected = PENALTIES[name], off(**PENALTIES[name])
    for future in (expected, off()):
        target = engine(SHAPES[shape], kind="bump", oracle=oracle_of({"r": future}))
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **penalties)
        assert_same(run(target, {"r": (PROMPT, params)})["r"], expected)


def test_bc08_penalties_act_inside_one_draft() -> None:
    """A run of the repeated token drafted in one step is cut exactly where the growing penalty takes over."""
    expected, naive = off(frequency_penalty=0.4), off()
    target = engine(chain("oracle", 23), kind="bump", oracle=oracle_of({"r": naive}))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, frequency_penalty=0.4)
    found = run(target, {"r": (PROMPT, params)}, trace=True)["r"]
    assert_same(found, expected)
    switch = next(i for i, t in enumerate(expected.outputs[0].token_ids) if t != BUMPED)
    draft = next(step for step in found.trace.steps if len(step.tokens) > 1)
    assert draft.committed == expected.outputs[0].token_ids[1 : switch + 1]
    assert len(draft.path) == switch - 1
