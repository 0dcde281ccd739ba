"""Acceptance of drafters on the evaluation prompts: drafter × shape × mode × temperature × domain, nodes fixed (policy="fixed").

    python -m bench.accept --drafters eagle3=HEAD peagle=HEAD ngram --shapes chain:1 chain:5 tree:32 --temperatures 0 1
    python -m bench.accept --drafters eagle3=HEAD --shapes chain:7 tree:32 --forced 2 --modes coupled deterministic rejection --seeds 4

Acceptance length counts committed tokens per target pass, correction or bonus included; end tokens are honoured. Free runs
compare temperatures on different texts; `--forced N` adds one verified step on each of N contexts a domain, prefixes of greedy
answers, the same for every temperature, mode and drafter. A cell is one record; those that this commit, head and machine
have recorded are skipped, so a run may be stopped and started again. The target is loaded once. Every cell has an engine of
its own, so that nothing a drafter learned (rates, past outputs) depends on what was measured before.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

from bench.cells import MODES, Cell, Drafter, Shape, Tally, recorded
from bench.schema import DOMAINS, append, environment, load_prompts, records
from bench.unaware import Unaware
from specdec.boot import build_engine, load_target
from specdec.config import MAX_NODES, EngineConfig, SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.errors import ConfigError
from specdec.models.load import LoadedModel, find_checkpoint, fingerprint_of
from specdec.paths import without_path
from specdec.spec.heads import load_heads
from specdec.trace import TracedStep

CHUNK = MAX_NODES  # a context is a whole number of prefill chunks and one token, from which the step then starts
OFF = SpecConfig(method="off")
Ids = list[int]


class Bench:
    """One target and the engines that share it. target: loaded already, and possibly other than what `model` names."""

    def __init__(self, model: str, device: str = "auto", target: LoadedModel | None = None):
        self.config = EngineConfig(model=model, speculation=OFF, device=device, max_num_seqs=1, enable_prefix_caching=False)
        self.target: LoadedModel = target or load_target(self.config)
        self.texts = cache(self._texts)

    def identified(self, drafter: Drafter) -> Drafter:
        """`drafter` with the digest of its weights, for a head also its share of the noise. Raises what loading them raises."""
        if drafter.method in ("eagle3", "peagle"):
            head = load_heads(drafter.spec(Shape(2, 1, 1)), self.target)[drafter.method]
            return replace(drafter, digest=f"{head.epoch}/{head.config.noise_share:g}")
        if drafter.method == "draft_model" and drafter.source is not None:
            found = find_checkpoint(drafter.source)
            return replace(drafter, digest=fingerprint_of(found.config, found.weights()))
        return drafter

    def engine(self, spec: SpecConfig, mode: str = "coupled", rows: int = 512) -> Engine:
        """A fresh engine. rows: of a step."""
        engine = build_engine(self.config.with_(speculation=spec, max_num_batched_tokens=rows), target=self.target)
        if mode == "deterministic":
            for name, proposer in engine.proposers.items():
                engine.proposers[name] = Unaware(proposer)
        return engine

    def prompts(self, domain: str, count: int) -> list[Ids]:
        """First turns of a domain through the chat template."""
        template = partial(self.target.tokenizer.apply_chat_template, add_generation_prompt=True)
        return [template([{"role": "user", "content": text}]) for text in load_prompts(domain, count)]

    def _texts(self, domain: str, prompts: int, max_tokens: int) -> list[tuple[int, Ids]]:
        """(prompt length, prompt and greedy answer) of every prompt of the domain."""
        engine, greedy = self.engine(OFF), SamplingParams(temperature=0.0, max_tokens=max_tokens)
        found = []
        for ids in self.prompts(domain, prompts):
            answer: Ids = []
            for _, tokens in steps(engine, ids, greedy):
                answer += tokens
            found.append((len(ids), ids + answer))
        return found

    def contexts(self, domain: str, count: int, max_tokens: int) -> list[Ids]:
        """`count` prefixes of greedy answers, at least one token of the answer in each, spread over prompts and lengths.

        ConfigError when the texts are too short for that many.
        """
        texts = self.texts(domain, count, max_tokens)
        cuts = [ids[: k + 1] for prompt, ids in texts for k in range(CHUNK, len(ids), CHUNK) if prompt < k + 1 < len(ids)]
        if len(cuts) < count:
            raise ConfigError(f"{domain} gives {len(cuts)} contexts, {count} are wanted; raise --max-tokens", param="forced")
        return [cuts[i * len(cuts) // count] for i in range(count)]

    def measure(self, drafter: Drafter, cell: Cell) -> Tally:
        """Run one cell."""
        shape, tally = Shape(cell.nodes, cell.depth, cell.width), Tally()
        spec = drafter.spec(shape, "coupled" if cell.mode == "deterministic" else cell.mode)
        forced = cell.texts == "forced"
        engine = self.engine(spec, cell.mode, CHUNK if forced else 512)
        room = cell.depth + 2 if forced else cell.max_tokens
        starts = self.contexts(cell.domain, cell.count, cell.max_tokens) if forced else self.prompts(cell.domain, cell.count)
        for ids, seed in itertools.product(starts, range(cell.seeds)):
            params = SamplingParams(temperature=cell.temperature, max_tokens=room, seed=seed)
            if forced:
                step, _ = next(steps(engine, ids, params))
                assert step.position == len(ids) - 1 and len(step.tokens) <= cell.nodes
                tally.add(step)
            else:
                tally.run([step for step, _ in steps(engine, ids, params)], cell.depth, len(ids) + room)
        engine.close()
        return tally


def steps(engine: Engine, ids: Ids, params: SamplingParams) -> Iterator[tuple[TracedStep, Ids]]:
    """Every step of one request that committed tokens, with what it handed out. What is left is aborted when the iterator is closed."""
    engine.add_request("bench", ids, params, trace=True)
    try:
        while engine.has_work():
            for output in engine.step():
                if output.trace.steps and output.outputs[0].token_ids:
                    yield output.trace.steps[-1], output.outputs[0].token_ids
    finally:
        engine.abort("bench")
        engine.collect()


def cells(bench: Bench, drafter: Drafter, args: argparse.Namespace) -> Iterator[Cell]:
    """The grid of one drafter. At temperature 0 nothing is drawn: one seed, and the default mode alone."""
    kinds = [("free", args.prompts)] * (args.prompts > 0) + [("forced", args.forced)] * (args.forced > 0)
    shapes = [Shape.of(text) for text in args.shapes]
    for (texts, count), shape, mode, temperature, domain in itertools.product(kinds, shapes, args.modes, args.temperatures, args.domains):
        if (mode != "coupled" and temperature == 0) or (mode == "block" and not shape.chain):
            continue
        seeds = 1 if temperature == 0 else args.seeds
        name = without_path(args.model)
        sizes = (shape.nodes, shape.depth, shape.width)
        yield Cell(name, drafter.method, drafter.digest, *sizes, mode, temperature, domain, texts, count, args.max_tokens, seeds)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--drafters", nargs="+", default=["ngram", "suffix"], metavar="METHOD[=SOURCE]", help="source: head or draft model")
    parser.add_argument("--shapes", nargs="+", default=["chain:5", "tree:16"], metavar="chain:K|tree:NODES[:DEPTH:WIDTH]")
    parser.add_argument("--modes", nargs="+", default=["coupled"], choices=MODES, help="deterministic: candidates without the noise")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0])
    parser.add_argument("--domains", nargs="+", default=DOMAINS, choices=DOMAINS)
    parser.add_argument("--prompts", type=int, default=10, help="free runs a domain; 0 = none")
    parser.add_argument("--forced", type=int, default=0, help="contexts a domain for single steps on the same text; 0 = none")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--seeds", type=int, default=1, help="runs per prompt or context where tokens are drawn")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    bench, machine = Bench(args.model, args.device), environment()
    done = recorded(records("accept"))
    print(
        f"{'drafter':12s} {'shape':28s} {'mode':14s} {'T':>4s} {'texts':7s} {'domain':13s} {'length':>7s} {'drafts':>6s}  ms: draft, pass"
    )
    for drafter in [bench.identified(Drafter.of(text)) for text in args.drafters]:
        for cell in cells(bench, drafter, args):
            if cell.key(machine) in done:
                continue
            result = bench.measure(drafter, cell).summary()
            source = None if drafter.source is None else without_path(drafter.source)
            append("accept", machine | {"bench": "accept", "source": source, "policy": "fixed"} | asdict(cell) | result)
            show(cell, result)


def show(cell: Cell, result: dict[str, Any]) -> None:
    shape = str(Shape(cell.nodes, cell.depth, cell.width))
    head = f"{cell.drafter:12s} {shape:28s} {cell.mode:14s} {cell.temperature:4.1f} {cell.texts:7s} {cell.domain:13s}"
    if not result["steps"]:
        print(f"{head} no step to count")
        return
    draft, forward = (1e3 * result[name]["p50"] for name in ("draft_seconds", "forward_seconds"))
    print(f"{head} {result['acceptance_length']:7.3f} {result['drafting']:6.2f}  {draft:.1f}, {forward:.1f}", flush=True)


if __name__ == "__main__":
    main()
