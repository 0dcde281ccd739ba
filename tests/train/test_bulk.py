"""Answers written in bulk are the engine's own, token by token."""

from __future__ import annotations

import pytest

from specdec import LLM, SamplingParams
from specdec.errors import ConfigError
from specdec.train.bulk import Question, answer
from tests.tiny import write_tiny


@pytest.fixture(scope="module", params=[False, True], ids=["one group", "two groups"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory = tmp_path_factory.mktemp("target")
    write_tiny(directory, two_groups=request.param, eos_token_id=list(range(2, 400, 7)))
    return LLM(str(directory), speculation="off", max_num_seqs=8)


def test_equal_to_the_engine(llm: LLM) -> None:
    """More questions than lanes, prompts of 1 to 60 tokens, greedy and sampled, ends by token and by length."""
    questions = [Question([(7 * i + j) % 500 for j in range(1 + 5 * i)], (0.0, 0.8, 1.3)[i % 3], 1000 + i) for i in range(12)]
    params = [SamplingParams(temperature=q.temperature, seed=q.seed, max_tokens=30) for q in questions]
    expected = [o.outputs[0].token_ids for o in llm.generate([q.ids for q in questions], params, use_tqdm=False)]
    counted: list[int] = []
    model = llm.engine.runner.model
    assert answer(model, questions, lanes=5, max_len=128, max_tokens=30, done=counted.append) == expected
    assert sum(counted) == len(questions)
    assert len({len(e) for e in expected}) > 1, "some answers should end by an end token"


def test_the_limit_of_positions_holds(llm: LLM) -> None:
    """A lane that is full ends its answer: prompt and answer together take max_len tokens at most."""
    found = answer(llm.engine.runner.model, [Question([5] * 60, 0.0, 0)], lanes=1, max_len=64, max_tokens=30)
    expected = llm.generate([[5] * 60], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert found[0] == expected[0].outputs[0].token_ids[: len(found[0])] and 1 <= len(found[0]) <= 4


def test_a_prompt_that_does_not_fit_is_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="64 tokens does not fit max_len=64"):
        answer(llm.engine.runner.model, [Question([5] * 64, 0.0, 0)], lanes=1, max_len=64, max_tokens=4)
