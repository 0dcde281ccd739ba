"""`Scheduler`: the queue, the running set, request slots and KV blocks.

`plan` decides and changes nothing (the policy is in `planning.py`); `apply` carries the decision out and cannot fail;
`commit` follows what a step computed. Preemption is by recompute: tokens are kept, KV is computed again or found in the
prefix cache.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from specdec.admission import check_room, max_running
from specdec.budget import slots
from specdec.cache.pool import BlockPool
from specdec.cache.prefix import PrefixCache, Reuse
from specdec.cache.sizing import blocks_for, least_blocks
from specdec.cache.tables import BlockTables, Copy
from specdec.config import EngineConfig
from specdec.errors import InvalidRequest, RequestTooLong
from specdec.planning import Roster, make_plan
from specdec.sequence import Sequence, Status
from specdec.types import KVGroup, SpecBudget, StepPlan


@dataclass(frozen=True, slots=True)
class Applied:
    """What applying a plan asks of the engine before the forward pass.

    copies: (group, source block, destination block), to be copied before anything is written. released: the preempted
    sequences with the request slots they gave up (their device state is void; the slot may have a new owner already).
    """

    copies: tuple[Copy, ...] = ()
    released: tuple[tuple[Sequence, int], ...] = ()


class Scheduler:
    """Owns the queue, the running set, the request slots and (through `tables`) all KV blocks. Single-threaded; `add` and
    `abort` are called between steps, never between `plan` and the last `commit` of its step. max_model_len: tokens.
    namespace: what KV content depends on besides tokens (model fingerprint, KV dtype, salt). wants_hidden: see `Roster`."""

    def __init__(
        self,
        config: EngineConfig,
        groups: Seq[KVGroup],
        pools: Seq[BlockPool],
        *,
        max_model_len: int,
        namespace: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
        wants_hidden: Callable[[Sequence], bool] = lambda seq: False,
    ):
        self.config = config
        self.pools = tuple(pools)
        self.tables = BlockTables(groups, pools, config.block_size, config.max_num_seqs, max_model_len)
        self.prefix = PrefixCache(groups, pools, config.block_size, namespace=namespace, enabled=config.enable_prefix_caching)
        self._roster = Roster(
            groups=tuple(groups),
            pools=self.pools,
            tables=self.tables,
            prefix=self.prefix,
            block_size=config.block_size,
            max_model_len=max_model_len,
            max_rows=config.max_num_batched_tokens,
            max_running=max_running(config),
            wants_hidden=wants_hidden,
        )
        self.prefix_queries = 0  # tokens looked up at admission
        self.prefix_hits = 0  # tokens found
        self.preemptions = 0
        self._clock = clock
        self._slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._arrivals = 0

    # Observation

    @property
    def has_work(self) -> bool:
        return bool(self._roster.order)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that own a request slot, by arrival."""
        return tuple(self._roster.running)

    @property
    def queue_depth(self) -> int:
        """Sequences that want to run and do not."""
        return len(self._roster.waiting) + len(self._roster.preempted)

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    @property
    def max_rows(self) -> int:
        """Of a step, drafts included."""
        return self._roster.max_rows

    @property
    def kv_usage(self) -> float:
        """Held share of the fullest group, in [0, 1]."""
        return max(pool.usage for pool in self.pools)

    def oldest_waiting_age(self, now: float | None = None) -> float:
        """Seconds since the arrival of the longest-waiting sequence; 0 when nobody waits."""
        heads = [next(iter(queue)).arrival for queue in (self._roster.preempted, self._roster.waiting) if queue]
        return max(0.0, (self._clock() if now is None else now) - min(heads)) if heads else 0.0

    @property
    def admits(self) -> bool:
        """Whether somebody waits and a plan may let them in."""
        return self.queue_depth > 0 and self.num_running < self._roster.max_running

    # Coming and going

    def add(self, *seqs: Sequence) -> None:
        """Queue sequences (the choices of a request together), all or none.

        Raises RequestTooLong for what could never run, QueueFull or InvalidRequest beyond `max_queue` (see `check_room`).
        """
        for seq in seqs:
            self._check_fits(seq)
        check_room(self.config, self.config.max_queue, len(seqs), running=self.num_running, waiting=self.queue_depth)
        for seq in seqs:
            parent = seq.fork_of
            if parent is not None and not seq.block_hashes:
                seq.block_hashes = parent.block_hashes[: seq.num_prompt // self.config.block_size]
            self.prefix.extend_hashes(seq)
            seq.status = Status.WAITING
            self._roster.order[seq] = self._arrivals
            self._arrivals += 1
            self._roster.waiting[seq] = None

    def _check_fits(self, seq: Sequence) -> None:
        if seq.num_prompt < 1:
            raise InvalidRequest("the prompt is empty; give at least one token", param="prompt")
        if seq.num_prompt >= self._roster.max_model_len or seq.max_total > self._roster.max_model_len:
            raise RequestTooLong(
                f"{seq.num_prompt} prompt tokens and {seq.max_total - seq.num_prompt} new ones do not fit "
                f"max_model_len={self._roster.max_model_len}; shorten the prompt or lower max_tokens",
                param="prompt",
            )
        for group, pool in zip(self._roster.groups, self.pools, strict=True):
            need = least_blocks(group, seq.max_total - 1, self.config.block_size)
            if need > pool.capacity:
                raise RequestTooLong(
                    f"{seq.num_prompt} prompt tokens and up to {seq.max_total - seq.num_prompt} new ones need {need} KV blocks of "
                    f"{self.config.block_size} tokens, the pool of group {group.name!r} has {pool.capacity}; lower max_tokens, or "
                    "start with a larger kv_cache_bytes or num_kv_blocks",
                    param="max_tokens",
                )

    def finish(self, seq: Sequence, reason: str | None = None) -> None:
        """The sequence is done, whatever its state: everything it holds is free at once. Does nothing the second time.

        reason: sets `finish_reason` unless it is set already.
        """
        if self._roster.order.pop(seq, None) is None:
            return
        if seq.status is Status.RUNNING:
            self._roster.running.remove(seq)
            self._vacate(seq)
        elif seq.status is Status.PREEMPTED:
            self._roster.preempted.remove(seq)
        else:
            del self._roster.waiting[seq]
        seq.status = Status.FINISHED
        seq.finish_reason = seq.finish_reason or reason
        seq.fork_of = None

    def abort(self, seq: Sequence) -> None:
        """Cancel: `finish` with reason "abort"."""
        self.finish(seq, "abort")

    def _vacate(self, seq: Sequence) -> int:
        """Take blocks and request slot from a running sequence; returns the slot."""
        self.tables.close(seq)
        slot, seq.request_slot = seq.request_slot, -1
        self._slots.append(slot)
        return slot

    # One step

    def plan(self, budget_of: Mapping[Sequence, SpecBudget] | None = None) -> StepPlan:
        """What the next step computes. Pure. budget_of: what the policy allows each decoding sequence (absent = no draft)."""
        return make_plan(self._roster, budget_of or {})

    def apply(self, plan: StepPlan) -> Applied:
        """Carry out a plan made from the present state. Order matters: blocks are given back, then shared, then newly taken,
        so that no allocation evicts what the plan means to share."""
        reuse = {seq: self._roster.reuse(seq) for seq in plan.admitted}
        room = {s.seq: s.num_new + slots(s.budget) - 1 for s in plan.scheduled}
        released = tuple((seq, self._preempt(seq)) for seq in plan.preempted)
        for seq in self._roster.running:
            self.tables.trim(seq, seq.num_computed + room.get(seq, 0))
        for seq in plan.admitted:
            self._admit(seq, reuse[seq])
        for seq, n in room.items():
            self.tables.reserve(seq, seq.num_computed + n)
        copies = [(g, src, seq.block_tables[g][len(r.blocks[g])]) for seq, r in reuse.items() for g, src in enumerate(r.tail)]
        return Applied(tuple(copies), released)

    def extend(self, slots: Mapping[Sequence, int]) -> bool:
        """Room for the step that follows each sequence's step in flight, beyond what its plan reserved: so many slots in all. False,
        changing nothing, where there are not blocks for everybody."""
        size = self.config.block_size
        missing = sum(max(0, blocks_for(count, size) - len(seq.block_tables[0])) for seq, count in slots.items())
        if any(pool.num_free < missing for pool in self.pools):
            return False
        for seq, count in slots.items():
            self.tables.reserve(seq, count)
        return True

    def _preempt(self, seq: Sequence) -> int:
        """Back to the queue, tokens kept, KV recomputed (or found in the prefix cache) later. Returns the vacated slot."""
        self.prefix.extend_hashes(seq)
        self._roster.running.remove(seq)
        slot = self._vacate(seq)
        seq.status = Status.PREEMPTED
        seq.num_computed = 0
        seq.num_hashed_cached = 0
        self.preemptions += 1
        insort(self._roster.preempted, seq, key=self._roster.order.__getitem__)
        return slot

    def _admit(self, seq: Sequence, reuse: Reuse) -> None:
        if seq.status is Status.PREEMPTED:
            self._roster.preempted.remove(seq)
        else:
            del self._roster.waiting[seq]
        seq.status = Status.RUNNING
        seq.request_slot = self._slots.pop()
        seq.fork_of = None
        seq.num_computed = reuse.num_tokens
        seq.num_hashed_cached = len(reuse.blocks[0])
        self.tables.open(seq, reuse)
        insort(self._roster.running, seq, key=self._roster.order.__getitem__)
        if self.prefix.enabled:
            self.prefix_queries += len(seq.tokens)
            self.prefix_hits += reuse.num_tokens
        if seq.metrics.first_scheduled is None:
            seq.metrics.cached_tokens = min(reuse.num_tokens, seq.num_prompt)

    def commit(self, seq: Sequence) -> None:
        """A running sequence advanced: `num_computed` counts its committed, compacted tokens again. Full blocks become findable,
        and sliding windows give back what they have passed. Call it before `finish`."""
        self.prefix.register(seq)
        self.tables.expire(seq)

    def check(self) -> None:
        """Verify every invariant that ties queue, slots, tables and pools together. AssertionError with details."""
        self.tables.check(self._roster.running)
        slots = [s.request_slot for s in self._roster.running]
        assert sorted(slots + self._slots) == list(range(self.config.max_num_seqs)), f"request slots {slots}, free {self._slots}"
        ranks = [self._roster.order[s] for s in self._roster.running]
        assert ranks == sorted(ranks) and all(s.status is Status.RUNNING for s in self._roster.running), "running set out of order"
        waiting = list(self._roster.queue())
        assert len(self._roster.order) == len(self._roster.running) + len(waiting), "a sequence is lost or listed twice"
        for s in waiting:
            assert s.request_slot == -1 and not any(s.block_tables), f"{s.request_id} waits and holds a slot or blocks"
