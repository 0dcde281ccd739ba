"""What drafted trees tell of smaller and larger ones, and what steps take."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.spec.profile import ENOUGH, HOPED, TRIAL, Pace, Profile, Shape

SCORES = np.array([[1.0, 0.8, 0.6, 0.3, 0.1, 0.05]], dtype=np.float32)
DEPTHS = np.array([[0, 1, 2, 3, 1, 2]])


def tried(scores: np.ndarray, depths: np.ndarray, shape: Shape, accepted: float | None = None) -> Profile:
    profile = Profile()
    promised = float(scores[:, 1:].sum(axis=1).mean())
    for _ in range(TRIAL):
        profile.learn(scores, depths, np.full(len(scores), scores.shape[1]), shape)
        profile.verified(promised, promised if accepted is None else accepted)
    return profile


def test_a_tree_tells_of_every_smaller_one() -> None:
    profile = tried(SCORES, DEPTHS, Shape(6, 3))
    assert profile.wins(Shape(6, 3)) == pytest.approx(1.85)
    assert profile.wins(Shape(4, 3)) == pytest.approx(1.7)
    assert profile.wins(Shape(4, 2)) == pytest.approx(1.5)
    assert profile.wins(Shape(2, 1)) == pytest.approx(0.8)
    assert profile.wins(Shape(3, 1)) == pytest.approx(0.9)


def test_and_of_larger_ones_as_its_chances_fall() -> None:
    chain = tried(np.array([[1.0, 0.8, 0.6, 0.3]], dtype=np.float32), np.array([[0, 1, 2, 3]]), Shape(4, 3))
    assert chain.wins(Shape(5, 4)) == pytest.approx(1.7 + 0.15)
    assert chain.wins(Shape(6, 5)) == pytest.approx(1.7 + 0.15 + 0.075)
    wide = tried(SCORES, DEPTHS, Shape(6, 3))
    assert 1.85 < wide.wins(Shape(8, 3)) < 1.95 and wide.wins(Shape(6, 5)) > 1.85


def test_what_is_left_out_of_a_tree_has_no_chance() -> None:
    profile = Profile()
    for _ in range(TRIAL):
        profile.learn(SCORES[:, :3], DEPTHS[:, :3], np.array([2]), Shape(4, 3))
        profile.verified(0.8, 0.8)
    assert profile.wins(Shape(4, 3)) == pytest.approx(0.8) == profile.wins(Shape(2, 1))


def test_before_anything_is_known_there_is_hope_and_then_honesty() -> None:
    assert Profile().wins(Shape(3, 2)) == pytest.approx(HOPED + HOPED**2)
    assert tried(SCORES, DEPTHS, Shape(6, 3), accepted=0.0).wins(Shape(6, 3)) < 0.2
    modest = tried(SCORES * 0.1, DEPTHS, Shape(6, 3), accepted=1.5)
    assert modest.wins(Shape(6, 3)) > 0.8


def test_batches_are_averaged() -> None:
    scores, depths = np.array([[1.0, 0.9, 0.8], [1.0, 0.1, 0.0]], dtype=np.float32), np.array([[0, 1, 2], [0, 1, 2]])
    assert tried(scores, depths, Shape(3, 2)).wins(Shape(3, 2)) == pytest.approx(0.9)


def test_a_pace_is_known_after_some_steps_and_guessed_from_the_nearest() -> None:
    pace = Pace()
    assert pace.beyond(Shape(4, 3), 1) is None
    for seconds in (1.0, 1.0, *[3e-3] * ENOUGH)[:ENOUGH]:
        pace.add(Shape(4, 3), 1, seconds)
    assert pace.beyond(Shape(4, 3), 1) == pytest.approx(3e-3)  # the first ones recorded it
    assert pace.beyond(Shape(4, 3), 8) == pytest.approx(3e-3)
    assert pace.beyond(Shape(8, 7), 1) == pytest.approx(6e-3)
    for _ in range(ENOUGH):
        pace.add(Shape(4, 3), 8, 5e-3)
    assert pace.beyond(Shape(4, 3), 6) == pytest.approx(3e-3) or pace.beyond(Shape(4, 3), 8) == pytest.approx(5e-3)
    assert pace.beyond(Shape(4, 3), 9) == pytest.approx(5e-3)
