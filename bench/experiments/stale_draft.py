"""A draft head that stays as it is while its target moves on: what it still wins, and whether the fingerprint check sees it.

    python -m bench.experiments.stale_draft --head eagle3=HEAD --noise 0 0.002 0.005 0.01 0.02 0.05 0.1 0.2 --prompts 1
    python -m bench.experiments.stale_draft --head eagle3=HEAD --noise --steps 0 10 30 100 300 --train-prompts FILE

A target moves by Gaussian noise on every matrix (relative to its root mean square) or by fine-tuning on its own answers in
capitals. Every point runs the engine free and greedy on the evaluation prompts with a copy of the head that has no
fingerprint, so that it drafts whatever the check says, and records the check's verdict beside it. How far the target has
moved is told by texts of the unmoved one, read again: its perplexity, where its likeliest token is still the same, and how
often the head's first draft is that token, which other texts do not blur.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.accept import Bench, steps
from bench.cells import Drafter, Shape, Tally
from bench.experiments.moved import fine_tuned, perturbed, shouted
from bench.schema import DOMAINS, ROOT, append, environment, records
from bench.walking import trainable
from specdec.config import SamplingParams
from specdec.errors import ConfigError
from specdec.models.head_files import SIDE_FILE, find_head
from specdec.models.head_fingerprint import correlation, measure, mismatch
from specdec.models.head_load import load_head
from specdec.models.load import LoadedModel, load_model
from specdec.paths import without_path
from specdec.train.capture import DenseTarget
from specdec.train.data import Answer, Corpus, make_corpus, pad
from specdec.train.generate import open_target
from specdec.train.loss import label_mask
from specdec.train.plot import Curve, Panel, draw
from specdec.train.prompts import read_prompts

NAME = "stale_draft"


@dataclass(frozen=True, slots=True)
class Moved:
    """A target that moved. cause: "noise" (amount: relative size) or "steps" (amount: of fine-tuning). loss: of that training."""

    cause: str
    amount: float
    target: LoadedModel
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """The answer tokens of some texts, read by one target: log p [R] f32 of each, its likeliest token there [R] i64, and what
    the head drafts there from its hidden states [R] i64."""

    log_p: Tensor
    top: Tensor
    draft: Tensor

    @classmethod
    @torch.inference_mode()
    def of(cls, target: LoadedModel, texts: Corpus, source: str) -> Reading:
        """source: directory of the head."""
        dense, parts = DenseTarget(target.model, load_head(source, target).config.taps), []
        lm_head, head = dense.lm_head.float(), trainable(target, source, dense)
        for i in range(len(texts)):
            batch = pad(texts, [i], 1, int(texts.lengths[i]))
            taps, hidden = dense(batch.tokens)
            where = label_mask(batch).flatten().nonzero().squeeze(1)
            logits = hidden[0, where].float() @ lm_head.T
            following = batch.tokens[0].roll(-1)[where]
            drafting = head.unroll(batch.tokens, taps, 1)[0, 0, where - 1]  # the pair one place before drafts the same token
            draft = head.target_ids[head.lm_head(drafting.float()).argmax(-1)]
            parts.append((logits.log_softmax(-1).gather(1, following[:, None])[:, 0], logits.argmax(-1), draft))
        return cls(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def against(self, before: Reading) -> dict[str, float]:
        """perplexity of the texts, and how it compares with the unmoved target's; agreement: same likeliest token;
        first_draft: the head's draft is this target's likeliest token."""
        mine, theirs = float((-self.log_p.mean()).exp()), float((-before.log_p.mean()).exp())
        same, right = ((self.top == other).double().mean() for other in (before.top, self.draft))
        return {"perplexity": mine, "perplexity_ratio": mine / theirs, "agreement": float(same), "first_draft": float(right)}


class Experiment:
    """One head and the unmoved target it was trained on. work: a folder for the head's copy and for checkpoints."""

    def __init__(self, model: str, drafter: Drafter, shape: Shape, work: Path, *, domains: list[str], prompts: int, max_tokens: int):
        assert drafter.source is not None
        self.bench = Bench(model, "cpu")
        self.shape, self.domains, self.prompts, self.max_tokens = shape, domains, prompts, max_tokens
        head = load_head(drafter.source, self.bench.target)
        if head.config.fingerprint is None:
            raise ConfigError(f"{drafter.source} has no fingerprint to check a moved target by", param="head")
        self.fingerprint, self.taps, self.digest = head.config.fingerprint, head.config.taps, head.epoch
        self.known = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill_(0, head.target_ids, True)
        self.drafter = Drafter(drafter.method, str(without_fingerprint(find_head(drafter.source), work / "head")))
        self.texts = self._texts()
        self.before = self._read(self.bench.target)

    def _read(self, target: LoadedModel) -> Reading:
        assert self.drafter.source is not None
        return Reading.of(target, self.texts, self.drafter.source)

    def _texts(self) -> Corpus:
        """The unmoved target's greedy answers, one a domain."""
        found = [(d, text) for d in self.domains for text in self.bench.texts(d, 1, self.max_tokens)]
        return make_corpus([Answer(ids, prompt, 0.0, False, d, d) for d, (prompt, ids) in found])

    def point(self, moved: Moved) -> dict[str, Any]:
        """Everything measured at one point."""
        tallies = self._served(moved.target)
        every = Tally()
        for _, tally, _ in tallies:
            every.merge(tally)
        tokens = torch.tensor([t for _, _, own in tallies for t in own], dtype=torch.int64)
        return {
            "cause": moved.cause,
            "amount": moved.amount,
            "loss": moved.loss,
            **self._check(moved.target),
            **self._read(moved.target).against(self.before),
            "covered": float(self.known[tokens].double().mean()),
            **every.summary(),
            "domains": {d: tally.summary() | {"committed": tally.committed} for d, tally, _ in tallies},
        }

    def _check(self, target: LoadedModel) -> dict[str, Any]:
        """What loading the head for this target would say: trusted, why not, and the correlation at each tap."""
        reason, found = mismatch(self.fingerprint, target.model), measure(target.model, self.taps)
        near = [round(correlation(self.fingerprint, found, tap), 4) for tap in self.taps]
        return {"trusted": reason is None, "reason": reason, "correlations": near}

    def _served(self, target: LoadedModel) -> list[tuple[str, Tally, list[int]]]:
        """(domain, what was counted, tokens of the answers) of free greedy runs."""
        own = Bench(self.bench.config.model, "cpu", target=target)
        found = []
        for domain in self.domains:
            tally, written = Tally(), []
            engine = own.engine(self.drafter.spec(self.shape))
            for ids in own.prompts(domain, self.prompts):
                run = list(steps(engine, ids, SamplingParams(temperature=0.0, max_tokens=self.max_tokens)))
                tally.run([step for step, _ in run], self.shape.depth, len(ids) + self.max_tokens)
                written += [t for _, tokens in run for t in tokens]
            engine.close()
            found.append((domain, tally, written))
        return found


def without_fingerprint(head: Path, copy: Path) -> Path:
    """A copy of a head's directory that fits any target of its shape, as a head of another trainer would."""
    shutil.copytree(head, copy)
    file = copy / SIDE_FILE
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | {"fingerprint": None}), encoding="utf-8")
    return copy


def points(args: argparse.Namespace, experiment: Experiment, work: Path) -> Iterator[Moved]:
    """One after the other; a target is gone when the next one is asked for."""
    base = experiment.bench.target
    for size in args.noise:
        yield Moved("noise", size, perturbed(base, size, args.seed))
    if not args.steps:
        return
    prompts = read_prompts([args.train_prompts])[: args.train_texts]
    texts = shouted(open_target(args.model, device="cpu", max_num_seqs=16), prompts, args.train_tokens)
    train = partial(fine_tuned, lr=args.lr, rows=args.rows, max_len=args.max_len, seed=args.seed)
    for count, loss, directory in train(args.model, texts, args.steps, work):
        yield Moved("steps", count, load_model(directory), loss if count else None)


def panels(rows: list[dict[str, Any]]) -> list[Panel]:
    """What a head still wins, and what the check sees, over the size of the move and over what it did to the target."""
    found: list[Panel] = []
    for cause, title in (("noise", "log10 of the noise, relative"), ("steps", "log10 of fine-tuning steps")):
        own = [r for r in rows if r["cause"] == cause and r["amount"] > 0]
        if own:
            x = [float(torch.tensor(r["amount"]).log10()) for r in own]
            curves: list[Curve] = [("acceptance length", x, [r["acceptance_length"] for r in own])]
            found.append((f"{title}: tokens a step", curves))
            near = [("correlation, least of the taps", x, [min(r["correlations"]) for r in own])]
            for name, key in (("same likeliest token", "agreement"), ("first draft", "first_draft")):
                near.append((name, x, [r[key] for r in own]))
            found.append((f"{title}: check, target and first draft", near))
    by_agreement = [
        (cause, [-r["agreement"] for r in own], [r["acceptance_length"] for r in own])
        for cause in ("noise", "steps")
        if (own := sorted((r for r in rows if r["cause"] == cause), key=lambda r: -r["agreement"]))
    ]
    return [*found, ("tokens a step over minus the share of unchanged likeliest tokens", by_agreement)] if found else []


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.steps and args.train_prompts is None:
        raise ConfigError("fine-tuning needs prompts to answer; name a file with --train-prompts", param="train_prompts")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        drafter, sizes = Drafter.of(args.head), {"domains": args.domains, "prompts": args.prompts, "max_tokens": args.max_tokens}
        experiment = Experiment(args.model, drafter, Shape.of(args.shape), work, **sizes)
        how = {"lr": args.lr, "rows": args.rows, "max_len": args.max_len, "train_texts": args.train_texts, "seed": args.seed}
        base = environment() | {"bench": NAME, "model": without_path(args.model), "drafter": drafter.method, "shape": args.shape}
        for moved in points(args, experiment, work):
            record = experiment.point(moved)
            append(NAME, base | {"digest": experiment.digest, **sizes, "training": how if moved.cause == "steps" else None} | record)
            show(record)
    last = [r for r in records(NAME) if r["digest"] == experiment.digest and r["commit"] == base["commit"]]
    draw(panels(last), ROOT / "results" / f"{NAME}.svg")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--head", required=True, metavar="METHOD=HEAD")
    parser.add_argument("--shape", default="chain:5", metavar="chain:K|tree:NODES[:DEPTH:WIDTH]")
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS), choices=DOMAINS)
    parser.add_argument("--prompts", type=int, default=1, help="a domain")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--noise", type=float, nargs="*", default=[0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2])
    parser.add_argument("--steps", type=int, nargs="*", default=[], help="of fine-tuning, rising")
    parser.add_argument("--train-prompts", type=Path, help="*.jsonl(.gz) of prompts to answer and train on")
    parser.add_argument("--train-texts", type=int, default=200)
    parser.add_argument("--train-tokens", type=int, default=64, help="of an answer, before it is put in capitals")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--rows", type=int, default=2, help="texts a training step")
    parser.add_argument("--max-len", type=int, default=128, help="of a training text")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def show(record: dict[str, Any]) -> None:
    trust = "trusted" if record["trusted"] else f"refused: {record['reason']}"
    positions = " ".join(f"{p:.2f}" for p in record["positions"])
    told = [("first draft", "first_draft"), ("same top", "agreement"), ("perplexity ×", "perplexity_ratio"), ("covered", "covered")]
    facts = "  ".join(f"{name} {record[key]:.3f}" for name, key in told)
    print(f"{record['cause']:6s} {record['amount']:<8g} length {record['acceptance_length']:.3f}  at position 1, 2, … {positions}")
    print(f"       {facts}  correlation {min(record['correlations']):.3f}  {trust}", flush=True)


if __name__ == "__main__":
    main()
