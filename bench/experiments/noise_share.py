"""How much of the target's noise should a draft listen to? Candidates are the top of log q + share · g: 0 is the law alone.

    python -m bench.experiments.noise_share --heads eagle3=HEAD peagle=HEAD --prompts 4 --max-tokens 96

The target samples answers; the head is walked along them, as a chain that is right so far would run. The noise that chose the
tokens is drawn again from its law given the tokens (`posterior_noise`), so that every share is judged on the same texts, the
same places and the same noise. Acceptance of a chain is exact in expectation. For trees it says how often the target's token
is among the top `width` of a node on the right path, which no budget of nodes limits.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.cells import Drafter
from bench.schema import DOMAINS, append, environment, load_prompts
from bench.walking import trainable
from specdec.boot import resolve_device
from specdec.models.head_load import load_head
from specdec.models.load import load_model
from specdec.paths import without_path
from specdec.train.capture import DenseTarget
from specdec.train.data import Corpus, TokenBatch, make_corpus, pad
from specdec.train.generate import GenerateConfig, Talk, converse, open_target
from specdec.train.loop import score
from specdec.train.loss import Entries, Labels, label_mask
from specdec.train.model import TrainableHead
from specdec.train.prompts import Prompt
from specdec.train.rollouts import sample_depths

SHARES = (0.0, 0.25, 0.5, 0.625, 0.75, 0.875, 1.0)
WIDTHS = (1, 2, 4, 8)


def posterior_noise(log_p: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
    """Gumbel noise given that it made `chosen` win: log_p [R, V] normalised, chosen [R] i64 -> g [R, V] with
    argmax(log_p + g) = chosen. The winning sum is Gumbel; every other is Gumbel cut off at it. -inf stays impossible: noise 0."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64).clamp_(1e-300, 1 - 1e-16)

    law = log_p.double()
    top = -(-uniform(len(law), 1).log()).log()  # log-sum-exp of log_p is 0
    free = law - (-uniform(*law.shape).log()).log()
    cut = -torch.logaddexp(-top.expand_as(free), -free)
    won = cut.scatter(1, chosen[:, None], top)
    return torch.where(law.isneginf(), 0.0, won - law)


@dataclass
class Ranks:
    """Of every scored prediction: how many draft tokens beat the text's own, by share. Summed over batches.

    within[share][width]: bool [depths, places] per batch, the text's token among the top `width`; seen [depths, places]: scored.
    """

    depths: int
    within: dict[tuple[float, int], list[Tensor]] = field(default_factory=dict)
    seen: list[Tensor] = field(default_factory=list)

    def conditional(self, share: float, width: int) -> list[float]:
        """Share of places that are right at each depth, given that the text so far is the path."""
        right = torch.cat([w.sum(1, keepdim=True) for w in self.within[share, width]], 1).sum(1)
        count = torch.cat([s.sum(1, keepdim=True) for s in self.seen], 1).sum(1)
        return [round(float(r / c.clamp(min=1)), 4) for r, c in zip(right, count, strict=True)]

    def length(self, share: float, width: int) -> float:
        """Tokens committed by a step from a random place: 1 + the chance of every depth."""
        total, places = 0.0, 0
        for w, s in zip(self.within[share, width], self.seen, strict=True):
            start = s[0]
            total += float((w & s).cumprod(0)[:, start].sum())
            places += int(start.sum())
        return round(1 + total / max(places, 1), 4)


class Walk:
    """One head over texts, every share judged on the same noise."""

    def __init__(self, head: TrainableHead, target: DenseTarget, *, depths: int, temperature: float = 1.0, seed: int = 0, rows: int = 64):
        """depths: of the chains. temperature: of target and draft. rows: predictions at a time, whose laws over the vocabulary
        are held."""
        self.head, self.target, self.temperature, self.rows = head, target, temperature, rows
        self.found, self._generator = Ranks(depths), torch.Generator().manual_seed(seed)
        self._place = torch.full((head.config.vocab_size,), -1, dtype=torch.int64)  # of a target id in the draft vocabulary
        self._place[head.target_ids] = torch.arange(len(head.target_ids))

    @torch.inference_mode()
    def add(self, batch: TokenBatch, *, redraw: bool = False) -> None:
        """Rank the next tokens of one text under every share. They must be drawn from the target, at its temperature; with
        `redraw` the text is context only, another next token is drawn at every place, and first drafts alone are judged."""
        depths = 1 if redraw else self.found.depths
        captured, mask = self.target.capture(batch.tokens), label_mask(batch).flatten()
        where = mask.nonzero().squeeze(1)
        logits = captured.hidden.flatten(0, 1)[where].float() @ self.target.lm_head.float().T
        log_p = (logits / self.temperature).log_softmax(-1)
        chosen = batch.tokens.flatten().roll(-1)[where]
        if redraw:
            chosen = torch.multinomial(log_p.exp(), 1, generator=self._generator)[:, 0]
        parts = zip(log_p.split(self.rows), chosen.split(self.rows), strict=True)
        noise = torch.cat([posterior_noise(p, x, self._generator)[:, self.head.target_ids].float() for p, x in parts])
        labels = Labels(where, mask.new_zeros(0, 0), chosen, torch.where(mask, mask.cumsum(0) - 1, -1))
        every = sample_depths(label_mask(batch), depths, 1.0, 1.0, torch.Generator()) if self.head.config.kind == "peagle" else None
        hidden, entries = score(self.head, batch, captured, labels, depths, every)
        self._judge(hidden, entries, noise, self._place[chosen], mask.numel())

    def _judge(self, hidden: Tensor, entries: Entries, noise: Tensor, wanted: Tensor, places: int) -> None:
        """hidden [E, Hd]; noise [R, Vd] and wanted [R] (draft id of the token, -1 = the draft does not know it) of the labels."""
        tables = {key: torch.zeros(self.found.depths, places, dtype=torch.bool) for key in _keys()}
        for part in torch.arange(len(entries.row)).split(self.rows):
            log_q = (self.head.lm_head(hidden[part].float()) / self.temperature).log_softmax(-1)
            label, cell = entries.label[part], (entries.depth[part], entries.place[part])
            known = wanted[label] >= 0
            for share in SHARES:
                race = log_q + share * noise[label]
                beaten = (race > race.gather(1, wanted[label].clamp(min=0)[:, None])).sum(1)
                for width in WIDTHS:
                    tables[share, width][cell] = (beaten < width) & known
        seen = torch.zeros(self.found.depths, places, dtype=torch.bool)
        seen[entries.depth, entries.place] = True
        self.found.seen.append(seen)
        for key, table in tables.items():
            self.found.within.setdefault(key, []).append(table)


def _keys() -> Iterator[tuple[float, int]]:
    return ((share, width) for share in SHARES for width in WIDTHS)


def answers(model: str, domains: list[str], prompts: int, max_tokens: int, temperature: float) -> Corpus:
    """The target's answers to the first prompts of every domain."""
    llm = open_target(model, device="cpu", max_num_seqs=16)
    config = GenerateConfig((temperature,), max_tokens)
    asked = [Prompt(f"{d}-{i}", d, (text,)) for d in domains for i, text in enumerate(load_prompts(d, prompts))]
    return make_corpus(converse(llm, [Talk(p, temperature, []) for p in asked], config))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--heads", nargs="+", required=True, metavar="METHOD=HEAD")
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS), choices=DOMAINS)
    parser.add_argument("--prompts", type=int, default=4, help="a domain")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--depths", type=int, default=7)
    parser.add_argument("--temperature", type=float, default=1.0, help="of the answers, above 0")
    parser.add_argument("--redraw", type=int, default=0, help="judge first drafts on greedy answers, next tokens drawn so many times")
    args = parser.parse_args(argv)
    loaded = load_model(args.model, device=resolve_device("cpu"))
    corpus = answers(args.model, args.domains, args.prompts, args.max_tokens, 0.0 if args.redraw else args.temperature)
    batches = [pad(corpus, [i], 1, int(n)) for i, n in enumerate(corpus.lengths.tolist())]
    for drafter in map(Drafter.of, args.heads):
        assert drafter.source is not None
        digest = load_head(drafter.source, loaded).epoch
        target = DenseTarget(loaded.model, load_head(drafter.source, loaded).config.taps)
        head = trainable(loaded, drafter.source, target)
        walk = Walk(head, target, depths=1 if args.redraw else args.depths, temperature=args.temperature)
        for batch, _ in itertools.product(batches, range(max(1, args.redraw))):
            walk.add(batch, redraw=args.redraw > 0)
        record = describe(walk.found) | {"drafter": drafter.method, "digest": digest, "source": without_path(drafter.source)}
        sizes = {
            "model": without_path(args.model),
            "texts": len(corpus),
            "tokens": corpus.num_answer_tokens,
            "redraw": args.redraw,
            "temperature": args.temperature,
        }
        append("noise_share", environment() | {"bench": "noise_share"} | sizes | record)
        show(record)


def describe(found: Ranks) -> dict[str, Any]:
    """What is recorded, a row per share and width."""
    rows = [
        {"share": share, "width": width, "length": found.length(share, width), "conditional": found.conditional(share, width)}
        for share, width in _keys()
    ]
    return {"depths": found.depths, "rows": rows}


def show(record: dict[str, Any]) -> None:
    print(f"{record['drafter']}: tokens a step, and right at depth 1, 2, … given the path, by share of the noise")
    for row in record["rows"]:
        right = " ".join(f"{c:.3f}" for c in row["conditional"])
        print(f"  width {row['width']}  share {row['share']:5.3f}  {row['length']:.3f}  {right}")


if __name__ == "__main__":
    main()
