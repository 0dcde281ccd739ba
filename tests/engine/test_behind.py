"""The host one step behind where heads draft: the same tokens, statistics and caches as the plain loop. A replay is the pass itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec import boot, ops
from specdec.behind import Wait
from specdec.config import SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.overlap import Flight
from specdec.runner.graphs import Outputs
from specdec.runner.runner import ModelRunner
from specdec.spec.tree import ancestor_words, root_only, tree_from_lists
from specdec.trace import TracedStep
from specdec.types import NO_DRAFT, Scheduled, SpecBudget, StepPlan, StepStats
from tests.engine.test_overlap import STATISTICS, cached
from tests.harness import GREEDY, Log, P, R, assert_same, drain, engine, run
from tests.spec import heads
from tests.spec.simulator import LineCost

SHAPES = {
    "eagle3 chain": heads.chain("eagle3", 3),
    "eagle3 tree": heads.tree("eagle3"),
    "eagle3 wide": heads.tree("eagle3", nodes=24, depth=4, width=5),
    "peagle chain": heads.chain("peagle", 3),
    "following tree": heads.tree("peagle", head=heads.random_head("peagle", transition=24)),
}


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def recorder(run: Callable[[], Outputs]) -> Callable[[], Outputs]:
        return run

    monkeypatch.setattr(boot, "_recorder", lambda config, device: lambda: recorder)
    monkeypatch.setattr(ModelRunner, "measure", lambda self, rows, context: 1.0 + 0.01 * rows)


def pair(spec: SpecConfig, **options: Any) -> list[Engine]:
    """The plain loop, and one step behind."""
    options = {"dtype": "bfloat16", "deterministic": True} | options
    return [engine(spec, overlap=on, **options) for on in (False, True)]


def followed(target: Engine) -> list[int]:
    """Sequences of each step that is begun behind another from now on."""
    counts: list[int] = []
    follow = target.behind.follow

    def seen(*args: Any) -> Any:
        found = follow(*args)
        if isinstance(found, Flight):
            counts.append(len(found.plan.scheduled))
        return found

    target.behind.follow = seen  # type: ignore[method-assign]
    return counts


DRAFTING = (*STATISTICS, "drafts", "accepted_position")


def watched(target: Engine) -> list[tuple[Any, ...]]:
    """Statistics, and what has been learned, of every step from now on until somebody nears his end: there the plain loop drafts no deeper
    than the request has room, while a step begun behind another drafts as ever."""
    seen: list[tuple[Any, ...]] = []
    near = False

    def observe(stats: StepStats) -> None:
        nonlocal near
        if not near:
            seen.append((*(copy.deepcopy(getattr(stats, name)) for name in DRAFTING), learned(target)))
        near |= any(seq.remaining <= target.config.speculation.depth + 1 for seq in target.scheduler.running)

    target.observers.append(observe)
    return seen


def learned(target: Engine) -> list[bytes]:
    return [drafter.scores.rates.tobytes() for drafter in target.proposers.values()]  # type: ignore[attr-defined]


def requests(count: int, temperature: float, **fields: Any) -> dict[str, Any]:
    params = SamplingParams(temperature=temperature, seed=11, ignore_eos=True, **fields)
    return {f"r{i}": ([i + 3, *P], replace(params, max_tokens=20 + 2 * i)) for i in range(count)}


def same(targets: list[Engine], asked: dict[str, Any], *, at_least: int = 5) -> dict[str, Any]:
    """Runs both; tokens and what is cached are the same, and statistics, traces and what was learned step for step, until somebody nears
    his end. At least so many steps follow."""
    counts, seen = followed(targets[1]), [watched(target) for target in targets]
    found = [run(target, asked, trace=True) for target in targets]
    synthetic = targets[0].config.speculation.verify == "synthetic"  # then drafts are the text
    for name in asked:
        if not synthetic:
            assert_same(found[1][name], found[0][name], tolerance=0)
        told = [outputs[name].trace.steps[: len(seen[0])] for outputs in found]
        assert [untimed(step) for step in told[1]] == [untimed(step) for step in told[0]]
    assert len(counts) >= at_least
    assert seen[1] == seen[0] != []
    if not synthetic:
        assert [set(group) for group in cached(targets[1])] == [set(group) for group in cached(targets[0])]
    return found[1]


def untimed(step: TracedStep) -> TracedStep:
    return replace(step, draft_seconds=0.0, forward_seconds=0.0, verify_seconds=0.0, step_seconds=0.0)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_same_as_the_plain_loop(shape: SpecConfig, temperature: float, count: int) -> None:
    same(pair(shape), requests(count, temperature))


@pytest.mark.parametrize("shape", [heads.chain, heads.tree])
@pytest.mark.parametrize("kind", ["last", "two_groups"])
def test_what_is_accepted(shape: Any, kind: str) -> None:
    """A head that is right: long paths. Windows slide over them."""
    head = heads.knowing_head("eagle3") if kind == "last" else heads.random_head("eagle3", kind="two_groups")
    found = same(pair(shape("eagle3", head=head), kind=kind), requests(3, 0.0), at_least=2)
    assert sum(output.metrics.accepted for output in found.values()) > (30 if kind == "last" else -1)


def test_what_is_accepted_moves() -> None:
    """A head that is right about which tokens may come, and not about the noise: paths through later children."""
    spec = heads.tree("eagle3", nodes=20, width=4, head=heads.knowing_head("eagle3", flat=0.3))
    targets, moves = pair(spec, kind="last"), []
    move = targets[0].kv.move

    def moved(group: int, source: Any, target: Any) -> None:
        moves.extend(target.tolist())
        move(group, source, target)

    targets[0].kv.move = moved  # type: ignore[method-assign]
    same(targets, requests(3, 0.9), at_least=2)
    assert moves


@pytest.mark.parametrize("method", ["eagle3", "peagle"])
@pytest.mark.parametrize("shape", [heads.chain, heads.tree])
def test_synthetic_acceptance(method: str, shape: Any) -> None:
    head = heads.random_head(method, transition=24) if method == "peagle" else None
    spec = shape(method, depth=3, head=head, verify="synthetic", synthetic_acceptance=(0.9, 0.7, 0.5))
    found = same(pair(spec), requests(3, 0.0), at_least=3)
    assert all(output.metrics.acceptance_length > 2 for output in found.values())


@pytest.mark.skipif(ops.WHY_NO_TRITON is not None or torch.cuda.is_available(), reason="interpreted")
@pytest.mark.parametrize("synthetic", [False, True])
def test_by_the_kernels_of_a_card(synthetic: bool) -> None:
    """What is around the passes, by the kernels of a card, interpreted: the same tokens as by the references."""
    forced = {"verify": "synthetic", "synthetic_acceptance": (0.9, 0.7, 0.5)} if synthetic else {}
    spec = heads.tree("eagle3", depth=3, **forced)
    asked = {name: (ids, replace(params, max_tokens=9)) for name, (ids, params) in requests(3, 0.9).items()}
    found = [run(pair(spec)[1], asked)]
    with ExitStack() as stack:
        for op in ("coupled_verify", "tree_walk", "tree_layout", "compaction_slots", "pad_batch", "gather_pairs"):
            stack.enter_context(ops.override(op, "triton"))
        target = pair(spec)[1]
        counts = followed(target)
        found.append(run(target, asked))
    assert counts
    for name in asked:
        assert found[1][name].outputs[0].token_ids == found[0][name].outputs[0].token_ids
        assert found[1][name].metrics.accepted == found[0][name].metrics.accepted


def test_trees_are_laid_out_on_the_device_as_on_the_host() -> None:
    target = pair(heads.tree("eagle3"), kind="two_groups")[1]
    for i in range(3):
        target.add_request(str(i), [i + 3, *P], GREEDY)
    for _ in range(3):
        target.step()
    shares = [Scheduled(seq, 1, True) for seq in target.scheduler.running]
    target.scheduler.extend({share.seq: len(share.seq.tokens) + 8 for share in shares})
    tree = tree_from_lists([([7, 8, 9, 10], [-1, 0, 0, 2], None), ([5, 6, 7, 8], [-1, 0, 1, 2], None), ([1, 2, 3, 4], [-1, 0, 0, 0], None)])
    host = target.builder.build(StepPlan(tuple(shares)), tree)
    slots, tables = target.builder.tables_of([share.seq for share in shares])
    words, lengths = ancestor_words(tree), target.sampling.length.clone()
    lengths[slots] = torch.tensor([share.seq.num_computed + 1 for share in shares])
    found = target.builder.trees(tree, tree.num_nodes, words, lengths, slots, tables)
    for name in ("input_ids", "positions", "cu_query", "ctx_lens", "tree_len", "tree_mask", "slot_mapping", "logit_rows"):
        assert torch.equal(getattr(found, name), getattr(host, name)), name
    blocks = host.block_tables.shape[2]
    assert torch.equal(found.block_tables[:, :, :blocks], host.block_tables)
    fewer = target.builder.trees(tree, torch.tensor([4, 2, 1]), words, lengths, slots, tables)
    assert (fewer.slot_mapping < 0).tolist() == [[False] * 6 + [True] * 2 + [False] + [True] * 3] * 2


def test_an_end_token_in_the_middle() -> None:
    """It is drafted, too: trees end there, with fewer nodes than planned."""
    spec = heads.chain("eagle3", 3, head=heads.knowing_head("eagle3"))
    asked = requests(3, 0.0)
    free = run(pair(spec, kind="last")[0], asked)
    ends = [free[name].outputs[0].token_ids[8 + 2 * i] for i, name in enumerate(asked)]
    asked = {name: (ids, replace(params, stop_token_ids=[end])) for (name, (ids, params)), end in zip(asked.items(), ends, strict=True)}
    same(pair(spec, kind="last"), asked, at_least=1)


def test_a_stop_string_in_the_middle() -> None:
    spec = heads.tree("eagle3")
    asked = requests(3, 0.9)
    free = run(pair(spec)[0], asked)
    stop = free["r1"].outputs[0].text[20:22]
    asked["r1"] = (asked["r1"][0], replace(asked["r1"][1], stop=[stop]))
    found = same(pair(spec), asked)
    assert found["r1"].outputs[0].stop_reason == stop
    assert stop not in found["r1"].outputs[0].text


def test_abort_while_in_flight() -> None:
    """The request slot and the blocks go to a new request while the old rows are still under way."""
    spec = heads.tree("eagle3")
    plain, target = pair(spec, max_num_seqs=2)
    counts = followed(target)
    target.add_request("a", P, replace(GREEDY, max_tokens=60))
    target.add_request("b", R, replace(GREEDY, max_tokens=60))
    for _ in range(6):
        target.step()
    assert counts and target._flight is not None
    target.abort("a")
    sampled = replace(GREEDY, temperature=0.9, seed=5)
    target.add_request("c", P, sampled)
    outputs = drain(target, Log())
    assert outputs["a"].outputs[0].finish_reason == "abort"
    expected = run(plain, {"b": (R, replace(GREEDY, max_tokens=60)), "c": (P, sampled)})
    assert outputs["c"].outputs[0].token_ids == expected["c"].outputs[0].token_ids
    assert expected["b"].outputs[0].token_ids[-len(outputs["b"].outputs[0].token_ids) :] == outputs["b"].outputs[0].token_ids


def test_an_admission_in_the_middle() -> None:
    spec = heads.chain("eagle3", 3)
    found = []
    for target in pair(spec):
        counts = followed(target)
        log = Log()
        target.add_request("a", P, replace(GREEDY, max_tokens=50))
        for _ in range(6):
            for delta in target.step():
                log.deltas.setdefault(delta.request_id, []).append(delta)
        target.add_request("b", R, replace(GREEDY, max_tokens=30))
        found.append(drain(target, log))
    assert 2 in counts and 1 in counts
    for name in ("a", "b"):
        assert_same(found[1][name], found[0][name], tolerance=0)


@pytest.mark.parametrize("shape", ["eagle3 tree", "peagle chain"])
def test_preemption_for_want_of_blocks(shape: str) -> None:
    targets, asked, logs = pair(SHAPES[shape], num_kv_blocks=40), requests(8, 0.9), (Log(), Log())
    counts = followed(targets[1])
    found = [run(target, asked, log=log) for target, log in zip(targets, logs, strict=True)]
    assert logs[0].preempted and logs[1].preempted and counts
    for name in asked:
        assert_same(found[1][name], found[0][name], tolerance=0)


def test_heads_are_swapped_in_flight() -> None:
    """The step in flight is committed with the head that drafted it; with a head on trial nobody goes ahead."""
    spec = heads.tree("eagle3")
    found = []
    for target in pair(spec):
        counts, log = followed(target), Log()
        target.add_request("a", P, replace(GREEDY, max_tokens=60))
        for _ in range(6):
            for delta in target.step():
                log.deltas.setdefault(delta.request_id, []).append(delta)
        before = len(counts)
        target.swap_heads(target.heads.load(heads.random_head("eagle3", seed=5)))
        found.append(drain(target, log)["a"])
    assert before and (len(counts) == before) == target.heads.on_trial
    assert_same(found[1], found[0], tolerance=0)


@pytest.mark.parametrize(
    "fields", [{"top_p": 0.9}, {"logprobs": 1}, {"repetition_penalty": 1.2}, {"bad_words": ["xyz"]}], ids=lambda fields: next(iter(fields))
)
def test_what_waits_for_the_verdict(fields: dict[str, Any]) -> None:
    same(pair(heads.chain("eagle3", 3)), requests(1, 0.9, **fields), at_least=0)
    target = pair(heads.chain("eagle3", 3))[1]
    counts = followed(target)
    run(target, requests(1, 0.9, **fields))
    assert not counts


# -- ends ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["eagle3 chain", "eagle3 tree", "following tree"])
def test_requests_that_end_at_different_times_keep_being_followed(shape: str) -> None:
    """One of 12 ends nearly always; only steps before which everybody may have ended wait."""
    targets, seen = pair(SHAPES[shape]), list[StepStats]()
    targets[1].observers.append(lambda stats: seen.append(stats))
    asked = {name: (ids, replace(params, max_tokens=6 + 3 * i)) for i, (name, (ids, params)) in enumerate(requests(12, 0.9).items())}
    found = [run(target, asked) for target in targets]
    for name in asked:
        assert_same(found[1][name], found[0][name], tolerance=0)
    waited = [stats.waited for stats in seen if stats.waited is not None]
    assert len(seen) > 20 and set(waited) <= {"end", "budget"} and len(waited) <= 4


def test_up_to_the_last_position_that_a_model_has() -> None:
    """Rows of drafts that nobody has room for stand beyond it."""
    targets = pair(SHAPES["eagle3 wide"], max_model_len=64)
    asked = {f"r{i}": ([i + 3, *P], replace(GREEDY, max_tokens=64 - len(P) - 1 - i)) for i in range(3)}
    found = [run(target, asked) for target in targets]
    for name in asked:
        assert_same(found[1][name], found[0][name], tolerance=0)


def test_late_ends_in_blocks_that_are_short() -> None:
    targets = pair(SHAPES["eagle3 tree"], num_kv_blocks=36, max_num_seqs=4)
    asked = requests(9, 0.9)
    found = [run(target, asked) for target in targets]
    for name in asked:
        assert_same(found[1][name], found[0][name], tolerance=0)


@pytest.mark.parametrize("most", [2, 3, 6])
@pytest.mark.parametrize("extra", range(4))
def test_the_longest_ends_first(most: int, extra: int) -> None:
    """Its accepted nodes are moved though it has no share in what follows, wherever its blocks end."""
    targets = pair(SHAPES["eagle3 wide"])
    asked = {"long": (R + P[:extra], replace(GREEDY, max_tokens=most)), "short": (P, replace(GREEDY, max_tokens=24))}
    found = [run(target, asked) for target in targets]
    for name in asked:
        assert_same(found[1][name], found[0][name], tolerance=0)


def test_behind_trees_of_roots_alone() -> None:
    """Somebody was to draft, nobody did, and next nobody is to."""
    target = pair(SHAPES["eagle3 chain"])[1]
    target.add_request("a", P, GREEDY)
    target.step()
    seq = target.scheduler.running[0]
    budget = SpecBudget("eagle3", 4, 3, 1, feeds=True)
    target.scheduler.extend({seq: len(seq.tokens) + 8})
    flight = target.launcher.launch(StepPlan((Scheduled(seq, 1, True, budget),)), root_only([seq.tokens[-1]]), 0.0)
    assert target.behind.follow(flight, {seq: NO_DRAFT}) is Wait.BUDGET


# -- the auto policy ----------------------------------------------------------------------------------------------------


def auto(spec: SpecConfig, *, first: float = 1.0, per_row: float = 0.01, **options: Any) -> list[Engine]:
    """`pair` under the auto policy, with costs that are not measured."""
    targets = pair(replace(spec, policy="auto"), **options)
    for target in targets:
        shared = target.policy.shared
        assert (shared is not None) == target.overlap
        target.policy.cost = LineCost(first=first, per_row=per_row)
        if shared is not None:
            shared._cost = target.policy.cost
            shared.took = lambda stats: None  # type: ignore[method-assign]
    return targets


def drafting(seen: list[StepStats]) -> list[StepStats]:
    return [stats for stats in seen if stats.drafts]


AUTO = {
    "eagle3 chain": heads.chain("eagle3", 4, head=heads.knowing_head("eagle3")),
    "eagle3 tree": heads.tree("eagle3", nodes=16, width=2, head=heads.knowing_head("eagle3", flat=0.3, noise_share=0.3)),
    "peagle chain": heads.chain("peagle", 3, head=heads.knowing_head("peagle")),
    "peagle tree": heads.tree("peagle", nodes=8, width=2, head=heads.knowing_head("peagle")),
}


@pytest.mark.parametrize("shape", AUTO.values(), ids=AUTO)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("count", [1, 5])
def test_auto_follows(shape: SpecConfig, temperature: float, count: int) -> None:
    """What is said is the same; nine of ten drafting steps follow another, and all statistics are there."""
    targets, seen = auto(shape, kind="last"), list[StepStats]()
    targets[1].observers.append(lambda stats: seen.append(stats))
    asked = {
        f"r{i}": ([i + 3, *P], SamplingParams(temperature=temperature, seed=i, ignore_eos=True, max_tokens=60 + i)) for i in range(count)
    }
    asked |= {f"s{i}": request for i, request in enumerate(asked.values())}  # the same once more, with what has been learned
    log = Log()
    found = [run(targets[0], asked), run(targets[1], asked, log=log)]
    for name in asked:
        assert_same(found[1][name], found[0][name], tolerance=0)
    drafts = drafting(seen)
    assert len(drafts) > 0.7 * len(seen)
    late = drafts[4:]
    assert sum(stats.waited is None for stats in late) >= 0.9 * len(late)
    accepted = sum(output.metrics.accepted for output in found[1].values())
    assert accepted == sum(sum(stats.accepted.values()) for stats in seen) > 20
    assert targets[1].policy.gain() is not None


def test_auto_gives_up_a_head_that_is_worth_nothing() -> None:
    """It is seen in steps that nobody waits for, and probed again later."""
    targets, seen = auto(heads.chain("eagle3", 4)), list[StepStats]()
    targets[1].observers.append(lambda stats: seen.append(stats))
    for turn in range(4):
        asked = {f"{turn}": ([turn + 3, *P], SamplingParams(temperature=0.9, seed=turn, ignore_eos=True, max_tokens=100))}
        found = [run(target, asked) for target in targets]
        assert_same(found[1][f"{turn}"], found[0][f"{turn}"], tolerance=0)
    drafts = drafting(seen)
    assert any(stats.waited is None for stats in drafts)
    assert 4 < len(drafts) < 0.15 * len(seen)
    assert drafts[-1].step > 60  # probed


def test_auto_mixes_with_requests_that_wait() -> None:
    """A request that may not draft, and one whose law the host must look at, take the whole batch with them and give it back."""
    shape = AUTO["eagle3 chain"]
    asked: dict[str, Any] = {f"r{i}": ([i + 3, *P], replace(GREEDY, max_tokens=90)) for i in range(3)}
    asked["off"] = (P, replace(GREEDY, max_tokens=12, speculation={"method": "off"}))
    asked["law"] = (R, replace(GREEDY, max_tokens=10, repetition_penalty=1.3))
    asked["told"] = (R, replace(GREEDY, max_tokens=10, logprobs=1))
    targets, seen = auto(shape, kind="last"), list[StepStats]()
    targets[1].observers.append(lambda stats: seen.append(stats))
    found = [run(target, asked) for target in targets]
    for name in asked:
        assert_same(found[1][name], found[0][name], tolerance=0)
    alone = [stats for stats in drafting(seen) if stats.num_seqs == 3]
    assert len(alone) > 6 and sum(stats.waited is None for stats in alone) >= len(alone) - 2
    assert {stats.waited for stats in drafting(seen)} == {None, "budget", "law"}
