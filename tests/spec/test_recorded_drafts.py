"""Recorded drafts, without a card: how many launches are not the head's own, and the same trees from the kernels that a card runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specdec import boot, ops
from specdec.config import SamplingParams, SpecConfig
from specdec.kernels.registry import Op
from specdec.models.draft_heads import DraftHead
from specdec.runner.graphs import Outputs
from specdec.runner.runner import ModelRunner
from specdec.spec.recorded_growth import Recorded
from tests.harness import P, engine, run
from tests.kernels.matrix import names
from tests.spec import heads

SHAPES = {
    "chain": heads.chain("eagle3"),
    "tree": heads.tree("eagle3", nodes=24, depth=4, width=5),
    "parallel chain": heads.chain("peagle"),
    "following": heads.tree("peagle", head=heads.random_head("peagle", transition=24)),
}
FUSED = ("draft_layout", "accepted_pairs", "draft_grow", "tree_build")


@pytest.fixture(params=SHAPES, name="shape")
def _shape(request: pytest.FixtureRequest) -> SpecConfig:
    return SHAPES[request.param]


def replayed(shape: SpecConfig, temperature: float, monkeypatch: pytest.MonkeyPatch, replay: Callable[[Recorded], Outputs]) -> set[str]:
    """Runs three requests, padded to four, then fewer, a step behind where it can. replay: stands for that of a recorded draft. Returns
    where drafts started."""
    starts: set[str] = set()

    def record(made: Callable[[], Outputs]) -> Callable[[], Outputs]:
        owner = getattr(made, "__self__", None)
        if not isinstance(owner, Recorded):
            return made
        starts.add(type(owner._start).__name__)
        return lambda: replay(owner)

    monkeypatch.setattr(boot, "_recorder", lambda config, device: lambda: record)
    monkeypatch.setattr(ModelRunner, "measure", lambda self, rows, context: 1.0 + 0.01 * rows)
    params = SamplingParams(temperature=temperature, seed=11, ignore_eos=True)
    target = engine(shape, dtype="bfloat16", deterministic=True, overlap=True)
    run(target, {f"r{n}": ([n, *P], replace(params, max_tokens=n)) for n in (8, 11, 14)})
    return starts


class Launches(TorchDispatchMode):
    """Counts the calls of torch that launch something on a card, but for those within ops or the head's network."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        views = any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)
        if not self.inside and not views and not func.__name__.startswith(("empty", "_unsafe_view")):
            self.found.append(func.__name__)
        return result

    def apart(self, own: Callable[..., Any], name: str | None) -> Callable[..., Any]:
        """The same function, whose inner calls do not count; itself it does, as `name` or as its op."""

        def call(subject: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.inside and name != "":
                self.found.append(name or subject.name)
            self.inside += 1
            try:
                return own(subject, *args, **kwargs)
            finally:
                self.inside -= 1

        return call


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    launches = Launches()
    with monkeypatch.context() as patch, launches:
        patch.setattr(Op, "__call__", launches.apart(Op.__call__, None))
        for name in ("fuse", "forward", "follow"):
            patch.setattr(DraftHead, name, launches.apart(getattr(DraftHead, name), ""))
        yield launches


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_takes_few_launches_beside_its_head(shape: SpecConfig, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the start, the layout included, at most 5; of a depth the race, the beam and one gather; of the end the tree and two more."""

    def replay(made: Recorded) -> Outputs:
        with counting(monkeypatch) as launches:
            outputs = made.grown()
        found = launches.found
        assert found.count("draft_topk") == found.count("draft_grow") == made._depth
        first, last = found.index("draft_topk"), len(found) - found.index("tree_build")
        assert first <= 5 and last <= 3, found
        assert len(found) - first - last <= 3 * made._depth - 1, found
        return outputs

    assert replayed(shape, temperature, monkeypatch, replay) == {"Given", "Accepted"}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_kernels_of_a_card_draw_the_same_trees(shape: SpecConfig, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available() or any("triton" not in names(op) for op in FUSED):
        pytest.skip("interpreted kernels, on the CPU")

    def replay(made: Recorded) -> Outputs:
        found = []
        for backend in ("triton", "reference"):
            with ExitStack() as stack:
                for op in FUSED:
                    stack.enter_context(ops.override(op, backend))
                found.append(made.grown())
        for mine, theirs in zip(*found, strict=True):
            assert torch.equal(mine, theirs)
        return found[0]

    assert replayed(shape, temperature, monkeypatch, replay) == {"Given", "Accepted"}
