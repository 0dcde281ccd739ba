"""The draft-model drafter: a smaller checkpoint with the same tokenizer guesses a chain, with siblings at every depth.

Coupled (default verification): the target's next token is argmax(log p + g) with noise g that only depends on seed, position
and token id. So the best guesses are the top tokens of log q + g with the *same* g, q being the draft's law under the
request's own temperature, truncation and penalties; at temperature 0 there is no noise and they are the top tokens of q.
Under verify="rejection" | "block" the drafts are drawn from q with noise of their own (purpose DRAFT), without replacement
among siblings, in a shape fixed beforehand, and q is handed over as `log_q`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec import ops, rng
from specdec.errors import ConfigError
from specdec.rows import RowInfo
from specdec.spec.draft_kv import DraftRunner
from specdec.spec.proposer import DrafterContext, register
from specdec.spec.tree import root_only, tree_from_lists
from specdec.spec.trie import Calibration, DraftTrie, outcomes
from specdec.types import DraftTree, Scheduled, Verdict

if TYPE_CHECKING:
    from specdec.sampling import SamplingState
    from specdec.sequence import Sequence

CANDIDATES = 256  # tokens of largest q that enter the noisy race; the rest are too unlikely to be worth their noise
RANKS, BUCKETS = 3, 10
PROBE_TEXT = "The quick brown fox: 3.14 + naïve\n\tif x == 42: return 世界"


class TipRows(RowInfo):
    """One row per sequence, the tip of its chain: the history of row b is the sequence plus `path[b]` ([B, d] i64)."""

    def __init__(self, path: Tensor, request_slots: list[int], device: torch.device):
        super().__init__(root_only([0] * len(request_slots)), request_slots, device)
        self.depth = torch.full((len(request_slots),), path.shape[1], dtype=torch.int64, device=device)
        self.path_tokens = path.to(device)


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
        self.max_len: int | None = own.max_positions - config.depth
        self.noise_coupled = config.verify not in ("rejection", "block")
        self._runner = DraftRunner(loaded.model, companion, group=group, block_size=context.kv.block_size, epoch=loaded.fingerprint)
        self._device = context.device
        self._tries: dict[Sequence, DraftTrie] = {}
        self._calibration = Calibration([(0.5 + b) / BUCKETS * (0.9 if r == 0 else 0.6) for b in range(BUCKETS) for r in range(RANKS)])

    @torch.inference_mode()
    def propose(self, shares: tuple[Scheduled, ...], sampling: SamplingState) -> DraftTree:
        """Chains of `depth` with up to `width - 1` siblings at each depth, as far as `nodes` allows."""
        tries = [DraftTrie(s.seq.tokens[-1], limit=64 * 8, width=max(1, s.budget.width)) for s in shares]
        depths = [max(0, min(s.budget.depth, s.budget.nodes - 1, s.seq.remaining - 1)) for s in shares]
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

    def observe(self, shares: tuple[Scheduled, ...], tree: DraftTree, verdict: Verdict) -> None:
        """Learn how often candidates of a given probability and rank are accepted."""
        for share, kept, done in zip(shares, outcomes(tree, verdict), verdict.finish.tolist(), strict=True):
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
        rows = TipRows(path, [shares[b].seq.request_slot for b in live], self._device)
        log_q = torch.log_softmax(sampling.process(logits, rows), dim=-1)
        ids, chances = self._candidates(log_q, rows, sampling, max(tries[b].width for b in live))
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

    def _candidates(self, log_q: Tensor, rows: TipRows, sampling: SamplingState, width: int) -> tuple[list[list[int]], list[list[float]]]:
        """(ids, chances) of the `width` best guesses per row, best first; a chance of 0 marks an impossible token."""
        width = min(width, log_q.shape[-1])
        if not sampling.samples(rows.request_slots):
            top = log_q.topk(width, dim=-1)
            return top.indices.tolist(), top.values.exp().tolist()
        seeds, positions, choices, noisy = sampling.noise(rows)
        if self.noise_coupled:
            field, purpose = log_q.topk(max(width, min(CANDIDATES, log_q.shape[-1])), dim=-1), rng.TARGET
            ids, values = field.indices, field.values
        else:
            ids, values = torch.arange(log_q.shape[-1], device=log_q.device).expand_as(log_q), log_q
            positions, purpose = positions - rows.depth, rng.draft_purpose(int(rows.depth[0]) + 1)
        noise = ops.gumbel_noise(seeds, positions, choices, ids.contiguous(), purpose)
        race = values + torch.where(noisy[:, None], noise, 0.0)
        best = race.topk(width, dim=-1)
        chance = torch.softmax(race, dim=-1).gather(1, best.indices)
        return ids.gather(1, best.indices).tolist(), chance.tolist()

    def _finish(self, shares: tuple[Scheduled, ...], tries: list[DraftTrie], laws: dict[tuple[int, int], Tensor]) -> DraftTree:
        """Cut to the budgets and pad. Drawn trees keep a shape that does not depend on what was drawn."""
        cut = []
        for b, (share, trie) in enumerate(zip(shares, tries, strict=True)):
            order = self._fixed_order(trie, share.budget.nodes) if any(key[0] == b for key in laws) else trie.best(share.budget.nodes)
            cut.append((trie.renumbered(order), order))
            self._tries[share.seq] = cut[-1][0]
        names = [self.name if len(t.tokens) > 1 else None for t, _ in cut]
        tree = tree_from_lists([(t.tokens, t.parents, t.scores) for t, _ in cut], names)
        if not laws:
            return tree
        vocab = next(iter(laws.values())).shape[-1]
        log_q = torch.full((*tree.tokens.shape, vocab), -torch.inf, device=self._device)
        for b, (_, order) in enumerate(cut):
            for new, old in enumerate(order):
                if (b, old) in laws:
                    log_q[b, new] = laws[b, old]
        return DraftTree(tree.tokens, tree.parents, tree.depth, tree.num_nodes, tree.score, log_q, tree.drafters)

    @staticmethod
    def _fixed_order(trie: DraftTrie, nodes: int) -> list[int]:
        """The chain of first children, then siblings by depth and rank, as many as fit."""
        first = {p: i for i, p in reversed(list(enumerate(trie.parents)))}
        chain, node = [0], 0
        while node in first:
            node = first[node]
            chain.append(node)
        inside = set(chain)
        return (chain + [i for i in range(len(trie.tokens)) if i not in inside])[:nodes]


register("draft_model")(DraftModel)
