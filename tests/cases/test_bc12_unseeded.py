"""BC-12: unseeded requests are independent of each other and of the last process."""

from __future__ import annotations

from functools import cache

import pytest

from specdec.config import SamplingParams, SpecConfig
from tests.harness import P, chain, engine, run, tree
from tests.spec import heads

CALLS = 60
SHAPES: dict[str, SpecConfig | str] = {
    "off": "off",
    "ngram": chain("ngram", ngram_min=1),
    "suffix": tree("suffix"),
    "E3 chain": heads.chain("eagle3"),
    "E3 TREE": heads.tree("eagle3"),
    "E3 rejection": heads.chain("eagle3", verify="rejection"),
    "PE TREE": heads.tree("peagle"),
}


def series(speculation: SpecConfig | str, calls: int = CALLS, *, together: bool = False) -> list[tuple[int, ...]]:
    """Outputs of equal unseeded requests, one after the other (the engine idle in between) or side by side."""
    target = engine(speculation, max_num_seqs=4)
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    if together:
        outputs = list(run(target, {str(i): (P, params) for i in range(calls)}).values())
    else:
        outputs = [run(target, {"r": (P, params)})["r"] for _ in range(calls)]
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@cache
def distinct_off() -> int:
    return len(set(series("off")))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_bc12_outputs_vary(shape: str, together: bool) -> None:
    """Eight tokens at temperature 1 over 512 ids practically never come twice: chance of a repeat far below 1e-6 here."""
    found = series(SHAPES[shape], together=together)
    assert len(set(found)) >= 0.9 * distinct_off()
    assert len(set(found)) > CALLS / 2
    assert found[:2] * (CALLS // 2) != found, "a cycle of two"


@pytest.mark.parametrize("shape", SHAPES)
def test_bc12_a_restart_is_another_series(shape: str) -> None:
    assert series(SHAPES[shape], 10) != series(SHAPES[shape], 10)


@pytest.mark.parametrize("shape", SHAPES)
def test_bc12_a_seeded_neighbour_changes_nothing_for_others(shape: str) -> None:
    """Seeded and unseeded requests in one batch: the seeded one repeats, the others do not."""
    target = engine(SHAPES[shape], max_num_seqs=4, deterministic=True)
    seeded = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=9)
    free = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    runs = [run(target, {"s": (P, seeded), "a": (P, free), "b": (P, free)}) for _ in range(5)]
    assert len({tuple(r["s"].outputs[0].token_ids) for r in runs}) == 1
    assert len({tuple(r[name].outputs[0].token_ids) for r in runs for name in "ab"}) == 10
