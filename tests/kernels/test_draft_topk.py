"""`draft_topk` and the path it is to replace: the same candidates and chances as `Race`, where the field is the whole draft vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec import ops, rng
from specdec.config import SamplingParams
from specdec.kernels.case import randn
from specdec.sampling import SamplingState
from specdec.sequence import Sequence
from specdec.spec.candidates import FIELD, Race, TipRows
from tests.kernels.device import at_home
from tests.kernels.matrix import names

BACKENDS = names("draft_topk")
VOCAB, SLOTS = 700, 3


def _state(temperatures: list[float]) -> SamplingState:
    sampling = SamplingState(SLOTS, VOCAB)
    for slot, temperature in enumerate(temperatures):
        sequence = Sequence("r", [1, 2, 3 + slot], 2, SamplingParams(temperature=temperature), 11 + slot, 90, request_slot=slot)
        sampling.add(sequence)
    return sampling


def _run(backend: str, *args: Any) -> Any:
    return at_home(ops.TABLE.ops["draft_topk"].find(backend), *args)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("temperatures", [[0.0, 0.0, 0.0], [0.7, 0.0, 1.3]])
def test_candidates_are_those_of_the_race(backend: str, mapped: bool, temperatures: list[float]) -> None:
    draft_vocab = FIELD if mapped or any(temperatures) else VOCAB  # without noise any vocabulary will do
    table = torch.arange(draft_vocab) * 2 if mapped else None
    sampling = _state(temperatures)
    if not mapped:
        sampling.vocab_size = draft_vocab
    rows = TipRows([0, 1, 2, 1, 0], torch.zeros(5, 2, dtype=torch.int64), 2, torch.device("cpu"))
    hidden, weight = randn(5, 64), randn(draft_vocab, 64, seed=1, scale=0.3)
    ids, chances = Race(sampling, True, table, 0.8)(hidden @ weight.T, rows, 6)
    noise = sampling.noise(rows) if any(temperatures) else (*[torch.zeros(5, dtype=torch.int64)] * 3, None)
    got = _run(backend, hidden, weight, sampling.temperature[rows.slot], table, *noise, rng.TARGET, 0.8, 6)
    assert torch.equal(got[0], ids)
    torch.testing.assert_close(got[1], chances, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(got[2], (hidden @ weight.T / sampling.temperature[rows.slot][:, None]).logsumexp(-1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_go_to_the_lowest_draft_id_and_none_is_named_twice(backend: str) -> None:
    hidden, weight = torch.ones(1, 16), torch.zeros(300, 16)
    weight[[290, 70, 131]] = 1.0
    unused = torch.zeros(1, dtype=torch.int64)
    ids, chances, _ = _run(backend, hidden, weight, torch.ones(1), None, unused, unused, unused, None, 0, 1.0, 6)
    assert ids.tolist() == [[70, 131, 290, 0, 1, 2]] and (chances[0, :3] == chances[0, 0]).all()
