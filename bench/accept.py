"""Acceptance of a drafter on the evaluation prompts, with fixed nodes, depth and width (policy="fixed").

    python -m bench.accept --method ngram --nodes 8 --depth 7 --width 1 --temperature 0

Acceptance length counts committed tokens per target pass, correction or bonus included. End tokens are honoured.
"""

from __future__ import annotations

import argparse

from bench.schema import DOMAINS, append, environment, load_prompts
from specdec import LLM, SamplingParams, SpecConfig
from specdec.types import StepStats


class Counter:
    """Sums StepStats over a domain."""

    def __init__(self) -> None:
        self.drafted = self.accepted = self.steps = self.committed = 0
        self.positions: list[int] = []
        self.drafts = 0

    def __call__(self, stats: StepStats) -> None:
        self.drafted += sum(stats.drafted.values())
        self.accepted += sum(stats.accepted.values())
        self.drafts += sum(stats.drafts.values())
        self.steps += stats.num_sampling
        self.committed += stats.committed
        for reached in stats.accepted_position.values():
            self.positions.extend([0] * (len(reached) - len(self.positions)))
            for i, count in enumerate(reached):
                self.positions[i] += count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--width", type=int, default=1)
    parser.add_argument("--verify", default="coupled")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--domains", nargs="*", default=DOMAINS)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    spec = SpecConfig(method=args.method, nodes=args.nodes, depth=args.depth, width=args.width, policy="fixed", verify=args.verify)
    llm = LLM(args.model, speculation=spec)
    base = environment() | {"bench": "accept", **{k: v for k, v in vars(args).items() if k != "domains"}}
    print(f"{'domain':14s} {'length':>7s} {'rate':>6s} {'drafting':>9s}   accepted at position 1, 2, … (share of drafts)")
    for domain in args.domains:
        counter = Counter()
        llm.engine.observers[:] = [counter]
        messages = [[{"role": "user", "content": p}] for p in load_prompts(domain, args.prompts)]
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=0)
        for message in messages:
            llm.chat(message, params)
        length = counter.committed / counter.steps
        rate = counter.accepted / max(counter.drafted, 1)
        share = [c / max(counter.drafts, 1) for c in counter.positions]
        append(
            "accept",
            base
            | {"domain": domain, "acceptance_length": length, "rate": rate, "drafting": counter.drafts / counter.steps, "positions": share},
        )
        print(
            f"{domain:14s} {length:7.3f} {rate:6.3f} {counter.drafts / counter.steps:9.3f}   " + " ".join(f"{s:.2f}" for s in share[:10]),
            flush=True,
        )


if __name__ == "__main__":
    main()
