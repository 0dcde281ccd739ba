"""`Proposer`: what a drafter must offer, and the registry that finds one by name.

Proposals have no side effects on the batch, and may be wrong in any way: verification never lets them change the output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from specdec.types import DraftTree, Forward, Scheduled, Verdict

if TYPE_CHECKING:
    from specdec.sampling import SamplingState
    from specdec.sequence import Sequence


@runtime_checkable
class Proposer(Protocol):
    """A drafter. `shares` are the sampling sequences the policy gave to this drafter, with their budgets."""

    name: str
    needs_hidden: bool  # wants `Forward.taps` of every row, prefill included

    def propose(self, shares: tuple[Scheduled, ...], sampling: SamplingState) -> DraftTree:
        """Trees for `shares`, in order; a root-only tree where it has nothing. Never exceeds the budgets."""
        ...

    def observe(self, shares: tuple[Scheduled, ...], tree: DraftTree, verdict: Verdict) -> None:
        """After commit: `seq.tokens` already hold the new tokens; learn from them."""
        ...

    def reset(self, seq: Sequence) -> None:
        """The sequence finished, was preempted, or its request slot is reused: forget what is kept for it."""
        ...


_REGISTRY: dict[str, Callable[..., Proposer]] = {}


def register(name: str) -> Callable[[Callable[..., Proposer]], Callable[..., Proposer]]:
    """Class decorator: `@register("ngram")`. The factory takes (SpecConfig, context) keyword arguments it needs."""

    def add(factory: Callable[..., Proposer]) -> Callable[..., Proposer]:
        _REGISTRY[name] = factory
        return factory

    return add


def registered() -> tuple[str, ...]:
    """Names known so far, in order of registration."""
    return tuple(_REGISTRY)


def create(name: str, **context: object) -> Proposer:
    """Build the drafter `name`; KeyError when it is not registered."""
    return _REGISTRY[name](**context)
