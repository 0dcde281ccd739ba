"""`make_policy`: the policy of an engine, with the costs that it plans with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from specdec.config import MAX_NODES, SpecConfig
from specdec.spec.cost import measure_costs
from specdec.spec.policy import SpecPolicy
from specdec.spec.proposer import Proposer


def make_policy(
    config: SpecConfig,
    proposers: Mapping[str, Proposer],
    measure: Callable[[int, int], float],
    *,
    key: str = "",
    max_model_len: int = 256,
    cache: Path | None = None,
    sizes: tuple[int, ...] = (),
    max_rows: int | None = None,
) -> SpecPolicy:
    """The policy for an engine. Costs are measured only when they will be used: policy="auto" and a drafter.

    measure: (rows, context) → seconds of a target pass. key, cache, sizes: as in `measure_costs`. max_rows: as in `SpecPolicy`.
    """
    if not proposers or config.policy == "fixed":
        return SpecPolicy(config, proposers, None)
    far = max(2, min(1024, max_model_len - 64))
    rows = max(1, min(MAX_NODES, max_model_len - far))
    if sizes and max_rows is not None and rows == MAX_NODES:
        rows = max(rows, max_rows)
    cost = measure_costs(measure, max_rows=rows, max_context=far, cache=cache, key=key, sizes=sizes)
    return SpecPolicy(config, proposers, cost, max_rows)
