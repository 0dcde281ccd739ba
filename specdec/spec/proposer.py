"""`Proposer`: what a drafter must offer, and the registry that finds one by name.

Proposals have no side effects on the batch, and may be wrong in any way: verification never lets them change the output.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from specdec.config import SpecConfig
from specdec.types import DraftTree, Forward, Scheduled, StepPlan, Verdict

if TYPE_CHECKING:
    from specdec.cache.kv import KVCache
    from specdec.cache.pool import BlockPool
    from specdec.models.draft_heads import DraftHead
    from specdec.models.load import LoadedModel
    from specdec.runner.graphs import Recorder
    from specdec.sampling import SamplingState
    from specdec.sequence import Sequence


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """Everything a drafter may be built from. The engine fills what it has; a drafter refuses what it misses.

    vocab_size: target vocabulary; drafts stay below it. max_model_len: target limit in tokens.
    tokenize: text → target ids without special tokens, for corpus files.
    oracle: future tokens of a sequence after those it holds (any number, may be empty), for the test drafters.
    kv, pools: the target's KV cache, where a draft model attaches its own, and the block pools of its groups.
    load: checkpoint name → loaded model (`models.load`), for draft_model.
    recorder: makes recorders of passes (`runner.graphs`), None = passes are run op by op.
    heads: draft heads by method. taps: the hidden states that the target's passes return. tables [G, max_num_seqs, M] i32: the
    scheduler's block tables by request slot.
    """

    config: SpecConfig
    vocab_size: int
    max_model_len: int
    max_num_seqs: int = 32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    tokenize: Callable[[str], list[int]] | None = None
    oracle: Callable[[Sequence], Seq[int]] | None = None
    kv: KVCache | None = None
    pools: Seq[BlockPool] = ()
    load: Callable[[str], LoadedModel] | None = None
    heads: Mapping[str, DraftHead] = field(default_factory=dict)
    taps: tuple[int, ...] = ()
    tables: Tensor | None = None
    recorder: Callable[[], Recorder] | None = None


@runtime_checkable
class Proposer(Protocol):
    """A drafter. `shares` are the sampling sequences the policy gave to this drafter, with their budgets.

    max_len: sequences longer than this many tokens are not drafted for (skip reason "draft_len"); None = no limit.
    Six attributes may be absent. feeds (absent: False): see `SpecBudget`. looks (absent: False): it stops drafting below the
    budget's floor. disabled (absent: None): why it must never draft, e.g. a draft head of another target (skip reason
    "disabled"). promise (absent: 0): tokens it is expected to win per step, before there is any evidence. owes(seq) (absent: 0):
    seconds that the next draft takes besides drafting, for what was put off. outlook(seq) (absent: 1): about the chance of the
    likeliest token it would draft for the sequence as it is now, 0 where it certainly has none; cheap, since it is asked in
    every step in which the drafter is chosen, so that steps without drafts stay plain ones.
    """

    name: str
    needs_hidden: bool  # wants `Forward.taps` of every row, prefill included
    max_len: int | None

    def propose(self, shares: tuple[Scheduled, ...], sampling: SamplingState) -> DraftTree:
        """Trees for `shares`, in order; a root-only tree where it has nothing. Never exceeds the budgets."""
        ...

    def observe(self, plan: StepPlan, tree: DraftTree, forward: Forward, verdict: Verdict) -> None:
        """After commit: `seq.tokens` already hold the new tokens; learn from them. tree and verdict are of `plan.sampling`."""
        ...

    def reset(self, seq: Sequence) -> None:
        """The sequence finished, was preempted, or its request slot is reused: forget what is kept for it."""
        ...


Factory = Callable[[DrafterContext], Proposer]
_FACTORIES: dict[str, Factory] = {}  # filled by `register` when a drafter's module is imported, read-only after


def register(name: str) -> Callable[[Factory], Factory]:
    """Class decorator: `@register("ngram")`. The factory takes one `DrafterContext`."""

    def add(factory: Factory) -> Factory:
        _FACTORIES[name] = factory
        return factory

    return add


def registered() -> tuple[str, ...]:
    """Names known so far, in order of registration."""
    return tuple(_FACTORIES)


def create(name: str, context: DrafterContext) -> Proposer:
    """Build the drafter `name`, importing its module when it is the first; KeyError when nobody registered it."""
    if name not in _FACTORIES and name in BUILT_IN:
        importlib.import_module(BUILT_IN[name])
    return _FACTORIES[name](context)


BUILT_IN = {  # name -> module that registers it, imported when first asked for
    "ngram": "specdec.spec.ngram",
    "suffix": "specdec.spec.suffix",
    "draft_model": "specdec.spec.draft_model",
    "eagle3": "specdec.spec.eagle3",
    "peagle": "specdec.spec.peagle",
    "oracle": "specdec.spec.testing",
    "wrong": "specdec.spec.testing",
    "mix": "specdec.spec.testing",
}
HOST_DRAFTERS = ("suffix", "ngram")  # what method="auto" chooses from besides draft heads, the usual best first


def create_for(context: DrafterContext) -> dict[str, Proposer]:
    """The drafters that `context.config.method` asks for, by name.

    Raises ConfigError where one cannot be built from the context; KeyError for a method nobody registered.
    """
    method = context.config.method
    names: Seq[str] = () if method == "off" else (*context.heads, *HOST_DRAFTERS) if method == "auto" else (method,)
    return {name: create(name, context) for name in names}
