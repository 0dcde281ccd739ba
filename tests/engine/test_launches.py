"""What a step begun behind another gives the device outside of its recorded passes. On a card each of these is a launch, at 2 us and more
whatever it does; here the ops and the calls of torch that would be launches are counted on a CPU, a replay being the pass itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from specdec import boot, overlap
from specdec.config import SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.kernels.registry import Op
from specdec.runner.graphs import Outputs
from specdec.runner.runner import ModelRunner
from tests.harness import P, engine
from tests.spec import heads

REPLAY = "replay"
NOTHING = ("empty", "empty_like", "empty_strided", "new_empty")  # allocate


class Launches(TorchDispatchMode):
    """names: of ops and of torch's calls, in order. Not of what is inside a recorded pass or an op."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.inside = 0
        self.on = False

    def note(self, name: str) -> None:
        if self.on and not self.inside:
            self.names.append(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # without gradients, calls made of others arrive here whole
            made = func.decompose(*args, **(kwargs or {}))
        if made is not NotImplemented:
            return made
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not views and func.overloadpacket.__name__ not in NOTHING:
            self.note(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def within(self, name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.note(name)
        self.inside += 1
        try:
            return run(*args, **kwargs)
        finally:
            self.inside -= 1


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Counts once it is entered and on, in engines built from now on."""
    seen = Launches()

    def recorder(run: Callable[[], Outputs]) -> Callable[[], Outputs]:
        return lambda: seen.within(REPLAY, run)

    call, arrival = Op.__call__, overlap.arrival
    monkeypatch.setattr(Op, "__call__", lambda op, *args, **kwargs: seen.within(op.name, call, op, *args, **kwargs))
    monkeypatch.setattr(overlap, "arrival", lambda tensors: seen.within("arrival", arrival, tensors))
    monkeypatch.setattr(boot, "_recorder", lambda config, device: lambda: recorder)
    monkeypatch.setattr(ModelRunner, "measure", lambda self, rows, context: 1.0 + 0.01 * rows)
    return seen


def followed(target: Engine, seen: Launches, part: Any, count: int, temperature: float) -> list[list[str]]:
    """Runs `count` requests; names by step begun behind another through `part.follow`, once shapes have been recorded."""
    steps: list[list[str]] = []
    follow = part.follow

    def watched(*args: Any) -> Any:
        seen.names, seen.on = [], True
        found = follow(*args)
        seen.on = False
        if seen.names:
            steps.append(seen.names)
        return found

    part.follow = watched
    params = SamplingParams(temperature=temperature, seed=11, ignore_eos=True, max_tokens=24)
    for i in range(count):
        target.add_request(str(i), [i + 3, *P], replace(params, max_tokens=24 + i))
    with seen:
        while target.has_work():
            target.step()
    assert len(steps) > 3
    return steps[2:-2]  # shapes are recorded in the first, the last have fewer and fewer sequences


def parts(names: list[str]) -> list[list[str]]:
    """Before, between and behind the replays."""
    found: list[list[str]] = [[]]
    for name in names:
        if name == REPLAY:
            found.append([])
        else:
            found[-1].append(name)
    return found


SYNTHETIC = {"verify": "synthetic", "synthetic_acceptance": (0.9, 0.7, 0.5)}
BEFORE = ["copy_", "copy_", "gather_pairs"]  # what was learned (sent to its place); what the host sends, to its place; the verdict
BETWEEN = ["tree_layout", "_to_copy", "pad_batch"]  # the second: scores as integers, to travel with the rest
BEHIND = ["clone", "coupled_verify", "tree_walk", "index_add_", "arrival"]  # the first: taps; the last: two, a cat and a copy


@pytest.mark.parametrize("spec", [heads.chain("eagle3", 3), heads.chain("peagle", 3), heads.chain("eagle3", 3, **SYNTHETIC)])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("count", [1, 3])
def test_of_a_step_that_drafts(spec: SpecConfig, temperature: float, count: int, launches: Launches) -> None:
    target = engine(spec, overlap=True, dtype="bfloat16", deterministic=True)
    for names in followed(target, launches, target.behind, count, temperature):
        assert parts(names) == [BEFORE, BETWEEN, BEHIND]


def test_of_a_step_that_drafts_trees(launches: Launches) -> None:
    """Accepted nodes are moved, a launch to gather and one to scatter."""
    target = engine(heads.tree("eagle3"), overlap=True, dtype="bfloat16", deterministic=True)
    for names in followed(target, launches, target.behind, 2, 0.9):
        assert parts(names) == [["compaction_slots", "move_kv", *BEFORE], BETWEEN, BEHIND]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_of_a_plain_step(temperature: float, launches: Launches) -> None:
    target = engine("off", overlap=True, dtype="bfloat16")
    for names in followed(target, launches, target.launcher, 3, temperature):
        assert parts(names) == [["tree_layout", "pad_batch"], BEHIND[1:]]
