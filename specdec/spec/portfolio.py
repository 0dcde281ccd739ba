"""Several drafters for one step: each proposes for its own sequences, the policy cuts what cannot pay."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from specdec.spec.tree import merge, root_only
from specdec.types import DraftTree, StepPlan

if TYPE_CHECKING:
    from specdec.sampling import SamplingState
    from specdec.spec.policy import SpecPolicy
    from specdec.spec.proposer import Proposer


def draft(plan: StepPlan, proposers: Mapping[str, Proposer], policy: SpecPolicy, sampling: SamplingState) -> DraftTree:
    """One tree per sampling share of the plan, in order."""
    shares = plan.sampling
    by_drafter: dict[str, list[int]] = {}
    for i, share in enumerate(shares):
        if share.budget.drafter is not None and share.budget.nodes > 1:
            by_drafter.setdefault(share.budget.drafter, []).append(i)
    if not by_drafter:
        return root_only([s.seq.tokens[-1] for s in shares])
    drafting = {i for own in by_drafter.values() for i in own}
    plain = [i for i in range(len(shares)) if i not in drafting]
    orders = [plain] if plain else []
    parts = [root_only([shares[i].seq.tokens[-1] for i in plain])] if plain else []
    for name, own in by_drafter.items():
        begin = time.perf_counter()
        parts.append(proposers[name].propose(tuple(shares[i] for i in own), sampling))
        policy.drafted(name, time.perf_counter() - begin, parts[-1])
        orders.append(own)
    return policy.trim(merge(parts, orders), shares, other_rows=plan.num_rows - len(shares))
