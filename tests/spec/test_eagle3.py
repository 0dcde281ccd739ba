"""EAGLE-3 drafting in the engine: the drafts are those of a plain computation, the output is that of OFF, and a good head wins."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from specdec.config import SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.errors import ConfigError
from specdec.spec.head_drafter import numbered
from specdec.types import DraftTree, RequestOutput
from tests.harness import GREEDY, P, R, assert_same, engine, run
from tests.spec.heads import Plain, chain, knowing_head, random_head, tree
from tests.spec.simulator import LineCost

FLAGS = {
    "plain": {},
    "norm_output": {"norm_output": True, "norm_before_residual": True, "norm_before_fc": True},
    "two layers": {"num_layers": 2, "fc_norm": True},
    "window": {"windows": (5,), "draft_vocab_size": 512},
}


def drafts(output: RequestOutput) -> list[tuple[int, list[int], list[int]]]:
    """(tokens held before the draft, tokens, parents) of every drafting step."""
    return [(step.position + 1, step.tokens, step.parents) for step in output.trace.steps if len(step.tokens) > 1]


@pytest.mark.parametrize("flags", FLAGS)
def test_chains_are_those_of_a_plain_computation(flags: str) -> None:
    """Every pass of the plain one starts from the first token: no chunk, no cached draft KV, no tree."""
    head = random_head("eagle3", **FLAGS[flags])
    found = run(engine(chain("eagle3", 4, head=head), deterministic=True, max_num_batched_tokens=7), {"r": (R[:20], GREEDY)}, trace=True)[
        "r"
    ]
    plain, tokens = Plain(head), [*R[:20], *found.outputs[0].token_ids]
    steps = drafts(found)
    assert len(steps) > 20
    for held, drafted, _ in steps[::4]:
        assert drafted[1:] == plain.greedy(tokens[:held], len(drafted) - 1)


@pytest.mark.parametrize("flags", ["plain", "two layers"])
def test_trees_hold_the_best_children_of_every_node(flags: str) -> None:
    """A node's children are the top tokens after its path; the plain computation runs every path alone."""
    head = random_head("eagle3", **FLAGS[flags])
    shape = tree("eagle3", nodes=20, depth=4, width=3, head=head)
    found = run(engine(shape, deterministic=True), {"r": (R[:20], replace(GREEDY, max_tokens=8))}, trace=True)["r"]
    plain, tokens = Plain(head), [*R[:20], *found.outputs[0].token_ids]
    steps = drafts(found)
    assert max(len(nodes) for _, nodes, _ in steps) == 20
    for held, nodes, parents in steps[::3]:
        paths: list[list[int]] = [[]]
        for token, parent in zip(nodes[1:], parents[1:], strict=True):
            paths.append([*paths[parent], token])
        for node, path in enumerate(paths):
            children = {nodes[i] for i in range(len(nodes)) if parents[i] == node}
            if children:
                assert children <= plain.best(plain.logits(tokens[:held], path), 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("width", [1, 3])
def test_a_head_that_knows_the_target_is_always_right(temperature: float, width: int) -> None:
    """Under coupling also at temperature 1: same law, same noise, same token."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=41, ignore_eos=True)
    shape = SpecConfig(method="eagle3", head=knowing_head(), nodes=1 + 4 * width, depth=4, width=width, policy="fixed")
    requests = {f"r{i}": (P[i:], replace(params, seed=i)) for i in range(3)}
    expected = run(engine(kind="last", deterministic=True), requests)
    found = run(engine(shape, kind="last", deterministic=True), requests)
    for name, output in found.items():
        assert_same(output, expected[name], tolerance=0)
        assert output.metrics.acceptance_length > 4.0


@pytest.mark.parametrize("width", [1, 3])
def test_a_flat_head_is_right_with_as_small_a_share_of_the_noise(width: int) -> None:
    """log p scaled down ranks with noise scaled down alike as log p does with all of it; with more noise it goes astray."""
    params = SamplingParams(temperature=1.0, max_tokens=41, ignore_eos=True)
    requests = {f"r{i}": (P[i:], replace(params, seed=i)) for i in range(3)}
    lengths = []
    for share in (0.5, 1.0):
        head = knowing_head(flat=0.5, noise_share=share)
        shape = SpecConfig(method="eagle3", head=head, nodes=1 + 4 * width, depth=4, width=width, policy="fixed")
        found = run(engine(shape, kind="last", deterministic=True), requests)
        lengths.append(min(output.metrics.acceptance_length for output in found.values()))
    assert lengths[0] > 4.0 > lengths[1]


def test_penalties_reach_the_drafts() -> None:
    """The head knows the target's law; with penalties on the ids it drafted itself it must apply them along the path."""
    params = SamplingParams(temperature=0, frequency_penalty=2.0, repetition_penalty=1.3, max_tokens=41, ignore_eos=True)
    found = run(engine(chain("eagle3", 4, head=knowing_head()), kind="last", deterministic=True), {"r": (P, params)})["r"]
    assert_same(found, run(engine(kind="last", deterministic=True), {"r": (P, params)})["r"], tolerance=0)
    assert found.metrics.acceptance_length > 4.0


def clock_heads(target: Engine) -> None:
    """The policy is told that drafting took half a millisecond per depth, and next to nothing without a head."""
    drafted = target.policy.drafted

    def clocked(name: str, seconds: float, tree: DraftTree) -> None:
        deepest = max(max(depths) for depths in tree.host.depth)
        drafted(name, 5e-4 * max(1, deepest) if name == "eagle3" else 1e-5, tree)

    target.policy.drafted = clocked


@pytest.mark.parametrize("method", ["eagle3", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_policy_works_with_a_good_head_and_rests_a_bad_one(method: str, temperature: float) -> None:
    """On the clock of a real model: a pass of the target takes 4 ms and 1 ms per further row, one of the head 0.5 ms."""
    params = SamplingParams(temperature=temperature, max_tokens=100, ignore_eos=True)
    requests = [{f"r{i}": (P[i:], replace(params, seed=i))} for i in range(4)]
    for kind, head in (("last", knowing_head()), ("t0", random_head())):
        target = engine(SpecConfig(method=method, head=head), kind=kind, max_model_len=200, deterministic=True)
        target.policy.cost, target.policy.fixed = LineCost(first=4e-3), False
        clock_heads(target)
        used: Counter[str] = Counter()
        target.observers.append(lambda stats, used=used: used.update(stats.drafted))
        lengths = []
        for request in requests:
            ((name, found),) = run(target, request).items()
            assert_same(found, run(engine(kind=kind, max_model_len=200, deterministic=True), request)[name], tolerance=0)
            lengths.append(found.metrics.acceptance_length)
        if kind == "last":
            assert lengths[-1] > 3.0 and used["eagle3"] > (200 if method == "eagle3" else 0), (lengths, used)
        else:
            assert used["eagle3"] < 40


def test_order_of_nodes() -> None:
    """Worked example of reference §3.4: {A, A1, A2} of A -0.1, B -2.5, A1 -0.4, A2 -1.6, B1 -2.7, B2 -5.5; best path first."""
    nodes = {"A": (0, -0.1, -1), "B": (1, -2.5, -1), "A1": (2, -0.4, 0), "A2": (3, -1.6, 0), "B1": (4, -2.7, 1), "B2": (5, -5.5, 1)}
    pool = [(place, 10.0**log, place, parent, 0) for place, log, parent in nodes.values()]
    pool.sort(key=lambda node: -node[1])
    draft = numbered(9, pool[:3])
    assert (draft.tokens, draft.parents) == ([9, 0, 2, 3], [-1, 0, 1, 1])
    draft = numbered(9, pool[:5])
    assert (draft.tokens, draft.parents) == ([9, 0, 2, 1, 3, 4], [-1, 0, 1, 0, 1, 3])  # path root, A, A1; then B, A2, B1
    assert numbered(9, pool[1:]).tokens == [9, 1, 4, 5], "nothing hangs on a node that is not there"


def test_heads_of_the_wrong_kind_and_missing_ones_are_refused() -> None:
    with pytest.raises(ConfigError, match="head for 'eagle3', not for method 'peagle'"):
        engine(SpecConfig(method="peagle", head=random_head("eagle3")))
    with pytest.raises(ConfigError, match="needs `head`"):
        engine(SpecConfig(method="eagle3"))
