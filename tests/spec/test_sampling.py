"""Processing of logits: every tree row equals a plain one-row computation with that row's own history, bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from specdec import ops, truncation
from specdec.config import SamplingParams
from specdec.rows import RowInfo
from specdec.sampling import SamplingState
from specdec.spec.tree import HostTree, tree_from_lists
from tests.spec.toy import new_sequence, toy_logits
from tests.spec.trees import host_trees, path_to

VOCAB = 11
CPU = torch.device("cpu")


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    """Any mixture of features, each off half of the time."""

    def maybe(strategy: st.SearchStrategy, off: object) -> object:
        return draw(strategy) if draw(st.booleans()) else off

    ids = st.integers(0, VOCAB - 1)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        top_k=maybe(st.integers(1, VOCAB + 2), 0),
        top_p=maybe(st.sampled_from([0.0113, 0.4973, 0.9011, 0.9991]), 1.0),  # no mass that a few equal tokens can sum to
        min_p=maybe(st.sampled_from([0.02, 0.3, 1.0]), 0.0),
        typical_p=maybe(st.sampled_from([0.2, 0.9]), 1.0),
        presence_penalty=maybe(st.sampled_from([-1.0, 0.5, 2.0]), 0.0),
        frequency_penalty=maybe(st.sampled_from([-2.0, 0.4, 2.0]), 0.0),
        repetition_penalty=maybe(st.sampled_from([0.7, 1.3]), 1.0),
        logit_bias=maybe(st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 2.0, 100.0]), min_size=1, max_size=4), None),
        allowed_token_ids=maybe(st.lists(ids, min_size=1, max_size=VOCAB), None),
        stop_token_ids=maybe(st.lists(ids, min_size=1, max_size=5), None),
        min_tokens=draw(st.integers(0, 6)),
        max_tokens=draw(st.integers(6, 18)),
    )


BAD_WORDS = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3), max_size=4)


def plain_scores(logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams, bad: list[list[int]]) -> torch.Tensor:
    """The specification, one row, loops over token ids where the definition does."""
    x = logits.clone()
    x[sorted(set(range(VOCAB)) - allowed_after(output, params, bad))] = -math.inf
    for v, bias in (params.logit_bias or {}).items():
        x[v] += bias
    for v in set(prompt + output):
        x[v] = x[v] / params.repetition_penalty if x[v] > 0 else x[v] * params.repetition_penalty
    for v in set(output):
        x[v] = x[v] - torch.tensor(params.frequency_penalty) * output.count(v) - torch.tensor(params.presence_penalty)
    return x if params.greedy else _plain_truncation(x / params.temperature, params)


def allowed_after(output: list[int], params: SamplingParams, bad: list[list[int]]) -> set[int]:
    """What may follow `output`: the specification of the four rules that forbid tokens."""
    ids = set(range(VOCAB) if params.allowed_token_ids is None else params.allowed_token_ids)
    ids -= {word[-1] for word in bad if len(word) == 1 or output[-(len(word) - 1) :] == word[:-1]}
    ids -= set(params.stop_token_ids or ()) if len(output) < params.min_tokens else set()
    return ids - {v for v, bias in (params.logit_bias or {}).items() if bias == -100}


def _plain_truncation(x: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    if params.min_p > 0:
        x = x.masked_fill(x < x.max() + torch.tensor(params.min_p).log(), -math.inf)
    if 0 < params.top_k < VOCAB:
        x = x.masked_fill(x < x.sort(descending=True).values[params.top_k - 1], -math.inf)
    if params.top_p < 1:
        order = sorted(range(VOCAB), key=lambda v: (-x[v].item(), v))
        x = _keep_until(x, order, params.top_p)
    return x


def _keep_until(x: torch.Tensor, order: list[int], mass: float) -> torch.Tensor:
    p, total, kept = x.double().softmax(-1).tolist(), 0.0, []
    for v in order:
        kept.append(v)
        total += p[v]
        if total >= mass - 1e-6:
            break
    return x.masked_fill(torch.tensor([v not in kept for v in range(VOCAB)]), -math.inf)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(sampling_params(), host_trees(vocab=VOCAB, max_nodes=8), BAD_WORDS), min_size=1, max_size=3),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
    st.lists(st.integers(0, VOCAB - 1), max_size=6),
)
def test_every_node_is_processed_with_its_own_history(
    requests: list[tuple[SamplingParams, HostTree, list[list[int]]]], prompt: list[int], output: list[int]
) -> None:
    """All but typical_p, whose order of distances has near-ties that a second formula rounds otherwise; it is tested below."""
    sampling = SamplingState(4, VOCAB, max_stop_ids=1)
    logits, expected, slots, trees = [], [], [], []
    for slot, (params, (tokens, parents, _), bad) in enumerate(requests):
        params = replace(params, typical_p=1.0)
        seq = new_sequence(slot, prompt, params)
        sampling.add(seq, bad)
        for token in output:
            seq.append([token], 0)
            sampling.advance([slot], torch.ones(1, dtype=torch.int64))
            sampling.commit(seq, [token])
        slots.append(slot)
        trees.append((tokens, parents, None))
        for node in range(len(tokens)):
            path = [tokens[i] for i in path_to(list(parents), node)[1:]]
            logits.append(toy_logits(prompt + output + path, VOCAB))
            expected.append(plain_scores(logits[-1], prompt, output + path, params, bad))
    scores = sampling.process(torch.stack(logits), RowInfo(tree_from_lists(trees), slots, CPU))
    assert torch.equal(scores, torch.stack(expected))


@settings(max_examples=60, deadline=None)
@given(sampling_params(), host_trees(vocab=VOCAB, max_nodes=6), sampling_params(), BAD_WORDS)
def test_scores_do_not_depend_on_the_batch(params: SamplingParams, tree: HostTree, other: SamplingParams, bad: list[list[int]]) -> None:
    sampling = SamplingState(2, VOCAB)
    for slot, (own, words) in enumerate(((params, []), (other, bad))):
        sampling.add(new_sequence(slot, [1, 2], own), words)
    logits = torch.stack([toy_logits([5, i], VOCAB) for i in range(2 * len(tree[0]))])
    both = sampling.process(logits, RowInfo(tree_from_lists([tree, tree]), [0, 1], CPU))
    for slot in (0, 1):
        own = slice(slot * len(tree[0]), (slot + 1) * len(tree[0]))
        assert torch.equal(both[own], sampling.process(logits[own], RowInfo(tree_from_lists([tree]), [slot], CPU)))


def test_nothing_used_costs_nothing() -> None:
    sampling = SamplingState(2, VOCAB)
    sampling.add(new_sequence(0, [1], SamplingParams(temperature=0, top_p=0.5, top_k=3)))
    sampling.add(new_sequence(1, [1], SamplingParams(temperature=1.0)))
    logits = torch.randn(2, VOCAB)
    assert sampling.process(logits, RowInfo(tree_from_lists([([1], [-1], None)] * 2), [0, 1], CPU)) is logits


def test_a_request_slot_forgets_its_former_owner() -> None:
    sampling = SamplingState(1, VOCAB)
    everything = SamplingParams(
        temperature=0.5, top_k=2, top_p=0.5, min_p=0.5, typical_p=0.5, presence_penalty=1, frequency_penalty=1, repetition_penalty=2,
        logit_bias={1: 5.0, 2: 7.0}, allowed_token_ids=[1, 2], stop_token_ids=[3, 4, 5, 6, 7], min_tokens=5,
    )  # fmt: skip
    sampling.add(new_sequence(0, [1, 2, 3], everything), [[3], [2]])
    sampling.remove(0)
    logits, rows = torch.randn(1, VOCAB), RowInfo(tree_from_lists([([1], [-1], None)]), [0], CPU)
    sampling.add(new_sequence(0, [1], SamplingParams(temperature=0)))
    assert sampling.process(logits, rows) is logits
    assert sampling.end_ids[0].tolist() == [-1] * 5
    smaller = SamplingParams(
        temperature=0.7, logit_bias={6: 1.0}, allowed_token_ids=[2, 5, 6], repetition_penalty=1.2, stop_token_ids=[5], min_tokens=1, top_k=2
    )
    fresh = SamplingState(1, VOCAB)
    for state in (sampling, fresh):
        state.add(new_sequence(0, [6], smaller), [[8]])
    assert torch.equal(sampling.process(logits, rows), fresh.process(logits, rows))


def test_adding_after_preemption_equals_committing_step_by_step() -> None:
    params = SamplingParams(temperature=0, presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.4, max_tokens=30)
    bad = [[4, 5, 6], [7]]
    grown, resumed = SamplingState(1, VOCAB), SamplingState(1, VOCAB)
    seq = new_sequence(0, [1, 2], params)
    grown.add(seq, bad)
    for run in ([3], [4, 5], [4, 4, 5]):
        seq.append(run, 0)
        grown.advance([0], torch.tensor([len(run)]))
        grown.commit(seq, run)
    resumed.add(seq, bad)
    rows = RowInfo(tree_from_lists([([5, 6, 1], [-1, 0, 1], None)]), [0], CPU)
    logits = torch.randn(3, VOCAB)
    assert torch.equal(grown.process(logits, rows), resumed.process(logits, rows))
    assert grown.length.tolist() == resumed.length.tolist() == [8]


def test_a_row_where_nothing_is_allowed_stays_forbidden_and_is_told() -> None:
    """Every rule at once, on top of it the truncations; the neighbours know nothing of it."""
    sampling = SamplingState(3, VOCAB)
    rules = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, typical_p=0.9, repetition_penalty=1.5, allowed_token_ids=[3, 4, 5],
        logit_bias={3: -100.0}, stop_token_ids=[4], min_tokens=3,
    )  # fmt: skip
    plain = SamplingParams(temperature=1.0)
    for slot, params in enumerate((plain, rules, plain)):
        sampling.add(new_sequence(slot, [1], params), [[7, 5]] if slot == 1 else [])
    rows = RowInfo(tree_from_lists([([1, 7], [-1, 0], None)] * 3), [0, 1, 2], CPU)
    scores = sampling.process(torch.zeros(6, VOCAB), rows)
    assert scores[2].isneginf().tolist() == [v != 5 for v in range(VOCAB)], "after the root, 5 is left"
    assert scores[3].isneginf().all(), "after 7 it completes a bad word"
    stuck = sampling.stuck(scores, rows)
    assert stuck is not None and stuck.tolist() == [False, False, False, True, False, False]
    sampling.remove(1)
    assert sampling.stuck(scores, rows) is None


# -- truncation on its own ----------------------------------------------------------------------------------------------


def test_top_p_keeps_the_smallest_prefix_and_the_lowest_ids_among_equals() -> None:
    law = torch.tensor([[0.1, 0.3, 0.1, 0.3, 0.1, 0.1]]).log()
    for p, kept in ((0.2, [1]), (0.35, [1, 3]), (0.65, [0, 1, 3]), (0.75, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3, 4, 5])):
        assert (~truncation.top_p(law, torch.tensor([p])).isneginf())[0].nonzero()[:, 0].tolist() == kept


class Called(TorchDispatchMode):
    """Names of the tensor operations run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cut", [truncation.top_p, truncation.typical_p])
@pytest.mark.parametrize("backend", ["cpu", "bisection"])
def test_a_flat_law_is_cut_without_sorting_the_vocabulary(cut: Any, backend: str) -> None:
    scores, called = torch.randn(2, 49152) * 0.1, Called()
    with ops.override("mass_cut", backend), called:
        cut(scores, torch.tensor([0.9, 0.99]))
    assert "log_softmax" in str(called.names) and not called.names & {"sort", "topk", "argsort"}


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.5, 3.0, 50.0])
@pytest.mark.parametrize("backend", ["cpu", "bisection", "reference"])
def test_the_cut_is_where_a_float64_running_sum_over_the_sorted_law_reaches_p(spread: float, backend: str) -> None:
    gen = torch.Generator().manual_seed(3)
    scores = torch.randn(40, 3000, generator=gen) * spread
    scores[::3] = (scores[::3] * 16).round() / 16
    scores[::5, ::7] = -torch.inf
    p = torch.rand(40, generator=gen)
    log_p = scores.log_softmax(dim=-1)
    ids = scores.sort(dim=-1, descending=True, stable=True).indices
    last = (log_p.gather(-1, ids).double().exp().cumsum(dim=-1) < p.double()[:, None]).sum(dim=-1, keepdim=True)
    expected = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, ids, torch.arange(3000) <= last)
    with ops.override("mass_cut", backend):
        assert torch.equal(ops.mass_cut(log_p, scores, p), expected)


@pytest.mark.parametrize("spread", [0.01, 0.5, 3.0])
def test_top_p_keeps_a_prefix_of_the_sorted_law(spread: float) -> None:
    """Flat and peaked laws together, on a grid so that ties cross the boundary."""
    gen = torch.Generator().manual_seed(3)
    scores = (torch.randn(6, 3000, generator=gen) * spread * 16).round() / 16
    p = torch.tensor([0.05, 0.3, 0.6, 0.9, 0.99, 0.9999])
    kept = ~truncation.top_p(scores, p).isneginf()
    for r in range(6):
        order = torch.sort(scores[r], descending=True, stable=True).indices
        mass = scores[r].double().softmax(-1)[order].cumsum(0)
        count = int((mass < p[r].double() - 1e-7).sum()) + 1
        loose = int((mass < p[r].double() + 1e-7).sum()) + 1
        assert count <= int(kept[r].sum()) <= loose
        assert torch.equal(kept[r].nonzero()[:, 0], order[: int(kept[r].sum())].sort().values)
        assert torch.equal(truncation.top_p(scores[r : r + 1], p[r : r + 1]), scores[r : r + 1].masked_fill(~kept[r : r + 1], -math.inf))


def test_top_k_keeps_ties_and_min_p_scales_with_the_peak() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0, 2.0, 0.0]])
    assert (~truncation.top_k(scores, torch.tensor([2]), 2).isneginf()).tolist() == [[True, False, True, True, False]]
    law = torch.tensor([[0.5, 0.26, 0.24]]).log()
    assert (~truncation.min_p(law, torch.tensor([0.5])).isneginf()).tolist() == [[True, True, False]]


def test_typical_p_keeps_what_is_nearest_to_the_entropy() -> None:
    """Entropy of this law is 1.16 nats; surprises 0.51, 1.39, 2.30, 3.00: distances 0.65, 0.23, 1.14, 1.84."""
    law = torch.tensor([[0.6, 0.25, 0.1, 0.05]]).log()
    for p, kept in ((0.2, [1]), (0.5, [0, 1]), (0.9, [0, 1, 2]), (0.99, [0, 1, 2, 3])):
        assert (~truncation.typical_p(law, torch.tensor([p])).isneginf())[0].nonzero()[:, 0].tolist() == kept
    masked = torch.tensor([[0.5, 0.5, 0.0]]).log()
    assert truncation.typical_p(masked, torch.tensor([0.3])).isneginf().tolist() == [[False, True, True]]


def test_truncation_rows_do_not_depend_on_their_batch() -> None:
    gen = torch.Generator().manual_seed(5)
    scores = torch.randn(7, 4099, generator=gen) * 2
    p = torch.linspace(0.1, 0.99, 7)
    whole = truncation.typical_p(truncation.top_p(truncation.min_p(scores, p / 1000), p), p)
    for r in range(7):
        row, own = scores[r : r + 1], p[r : r + 1]
        assert torch.equal(whole[r : r + 1], truncation.typical_p(truncation.top_p(truncation.min_p(row, own / 1000), own), own))
