"""The draft-model drafter: a smaller checkpoint with the same tokenizer guesses a chain, with siblings at every depth.

Candidates are chosen as `candidates` says. Under verify="rejection" | "block" the shape of the tree is fixed beforehand, and
the law of every node's children is handed over as `log_q`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.spec.candidates import Race, TipRows, drawn_tree, noise_coupled, spine_first
from specdec.spec.draft_kv import DraftRunner
from specdec.spec.proposer import DrafterContext, register
from specdec.spec.tree import tree_from_lists
from specdec.spec.trie import Calibration, DraftTrie, outcomes
from specdec.types import DraftTree, Forward, Scheduled, StepPlan, Verdict

if TYPE_CHECKING:
    from specdec.sampling import SamplingState
    from specdec.sequence import Sequence

RANKS, BUCKETS = 3, 10
PROBE_TEXT = "The quick brown fox: 3.14 + naïve\n\tif x == 42: return 世界"


def _cell(probability: float, rank: int) -> int:
    return min(int(probability * BUCKETS), BUCKETS - 1) * RANKS + min(rank, RANKS - 1)


class DraftModel:
    """See the module. Needs `load`, `kv` and `pools` in its context; raises ConfigError where the checkpoint does not fit."""

    name = "draft_model"
    needs_hidden = False

    def __init__(self, context: DrafterContext):
        config = context.config
        if config.model is None:
            raise ConfigError("speculation method 'draft_model' needs `model`, the draft checkpoint", param="model")
        if context.load is None or context.kv is None or not context.pools:
            raise ConfigError("a draft model needs an engine with a KV cache and a model loader", param="method")
        loaded = context.load(config.model)
        if loaded.config.vocab_size != context.vocab_size:
            raise ConfigError(
                f"draft model {config.model!r} has a vocabulary of {loaded.config.vocab_size} tokens, the target {context.vocab_size}; "
                "they must share the tokenizer",
                param="model",
            )
        if context.tokenize is not None and list(loaded.tokenizer.encode(PROBE_TEXT)) != list(context.tokenize(PROBE_TEXT)):
            raise ConfigError(f"draft model {config.model!r} tokenizes text differently from the target", param="model")
        group = next((i for i, g in enumerate(context.kv.groups) if g.window is None), None)
        if group is None:
            raise ConfigError("a draft model needs a target with full-attention layers", param="method")
        own = loaded.config
        companion = context.kv.attach(
            self.name, context.pools[group], own.num_layers, own.num_kv_heads, own.head_dim, group=group, dtype=loaded.model.dtype
        )
        self._positions = own.max_positions
        self.max_len: int | None = own.max_positions
        self.noise_coupled = noise_coupled(config)
        self._runner = DraftRunner(loaded.model, companion, group=group, block_size=context.kv.block_size, epoch=loaded.fingerprint)
        self._device = context.device
        self._tries: dict[Sequence, DraftTrie] = {}
        self._calibration = Calibration([(0.5 + b) / BUCKETS * (0.9 if r == 0 else 0.6) for b in range(BUCKETS) for r in range(RANKS)])

    @torch.inference_mode()
    def propose(self, shares: tuple[Scheduled, ...], sampling: SamplingState) -> DraftTree:
        """Chains of `depth` with up to `width - 1` siblings at each depth, as far as `nodes` allows."""
        tries = [DraftTrie(s.seq.tokens[-1], limit=64 * 8, width=max(1, s.budget.width)) for s in shares]
        depths = [self._depth(s) for s in shares]
        laws: dict[tuple[int, int], Tensor] = {}  # (share, node) -> log q of its children
        live = [b for b, d in enumerate(depths) if d > 0]
        logits = self._runner.catch_up([shares[b].seq for b in live]) if live else None
        tips = dict.fromkeys(live, 0)
        for d in range(1, max(depths, default=0) + 1):
            assert logits is not None
            live = self._extend(logits, live, shares, tries, tips, laws, sampling)
            live = [b for b in live if depths[b] > d]
            if not live:
                break
            logits = self._runner.feed([(shares[b].seq, tries[b].tokens[tips[b]]) for b in live])
        return self._finish(shares, tries, laws)

    def _depth(self, share: Scheduled) -> int:
        """Levels to draft. The last one is guessed, not fed, so a draft model of P positions reaches position P."""
        reach = self._positions - len(share.seq.tokens) + 1
        return max(0, min(share.budget.depth, share.budget.nodes - 1, share.seq.remaining - 1, reach))

    def observe(self, plan: StepPlan, tree: DraftTree, forward: Forward, verdict: Verdict) -> None:
        """Learn how often candidates of a given probability and rank are accepted."""
        for share, kept, done in zip(plan.sampling, outcomes(tree, verdict), verdict.host.finish, strict=True):
            trie = self._tries.pop(share.seq, None)
            if trie is not None and kept and not done:
                trie.draft().learn(kept, self._calibration)

    def reset(self, seq: Sequence) -> None:
        """Forget the sequence; its draft KV stays in the blocks that the prefix cache keeps."""
        self._tries.pop(seq, None)
        self._runner.forget(seq)

    def _extend(
        self,
        logits: Tensor,
        live: list[int],
        shares: tuple[Scheduled, ...],
        tries: list[DraftTrie],
        tips: dict[int, int],
        laws: dict[tuple[int, int], Tensor],
        sampling: SamplingState,
    ) -> list[int]:
        """Give every live chain its next candidates, best first, and move its tip; returns those that go on."""
        path = torch.tensor([self._path(tries[b], tips[b]) for b in live], dtype=torch.int64).view(len(live), -1)
        rows = TipRows([shares[b].seq.request_slot for b in live], path, path.shape[1], self._device)
        race = Race(sampling, self.noise_coupled)
        log_q = race.law(logits, rows)
        width = min(max(tries[b].width for b in live), log_q.shape[-1])
        ids, chances = (t.tolist() for t in race.pick(log_q, rows, width))
        rates, going = self._calibration.rates, []
        for row, b in enumerate(live):
            trie, tip, seq = tries[b], tips[b], shares[b].seq
            for rank, (token, chance) in enumerate(zip(ids[row], chances[row], strict=True)):
                if chance <= 0.0 or rank >= trie.width:
                    break
                cell = _cell(chance, rank)
                child = trie.add(tip, token, cell, rates[cell])
                if rank == 0 and child is not None:
                    tips[b] = child
            if not self.noise_coupled and not seq.params.greedy:
                laws[b, tip] = log_q[row]
            if tips[b] != tip and (not self.noise_coupled or trie.tokens[tips[b]] not in seq.end_ids):
                going.append(b)
        return going

    @staticmethod
    def _path(trie: DraftTrie, node: int) -> list[int]:
        path: list[int] = []
        while node > 0:
            path.append(trie.tokens[node])
            node = trie.parents[node]
        return path[::-1]

    def _finish(self, shares: tuple[Scheduled, ...], tries: list[DraftTrie], laws: dict[tuple[int, int], Tensor]) -> DraftTree:
        """Cut to the budgets and pad. Drawn trees keep a shape that does not depend on what was drawn."""
        cut = []
        for b, (share, trie) in enumerate(zip(shares, tries, strict=True)):
            order = spine_first(trie.parents, share.budget.nodes) if any(key[0] == b for key in laws) else trie.best(share.budget.nodes)
            cut.append((trie.renumbered(order), order))
            self._tries[share.seq] = cut[-1][0]
        names = [self.name if len(t.tokens) > 1 else None for t, _ in cut]
        tree = tree_from_lists([(t.tokens, t.parents, t.scores) for t, _ in cut], names)
        where = {b: {old: new for new, old in enumerate(order)} for b, (_, order) in enumerate(cut)}
        kept = {(b, where[b][old]): law for (b, old), law in laws.items() if old in where[b]}
        return drawn_tree(tree, kept, self._device)


register("draft_model")(DraftModel)
