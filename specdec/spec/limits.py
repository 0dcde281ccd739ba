"""What a request may ask of speculation: the engine's configuration, narrowed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec.config import SpecConfig

if TYPE_CHECKING:
    from specdec.sequence import Sequence
    from specdec.spec.proposer import Proposer


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine's configuration and the request allow."""

    drafters: tuple[str, ...]
    nodes: int
    depth: int
    width: int


def fits(proposer: Proposer, length: int) -> bool:
    """Whether the drafter takes sequences of `length` tokens."""
    return proposer.max_len is None or length <= proposer.max_len


def usable(names: Iterable[str], proposers: Mapping[str, Proposer], length: int) -> tuple[list[str], str]:
    """Those of `names` that may draft for a sequence of `length` tokens, and why none may where none is left."""
    able = [name for name in names if getattr(proposers[name], "disabled", None) is None]
    return [name for name in able if fits(proposers[name], length)], "draft_len" if able else "disabled"


def uses(name: str, max_len: int | None) -> Callable[[Sequence], bool]:
    """Whether a sequence may be drafted for by `name`, now: its request allows it, and it is not too long."""

    def allowed(seq: Sequence) -> bool:
        return (max_len is None or len(seq.tokens) <= max_len) and _method(seq.params.speculation) in ("auto", name)

    return allowed


def _method(override: Mapping[str, object] | None) -> object:
    return (override or {}).get("method") or "auto"


def limits_of(override: Mapping[str, object] | None, config: SpecConfig, drafters: tuple[str, ...]) -> Limits:
    """Engine configuration narrowed by a request's `speculation`, which always wins and never widens."""
    asked, method = dict(override or {}), _method(override)
    names = drafters if method == "auto" else tuple(n for n in drafters if n == method)

    def narrowed(name: str, limit: int) -> int:
        value = asked.get(name)
        return limit if not isinstance(value, int) else min(limit, value)

    return Limits(names, narrowed("nodes", config.nodes), narrowed("depth", config.depth), max(1, narrowed("width", config.width)))
