"""What one acceptance measurement is (`Cell`), what is counted in it (`Tally`), and which are recorded already."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.schema import quantiles
from specdec.config import MAX_NODES, SpecConfig
from specdec.errors import ConfigError
from specdec.trace import TracedStep

MODES = ("coupled", "deterministic", "rejection", "block")
"""How drafts are verified (`SpecConfig.verify`). "deterministic": coupled, with candidates found by the draft law alone."""
MACHINE = ("commit", "cpu", "gpu", "threads")  # of `schema.environment`: what a measurement depends on besides its cell
TIMES = ("draft_seconds", "forward_seconds", "verify_seconds")


@dataclass(frozen=True, slots=True)
class Shape:
    """Largest draft: nodes with the root, depth and width as in `SpecConfig`."""

    nodes: int
    depth: int
    width: int

    @classmethod
    def of(cls, text: str) -> Shape:
        """ "chain:K" (K drafts) or "tree:NODES", "tree:NODES:DEPTH:WIDTH"; without them depth 7 and width 4. ConfigError."""
        kind, *numbers = text.split(":")
        if all(n.isdecimal() for n in numbers):
            sizes = [int(n) for n in numbers]
            if kind == "chain" and len(sizes) == 1 and 1 <= sizes[0] < MAX_NODES:
                return cls(sizes[0] + 1, sizes[0], 1)
            if kind == "tree" and len(sizes) in (1, 3) and 2 <= sizes[0] <= MAX_NODES and min(sizes) > 0:
                depth, width = sizes[1:] or (7, 4)
                return cls(sizes[0], min(depth, sizes[0] - 1), width)
        raise ConfigError(f"shape {text!r} is neither chain:K nor tree:NODES nor tree:NODES:DEPTH:WIDTH", param="shapes")

    @property
    def chain(self) -> bool:
        return self.width == 1

    def __str__(self) -> str:
        return f"chain {self.depth}" if self.chain else f"tree {self.nodes} ({self.depth} deep, {self.width} wide)"


@dataclass(frozen=True, slots=True)
class Drafter:
    """A method with its head or draft model. source: what the user named, or None. digest: of the draft, "" without weights.
    precision: `SpecConfig.draft_quantization` of a head."""

    method: str
    source: str | None = None
    digest: str = ""
    precision: str | None = None

    @classmethod
    def of(cls, text: str) -> Drafter:
        """ "METHOD" or "METHOD=SOURCE"."""
        method, _, source = text.partition("=")
        return cls(method, source or None)

    def spec(self, shape: Shape, verify: str = "coupled") -> SpecConfig:
        """policy="fixed" at this shape. ConfigError where the method takes no source."""
        own: dict[str, Any] = {} if self.source is None else {"model" if self.method == "draft_model" else "head": self.source}
        own |= {} if self.precision is None else {"draft_quantization": self.precision}
        return SpecConfig(method=self.method, nodes=shape.nodes, depth=shape.depth, width=shape.width, policy="fixed", verify=verify, **own)


@dataclass(frozen=True, slots=True)
class Cell:
    """One record's worth of measuring. texts: "free" = the target's own run; "forced" = single steps on contexts of recorded texts.

    count: prompts, or contexts. max_tokens: of an answer, or of a recorded text. seeds: runs per prompt or context.
    """

    model: str
    drafter: str
    digest: str
    nodes: int
    depth: int
    width: int
    mode: str
    temperature: float
    domain: str
    texts: str
    count: int
    max_tokens: int
    seeds: int

    def key(self, machine: dict[str, Any]) -> tuple[Any, ...]:
        """Equal for two measurements of the same thing; machine: a record, or `schema.environment`."""
        return (*asdict(self).values(), *(machine[name] for name in MACHINE))


def recorded(rows: Iterable[dict[str, Any]]) -> set[tuple[Any, ...]]:
    """Keys of the records. Those of a changed tree (commit with "+") count for nothing: nobody knows what ran."""
    names = tuple(Cell.__dataclass_fields__)
    return {Cell(*(row[n] for n in names)).key(row) for row in rows if "texts" in row and not row["commit"].endswith("+")}


@dataclass(slots=True)
class Tally:
    """Sums over target passes of decoding sequences. positions[i]: drafts accepted at position i + 1."""

    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: list[int] = field(default_factory=list)  # of every step
    positions: list[int] = field(default_factory=list)
    times: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in TIMES})

    def run(self, steps: list[TracedStep], depth: int, limit: int) -> None:
        """Add one request whose sequence may have `limit` tokens, prompt included.

        Left out: the pass over the prompt, which drafts cannot take part in, and passes so near the limit that a draft of
        `depth` could not be committed. Ends of the text that the model chose count as they are.
        """
        for before, step in itertools.pairwise(steps):
            assert before.position < step.position
            if step.position + depth + 1 < limit:
                self.add(step)

    def add(self, step: TracedStep) -> None:
        """Add one pass."""
        self.steps += 1
        self.drafts += len(step.tokens) > 1
        self.drafted += len(step.tokens) - 1
        taken = min(len(step.path), len(step.committed))
        self.accepted += taken
        self.committed.append(len(step.committed))
        self.positions.extend([0] * (taken - len(self.positions)))
        for i in range(taken):
            self.positions[i] += 1
        for name, seconds in self.times.items():
            seconds.append(getattr(step, name))

    def merge(self, other: Tally) -> None:
        """Add all that `other` has counted."""
        self.steps, self.drafts = self.steps + other.steps, self.drafts + other.drafts
        self.drafted, self.accepted = self.drafted + other.drafted, self.accepted + other.accepted
        self.committed += other.committed
        self.positions = [a + b for a, b in itertools.zip_longest(self.positions, other.positions, fillvalue=0)]
        for name, seconds in self.times.items():
            seconds.extend(other.times[name])

    def summary(self) -> dict[str, Any]:
        """What is recorded. acceptance_length: committed tokens per pass; rate: accepted / drafted; positions: share of all
        drafts; drafting: share of passes with a draft; *_seconds: per pass. verify_seconds has commit and bookkeeping in it."""
        spread = statistics.stdev(self.committed) / self.steps**0.5 if self.steps > 1 else None
        return {
            "steps": self.steps,
            "acceptance_length": sum(self.committed) / self.steps if self.steps else None,
            "standard_error": spread,
            "rate": self.accepted / max(self.drafted, 1),
            "drafting": self.drafts / max(self.steps, 1),
            "drafted_per_step": self.drafted / max(self.steps, 1),
            "positions": [count / max(self.drafts, 1) for count in self.positions],
            **{name: quantiles(seconds) for name, seconds in self.times.items() if seconds},
        }
