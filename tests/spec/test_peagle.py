"""P-EAGLE drafting in the engine: marginals of one pass against a plain computation, best-first trees, output as OFF."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from specdec.config import SamplingParams, SpecConfig
from specdec.spec.peagle import best_first
from tests.harness import GREEDY, P, R, assert_same, engine, run
from tests.spec.heads import Plain, knowing_head, random_head, tree
from tests.spec.test_eagle3 import drafts

FLAGS = {
    "plain": {},
    "three layers": {"num_layers": 3, "norm_before_residual": True, "norm_before_fc": True},
    "own embedding, window": {"own_embedding": True, "windows": (9,), "num_depths": 3},
}


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("width", [1, 3])
def test_drafts_are_those_of_a_plain_computation(flags: str, width: int) -> None:
    head = random_head("peagle", **FLAGS[flags])
    shape = tree("peagle", nodes=1 + 5 * width, depth=5, width=width, head=head)
    found = run(engine(shape, deterministic=True, max_num_batched_tokens=17), {"r": (R[:20], GREEDY)}, trace=True)["r"]
    plain, tokens = Plain(head), [*R[:20], *found.outputs[0].token_ids]
    steps = drafts(found)
    assert len(steps) > 20
    for held, drafted, parents in steps[::4]:
        depth = [0] * len(drafted)
        for i in range(1, len(drafted)):
            depth[i] = depth[parents[i]] + 1
        assert max(depth) <= FLAGS[flags].get("num_depths", 5)
        laws = plain.marginals(tokens[:held], max(depth))
        for i in range(1, len(drafted)):
            assert drafted[i] in plain.best(laws[depth[i] - 1], width)
        if width == 1:
            assert depth == list(range(len(drafted)))


@pytest.mark.parametrize("width", [1, 3])
def test_with_a_transition_children_follow_from_the_draft_before(width: int) -> None:
    """The children of every node are the best after it, whatever came before that; those of the root are the marginal's."""
    head = random_head("peagle", transition=24)
    shape = tree("peagle", nodes=1 + 5 * width, depth=5, width=width, head=head)
    found = run(engine(shape, deterministic=True, max_num_batched_tokens=17), {"r": (R[:20], GREEDY)}, trace=True)["r"]
    plain, tokens = Plain(head), [*R[:20], *found.outputs[0].token_ids]
    steps, differing = drafts(found), 0
    assert len(steps) > 20
    for held, drafted, parents in steps[::4]:
        depth = [0] * len(drafted)
        for i in range(1, len(drafted)):
            depth[i] = depth[parents[i]] + 1
            marginal = plain.marginals(tokens[:held], depth[i])[-1]
            law = marginal if depth[i] == 1 else plain.follower(tokens[:held], depth[i], drafted[parents[i]])
            assert drafted[i] in plain.best(law, width)
            differing += drafted[i] not in plain.best(marginal, width)
    assert differing > 10  # a transition that changed nothing would pass as well


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_first_depth_of_a_head_that_knows_the_target_is_right(temperature: float) -> None:
    """Its mask rows know no token, so one draft is accepted per step, and now and then one more by luck."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=40, ignore_eos=True)
    shape = tree("peagle", nodes=8, depth=3, width=3, head=knowing_head("peagle"))
    requests = {f"r{i}": (P[i:], replace(params, seed=i)) for i in range(3)}
    expected = run(engine(kind="last", deterministic=True), requests)
    for name, output in run(engine(shape, kind="last", deterministic=True), requests).items():
        assert_same(output, expected[name], tolerance=0)
        assert output.metrics.acceptance_length >= 1.9


def test_best_first_takes_the_likeliest_combinations() -> None:
    """Against all paths of the product, sorted."""
    dice = random.Random(3)
    for _ in range(50):
        depths, width, nodes = dice.randint(1, 4), dice.randint(1, 4), dice.randint(2, 20)
        options = [[(10 * d + r, dice.random(), r) for r in range(width)] for d in range(depths)]
        ends = frozenset(dice.sample(range(40), 3))
        draft = best_first(99, options, nodes, ends)
        scores = []
        for depth in range(1, depths + 1):
            for path in product(*options[:depth]):
                if not any(token in ends for token, _, _ in path[:-1]):
                    score = 1.0
                    for _, rate, _ in path:
                        score *= rate
                    scores.append(score)
        scores.sort(reverse=True)
        assert sorted(draft.scores[1:], reverse=True) == pytest.approx(scores[: nodes - 1])
        assert all(parent < i for i, parent in enumerate(draft.parents))


def test_both_heads_serve_auto_side_by_side() -> None:
    """One engine, two heads, a request for each and one for all; the taps are shared."""
    from specdec.spec import heads as module

    shipped = {"peagle": random_head("peagle", taps=(0, 2))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "shipped_heads", lambda name: shipped)
        target = engine(SpecConfig(method="auto", head=random_head("eagle3"), nodes=8, depth=3, width=2), deterministic=True)
    assert list(target.proposers) == ["eagle3", "peagle", "suffix", "ngram"]
    assert target.runner.taps == (0, 1, 2)
    requests = {str(method): (R, replace(GREEDY, speculation=method)) for method in (None, "eagle3", "peagle", "off")}
    expected = {name: run(engine(deterministic=True), {name: (R, GREEDY)})[name] for name in requests}
    for name, output in run(target, requests).items():
        assert_same(output, expected[name], tolerance=0)
