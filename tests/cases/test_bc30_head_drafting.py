"""BC-30, drafting: one head in three layouts drafts the same ids; a head of another target is flagged and does not draft."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.config import SamplingParams, SpecConfig
from specdec.models.head_fingerprint import measure
from tests.harness import Log, P, assert_same, engine, run
from tests.spec.heads import target
from tests.tiny_heads import tiny_head, write_head

TAPS = (0, 1, 2)
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LAYOUTS = ("eagle", "speculators", "specforge")


def shapes(head: Path) -> dict[str, SpecConfig]:
    return {
        "chain": SpecConfig(method="eagle3", head=str(head), nodes=5, depth=4, width=1, policy="fixed"),
        "TREE": SpecConfig(method="eagle3", head=str(head), nodes=10, depth=3, width=3, policy="fixed"),
    }


@pytest.mark.parametrize("shape", ["chain", "TREE"])
def test_layouts_draft_the_same(shape: str, tmp_path: Path) -> None:
    config, tensors = tiny_head("eagle3", target().config, taps=TAPS)
    expected = run(engine(deterministic=True), {"r": (P, PARAMS)})["r"]
    found = []
    for layout in LAYOUTS:
        head = write_head(tmp_path / layout, layout, config, tensors, fingerprint=measure(target().model, TAPS))
        output = run(engine(shapes(head)[shape], deterministic=True), {"r": (P, PARAMS)}, trace=True)["r"]
        assert_same(output, expected, tolerance=0)
        found.append([(step.position, step.tokens, step.parents, step.path) for step in output.trace.steps])
    assert found[0] == found[1] == found[2]
    assert sum(len(tokens) > 1 for _, tokens, _, _ in found[0]) > 15


@pytest.mark.parametrize("method", ["eagle3", "auto"])
def test_a_head_of_another_target_does_not_draft(method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The target's hidden basis changed under the head: the fingerprint is that of other weights."""
    config, tensors = tiny_head("eagle3", target().config, taps=TAPS)
    head = write_head(tmp_path / "head", "speculators", config, tensors, fingerprint=measure(target("last").model, TAPS))
    served, log = engine(SpecConfig(method=method, head=str(head), policy="fixed"), deterministic=True), Log()
    assert "trained on another target" in caplog.text
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, speculation="eagle3")
    found = run(served, {"r": (P, params)}, log=log)["r"]
    assert_same(found, run(engine(deterministic=True), {"r": (P, PARAMS)})["r"], tolerance=0)
    assert log.drafted == 0 and log.skipped["disabled"] >= 22
