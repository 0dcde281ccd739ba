"""Acceptance and memory of a draft head by the storage of its weights (`draft_quantization`).

    python -m bench.draft_precision --heads eagle3=HEAD peagle=HEAD --answers DIRECTORY --texts 4 --prompts 2

Two measurements a storage, at temperature 0. Walked: chains over recorded greedy answers of the target, by domain the first
`--texts` (no verification runs, so many texts are cheap). Served: the engine with fixed shapes on the first `--prompts` of
every domain; all storages draft for the same text, because verification is coupled.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.accept import Bench
from bench.cells import Cell, Drafter, Shape, Tally
from bench.schema import DOMAINS, append, environment, records
from bench.walking import trainable
from specdec.errors import ConfigError
from specdec.models.head_load import DRAFT_QUANTIZATIONS, load_head
from specdec.paths import without_path
from specdec.train.capture import DenseTarget
from specdec.train.data import Corpus, read_corpus
from specdec.train.evaluate import Acceptance, simulate
from specdec.train.recipe import open_features

SHAPES = ("chain:5", "tree:32:7:4")


def first_texts(corpus: Corpus, domains: Sequence[str], count: int) -> Corpus:
    """The first `count` greedy answers of every domain. ConfigError where there is none."""
    greedy = (corpus.temperature == 0).tolist()
    picked = [[i for i, d in enumerate(corpus.domains) if d == domain and greedy[i]][:count] for domain in domains]
    if not any(picked):
        raise ConfigError("the answers hold no greedy text of these domains; pass others with --answers", param="answers")
    return corpus.take([i for own in picked for i in own])


class Heads:
    """One head in every storage, walked and served."""

    def __init__(self, bench: Bench, drafter: Drafter, texts: Corpus | None, depths: int):
        assert drafter.source is not None
        self.bench, self.drafter, self.source, self.depths = bench, drafter, drafter.source, depths
        self.texts = texts
        if texts is not None:
            self.target = DenseTarget(bench.target.model, load_head(self.source, bench.target).config.taps)
            self.features = open_features(self.target, texts)

    def walked(self, precision: str) -> Acceptance | None:
        """Chains over the texts, or None without any."""
        if self.texts is None:
            return None
        head = trainable(self.bench.target, self.source, self.target, precision)
        return simulate(head, self.features, self.texts, depths=self.depths)["all"]

    def served(self, precision: str, shape: Shape, domains: Sequence[str], prompts: int, max_tokens: int) -> list[Tally]:
        """A tally a domain."""
        drafter = Drafter(self.drafter.method, self.source, precision=precision)
        sizes = (shape.nodes, shape.depth, shape.width)
        cells = [Cell("", drafter.method, "", *sizes, "coupled", 0.0, d, "free", prompts, max_tokens, 1) for d in domains]
        return [self.bench.measure(drafter, cell) for cell in cells]

    def record(self, precision: str, args: argparse.Namespace) -> dict[str, Any]:
        head = load_head(self.source, self.bench.target, draft_quantization=precision)
        found: dict[str, Any] = {"precision": precision, "bytes": head.nbytes, "digest": head.epoch}
        walked = self.walked(precision)
        if walked is not None and self.texts is not None:
            found["walked"] = walked.to_json() | {"texts": len(self.texts)}
        for text in args.shapes if args.prompts else ():
            shape = Shape.of(text)
            tallies = self.served(precision, shape, args.domains, args.prompts, args.max_tokens)
            found[text] = {"domains": dict(zip(args.domains, [t.summary() for t in tallies], strict=True))} | asdict(shape)
        return found


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown: the newest record of every drafter and storage, in the order of the storages."""
    newest = {(r["drafter"], r["precision"]): r for r in rows}
    shapes = [s for s in SHAPES if any(s in r for r in newest.values())]
    lines = ["| drafter | storage | MB | walked K = 1, 3, 5, 7 | " + " | ".join(f"served {s}" for s in shapes) + " |"]
    lines.append("|---|---|---|---|" + "---|" * len(shapes))
    for drafter in dict.fromkeys(name for name, _ in newest):
        for precision in DRAFT_QUANTIZATIONS:
            if (r := newest.get((drafter, precision))) is not None:
                walked = " ".join(f"{length:.3f}" for length in r["walked"]["lengths"][:7:2]) if "walked" in r else ""
                lengths = " | ".join(f"{served_length(r[s]):.3f}" if s in r else "" for s in shapes)
                lines.append(f"| {drafter} | {precision} | {r['bytes'] / 1e6:.1f} | {walked} | {lengths} |")
    return lines


def served_length(served: dict[str, Any]) -> float:
    """Mean over domains, each weighing the same."""
    lengths = [d["acceptance_length"] for d in served["domains"].values() if d["steps"]]
    return float(sum(lengths) / len(lengths))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--heads", nargs="+", required=True, metavar="METHOD=HEAD")
    parser.add_argument("--storages", nargs="+", default=list(DRAFT_QUANTIZATIONS), choices=DRAFT_QUANTIZATIONS)
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS), choices=DOMAINS)
    parser.add_argument("--answers", type=Path, help="directory of recorded greedy answers (specdec train generate)")
    parser.add_argument("--texts", type=int, default=4, help="answers a domain to walk over")
    parser.add_argument("--max-len", type=int, default=512, help="of a text, prompt included")
    parser.add_argument("--depths", type=int, default=8, help="longest walked chain")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--prompts", type=int, default=2, help="served a domain; 0 = none")
    parser.add_argument("--max-tokens", type=int, default=64, help="of a served answer")
    args = parser.parse_args(argv)
    bench = Bench(args.model, "cpu")
    texts = None if args.answers is None else first_texts(read_corpus(args.answers).cut(args.max_len), args.domains, args.texts)
    for drafter in map(Drafter.of, args.heads):
        heads = Heads(bench, drafter, texts, args.depths)
        for precision in args.storages:
            own = {"bench": "draft_precision", "model": without_path(args.model), "drafter": drafter.method}
            counts = {"source": without_path(heads.source), "prompts": args.prompts, "max_tokens": args.max_tokens}
            append("draft_precision", environment() | own | counts | heads.record(precision, args))
    print("\n".join(table(records("draft_precision"))))


if __name__ == "__main__":
    main()
