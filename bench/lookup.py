"""Microseconds of a lookup: drafting for one sequence, and indexing a prompt, compiled against the reference.

    python -m bench.lookup [--context 2000] [--prompt 50000] [--repeats 200] [--record]

The text is a random stretch of 700 tokens over and over, so that the drafts are long. draft_us: one proposal, tensors included,
after the sequence grew by one token. index_ms: the first proposal for a prompt of random tokens. The two backends take turns and
the fastest of each counts: other work on the machine only ever adds time. --record appends to results/lookup.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable

from bench.schema import append, environment
from specdec import ops
from specdec.config import SamplingParams, SpecConfig
from specdec.sequence import Sequence
from specdec.spec.lookup import LookupDrafter
from specdec.spec.ngram import NgramDrafter
from specdec.spec.proposer import DrafterContext
from specdec.spec.suffix import SuffixDrafter
from specdec.types import Scheduled, SpecBudget

VOCAB, PERIOD = 49152, 700
KINDS: dict[str, Callable[..., LookupDrafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}


def share(tokens: list[int], drafter: str) -> Scheduled:
    """A decoding sequence that may draft a chain of 15 tokens."""
    seq = Sequence("bench", tokens, len(tokens), SamplingParams(), 0, 1 << 30)
    seq.num_computed = len(tokens) - 1
    return Scheduled(seq, 1, True, SpecBudget(drafter, 16, 15, 1))


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(name: str, context: int, prompt: int, repeats: int) -> dict[str, dict[str, float]]:
    """Backend → draft_us, index_ms."""
    rng = random.Random(0)
    period = [rng.randrange(VOCAB) for _ in range(PERIOD)]
    text = [period[i % PERIOD] for i in range(context + repeats)]
    long = [rng.randrange(VOCAB // 16) for _ in range(prompt)]
    config = DrafterContext(SpecConfig(method=name), VOCAB, 1 << 20)
    backends = {"compiled": True, "reference": False} if ops.compiled() else {"reference": False}
    drafters = {label: KINDS[name](config, compiled=compiled) for label, compiled in backends.items()}
    shares = {label: share(text[:context], name) for label in drafters}
    best = {label: {"draft_us": float("inf"), "index_ms": float("inf")} for label in drafters}
    for i in range(repeats):
        for label, drafter in drafters.items():
            spent = seconds(lambda d=drafter, s=shares[label]: d.propose((s,), None))
            if i:  # the first one builds the index
                best[label]["draft_us"] = min(best[label]["draft_us"], round(spent * 1e6, 1))
            shares[label].seq.append([text[context + i]], 0)
    for _ in range(5):
        for label, drafter in drafters.items():
            fresh = share(list(long), name)
            spent = seconds(lambda d=drafter, s=fresh: d.propose((s,), None))
            best[label]["index_ms"] = min(best[label]["index_ms"], round(spent * 1e3, 2))
            drafter.reset(fresh.seq)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--prompt", type=int, default=50000)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    for name in KINDS:
        record = {"drafter": name, "context": args.context, "prompt": args.prompt, **measure(name, args.context, args.prompt, args.repeats)}
        print(json.dumps(record), flush=True)
        if args.record:
            append("lookup", {**environment(), **record})


if __name__ == "__main__":
    main()
