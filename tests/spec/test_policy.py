"""The policy in simulation: never lose, find gains, collapse and recovery, load, limits, reasons. Time is simulated."""

from __future__ import annotations

import random
import statistics

import pytest

from specdec.config import SamplingParams, SpecConfig
from specdec.spec.acceptance import (
    MAX_DEPTH,
    TRIED,
    DepthRates,
    DrafterRecord,
    Ledger,
    Reliability,
    SequenceRecord,
    expected_tokens,
    synthesise,
)
from specdec.spec.allocate import Candidate, allocate
from specdec.spec.choice import least_chance, paying_depth, widest
from specdec.spec.limits import Limits, limits_of
from specdec.spec.make import make_policy
from specdec.spec.median import Median
from specdec.spec.policy import SpecPolicy
from specdec.spec.tree import root_only, tree_from_lists
from specdec.types import NO_DRAFT, Scheduled, SpecBudget, StepStats
from tests.spec.drafting import judge, lists, sequence
from tests.spec.simulator import Fake, LineCost, LoadCost, RowLoadCost, constant, simulate

FOUR = SpecConfig(method="wrong", nodes=5, depth=4, width=1)


def policy(*names: str, config: SpecConfig | None = None, cost: LineCost | None = None) -> SpecPolicy:
    config = config or SpecConfig(method="auto", nodes=16, depth=15, width=2)
    return SpecPolicy(config, {n: Fake(n) for n in names or ("ngram",)}, cost or LineCost())


# -- never lose -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("cost", [LoadCost, RowLoadCost])
def test_hopeless_drafts_stop_within_twenty_steps_and_cost_three_percent(batch, cost):
    result = simulate({"wrong": constant(0.0, claim=0.8)}, cost=cost(), lengths=[40] * batch, config=FOUR)
    assert result.ratio <= 1.03
    assert not any(any(step) for step in result.drafts[20:])


def test_good_drafts_are_used_at_batch_one_and_dropped_under_load():
    ratios = {b: simulate({"mix": constant(0.9, 0.8)}, cost=LoadCost(), lengths=[40] * b, config=FOUR).ratio for b in (1, 2, 4, 8, 16)}
    assert max(ratios[1], ratios[2], ratios[4]) < 0.5
    assert ratios[8] <= 1.0 and ratios[16] <= 1.0


def test_crossing_the_load_threshold_back_and_forth_never_stalls():
    """Sequences of different lengths: the batch falls from 16 to 1, drafting starts as soon as it pays and only then."""
    result = simulate({"mix": constant(0.9, 0.8)}, cost=LoadCost(), lengths=[20 + 6 * i for i in range(16)], config=FOUR)
    for step in result.drafts:
        assert not any(step) or len(step) <= 5
    assert any(any(step) for step in result.drafts)
    assert result.ratio < 1.0


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("claim", [None, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("per_row", [0.3e-3, 1e-3, 3e-3])
def test_never_lose_bound_for_hopeless_drafters(rate, claim, per_row):
    for seed in range(3):
        result = simulate({"ngram": constant(rate, claim)}, cost=LineCost(per_row=per_row), lengths=[220], seed=seed)
        assert result.ratio <= 1.03


def test_hopeless_drafter_over_many_short_requests():
    config = SpecConfig(method="ngram", nodes=16, depth=15, width=1)
    shared = SpecPolicy(config, {"ngram": Fake("ngram")}, LineCost())
    ratios = [simulate({"ngram": constant(0.0, 0.9)}, cost=LineCost(), lengths=[32], policy=shared, seed=i).ratio for i in range(40)]
    assert sum(ratios) / len(ratios) <= 1.015
    assert max(ratios) <= 1.03


def test_costly_hopeless_drafter_goes_dormant():
    """A draft model whose every draft costs half a row: asked for less and less, total loss bounded."""
    config = SpecConfig(method="draft_model", nodes=8, depth=7, width=1)
    result = simulate({"draft_model": constant(0.02, 0.8)}, cost=LineCost(), lengths=[400], config=config, draft_seconds=4e-4)
    assert result.ratio <= 1.03
    drafted = [any(step) for step in result.drafts]
    assert sum(drafted[200:]) <= 6


def test_lookups_that_find_nothing_do_not_use_up_the_allowance():
    """Two hundred empty lookups at 1.5 % of a step each, then copying starts: it is drafted at once."""

    def late(seq, depth, dice):
        return [(True, 0.95 ** (i + 1)) for i in range(depth)] if seq.num_output >= 200 else []

    result = simulate({"ngram": late}, cost=LineCost(), lengths=[300], draft_seconds=1.2e-4 / 15)
    assert not any(map(any, result.drafts[:200]))
    assert len(result.drafts) < 225


# -- find gains -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "bound"), [(0.5, 0.85), (0.7, 0.7), (0.9, 0.45), (0.97, 0.32)])
def test_gain_grows_with_acceptance(rate, bound):
    ratios = [simulate({"ngram": constant(rate)}, cost=LineCost(), lengths=[200], seed=s).ratio for s in range(6)]
    assert sum(ratios) / len(ratios) < bound


def test_copy_regime_comes_close_to_an_oracle_policy():
    """Runs of 25 right tokens between stretches of 15 hopeless ones, honest scores: within 12 % of knowing which is which."""

    def copying(seq, depth, dice):
        phase = seq.num_output % 40
        good = max(0, 25 - phase)
        return [(i < good, 0.97 ** (i + 1) if i < good else 0.1 ** (i + 1)) for i in range(depth)]

    result = simulate({"ngram": copying}, cost=LineCost(), lengths=[400])
    cost = LineCost()
    oracle = 10 * (cost.base(16, 1) + cost.base(10, 1) + 15 * cost.base(1, 1))
    assert result.seconds < 1.12 * oracle


def test_collapse_is_noticed_and_recovery_too():
    """A perfect drafter that turns useless at 200 and perfect again at 400, claiming the same confidence throughout."""

    def phases(seq, depth, dice):
        good = not 200 <= seq.num_output < 400
        return [(good, 0.9 ** (i + 1)) for i in range(depth)]

    result = simulate({"ngram": phases}, cost=LineCost(), lengths=[700])
    position, useless, after = 0, 0, []
    for step in result.drafts:
        if 200 <= position < 400:
            useless += step[0]
            position += 1
        else:
            if position >= 550:
                after.append(step[0])
            position = min(position + 1 + step[0], 700) if position < 200 else position + 1 + step[0]
    assert useless * 1e-3 < 0.06 * 200 * 8e-3  # a credit won before may be spent, no more
    assert sum(after) / len(after) > 4


def test_long_drafts_only_where_confident():
    def two_kinds(seq, depth, dice):
        sure = seq.num_output * 7919 % 10 < 5
        return [(sure or dice.random() < 0.3, (0.98 if sure else 0.3) ** (i + 1)) for i in range(depth)]

    result = simulate({"ngram": two_kinds}, cost=LineCost(), lengths=[400])
    lengths = [step[0] for step in result.drafts[20:]]
    assert max(lengths) >= 12
    assert sum(1 for n in lengths if n <= 2) > 0.25 * len(lengths)


def test_portfolio_finds_the_better_drafter():
    made = {"ngram": constant(0.1), "suffix": constant(0.9)}
    both = [simulate(made, cost=LineCost(), lengths=[200], seed=s).ratio for s in range(4)]
    swapped = [simulate({"ngram": made["suffix"], "suffix": made["ngram"]}, cost=LineCost(), lengths=[200], seed=s).ratio for s in range(4)]
    assert sum(both) / 4 < 0.6 and sum(swapped) / 4 < 0.6


def test_one_bad_sequence_does_not_spoil_the_others():
    def by_sequence(seq, depth, dice):
        return [(seq.seed != 0 and dice.random() < 0.9, 0.9 ** (i + 1)) for i in range(depth)]

    result = simulate({"ngram": by_sequence}, cost=LineCost(per_row=0.3e-3), lengths=[150, 600, 600, 600])
    together = [step for step in result.drafts[10:] if len(step) == 4]
    assert len(together) > 60
    assert sum(sum(step[1:]) for step in together) / (3 * len(together)) > 3
    assert sum(step[0] for step in together) < 0.1 * len(together)


def test_same_decisions_for_the_same_history():
    runs = [simulate({"ngram": constant(0.6)}, cost=LineCost(), lengths=[100, 80], seed=3).drafts for _ in range(2)]
    assert runs[0] == runs[1]


# -- limits, reasons, shapes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, Limits(("ngram", "suffix"), 16, 15, 2)),
        ({"method": "off"}, Limits((), 16, 15, 2)),
        ({"method": "suffix", "nodes": 4}, Limits(("suffix",), 4, 15, 2)),
        ({"method": "auto", "nodes": 60, "depth": 3, "width": 1}, Limits(("ngram", "suffix"), 16, 3, 1)),
        ({"method": "eagle3"}, Limits((), 16, 15, 2)),
        ({"method": None, "nodes": None}, Limits(("ngram", "suffix"), 16, 15, 2)),
    ],
)
def test_requests_narrow_and_never_widen(asked, expected):
    config = SpecConfig(method="auto", nodes=16, depth=15, width=2)
    assert limits_of(asked, config, ("ngram", "suffix")) == expected


def test_request_limit_wins_over_everything():
    off = simulate({"ngram": constant(1.0)}, cost=LineCost(), lengths=[40], params={"method": "off"})
    assert off.ratio == pytest.approx(1.0) and not any(map(any, off.drafts))
    three = simulate({"ngram": constant(1.0)}, cost=LineCost(), lengths=[80], params={"nodes": 3})
    assert max(max(step) for step in three.drafts) == 2
    fixed = SpecConfig(method="ngram", nodes=8, depth=7, width=1, policy="fixed")
    one = simulate({"ngram": constant(1.0)}, cost=LineCost(), lengths=[40], config=fixed, params={"method": "off"})
    assert not any(map(any, one.drafts))


def test_fixed_asks_for_exactly_these_numbers():
    config = SpecConfig(method="ngram", nodes=9, depth=6, width=2, policy="fixed")
    made = SpecPolicy(config, {"ngram": Fake("ngram")}, None)
    seq = sequence([1, 2, 3], max_total=8)
    assert made.budget([seq], None) == {seq: SpecBudget("ngram", 9, 4, 2)}  # a fifth token could not be committed
    seq.max_total = 100
    for _ in range(50):
        assert made.budget([seq], None) == {seq: SpecBudget("ngram", 9, 6, 2)}
    tree = tree_from_lists([([3, 4, 5], [-1, 0, 1], [1.0, 0.01, 0.001])], ["ngram"])
    assert made.trim(tree, (Scheduled(seq, 1, True, SpecBudget("ngram", 9, 6, 2)),)) is tree


def test_reasons_are_counted():
    made = SpecPolicy(SpecConfig(method="auto"), {"ngram": Fake("ngram", max_len=5)}, LineCost(per_row=2.5e-4))
    last, long, refused, fine = sequence([1], max_total=2), sequence([1] * 6), sequence([1]), sequence([1, 2])
    refused.params = SamplingParams(speculation={"method": "off"})
    prefilling = sequence([1, 2, 3])
    prefilling.num_computed = 0
    budgets = made.budget([last, long, refused, fine, prefilling], None)
    assert budgets.keys() == {last, long, refused, fine}
    assert [budgets[s] for s in (last, long, refused)] == [NO_DRAFT] * 3
    shares = (Scheduled(fine, 1, True, budgets[fine]),)
    made.trim(tree_from_lists([([2], [-1], [1.0])]), shares)
    assert made.take_skipped() == {"limit": 2, "draft_len": 1, "no_match": 1}
    assert made.take_skipped() == {}
    made.trim(tree_from_lists([([2, 3], [-1, 0], [1.0, 0.04])]), shares)
    assert made.take_skipped() == {"policy": 1}


def test_load_is_a_reason_too():
    made = policy(cost=LoadCost())
    seqs = [sequence([1, 2]) for _ in range(16)]
    assert set(made.budget(seqs, None).values()) == {NO_DRAFT}
    assert made.take_skipped() == {"policy": 16}


def test_trim_keeps_the_best_subtree_in_order():
    made = policy(cost=LineCost(first=1.0, per_row=0.2))
    seq = sequence([1, 2])
    budget = made.budget([seq], None)[seq]
    made.experience.states[seq].ledger.loss = -10.0
    tree = tree_from_lists([([2, 10, 11, 12, 20, 21], [-1, 0, 1, 2, 0, 4], [1.0, 0.8, 0.7, 0.05, 0.6, 0.05])], ["ngram"])
    kept = made.trim(tree, (Scheduled(seq, 1, True, budget),))
    assert lists(kept) == ([2, 10, 11, 20], [-1, 0, 1, 0])
    assert kept.drafters == ("ngram",)
    assert kept.score is not None and kept.score[0].tolist() == pytest.approx([1.0, 0.8, 0.7, 0.6])


def test_drawn_trees_are_not_pruned():
    import torch

    made = policy(cost=LineCost(first=1.0, per_row=5.0))
    seq = sequence([1, 2])
    made.budget([seq], None)
    tree = tree_from_lists([([2, 10], [-1, 0], [1.0, 0.1])], ["ngram"])
    drawn = type(tree)(tree.tokens, tree.parents, tree.depth, tree.num_nodes, tree.score, torch.zeros(1, 2, 30), tree.drafters)
    assert made.trim(drawn, (Scheduled(seq, 1, True, SpecBudget("ngram", 4, 3, 1)),)) is drawn


def test_a_drafter_without_scores_is_judged_by_depth():
    rates = DepthRates(None, weight=4.0)
    for _ in range(50):
        rates.record(1, True)
        rates.record(2, False)
    raw = [0.0] * 4
    synthesise(raw, [-1, 0, 1, 0], 4, rates)
    assert raw[1] > 0.9 and raw[2] < 0.1 * raw[1] + 0.05 and raw[3] < 0.05
    assert expected_tokens(rates, 2)[2] == pytest.approx(raw[1] + raw[2])


def test_gain_and_states():
    made = policy("ngram", "suffix")
    seq = sequence([1, 2])
    assert made.gain() is None
    made.budget([seq], None)
    assert sorted(s["active"] + s["dormant"] for s in made.states().values()) == [1, 1]
    assert sum(s["active"] for s in made.states().values()) == 1
    made.budget([seq], StepStats(0, 1, 4, 1, 10, step_seconds=16e-3, committed=4))
    assert made.gain() == pytest.approx(2.0)
    made.budget([seq], StepStats(0, 1, 4, 1, 10, step_seconds=1.0, committed=1))  # the same step is counted once
    assert made.gain() == pytest.approx(2.0)
    made.reset(seq)
    assert not any(any(s.values()) for s in made.states().values())


def test_the_cost_model_sees_decoding_steps_without_draft_time():
    cost = LineCost()
    made = policy(cost=cost)
    seq = sequence([1, 2])
    made.budget([seq], None)
    made.drafted("ngram", 3e-3, root_only([2]))
    made.budget([seq], StepStats(0, 1, 4, 1, 10, step_seconds=13e-3, committed=4, drafter_seconds=made.take_drafting()))
    made.budget([seq], StepStats(1, 2, 400, 1, 10, step_seconds=1.0, committed=1, alone=False))  # a prefill share
    assert made.take_drafting() == 0.0
    assert cost.observed == [(4, pytest.approx(10e-3))]


def test_finished_steps_teach_nothing():
    made = policy()
    seq = sequence([1, 2])
    share = Scheduled(seq, 1, True, made.budget([seq], None)[seq])
    tree = made.trim(tree_from_lists([([2, 3], [-1, 0], [1.0, 0.9])], ["ngram"]), (share,))
    verdict = judge(tree, [[9]])
    verdict.finish[0] = 1
    made.observe((share,), tree, verdict)
    assert made.experience.drafters["ngram"].reliability.promised == [0.0, 0.0, 0.0]


# -- parts ------------------------------------------------------------------------------------------------------------


def test_reliability_moves_from_drafter_to_sequence():
    drafter = Reliability(None, weight=6.0, horizon=60.0)
    own = Reliability(drafter, weight=1.5, horizon=20.0)
    assert own.factor(2) == 1.0
    for _ in range(20):
        drafter.record(0.9, False)
    inherited = own.factor(2)
    assert inherited == drafter.factor(2) < 0.3
    for _ in range(20):
        own.record(0.9, True)
    assert own.factor(2) > 0.9 and own.factor(0) == 1.0
    own.forget()
    assert own.factor(2) == inherited


def test_ledger_bounds_losses_and_caps_credit():
    ledger, lost = Ledger(), 0.0
    dice = random.Random(0)
    for step in range(1000):
        ledger.steps = step
        spend = min(dice.random(), max(0.0, ledger.headroom()))
        ledger.record(spend, 0)
        lost += spend
    assert lost <= Ledger.INITIAL + Ledger.SHARE * 1000
    for _ in range(100):
        ledger.record(0.0, 10)
    assert ledger.loss == -Ledger.CREDIT[1]


def test_probes_back_off_exponentially_and_success_restores_trust():
    record = SequenceRecord(DrafterRecord())
    waits = []
    for _ in range(6):
        waits.append(record.interval)
        record.idle = record.interval
        assert record.probe_due()
        record.verified(0, probe=True)
    assert waits == [4, 40, 80, 160, 320, 640]
    record.reliability.record(0.9, False)
    record.verified(2, probe=True)
    assert record.interval == SequenceRecord.LATER and record.reliability.factor(2) == 1.0


def test_widest_follows_the_cost_of_rows():
    assert widest([100], LineCost(first=1.0, per_row=0.0)) == 64
    assert widest([100], LineCost(first=1.0, per_row=1.0)) == 1
    assert widest([100] * 16, LoadCost()) == 1
    middle = widest([100], LineCost())
    assert 8 <= middle <= 32


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("cost", [LineCost(per_key=1e-6), LineCost(per_row=1e-5), LoadCost(), RowLoadCost()])
def test_no_tree_below_the_least_chance_pays(cost, batch):
    contexts = [100] * batch
    least = least_chance(contexts, cost)
    for nodes in (2, 3, 4, 6, 8, 12, 16):
        for drafting in (1, batch):
            trees = [Candidate([1.0] + [max(0.0, least - 1e-9)] * (nodes - 1 if b < drafting else 0), 100, 1e9) for b in range(batch)]
            assert all(kept == [0] for kept in allocate(trees, cost).kept)


def test_who_can_draft_nothing_is_not_asked():
    """No match, a match that promises too little, and one that promises enough; a probe that is due goes ahead all the same."""
    drafter = Fake("ngram")
    made = SpecPolicy(SpecConfig(method="auto", nodes=16, depth=15, width=2), {"ngram": drafter}, LineCost(per_row=1e-3))
    seq = sequence([1, 2])
    for outlook, reason in ((0.0, {"no_match": 1}), (0.05, {"policy": 1}), (0.6, {})):
        drafter.outlook = lambda seq, outlook=outlook: outlook
        drafts = made.budget([seq], None)[seq].nodes > 1
        assert made.take_skipped() == reason and drafts == (not reason)
    drafter.outlook = lambda seq: 0.05
    made.experience.states[seq].records["ngram"].idle = 1000
    assert made.budget([seq], None)[seq].nodes > 1


def test_a_drafter_that_does_not_pay_rests_longer_each_time_and_comes_back():
    record, waits = SequenceRecord(DrafterRecord()), []
    for _ in range(7):
        record.dismiss()
        waits.append(record.rest)
    assert waits == [1, 2, 4, 8, 16, 16, 16]
    for _ in range(SequenceRecord.REST):
        record.step()
    assert record.rest == 0
    record.verified(1, probe=False)
    record.dismiss()
    assert record.rest == 1


def test_what_a_drafter_won_overrules_what_its_depths_promise():
    drafter, cost = DrafterRecord(), LineCost()
    record = SequenceRecord(drafter)
    for _ in range(20):
        record.rates.record(1, True)
    assert paying_depth(record, 1e-3, 4, 1.0, cost.base(1, 1), cost, 1) > 0
    for _ in range(TRIED):
        record.value.record(-0.3)
        drafter.value.record(-0.3)
    assert paying_depth(record, 1e-3, 4, 1.0, cost.base(1, 1), cost, 1) == 0
    welcome = [SequenceRecord(drafter) for _ in range(8)]
    for other in welcome:
        other.idle = SequenceRecord.FIRST
    assert sum(other.trial_due() for other in welcome) == 2  # every fourth sequence tries it soon
    for other in welcome:
        other.idle = SequenceRecord.LATER
    assert all(other.trial_due() for other in welcome)


def test_median_of_the_latest():
    dice, median = random.Random(1), Median(7)
    latest: list[float] = []
    for _ in range(60):
        latest.append(dice.choice([1.0, 2.0, dice.random()]))
        assert median.add(latest[-1]) == statistics.median(latest[-7:])
    median.clear()
    assert median.add(3.0) == 3.0


def test_costly_drafter_drafts_as_deep_as_it_pays():
    record, cost = SequenceRecord(DrafterRecord()), LineCost()
    for _ in range(60):
        for depth in (1, 2, 3):
            record.rates.record(depth, True)
        record.rates.record(4, False)
    assert paying_depth(record, 1e-3, 8, 1.0, cost.base(1, 1), cost, 1) == 3
    assert paying_depth(record, 20e-3, 8, 1.0, cost.base(1, 1), cost, 1) == 0
    assert paying_depth(record, 1e-3, 8, 0.0, cost.base(1, 1), cost, 1) == 0
    record.idle = 1000
    assert paying_depth(record, 20e-3, 8, 1.0, cost.base(1, 1), cost, 1) == 2  # a probe


def test_make_policy_measures_only_what_it_uses(tmp_path):
    calls = []

    def measure(rows: int, context: int) -> float:
        calls.append((rows, context))
        return 1e-3 * (8 + rows)

    made = make_policy(SpecConfig(method="off"), {}, measure)
    assert made.budget([sequence([1, 2])], None) == {} and not calls
    make_policy(SpecConfig(method="ngram", policy="fixed"), {"ngram": Fake("ngram")}, measure)
    assert not calls
    auto = make_policy(SpecConfig(method="ngram"), {"ngram": Fake("ngram")}, measure, max_model_len=256, cache=tmp_path)
    assert calls and max(rows + context for rows, context in calls) <= 256
    assert auto.cost is not None and auto.cost.base(1, 1) == pytest.approx(9e-3)


@pytest.mark.parametrize("parented", [False, True])
def test_all_depths_at_once_are_the_depths_one_by_one(parented: bool) -> None:
    draw, shared = random.Random(3), DepthRates(None, weight=4.0)
    own = DepthRates(shared, weight=2.0) if parented else shared
    for rates in {id(r): r for r in (shared, own)}.values():
        for _ in range(200):
            rates.record(draw.randint(1, 6), draw.random() < 0.6)
    for deepest in (0, 1, MAX_DEPTH, MAX_DEPTH + 3):
        assert own.up_to(deepest) == [own.rate(depth) for depth in range(1, deepest + 1)]
