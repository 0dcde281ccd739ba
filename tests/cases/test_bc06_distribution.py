"""BC-06: the sampled distribution is the target's own.

The joint law of three tokens is enumerated from transformers' logits, with the truncations written out again here, and held
against what the engine samples over many seeds. Coupled verification must give OFF's tokens seed by seed, so there the law
is tested once; rejection and block draw differently and are tested each. A right engine fails a chi-square test here
with probability 1e-3, ten of them with at most 1e-2; the seeds are fixed, so that no run differs from the next.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from specdec.config import SamplingParams, SpecConfig
from specdec.sequence import Sequence
from specdec.types import DraftTree
from tests.harness import P, chain, checkpoint, engine, run, tree
from tests.oracle import oracle, oracle_logits
from tests.spec import heads
from tests.spec.heads import random_head

IDS = list(range(20, 36))  # the vocabulary, cut to 16 by allowed_token_ids
TEMPERATURE, TOP_P, TOP_K, TOKENS, DRAWN = 0.8, 0.9, 8, 3, 5
ALPHA = 1e-3
FEW, MANY = 1500, 20_000
Triple = tuple[int, int, int]
E3, PE = (random_head(method, draft_vocab_size=512) for method in ("eagle3", "peagle"))  # sampled heads

COUPLED = {
    "WRONG chain": chain("wrong", 3),
    "WRONG TREE": tree("wrong"),
    "MIX chain": chain("mix", 3),
    "MIX TREE": tree("mix"),
    "ngram TREE": tree("ngram", ngram_min=1),
    "E3 chain": heads.chain("eagle3", 3, head=E3),
    "E3 TREE": heads.tree("eagle3", head=E3),
    "PE TREE": heads.tree("peagle", head=PE),
}
RESAMPLED = {
    "rejection, WRONG chain": chain("wrong", 3, verify="rejection"),
    "rejection, MIX chain": chain("mix", 3, verify="rejection"),
    "rejection, MIX TREE": tree("mix", verify="rejection"),
    "block, MIX chain": chain("mix", 3, verify="block"),
    "rejection, E3 chain": heads.chain("eagle3", 3, head=E3, verify="rejection"),
    "rejection, E3 TREE": heads.tree("eagle3", nodes=10, head=E3, verify="rejection"),
    "block, E3 chain": heads.chain("eagle3", 3, head=E3, verify="block"),
    "rejection, PE TREE": heads.tree("peagle", nodes=10, head=PE, verify="rejection"),
    "block, PE chain": heads.chain("peagle", 3, head=PE, verify="block"),
}


def law_after(logits: np.ndarray) -> dict[int, float]:
    """Processed distribution of one row [V]: allowed ids, temperature, the 8 likeliest, then the fewest whose mass reaches 0.9."""
    scores = logits[IDS].astype(np.float64) / TEMPERATURE
    order = np.argsort(-scores, kind="stable")[:TOP_K]
    p = np.exp(scores[order] - scores[order].max())
    p /= p.sum()
    kept = int(np.searchsorted(np.cumsum(p), TOP_P)) + 1
    p = p[:kept] / p[:kept].sum()
    return {IDS[i]: float(q) for i, q in zip(order, p, strict=False)}


@cache
def laws() -> dict[tuple[int, ...], dict[int, float]]:
    """Output so far, at most two tokens -> law of the next one."""
    model, result = oracle(Path(checkpoint())), {}
    for length in range(TOKENS):
        for prefix in product(IDS, repeat=length):
            if all(token in result[prefix[:k]] for k, token in enumerate(prefix)):
                result[prefix] = law_after(oracle_logits(model, [*P, *prefix])[-1].numpy())
    return result


@cache
def joint_law() -> dict[Triple, float]:
    """Probability of every possible triple of output tokens after P."""
    law = {(a, b, c): pa * pb * pc for a, pa in laws()[()].items() for b, pb in laws()[a,].items() for c, pc in laws()[a, b].items()}
    assert abs(sum(law.values()) - 1) < 1e-9
    return law


def greedy(seq: Sequence) -> list[int]:
    """ORACLE's knowledge: the target's greedy continuation, which makes any favour for drafts show most."""
    path = seq.output
    while len(path) < TOKENS:
        law = laws()[tuple(path)]
        path = [*path, max(law, key=lambda token: law[token])]
    return [*path, *IDS[:DRAWN]][seq.num_output :]


def p_value(triples: list[Triple]) -> float:
    """Chi-square of observed triples; cells with fewer than 5 expected are joined. 0 for an impossible triple."""
    law, seen = joint_law(), Counter(triples)
    if set(seen) - set(law):
        return 0.0
    cells: list[tuple[float, float]] = []
    expected = observed = 0.0
    for triple, p in sorted(law.items(), key=lambda item: -item[1]):
        expected, observed = expected + p * len(triples), observed + seen[triple]
        if expected >= 5:
            cells.append((observed, expected))
            expected = observed = 0.0
    last = cells.pop()
    cells.append((last[0] + observed, last[1] + expected))
    return float(chisquare([o for o, _ in cells], [e for _, e in cells]).pvalue)


def sample(seeds: range, speculation: SpecConfig | str = "off") -> dict[int, Triple]:
    """The first three tokens for every seed, 500 requests at a time in one engine; two more are drawn, so that drafts are deep."""
    target = engine(
        speculation,
        oracle=greedy,
        max_num_seqs=500,
        max_num_batched_tokens=8000,
        num_kv_blocks=4000,
        max_model_len=16,
        deterministic=True,
    )
    result: dict[int, Triple] = {}
    for first in range(seeds.start, seeds.stop, 500):
        requests = {str(seed): (P, _params(seed)) for seed in range(first, min(first + 500, seeds.stop))}
        for name, output in run(target, requests).items():
            a, b, c = output.outputs[0].token_ids[:TOKENS]
            result[int(name)] = (a, b, c)
    return result


def _params(seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=TEMPERATURE, top_p=TOP_P, top_k=TOP_K, max_tokens=DRAWN, seed=seed, ignore_eos=True, allowed_token_ids=IDS
    )


@cache
def off(count: int) -> dict[int, Triple]:
    return sample(range(count))


def test_bc06_off_samples_the_law() -> None:
    assert p_value(list(off(FEW).values())) > ALPHA


def test_bc06_the_test_can_fail() -> None:
    """The control: drafts taken a little too often, or a temperature that is a little wrong, do not pass."""
    law, rng = joint_law(), np.random.default_rng(0)
    triples, p = list(law), np.array(list(law.values()))
    assert p_value([triples[i] for i in rng.choice(len(triples), FEW, p=p)]) > ALPHA
    for biased in (p**0.8, p + 0.15 * (p == p.max())):
        assert p_value([triples[i] for i in rng.choice(len(triples), FEW, p=biased / biased.sum())]) < ALPHA


@pytest.mark.parametrize("shape", COUPLED)
def test_bc06_coupled_equals_off_seed_by_seed(shape: str) -> None:
    assert sample(range(300), COUPLED[shape]) == {seed: off(FEW)[seed] for seed in range(300)}


@pytest.mark.parametrize("shape", RESAMPLED)
def test_bc06_resampled_draws_have_the_law(shape: str) -> None:
    found = sample(range(FEW), RESAMPLED[shape])
    assert p_value(list(found.values())) > ALPHA
    assert found != off(FEW), "resampling does not reproduce OFF's draws; if it did, this would test nothing new"


@pytest.mark.parametrize("shape", [name for name in RESAMPLED if "E3" in name or "PE" in name])
def test_bc06_every_draft_could_have_been_drawn(shape: str) -> None:
    """q of the ratio is the processed law the draft was drawn from: each drafted token has mass there, and only allowed ids have."""
    target, drafted = engine(RESAMPLED[shape], max_model_len=16, deterministic=True), 0
    verify = target.verifier.verify

    def watched(tree: DraftTree, *rest: Any) -> Any:
        nonlocal drafted
        if tree.log_q is not None:
            for b, count in enumerate(tree.num_nodes.tolist()):
                for node in range(1, count):
                    law = tree.log_q[b, tree.parents[b, node]].exp()
                    assert law[tree.tokens[b, node]] > 0 and abs(float(law[IDS].sum()) - 1) < 1e-5 and int((law > 0).sum()) <= TOP_K
                    drafted += 1
        return verify(tree, *rest)

    target.verifier.verify = watched  # type: ignore[method-assign]
    run(target, {str(seed): (P, _params(seed)) for seed in range(30)})
    assert drafted > 100


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["off", *COUPLED, *RESAMPLED])
def test_bc06_twenty_thousand_seeds(shape: str) -> None:
    """The case in full size."""
    shapes: dict[str, SpecConfig | str] = {"off": "off", **COUPLED, **RESAMPLED}
    found = off(MANY) if shape == "off" else sample(range(MANY), shapes[shape])
    assert p_value(list(found.values())) > ALPHA
    if shape in COUPLED:
        assert found == off(MANY)
