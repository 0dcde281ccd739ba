"""One sequence's EAGLE-3 draft in one compiled call: the trees of the Python growth, for the requests it fits, and no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdec import ops
from specdec.config import SamplingParams, SpecConfig
from specdec.spec import compiled_growth
from specdec.types import RequestOutput
from tests.harness import GREEDY, R, assert_same, engine, run
from tests.spec.heads import knowing_head, random_head

FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed": {"norm_output": True, "norm_before_residual": True, "norm_before_fc": True},
    "two layers": {"num_layers": 2, "fc_norm": True},
    "window, whole vocabulary": {"windows": (5,), "draft_vocab_size": 512},
}
SHAPES = {"chain": (6, 5, 1), "tree": (20, 4, 3), "bush": (12, 1, 11), "narrow beam": (24, 40, 5)}
LAWS = {"greedy": GREEDY, "hot": replace(GREEDY, temperature=1.3, seed=5), "warm": replace(GREEDY, temperature=0.4, seed=2)}


def _shape(nodes: int, depth: int, width: int, **fields: Any) -> SpecConfig:
    return SpecConfig(method="eagle3", nodes=nodes, depth=depth, width=width, policy="fixed", **fields)


def _trees(output: RequestOutput) -> list[tuple[list[int], list[int]]]:
    return [(step.tokens, step.parents) for step in output.trace.steps]


def _calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one entry with every compiled draft."""
    made: list[int] = []
    grow = compiled_growth.grow

    def counted(*args: Any) -> Any:
        made.append(1)
        return grow(*args)

    monkeypatch.setattr(compiled_growth, "grow", counted)
    return made


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("flags", FLAGS)
def test_the_trees_are_those_of_the_python_growth(flags: str, shape: str, law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = _shape(*SHAPES[shape], head=random_head("eagle3", **FLAGS[flags]))
    calls, request = _calls(monkeypatch), {"r": (R[:20], LAWS[law])}
    found = run(engine(spec, deterministic=True, max_num_batched_tokens=31), request, trace=True)["r"]
    compiled = len(calls)
    with ops.override("draft_pass", "reference"):
        expected = run(engine(spec, deterministic=True, max_num_batched_tokens=31), request, trace=True)["r"]
    assert compiled > 10 and len(calls) == compiled
    assert_same(found, expected, tolerance=0)
    assert _trees(found) == _trees(expected)
    assert max(len(tokens) for tokens, _ in _trees(found)) > 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_hopeless_beam_is_not_run_in_either(temperature: float) -> None:
    """Under policy auto a draft ends early; what was drafted then is still the same."""
    spec = SpecConfig(method="eagle3", head=random_head(), nodes=16, depth=8, width=2)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
    found = []
    for backend in ("cpu", "reference"):
        with ops.override("draft_pass", backend):
            target = engine(spec, deterministic=True)
            target.policy.fixed = True  # the same budget every step, whatever the clock says
            found.append(run(target, {"r": (R, params)}, trace=True)["r"])
    assert _trees(found[0]) == _trees(found[1])
    assert any(1 < len(tokens) < 16 for tokens, _ in _trees(found[0]))


def test_nothing_is_run_below_an_end_token() -> None:
    """The head drafts what the target says; with that token as a stop the draft ends with it."""
    spec = _shape(7, 6, 1, head=knowing_head())
    free = run(engine(spec, kind="last", deterministic=True), {"r": (R, GREEDY)}, trace=True)["r"]
    stop = free.outputs[0].token_ids[2]
    params = SamplingParams(temperature=0, max_tokens=32, stop_token_ids=[stop])
    found = run(engine(spec, kind="last", deterministic=True), {"r": (R, params)}, trace=True)["r"]
    for step in found.trace.steps:
        assert stop not in step.tokens[1:-1]
    assert found.outputs[0].token_ids[-1] == stop


@pytest.mark.parametrize(
    "params",
    [
        replace(GREEDY, logit_bias={7: 3.0}),
        replace(GREEDY, presence_penalty=0.5),
        replace(GREEDY, temperature=1.0, seed=1, top_p=0.9),
        replace(GREEDY, temperature=1.0, seed=1, top_k=5),
        replace(GREEDY, temperature=1.0, seed=1, min_p=0.1),
        replace(GREEDY, allowed_token_ids=list(range(40))),
    ],
)
def test_other_laws_are_drafted_in_python(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _calls(monkeypatch)
    found = run(engine(_shape(8, 3, 2, head=random_head()), deterministic=True), {"r": (R, params)}, trace=True)["r"]
    assert not calls and any(len(tokens) > 1 for tokens, _ in _trees(found))


def test_batches_and_rejection_are_drafted_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _calls(monkeypatch)
    run(engine(_shape(8, 3, 2, head=random_head(), verify="rejection")), {"r": (R, replace(GREEDY, temperature=1.0))})
    run(engine(_shape(8, 3, 2, head=random_head())), {"a": (R, GREEDY), "b": (R, GREEDY)})
    assert not calls
