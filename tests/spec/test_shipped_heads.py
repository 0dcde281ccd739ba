"""The draft heads that come with the package: sizes, cards, and drafts for the default model that are worth something."""

from __future__ import annotations

import pytest

from specdec import LLM, SamplingParams
from specdec.config import SpecConfig
from specdec.models.head_files import shipped_heads

MODEL = "smollm2-135m-instruct"
MOST_BYTES = {"eagle3": 30e6, "peagle": 60e6}
LEAST_LENGTH = {"eagle3": 2.2, "peagle": 2.0}  # committed tokens a pass of the two texts below, well below what they reach
PROMPTS = ["Write a Python function that adds two numbers, with a docstring.", "Explain how rain forms."]


@pytest.mark.parametrize("kind", list(MOST_BYTES))
def test_a_shipped_head_is_small_and_says_where_it_comes_from(kind: str) -> None:
    directory = shipped_heads(MODEL)[kind]
    assert sum(f.stat().st_size for f in directory.iterdir()) < MOST_BYTES[kind]
    assert "Command: `python -m specdec.train" in (directory / "README.md").read_text(encoding="utf-8")


def answers(speculation: SpecConfig) -> tuple[list[list[int]], float]:
    """(token ids, committed tokens a pass) of the two texts."""
    llm = LLM(MODEL, speculation=speculation)
    found = llm.chat([[{"role": "user", "content": text}] for text in PROMPTS], SamplingParams(max_tokens=48, temperature=0.0))
    return [list(o.outputs[0].token_ids) for o in found], sum(o.metrics.acceptance_length for o in found) / len(found)


@pytest.mark.model
@pytest.mark.parametrize("kind", list(MOST_BYTES))
def test_a_shipped_head_drafts_for_the_default_model(kind: str) -> None:
    tokens, length = answers(SpecConfig(method=kind, policy="fixed", nodes=16, depth=6, width=4))
    assert tokens == answers(SpecConfig(method="off"))[0]
    assert length > LEAST_LENGTH[kind]
