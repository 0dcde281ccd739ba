"""The alarm on acceptance: how often it rings for nothing, how fast in earnest, and the way back. Seeds are fixed."""

from __future__ import annotations

import logging
import math
import random

import pytest

from specdec.config import SpecConfig
from specdec.spec.acceptance import DepthRates
from specdec.spec.alarm import COLLAPSE, FIRST, LONGEST, OFF_LEVEL, P_MAX, Alarm, Trial, evidence, trials_of
from specdec.spec.policy import SpecPolicy
from specdec.spec.watch import ENOUGH, VERIFIED, Comparison, Watch
from tests.spec.simulator import Fake, LineCost, constant, simulate


def known(rate: float, trials: int = 280) -> DepthRates:
    """Rates of a drafter that has been seen for long."""
    rates = DepthRates(None, weight=4.0)
    rates.trials = [float(trials)] * len(rates.trials)
    rates.hits = [rate * trials] * len(rates.hits)
    return rates


def trials_until_off(rate: float, chance: float, dice: random.Random, limit: int, *, claim: float = 1.0) -> int:
    """Trials of one long sequence, rates learning as they do in the policy, until the alarm rings; `limit` if it does not."""
    shared = known(rate)
    own, alarm = DepthRates(shared, weight=2.0), Alarm()
    own.trials[1], own.hits[1] = 100.0, 100.0 * rate
    for n in range(1, limit):
        hit = dice.random() < chance
        if alarm.record([Trial(1, hit, claim)], own, shared):
            return n
        own.record(1, hit)
        shared.record(1, hit)
    return limit


# -- the test -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8, 0.95, 1.0])
def test_no_false_alarm_in_a_long_life(rate: float) -> None:
    """Promised: one in ten million trials. A fifth of a million are played here, rates learning all the while."""
    assert trials_until_off(rate, rate, random.Random(1), 200_000) == 200_000


def test_the_false_alarm_rate_is_the_one_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a level where alarms are frequent enough to be counted, the mean time between them is at least exp(level)."""
    monkeypatch.setattr("specdec.spec.alarm.OFF_LEVEL", math.log(100))
    dice, rates, total, alarms = random.Random(2), known(0.7), 200_000, 0
    alarm = Alarm()
    for _ in range(total):
        if alarm.record([Trial(1, dice.random() < rates.rate(1), 1.0)], rates, rates):
            alarms, alarm = alarms + 1, Alarm()
    assert alarms > 20
    assert total / alarms >= 100


@pytest.mark.parametrize(("rate", "delay"), [(0.9, 8), (0.7, 16), (0.5, 29)])
def test_total_collapse_is_noticed_after_the_stated_delay(rate: float, delay: int) -> None:
    """Rates that learn the collapse while it goes on cost a few trials more."""
    found = trials_until_off(rate, 0.0, random.Random(3), 1000)
    assert delay <= found <= 1.5 * delay


@pytest.mark.parametrize(("rate", "delay"), [(0.9, 13), (0.7, 27), (0.5, 51)])
def test_a_fall_to_a_quarter_is_noticed_after_the_stated_delay(rate: float, delay: int) -> None:
    found = sorted(trials_until_off(rate, COLLAPSE * rate, random.Random(seed), 5000) for seed in range(101))
    assert 0.6 * delay <= found[50] <= 2 * delay


def test_the_mean_of_the_likelihood_ratio_is_one() -> None:
    """The martingale that bounds false alarms: E[exp(l)] = 1 under the reference chance."""
    for p in (0.01, 0.5, P_MAX):
        for ratio in (COLLAPSE, 0.6):
            mean = p * math.exp(evidence(p, True, ratio)) + (1 - p) * math.exp(evidence(p, False, ratio))
            assert mean == pytest.approx(1.0)


def test_a_drafter_that_knows_it_does_not_know_rings_no_alarm() -> None:
    assert trials_until_off(0.9, 0.05, random.Random(4), 400, claim=0.05) == 400


def test_a_drafter_that_never_was_good_rings_no_alarm() -> None:
    shared = DepthRates(None, weight=4.0)
    own, alarm = DepthRates(shared, weight=2.0), Alarm()
    for _ in range(2000):
        assert not alarm.record([Trial(1, False, 0.8)], own, shared)
        own.record(1, False)
        shared.record(1, False)


def test_one_text_it_does_badly_on_rings_no_alarm_beside_others() -> None:
    """Three sequences at 0.8 and one at 0, new ones after every 60 drafts each."""
    dice, shared, alarm = random.Random(5), known(0.8), Alarm()
    for _ in range(50):
        owns = [DepthRates(shared, weight=2.0) for _ in range(4)]
        for _ in range(60):
            for i, own in enumerate(owns):
                hit = i > 0 and dice.random() < 0.8
                assert not alarm.record([Trial(1, hit, 1.0)], own, shared)
                own.record(1, hit)
                shared.record(1, hit)


# -- the way back ---------------------------------------------------------------------------------------------------------


def collapsed(rate: float = 0.8) -> tuple[Alarm, DepthRates]:
    shared = known(rate)
    alarm = Alarm()
    while not alarm.record([Trial(1, False, 1.0)], shared, shared):
        shared.record(1, False)
    assert alarm.off
    return alarm, shared


def probes(alarm: Alarm, shared: DepthRates, chance: float, dice: random.Random, steps: int) -> tuple[int, int]:
    """(probes of one trial handed out, step at which it was on again or `steps`)."""
    asked = 0
    for step in range(steps):
        alarm.tick()
        if alarm.probe_due:
            asked += 1
            alarm.probed()
            if alarm.record([Trial(1, dice.random() < chance, 1.0)], shared, shared):
                return asked, step
    return asked, steps


def test_the_rates_of_before_the_change_are_kept() -> None:
    alarm, shared = collapsed(0.8)
    assert alarm.before is not None and alarm.before.rate(1) == pytest.approx(known(0.8).rate(1))
    assert shared.rate(1) < alarm.before.rate(1)


def test_probes_of_a_dead_drafter_become_rare() -> None:
    """At most log2(1024 / 16) while the interval grows, then one in 1024 steps."""
    alarm, shared = collapsed()
    asked, on = probes(alarm, shared, 0.0, random.Random(6), 20_000)
    assert on == 20_000 and asked <= math.log2(LONGEST / FIRST) + 1 + 20_000 / LONGEST
    assert alarm.interval == LONGEST


def test_a_probe_that_comes_to_nothing_does_not_count_as_failure() -> None:
    alarm, shared = collapsed()
    alarm.probed()
    assert not alarm.record([], shared, shared) and alarm.interval == FIRST


@pytest.mark.parametrize("chance", [0.8, 0.95])
def test_a_drafter_that_works_again_is_found_soon(chance: float) -> None:
    """Once it works the next probe finds out, and those after it follow step by step; bad luck doubles the wait."""
    waits = []
    for seed in range(101):
        alarm, shared = collapsed()
        dice = random.Random(seed)
        probes(alarm, shared, 0.0, dice, 200)
        wait = alarm.interval
        asked, on = probes(alarm, shared, chance, dice, 10 * LONGEST)
        assert not alarm.off and asked <= 60
        waits.append(on / wait)
    assert sorted(waits)[50] <= 1.2 and max(waits) <= 16


def test_luck_rarely_brings_a_dead_drafter_back() -> None:
    """At a quarter of the old rate, fewer than one return in 200 trials."""
    total, back, dice = 0, 0, random.Random(7)
    for _ in range(200):
        alarm, shared = collapsed()
        asked, _ = probes(alarm, shared, 0.2, dice, 20_000)
        total, back = total + asked, back + (not alarm.off)
    assert back <= total / 200


# -- trials of a tree -------------------------------------------------------------------------------------------------------


def test_trials_are_the_nodes_of_the_accepted_path_that_have_children() -> None:
    """Root with children 1 and 2; 1 with child 3, 2 with child 4; 2 was accepted and 4 was not."""
    parents, depths, scores = [-1, 0, 0, 1, 2], [0, 1, 1, 2, 2], [1.0, 0.5, 0.25, 0.4, 0.2]
    assert trials_of(parents, depths, scores, 5, {2}) == [Trial(1, True, 0.75), Trial(2, False, pytest.approx(0.8))]
    assert trials_of(parents, depths, None, 5, set()) == [Trial(1, False, 1.0)]
    assert trials_of(parents, depths, [0.0] * 5, 3, {2}) == [Trial(1, True, 1.0)]
    assert trials_of([-1], [0], [1.0], 1, set()) == []


# -- in the policy ----------------------------------------------------------------------------------------------------------


class Script:
    """A drafter that works, or not, by the number of sequences it has seen; claims 0.8 a token throughout."""

    def __init__(self) -> None:
        self.good = True

    def __call__(self, seq, depth, dice):
        return [(self.good and dice.random() < 0.9, 0.8 ** (i + 1)) for i in range(depth)]


def test_good_bad_good_over_many_requests(caplog: pytest.LogCaptureFixture) -> None:
    """Off within a few requests of the collapse, for new ones too and with its reason; on again when it works again."""
    config = SpecConfig(method="ngram", nodes=5, depth=4, width=1)
    policy, script = SpecPolicy(config, {"ngram": Fake("ngram")}, LineCost()), Script()
    watch = policy.experience.watch

    def serve(requests: int, seed: int) -> list[list[int]]:
        played = []
        for i in range(requests):
            played += simulate({"ngram": script}, cost=LineCost(), lengths=[60], policy=policy, seed=seed + i).drafts
        return played

    serve(6, 0)
    assert not watch.off and watch.alarms == {}
    script.good = False
    with caplog.at_level(logging.INFO, "specdec"):
        serve(8, 100)
        assert watch.off == {"ngram"} and watch.alarms == {"ngram": 1}
        assert [r.levelname for r in caplog.records] == ["WARNING"] and "collapsed" in caplog.text
        policy.take_skipped()
        rest = serve(20, 200)
        assert policy.take_skipped()["collapsed"] > 0.9 * len(rest)
        assert sum(map(sum, rest)) < 0.02 * len(rest)
        script.good = True
        after = serve(60, 300)
        assert not watch.off and watch.alarms == {"ngram": 1} and "works again" in caplog.text
    assert sum(map(sum, after[-100:])) > 200


def test_the_loss_stays_small_whatever_happens() -> None:
    """A drafter that dies and lives by turns: time over plain decoding of what it could not help with."""
    policy, script = SpecPolicy(SpecConfig(method="ngram", nodes=5, depth=4, width=1), {"ngram": Fake("ngram")}, LineCost()), Script()
    for turn in range(6):
        script.good = turn % 2 == 0
        ratios = [simulate({"ngram": script}, cost=LineCost(), lengths=[60], policy=policy, seed=10 * turn + i).ratio for i in range(20)]
        assert sum(ratios) / len(ratios) <= (0.9 if script.good else 1.02)


def test_another_drafter_takes_over() -> None:
    script = Script()
    policy = SpecPolicy(
        SpecConfig(method="auto", nodes=8, depth=7, width=1), {"suffix": Fake("suffix"), "ngram": Fake("ngram")}, LineCost()
    )
    made = {"suffix": script, "ngram": constant(0.7, 0.8)}
    for i in range(6):
        simulate(made, cost=LineCost(), lengths=[100], policy=policy, seed=i)
    script.good = False
    ratios = [simulate(made, cost=LineCost(), lengths=[100], policy=policy, seed=50 + i).ratio for i in range(12)]
    assert policy.experience.watch.off == {"suffix"}
    assert sum(ratios[6:]) / 6 < 0.75
    assert policy.states() == {name: {"active": 0, "warm": 0, "dormant": 0, "collapsed": 0} for name in ("suffix", "ngram")}


def test_fixed_reports_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    config, script = SpecConfig(method="ngram", nodes=5, depth=4, width=1, policy="fixed"), Script()
    policy = SpecPolicy(config, {"ngram": Fake("ngram")}, None)
    simulate({"ngram": script}, cost=LineCost(), lengths=[400], policy=policy)
    script.good = False
    watch, seen = policy.experience.watch, []
    for seed in range(5):
        drafts = simulate({"ngram": script}, cost=LineCost(), lengths=[100], policy=policy, seed=seed).drafts
        seen.append(watch.collapsed["ngram"])
        assert all(step[0] == 4 for step in drafts[:90])
    assert not seen[0] and seen[-1]  # one text that it does badly on is no collapse
    assert watch.alarms == {"ngram": 1} and not watch.off and caplog.text.count("collapsed") == 1
    script.good = True
    simulate({"ngram": script}, cost=LineCost(), lengths=[100], policy=policy)
    assert watch.collapsed == {"ngram": False}


# -- old head against new -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.5, 0.7, 0.9])
def test_a_useless_head_is_worse_and_an_equal_one_is_not(rate: float) -> None:
    wrong, dice = 0, random.Random(8)
    for _ in range(500):
        equal = Comparison(known(rate))
        while not equal.passed and not equal.worse:
            equal.record([Trial(1, dice.random() < equal.old.rate(1), 1.0)])
        wrong += equal.worse
    assert wrong <= 3 and VERIFIED > 100
    useless = Comparison(known(rate))
    while not useless.worse:
        useless.record([Trial(1, False, 1.0)])
    assert useless.drafts <= 22 and not useless.passed


def test_little_known_of_the_old_head_proves_nothing() -> None:
    comparison = Comparison(known(0.9, ENOUGH - 1))
    for _ in range(VERIFIED):
        comparison.record([Trial(1, False, 1.0)])
    assert comparison.passed and not comparison.worse


def test_an_alarm_on_trial_is_enough() -> None:
    watch, rates = Watch(["eagle3"], warn_only=True), known(0.9)
    watch.replace("eagle3", present=True, comparison=Comparison(DepthRates(None, weight=4.0)))
    for _ in range(20):
        watch.record("eagle3", [Trial(1, False, 1.0)], rates, rates)
    assert watch.comparisons["eagle3"].worse
    watch.replace("eagle3", present=False)
    assert watch.collapsed == {} and watch.comparisons == {} and watch.alarms == {"eagle3": 1} and OFF_LEVEL > 0
