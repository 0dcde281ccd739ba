"""`Sequence`: one choice of one request, the only mutable record of its tokens.

Invariant between steps: a running sequence has `num_computed == len(tokens) - 1`, i.e. every token but the newest has its
KV in the cache; a prefilling one has less. Nothing else tracks lengths; draft state derives from these two numbers.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from specdec.config import SamplingParams
from specdec.types import RequestMetrics


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"  # owns a request slot and blocks (prefilling or decoding)
    PREEMPTED = "preempted"  # waiting again, tokens kept, blocks lost
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens and progress of one choice. `tokens` = prompt then output; ids are ints in [0, vocab).

    seed: the 64-bit noise key (given, or drawn at admission). choice: index among n > 1, separates their noise.
    request_slot: index into device state while running, else -1. end_ids: token ids that finish it (empty if ignore_eos).
    max_total: largest len(tokens) allowed (prompt + max_tokens, clipped to max_model_len).
    fork_of: the sibling whose prompt blocks this one shares (n > 1), until it has been forked.
    """

    request_id: str
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    max_total: int
    choice: int = 0
    end_ids: frozenset[int] = frozenset()
    arrival: float = 0.0
    status: Status = Status.WAITING
    num_computed: int = 0
    request_slot: int = -1
    block_tables: list[list[int]] = field(default_factory=list)  # per KV group, block ids (owned by the scheduler)
    block_hashes: list[bytes] = field(default_factory=list)  # chained hashes of full blocks of `tokens`, as far as known
    num_hashed_cached: int = 0  # full blocks already offered to the prefix cache
    fork_of: Sequence | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    prediction: tuple[int, ...] = ()  # token ids of `params.prediction`, a source for n-gram drafters

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def remaining(self) -> int:
        """Tokens still allowed; drafts beyond `remaining - 1` can never be committed."""
        return self.max_total - len(self.tokens)

    @property
    def decoding(self) -> bool:
        """All but the newest token are computed: the next step is one row (plus drafts)."""
        return self.num_computed == len(self.tokens) - 1

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def append(self, new_tokens: list[int], num_accepted: int) -> None:
        """Commit one verified step: root and `num_accepted` draft tokens got KV, `new_tokens` were emitted."""
        self.num_computed += 1 + num_accepted
        self.tokens.extend(new_tokens)
