"""The deciding half of the scheduler: pure functions from a `Roster` (who runs, who waits, on what) to a `StepPlan`.

Policy: every running sequence first, oldest arrival first: decode rows, then chunks of unfinished prefills; then admissions
in order of arrival. Drafts get rows before those two (half of what is left while prompts wait), but blocks after everybody.
When blocks run out drafts shrink to none, then chunks shrink, and only then is the most recently arrived sequence preempted:
it loses its blocks, keeps its tokens, and is the first to be admitted again.
Why there is always progress: the oldest sequence is never preempted, everybody else's blocks are available to it, and what
does not fit alone is refused on arrival. A sequence that no younger one can make room for holds its blocks and waits a step.
Source: reference §9.3.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice

from specdec.budget import clip, confine, fair_cap, shrink, slots
from specdec.cache.ledger import Ledger
from specdec.cache.pool import BlockPool
from specdec.cache.prefix import PrefixCache, Reuse
from specdec.cache.sizing import blocks_for, least_blocks
from specdec.cache.tables import BlockTables
from specdec.sequence import Sequence, Status
from specdec.types import NO_DRAFT, KVGroup, Scheduled, SpecBudget, StepPlan

Budgets = Mapping[Sequence, SpecBudget]


@dataclass(slots=True)
class Roster:
    """What plans are made from. Only the scheduler changes it.

    max_rows: rows per step, drafts included. max_running: at most `max_rows`, so that everybody running gets a row.
    order: arrival rank of every unfinished sequence; `running` and `preempted` are sorted by it, `waiting` is by nature.
    wants_hidden: a draft head reads the hidden states of this sequence, that of the last reused token included.
    """

    groups: tuple[KVGroup, ...]
    pools: tuple[BlockPool, ...]
    tables: BlockTables
    prefix: PrefixCache
    block_size: int
    max_model_len: int
    max_rows: int
    max_running: int
    running: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    waiting: OrderedDict[Sequence, None] = field(default_factory=OrderedDict)
    order: dict[Sequence, int] = field(default_factory=dict)
    wants_hidden: Callable[[Sequence], bool] = lambda seq: False

    def queue(self) -> Iterator[Sequence]:
        """Who waits, in order of admission."""
        return chain(self.preempted, self.waiting)

    def ready(self, seq: Sequence) -> bool:
        """False while a sibling is about to compute the prompt that this choice will share."""
        parent = seq.fork_of
        if parent is None or parent not in self.order or parent.status is Status.PREEMPTED:
            return True
        return parent.status is Status.RUNNING and parent.num_computed >= seq.num_prompt - 1

    def reuse(self, seq: Sequence) -> Reuse:
        """KV that exists for the beginning of a waiting sequence: its sibling's prompt, else the prefix cache's."""
        parent = seq.fork_of
        if parent is not None and parent.status is Status.RUNNING:
            shared = self.tables.fork(parent, seq.num_prompt - 1)
            if shared is not None:
                return shared
        if seq.params.prompt_logprobs is not None and seq.choice == 0 and seq.num_output == 0:
            return Reuse(0, ((),) * len(self.groups))  # every prompt row must run
        return self.prefix.match(seq)


def make_plan(roster: Roster, budget_of: Budgets) -> StepPlan:
    """The next step. budget_of: what the policy allows each decoding sequence; absent means no draft."""
    ledger = Ledger(roster.pools, roster.block_size, roster.running)
    decode = [s for s in roster.running if s.decoding]
    prefill = [s for s in roster.running if not s.decoding]
    budgets = _fit_rows(roster, decode, prefill, budget_of)
    rows = roster.max_rows - len(decode) - sum(b.nodes - 1 for b in budgets.values())
    shares, preempted = _plan_running(roster, ledger, decode + prefill, rows)
    budgets = {s: b for s, b in budgets.items() if s in shares}
    rows = roster.max_rows - sum(shares.values()) - sum(b.nodes - 1 for b in budgets.values())
    admitted = {} if preempted else _plan_admissions(roster, ledger, shares, rows)
    budgets = {s: _fit_blocks(roster, ledger, s, b) for s, b in budgets.items()}
    scheduled = [Scheduled(s, n, s.num_computed + n == len(s.tokens), budgets.get(s, NO_DRAFT)) for s, n in shares.items()]
    scheduled += [Scheduled(s, n, start + n == len(s.tokens), rerun=again) for s, (start, n, again) in admitted.items()]
    return StepPlan(tuple(scheduled), tuple(preempted), tuple(admitted))


def _fit_rows(roster: Roster, decode: list[Sequence], prefill: list[Sequence], budget_of: Budgets) -> dict[Sequence, SpecBudget]:
    """Drafts that fit the rows. While prompts wait, drafts leave them half of what the decode rows leave, if they need it."""
    budgets = {s: clip(budget_of.get(s, NO_DRAFT), s, roster.max_model_len) for s in decode}
    spare = roster.max_rows - len(decode)
    wanted = sum(len(s.tokens) - s.num_computed for s in prefill)
    places = roster.max_running - len(roster.running)
    wanted += sum(len(s.tokens) for s in islice(roster.queue(), max(0, places)))
    reserved = max(len(prefill), min(wanted, spare // 2))  # at least a row for everybody who is running
    cap = fair_cap([b.nodes - 1 for b in budgets.values()], spare - reserved)
    return {s: shrink(b, 1 + cap) for s, b in budgets.items()}


def _fit_blocks(roster: Roster, ledger: Ledger, seq: Sequence, budget: SpecBudget) -> SpecBudget:
    """`budget`, cut to the blocks the sequence has anyway when there are no others for its lookahead."""
    if ledger.charge(seq, seq.num_computed + slots(budget)):
        return budget
    return confine(budget, ledger.length(seq) * roster.block_size - seq.num_computed)


def _plan_running(roster: Roster, ledger: Ledger, seqs: list[Sequence], rows: int) -> tuple[dict[Sequence, int], list[Sequence]]:
    """Rows without drafts for the running sequences, and who is preempted for them. A sequence gets none only when not a
    block is left and it is the youngest. seqs: decoding ones first, each kind by arrival. rows: for the prefill; there is one
    at most, since nobody is admitted while rows or blocks cut another's chunk short."""
    shares: dict[Sequence, int] = {}
    alive = list(roster.running)
    for seq in seqs:
        if seq in ledger and _make_room(ledger, seq, alive, shares):
            want = 1 if seq.decoding else min(len(seq.tokens) - seq.num_computed, rows)
            shares[seq] = n = min(want, ledger.reach(seq) - seq.num_computed)
            ledger.charge(seq, seq.num_computed + n)
    return shares, roster.running[len(alive) :]


def _make_room(ledger: Ledger, seq: Sequence, alive: list[Sequence], shares: dict[Sequence, int]) -> bool:
    """Preempt the youngest of `alive` until `seq` can have one more slot; False when it is itself the youngest."""
    while ledger.reach(seq) <= seq.num_computed:
        if alive[-1] is seq:
            return False
        victim = alive.pop()
        ledger.release(victim)
        shares.pop(victim, None)
    return True


def _plan_admissions(roster: Roster, ledger: Ledger, shares: Mapping[Sequence, int], rows: int) -> dict[Sequence, tuple[int, int, int]]:
    """Sequences to admit -> (first token to compute, number of tokens, reused tokens to run again).

    The head of the queue waits until all its present tokens will fit beside what running prefills still need and one spare
    block for each running sequence: admitting earlier would only lead to preemption. Nobody overtakes it, except that
    choices waiting for their sibling's prompt are passed over.
    """
    admitted: dict[Sequence, tuple[int, int, int]] = {}
    spare = [free - sum(_outstanding(roster, ledger, s, g) for s in shares) for g, free in zip(roster.groups, ledger.free, strict=True)]
    for seq in roster.queue():
        busy = len(roster.running) + len(admitted)
        if rows < 1 or busy >= roster.max_running:
            break
        if not roster.ready(seq):
            continue
        reuse = roster.reuse(seq)
        need = [taken + new for taken, new in zip(ledger.cost(reuse), _new_blocks(roster, seq, reuse), strict=True)]
        if any(have - busy < n for have, n in zip(spare, need, strict=True)):
            break
        ledger.adopt(seq, reuse)
        again = int(rows > 1 and reuse.num_tokens > 0 and roster.wants_hidden(seq))
        n = min(len(seq.tokens) - reuse.num_tokens, rows - again, ledger.reach(seq) - reuse.num_tokens)
        ledger.charge(seq, reuse.num_tokens + n)
        rows -= n + again
        spare = [have - n_blocks for have, n_blocks in zip(spare, need, strict=True)]
        admitted[seq] = (reuse.num_tokens, n, again)
    return admitted


def _new_blocks(roster: Roster, seq: Sequence, reuse: Reuse) -> list[int]:
    """Per group, the blocks a sequence needs beyond the reused ones to compute its present tokens; at least one."""
    shared = [sum(block != 0 for block in blocks) for blocks in reuse.blocks]
    return [least_blocks(g, len(seq.tokens), roster.block_size) - n for g, n in zip(roster.groups, shared, strict=True)]


def _outstanding(roster: Roster, ledger: Ledger, seq: Sequence, group: KVGroup) -> int:
    """Blocks a running prefill still needs to compute its present tokens (for sliding groups an upper bound)."""
    missing = max(0, blocks_for(len(seq.tokens), roster.block_size) - ledger.length(seq))
    return min(least_blocks(group, len(seq.tokens), roster.block_size), missing)
