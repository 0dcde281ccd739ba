"""How far a head would get: greedy chains walked over held-out texts, and real runs through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.config import SamplingParams
from specdec.train.data import Corpus, TokenBatch, epoch
from specdec.train.loop import Features, score
from specdec.train.loss import Labels, label_mask, token_before
from specdec.train.model import TrainableHead
from specdec.train.prompts import Prompt
from specdec.train.rollouts import sample_depths

if TYPE_CHECKING:
    from specdec.llm import LLM


@dataclass(slots=True)
class Acceptance:
    """Chains of up to K drafts walked over texts. steps[K - 1], tokens[K - 1]: target passes, and tokens they committed.

    reached[i]: passes of the longest chain that accepted more than i drafts.
    """

    steps: list[int]
    tokens: list[int]
    reached: list[int]

    @property
    def lengths(self) -> list[float]:
        """Acceptance length of chains of K = 1, 2, … drafts."""
        return [round(t / max(s, 1), 4) for t, s in zip(self.tokens, self.steps, strict=True)]

    @property
    def positions(self) -> list[float]:
        """Acceptance at position i, unconditional, of the longest chain."""
        return [round(r / max(self.steps[-1], 1), 4) for r in self.reached]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"lengths": self.lengths, "positions": self.positions}


@torch.no_grad()
def simulate(head: TrainableHead, features: Features, corpus: Corpus, *, depths: int, batch_tokens: int = 16_384) -> dict[str, Acceptance]:
    """Acceptance by domain, and over "all". Exact for texts of temperature 0: a draft is accepted when it is the text's token.

    Each walk starts where the engine would: after the prompt and the first token of the answer.
    """
    device = head.target_ids.device
    result: dict[str, Acceptance] = {}
    for batch in epoch(corpus, batch_tokens, 0, 0):
        runs = accepted_runs(head, features, batch, depths, device)
        members = torch.searchsorted(corpus.offsets, batch.index[:, 0].contiguous(), right=True) - 1
        for row, sequence in enumerate(members.tolist()):
            first, last = int(batch.prompt_len[row]) - 1, int(batch.lengths[row])
            for name in ("all", corpus.domains[sequence]):
                into = result.setdefault(name, Acceptance([0] * depths, [0] * depths, [0] * depths))
                _walk(into, runs[row, : last - 2].tolist(), first)
    return dict(sorted(result.items()))


def accepted_runs(head: TrainableHead, features: Features, batch: TokenBatch, depths: int, device: torch.device) -> Tensor:
    """[B, L] i64 on the CPU: how many drafts of the chain that starts at each place equal the text's next tokens."""
    batch, kept = batch.to(device), None
    if head.config.kind == "peagle":
        kept = sample_depths(label_mask(batch), depths, 1.0, 1.0, torch.Generator(device))
    mask = label_mask(batch).flatten()
    empty = mask.new_zeros(0, 0)
    rank = torch.where(mask, mask.cumsum(0) - 1, -1)
    following = batch.tokens.flatten().roll(-1)[mask]
    labels = Labels(mask.nonzero().squeeze(1), empty, following, rank)
    hidden, entries = score(head, batch, features(batch), labels, depths, kept)
    if head.transition is not None:
        deep = entries.depth > 0
        hidden[deep] = head.follow(hidden[deep], token_before(entries, batch.tokens)[deep])
    best = torch.cat([head.lm_head(part.float()).argmax(-1) for part in hidden.split(8192)])
    right = torch.zeros(depths, mask.numel(), dtype=torch.bool, device=device)
    right[entries.depth, entries.place] = head.target_ids[best] == labels.best[entries.label]
    return right.cumprod(0).sum(0).view(batch.tokens.shape).cpu()


def _walk(into: Acceptance, runs: Sequence[int], first: int) -> None:
    """Add one text. runs[t]: drafts accepted from anchor t; every anchor has at least one token to predict."""
    longest = len(into.steps)
    for k in range(1, longest + 1):
        at = first
        while at < len(runs):
            taken = min(runs[at], k)
            committed = min(taken + 1, len(runs) - at)
            into.steps[k - 1] += 1
            into.tokens[k - 1] += committed
            if k == longest:
                for i in range(taken):
                    into.reached[i] += 1
            at += taken + 1


def served(llm: LLM, prompts: Sequence[Prompt], *, temperature: float, max_tokens: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """The real thing: first turns answered by the engine with its own speculation, by domain and over "all".

    -> acceptance length, target passes and tokens; the pass over the prompt counts as one that committed one token.
    """
    ids = [llm.tokenizer.apply_chat_template([{"role": "user", "content": p.turns[0]}]) for p in prompts]
    outputs = llm.generate(ids, SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed))
    sums: dict[str, list[int]] = {}
    for prompt, output in zip(prompts, outputs, strict=True):
        for name in ("all", prompt.domain):
            steps, tokens = sums.get(name, (0, 0))
            sums[name] = [steps + output.metrics.steps, tokens + output.metrics.generated]
    return {name: {"length": round(t / max(s, 1), 4), "steps": s, "tokens": t} for name, (s, t) in sorted(sums.items())}
