"""The engine: plan → draft → build → forward → verify → commit, with no prefill/decode fork.

`Engine.step` is the whole architecture in ten lines. Everything it calls decides and returns values; `_commit` is the one
place that changes sequences, caches and statistics.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from specdec.behind import Behind, Wait
from specdec.commit import clocked, compaction, count, move, open_stats
from specdec.config import EngineConfig, SamplingParams
from specdec.errors import InvalidRequest
from specdec.logprobs import prompt_logprobs
from specdec.overlap import Flight, Launcher, landed
from specdec.request import RequestState, check_override, check_prompt, check_start, token_ids
from specdec.spec.portfolio import draft
from specdec.spec.watch import DrafterHealth
from specdec.trace import Trace
from specdec.types import RequestOutput, Scheduled, SpecBudget, StepPlan, StepStats

if TYPE_CHECKING:
    from specdec.boot import Parts
    from specdec.live_heads import Change
    from specdec.sequence import Sequence


class Engine:
    """Serves requests one step at a time. Not thread-safe: one thread owns it.

    Build it with `specdec.boot.build_engine(config)`. `observers` are called with the StepStats of every step.
    """

    def __init__(self, config: EngineConfig, parts: Parts):
        self.config = config
        self.model_name, self.quantization = parts.name, parts.quantization
        self.model_config, self.tokenizer = parts.model_config, parts.tokenizer
        self.vocab_size, self.max_model_len = parts.model_config.vocab_size, parts.max_model_len
        self.scheduler, self.builder = parts.scheduler, parts.builder
        self.runner, self.kv = parts.runner, parts.kv
        self.sampling, self.verifier = parts.sampling, parts.verifier
        self.launcher = Launcher(parts.scheduler, parts.builder, parts.runner, parts.verifier, parts.sampling)
        self.behind = Behind(self.launcher, parts)
        self.overlap = config.overlaps(parts.builder.device.type)
        self.policy, self.proposers, self.heads = parts.policy, parts.proposers, parts.heads
        self.stats: StepStats | None = None
        self.observers: list[Callable[[StepStats], None]] = []
        self._requests: dict[str, RequestState] = {}
        self._ready: list[RequestState] = []
        self._steps = 0
        self._flight: Flight | None = None  # begun behind the step that was committed last
        self._budgets: dict[Sequence, SpecBudget] | None = None  # for the next plan, where they are known already
        self._waits: Wait | None = None  # why the next step does not begin behind the last one
        self._ended = 0.0

    # -- requests ---------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        arrival: float | None = None,
        trace: bool = False,
    ) -> None:
        """Validate and queue. Raises InvalidRequest, RequestTooLong, or QueueFull; nothing is kept when it raises."""
        if request_id in self._requests:
            raise InvalidRequest(f"request id {request_id!r} is already running", param="request_id")
        text, ids = (prompt, self.tokenizer.encode(prompt)) if isinstance(prompt, str) else (None, token_ids(prompt))
        check_prompt(ids, params, self.vocab_size, self.max_model_len)
        check_override(params.speculation, tuple(self.proposers))
        state = RequestState(
            request_id,
            text,
            ids,
            params,
            self.tokenizer,
            arrival=time.monotonic() if arrival is None else arrival,
            max_model_len=self.max_model_len,
            eos_ids=frozenset(self.model_config.eos_ids),
        )
        check_start(params, state.bad_words, state.sequences[0].end_ids, self.vocab_size)
        if trace or self.config.trace:
            state.trace = Trace(self.tokenizer)
        self.scheduler.add(*state.sequences)
        self._requests[request_id] = state

    def abort(self, request_id: str) -> None:
        """Stop a request and free what it holds at once; its last output (finish reason "abort") comes with the next step."""
        state = self._requests.get(request_id)
        if state is None:
            return
        state.abort()  # before the scheduler names a reason: the text held back for a stop string is still to be released
        for seq in state.sequences:
            if not seq.finished:
                self._release(seq, self.scheduler.abort)
        self._ready.append(state)

    @torch.inference_mode()
    def swap_heads(self, change: Change) -> None:
        """Put what `heads.load` found in place, between two steps: the one in flight is committed first. Raises as `LiveHeads.apply`."""
        flight, self._flight = landed(self._flight), None
        if flight is not None:
            self.stats = self._commit(self.behind.settled(flight))
        self._budgets = None  # they may name a drafter that goes
        self.heads.apply(change, self.policy)

    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._requests)

    # -- the step ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """One plan → draft → verify → commit. Returns what is new for each request that moved.

        Where the next step is known before this one's verdict is, it is on its way while this one is committed.
        """
        flight, self._flight = landed(self._flight) or self._begin(), None
        if flight is not None:
            self._flight = self._follow(flight)
            self.stats = self._commit(self.behind.settled(flight))
        return self.collect()

    def _begin(self) -> Flight | None:
        """The next step, or None where there is nothing to compute."""
        start, plan = time.perf_counter(), self._plan()
        if not plan.scheduled:
            return None
        flight = self.launcher.launch(plan, draft(plan, self.proposers, self.policy, self.sampling), start)
        waits, self._waits = self._waits, None
        return replace(flight, drafter_seconds=self.policy.take_drafting(), waited=None if waits is None else waits.value)

    def _follow(self, flight: Flight) -> Flight | None:
        """The step behind `flight`, unless it takes a verdict to know it."""
        if not self.overlap:
            return None
        following = None
        if any(share.budget.drafter is not None for share in flight.plan.scheduled):
            found = self.behind.waits(flight) or self.behind.follow(flight, self._budget())
            following, self._waits = (found, None) if isinstance(found, Flight) else (None, found)
        elif self.launcher.can_follow(flight):
            plain = all(budget.drafter is None for budget in self._budget().values())
            following, self._waits = (self.launcher.follow(flight), None) if plain else (None, Wait.BUDGET)
        if following is not None:
            self._budgets = None
        return following

    def _budget(self) -> dict[Sequence, SpecBudget]:
        """What each decoding sequence may draft in the next step; asked once a step."""
        if self._budgets is None:
            ahead = self.behind.able(self.scheduler.running) if self.overlap and not self.policy.fixed else {}
            self._budgets = self.policy.budget(self.scheduler.running, self.stats, ahead)
        return self._budgets

    def _plan(self) -> StepPlan:
        """Budgets, then a plan, then its application: blocks reserved for the worst tree, request slots handed out."""
        self.heads.review(self.policy)  # here alone: nothing is in flight, whose hidden states are those that the present heads read
        budgets, self._budgets = self._budget(), None
        plan = self.scheduler.plan(budgets)
        for seq in plan.preempted:
            self._forget(seq)
            seq.metrics.preemptions += 1
        for group, source, target in self.scheduler.apply(plan).copies:
            self.kv.copy_blocks(group, [(source, target)])
        now = time.monotonic()
        for seq in plan.admitted:
            self.sampling.add(seq, bad_words_ids=self._requests[seq.request_id].bad_words)
            if seq.metrics.first_scheduled is None:
                seq.metrics.first_scheduled = now
        return plan

    def _commit(self, flight: Flight) -> StepStats:
        """Move accepted KV into place, append tokens, settle finished sequences, tell drafters, policy and observers."""
        plan, tree, forward, verdict = flight.plan, flight.tree, flight.forward, flight.verdict
        stats = open_stats(self._steps, plan, tree)
        if forward.prompt_logits is not None:
            for seq, start, entries in prompt_logprobs(plan, forward.prompt_logits):
                self._requests[seq.request_id].add_prompt_logprobs(start, entries)
        if self._flight is None:  # else the step behind this one has begun with it
            move(compaction(plan.sampling, verdict), self.builder, self.kv)
        decided, now, b = verdict.host, time.monotonic(), 0
        for share in plan.scheduled:
            if not share.samples:
                share.seq.num_computed += share.num_new
                self.scheduler.commit(share.seq)
                continue
            state, logprobs = self._requests[share.seq.request_id], verdict.logprobs[b] if verdict.logprobs is not None else None
            kept = state.feed(share.seq.choice, decided.committed[b][: decided.num_committed[b]], decided.finish[b], logprobs)
            taken = min(decided.num_accepted[b], len(kept))
            self._append(share, kept, taken, now)
            count(stats, share, tree.drafters[b] if tree.drafters else None, tree.host.num_nodes[b] - 1, taken, len(kept))
            if state.trace is not None:
                state.trace.add(self._steps, share.seq, tree, verdict, b)
            b += 1
        self._observe(flight)
        self._settle(plan)
        return self._close_stats(stats, flight)

    # -- commit, in parts -------------------------------------------------------------------------------------------

    def _append(self, share: Scheduled, kept: list[int], accepted: int, now: float) -> None:
        """The sequence gains its tokens; sampling state and prefix cache follow it."""
        seq = share.seq
        seq.num_computed += share.num_new - 1
        seq.append(kept, accepted)
        self.sampling.commit(seq, kept)
        self.scheduler.commit(seq)
        if seq.metrics.first_token is None:
            seq.metrics.first_token = now

    def _observe(self, flight: Flight) -> None:
        """Every drafter sees the whole step, with the hidden states of all rows; the policy sees the trees."""
        for proposer in self.proposers.values():
            proposer.observe(flight.plan, flight.tree, flight.forward, flight.verdict)
        self.policy.observe(flight.plan.sampling, flight.tree, flight.verdict)

    def _settle(self, plan: StepPlan) -> None:
        """Free what finished sequences hold, and remember whose output moved."""
        moved: dict[str, RequestState] = {}
        for share in plan.scheduled:
            seq = share.seq
            if seq.finish_reason is not None and not seq.finished:
                seq.metrics.finished = time.monotonic()
                self._release(seq, self.scheduler.finish)
            moved[seq.request_id] = self._requests[seq.request_id]
        self._ready.extend(moved.values())

    def _close_stats(self, stats: StepStats, flight: Flight) -> StepStats:
        self._ended = clocked(stats, flight, self._ended)
        stats.skipped = self.policy.take_skipped()
        stats.drafter_states = self.policy.states()
        stats.gain = self.policy.gain()
        self._steps += 1
        for state in self._requests.values():
            if state.trace is not None:
                state.trace.close_step(stats)
        for observer in self.observers:
            observer(stats)
        return stats

    def _release(self, seq: Sequence, how: Callable[[Sequence], None]) -> None:
        """Let go of a sequence everywhere: drafters and sampling state first, blocks and request slot last."""
        self._forget(seq)
        how(seq)

    def _forget(self, seq: Sequence) -> None:
        for proposer in self.proposers.values():
            proposer.reset(seq)
        self.policy.reset(seq)
        if seq.request_slot >= 0:
            self.sampling.remove(seq.request_slot)

    def collect(self) -> list[RequestOutput]:
        """Outputs of the requests that moved; finished requests are forgotten here."""
        outputs = [output for state in self._ready if (output := state.take()) is not None]
        self._ready = []
        for output in outputs:
            if output.finished:
                self._requests.pop(output.request_id, None)
        return outputs

    # -- gauges -----------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return self.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self.scheduler.queue_depth

    @property
    def oldest_wait_seconds(self) -> float:
        return self.scheduler.oldest_waiting_age()

    @property
    def kv_usage(self) -> float:
        return self.scheduler.kv_usage

    @property
    def preemptions(self) -> int:
        return self.scheduler.preemptions

    @property
    def prefix_queries(self) -> int:
        return self.scheduler.prefix_queries

    @property
    def prefix_hits(self) -> int:
        return self.scheduler.prefix_hits

    @property
    def drafter_health(self) -> DrafterHealth:
        watch = self.policy.experience.watch
        return DrafterHealth(dict(watch.alarms), watch.collapsed, self.heads.swaps, self.heads.rollbacks)

    def close(self) -> None:
        """Abort everything; the engine can be dropped afterwards."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self.collect()
