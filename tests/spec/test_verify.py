"""Coupled verification: the text is that of one-token steps, whatever is drafted. Stops, limits, masks, synthetic, logprobs."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import ops, rng
from specdec.config import SamplingParams
from specdec.errors import ConfigError
from specdec.kernels.noise import reference as noise
from specdec.rows import RowInfo
from specdec.sampling import SamplingState
from specdec.sequence import Sequence
from specdec.spec.tree import HostTree, chain, tree_from_lists
from specdec.spec.verify import Verifier, choose
from specdec.types import NOTHING_ALLOWED, STUCK, Verdict
from tests.spec.test_sampling import BAD_WORDS, VOCAB, allowed_after, sampling_params
from tests.spec.toy import decode, new_sequence, root_drafts, toy_logits, toy_step
from tests.spec.trees import host_trees, path_to, walk

PROMPT = [1, 2, 3]
CPU = torch.device("cpu")


def random_drafts(seed: int, future: list[int] | None = None) -> object:
    """A drafter of random trees; with `future` (all tokens of the sequence) one branch is often right for a while."""
    gen = random.Random(seed)

    def draft(seq: Sequence) -> HostTree:
        tokens, parents, taken = [seq.tokens[-1]], [-1], set()
        ahead = [] if future is None else future[len(seq.tokens) : len(seq.tokens) + gen.randint(0, 5)]
        for node, token in enumerate(ahead):
            tokens.append(token)
            parents.append(node)
            taken.add((node, token))
        for _ in range(gen.randint(0, 10)):
            parent, token = gen.randrange(len(tokens)), gen.randrange(VOCAB)
            if (parent, token) not in taken:
                taken.add((parent, token))
                tokens.append(token)
                parents.append(parent)
        return tokens, parents, None

    return draft


@settings(max_examples=60, deadline=None)
@given(sampling_params(), BAD_WORDS, st.integers(-(2**63), 2**64 - 1), st.integers(0, 3), st.integers(0, 2**32))
def test_coupled_text_equals_one_token_steps(params: SamplingParams, bad: list[list[int]], seed: int, choice: int, draft_seed: int) -> None:
    """Seeded identity under every sampling parameter, over many steps: wrong drafts, random trees, nearly right trees."""
    same = {"prompt": PROMPT, "vocab": VOCAB, "seed": seed, "choice": choice, "bad_words_ids": bad}
    off = decode(params, root_drafts, **same)
    for future in (None, off.tokens):
        on = decode(params, random_drafts(draft_seed, future), **same)
        assert on.tokens == off.tokens
        assert on.finish_reason == off.finish_reason


FEW = st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True)


@settings(max_examples=150, deadline=None)
@given(sampling_params(), FEW, st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=6), st.integers(0, 2**32))
def test_forbidden_tokens_never_come_out(params: SamplingParams, few: list[int], bad: list[list[int]], seed: int) -> None:
    """So few tokens are allowed that outputs run into dead ends; there they end, with drafts and without."""
    params = replace(params, allowed_token_ids=few, temperature=1.0)
    same = {"prompt": PROMPT, "vocab": VOCAB, "seed": seed, "bad_words_ids": bad}
    off = decode(params, root_drafts, **same)
    output = off.tokens[len(PROMPT) :]
    for i, token in enumerate(output):
        assert token in allowed_after(output[:i], params, bad)
    ended = off.finish_reason == "stop" or len(output) == params.max_tokens
    assert off.finish_reason == (NOTHING_ALLOWED if not ended else off.finish_reason)
    assert ended or not allowed_after(output, params, bad)
    on = decode(params, random_drafts(seed, off.tokens), **same)
    assert (on.tokens, on.finish_reason) == (off.tokens, off.finish_reason)


def test_dead_ends_are_met_inside_drafts() -> None:
    """5 and 6 alternate until "5 6 5" would come: the row after the second draft is stuck, and a third draft cannot be accepted."""
    params = SamplingParams(temperature=0.0, allowed_token_ids=[5, 6], max_tokens=9)
    sampling, seq = SamplingState(1, VOCAB), new_sequence(0, PROMPT, params)
    sampling.add(seq, [[5, 5], [6, 6], [5, 6, 5]])
    first = toy_step(Verifier(), sampling, [seq], [root_drafts(seq)], logits_of=lambda history: -torch.arange(float(VOCAB)))
    assert first.committed[0].tolist() == [5]
    verdict = toy_step(Verifier(), sampling, [seq], [([5, 6, 0, 0], [-1, 0, 1, 2], None)], logits_of=lambda history: torch.zeros(VOCAB))
    assert (int(verdict.num_committed[0]), int(verdict.num_accepted[0]), int(verdict.finish[0])) == (1, 1, STUCK)
    assert seq.tokens == [*PROMPT, 5, 6] and seq.finish_reason == NOTHING_ALLOWED


def test_good_drafts_are_accepted() -> None:
    """The identity above would also hold if nothing were ever accepted; here everything is."""
    params = SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=0.3, max_tokens=24)
    off = decode(params, root_drafts, prompt=PROMPT, vocab=VOCAB)
    sampling, seq = SamplingState(1, VOCAB), new_sequence(0, PROMPT, params)
    sampling.add(seq)
    steps = 0
    while seq.finish_reason is None:
        ahead = off.tokens[len(seq.tokens) :][:5]
        verdict = toy_step(Verifier(), sampling, [seq], [([seq.tokens[-1], *ahead], range(-1, len(ahead)), None)])
        assert int(verdict.num_accepted[0]) == len(ahead)
        steps += 1
    assert seq.tokens == off.tokens and steps == 4


def test_sampled_tokens_are_the_noisy_argmax_at_their_absolute_positions() -> None:
    """The definition itself: seed, choice and position name the noise. Different choices and seeds give different texts."""
    params = SamplingParams(temperature=1.0, max_tokens=30)
    texts = set()
    for seed, choice in ((5, 0), (5, 1), (6, 0), (2**64 - 1, 0)):
        seq = decode(params, random_drafts(seed), prompt=PROMPT, vocab=VOCAB, seed=seed, choice=choice)
        for position in range(len(PROMPT), len(seq.tokens)):
            named = [torch.tensor([value]) for value in (rng.to_key(seed), position, choice)]
            g = noise.gumbel_noise(*named, torch.arange(VOCAB)[None], rng.TARGET)[0]
            assert seq.tokens[position] == int((toy_logits(seq.tokens[:position], VOCAB) + g).argmax())
        texts.add(tuple(seq.tokens))
    assert len(texts) == 4


@settings(max_examples=100, deadline=None)
@given(st.lists(host_trees(vocab=5, max_nodes=14), min_size=1, max_size=4), st.integers(0, 1000))
def test_verdict_equals_the_python_walk(trees: list[HostTree], salt: int) -> None:
    def logits_of(history: list[int]) -> torch.Tensor:
        return toy_logits([salt, *history], 5)

    sampling = SamplingState(4, 5)
    seqs = [new_sequence(b, [tree[0][0]], SamplingParams(temperature=0.0, max_tokens=None)) for b, tree in enumerate(trees)]
    for seq in seqs:
        sampling.add(seq)
    starts = [list(seq.tokens) for seq in seqs]
    verdict = toy_step(Verifier(), sampling, seqs, trees, logits_of=logits_of)
    tree, first = tree_from_lists(trees), 0
    for b, (_, parents, _) in enumerate(trees):
        nodes, emitted = walk(tree, b, lambda path, b=b: int(logits_of(starts[b] + path).argmax()))
        count = len(nodes)
        assert verdict.num_accepted[b] == count and verdict.num_committed[b] == count + 1
        assert verdict.path[b].tolist() == nodes + [0] * (verdict.path.shape[1] - count)
        assert verdict.committed[b].tolist() == emitted + [0] * (verdict.committed.shape[1] - count - 1)
        assert verdict.rows[b, : count + 1].tolist() == [first + node for node in [0, *nodes]]
        assert [n for node in nodes for n in path_to(list(parents), node)][:1] in ([], [0])
        first += len(parents)


@pytest.mark.parametrize("host", [chain([1], [[i % 5 for i in range(63)]]), tree_from_lists([([1, *range(63)], [-1] + [0] * 63, None)])])
def test_full_trees_of_64(host: object) -> None:
    """The 64-deep chain and the 63-leaf star: every possible accepted prefix, every possible leaf."""
    rows, sampling = RowInfo(host, [0], CPU), SamplingState(1, 64)
    sampling.add(new_sequence(0, [1], SamplingParams(temperature=0, max_tokens=99)))
    deepest = int(host.depth.max())
    for keep in range(64):
        agrees = torch.zeros(64, dtype=torch.bool)
        agrees[0] = True
        if deepest == 63:
            agrees[: keep + 1] = True
        elif keep:
            agrees[keep] = True
        committed, count, _, accepted, _, taken = ops.tree_walk(torch.arange(64), agrees, rows, sampling)
        assert int(accepted) == (keep if deepest == 63 else min(keep, 1))
        assert int(taken[0, accepted]) == keep and int(committed[0, count - 1]) == keep


def test_batch_composition_changes_nothing() -> None:
    """Three requests with different parameters, together and apart, with other drafts each time."""
    requests = [
        SamplingParams(temperature=0.9, top_p=0.8, max_tokens=15),
        SamplingParams(temperature=0.0, presence_penalty=1.0, max_tokens=15),
        SamplingParams(temperature=1.3, min_p=0.05, logit_bias={4: 2.0}, max_tokens=15),
    ]
    apart = [decode(p, root_drafts, prompt=PROMPT, vocab=VOCAB, seed=b).tokens for b, p in enumerate(requests)]
    sampling = SamplingState(3, VOCAB)
    seqs = [new_sequence(2 - b, PROMPT, p, seed=b) for b, p in enumerate(requests)]
    for seq in seqs:
        sampling.add(seq)
    drafters = [random_drafts(b, apart[b]) for b in range(3)]
    while live := [b for b in range(3) if seqs[b].finish_reason is None]:
        toy_step(Verifier(), sampling, [seqs[b] for b in live], [drafters[b](seqs[b]) for b in live])
    assert [seq.tokens for seq in seqs] == apart


def test_coupled_joint_law_of_two_tokens_by_chi_square() -> None:
    """20,000 seeds, 16 pairs, WRONG and right drafts mixed. 15 degrees of freedom: a true sampler exceeds 44.3 once in 10,000
    choices of the seeds, which are fixed."""
    vocab, count = 4, 20_000
    params = SamplingParams(temperature=0.8, max_tokens=2)
    sampling = SamplingState(count, vocab)
    sampling.add(new_sequence(0, [1], params))
    for array in (sampling.length, sampling.max_total, sampling.noisy):
        array.copy_(array[0].expand(count))  # request slot 0 for all, but for the seed
    sampling.seed.copy_(torch.arange(count))
    trees = [([1, 0, 2, 3], [-1, 0, 0, 1], None)] * count
    tables = torch.stack([toy_logits([1, *p], vocab) for p in ([], [0], [2], [0, 3])]) / params.temperature
    rows = RowInfo(tree_from_lists(trees), list(range(count)), CPU)
    chosen = choose(tables.repeat(count, 1), rows, sampling)
    verdict = Verdict(*ops.tree_walk(chosen, None, rows, sampling))
    second = verdict.committed[:, 1].clone()
    short = verdict.num_committed == 1
    laws = torch.stack([toy_logits([1, v], vocab) for v in range(vocab)]) / params.temperature
    keys = torch.arange(count)
    tail = noise.gumbel_argmax(laws[verdict.committed[:, 0]], keys, keys * 0 + 2, keys * 0, keys >= 0, rng.TARGET)
    second[short] = tail[short]
    assert 0.2 < short.double().mean() < 0.8, "both branches must be exercised"
    joint = (tables[0].double().softmax(-1)[:, None] * laws.double().softmax(-1)).flatten()
    counts = torch.bincount(verdict.committed[:, 0] * vocab + second, minlength=vocab**2).double()
    assert ((counts - count * joint) ** 2 / (count * joint)).sum().item() < 44.3


# -- stops and limits ----------------------------------------------------------------------------------------------------


def _stopping(params: SamplingParams, drafts: list[int], right: list[int]) -> tuple[list[int], int, int, str | None]:
    """One step whose target says `right` in turn, whatever it is asked, over a chain of `drafts`."""
    sampling, seq = SamplingState(1, VOCAB), new_sequence(0, PROMPT, params)
    sampling.add(seq)

    def logits_of(history: list[int]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(right[len(history) - len(PROMPT)]), VOCAB).float()

    verdict = toy_step(Verifier(), sampling, [seq], [([3, *drafts], range(-1, len(drafts)), None)], logits_of=logits_of)
    return seq.output, int(verdict.num_accepted[0]), int(verdict.finish[0]), seq.finish_reason


def test_run_is_cut_at_the_first_end_token() -> None:
    params = SamplingParams(temperature=0, stop_token_ids=[7, 9])
    assert _stopping(params, [5, 7, 9], [5, 7, 9, 1]) == ([5, 7], 2, 1, "stop")
    assert _stopping(params, [5, 6], [5, 6, 9]) == ([5, 6, 9], 2, 1, "stop")
    assert _stopping(params, [5, 6], [7, 6, 9]) == ([7], 0, 1, "stop")
    assert _stopping(params, [5, 6], [5, 6, 4]) == ([5, 6, 4], 2, 0, None)


def test_run_is_cut_at_max_tokens_and_stop_wins_at_the_limit() -> None:
    params = SamplingParams(temperature=0, stop_token_ids=[7], max_tokens=3)
    assert _stopping(params, [5, 6, 4, 8], [5, 6, 4, 8, 1]) == ([5, 6, 4], 3, 2, "length")
    assert _stopping(params, [5, 6, 7, 8], [5, 6, 7, 8, 1]) == ([5, 6, 7], 3, 1, "stop")
    assert _stopping(params, [5, 6, 4, 7], [5, 6, 4, 7, 1]) == ([5, 6, 4], 3, 2, "length")
    assert _stopping(SamplingParams(temperature=0, max_tokens=1), [], [5]) == ([5], 0, 2, "length")


def test_min_tokens_hides_the_end_token_at_every_depth() -> None:
    params = SamplingParams(temperature=0, stop_token_ids=[7], min_tokens=2, max_tokens=5)
    output, accepted, finish, _ = _stopping(params, [0, 0], [7, 7, 7, 7])
    assert (output, accepted, finish) == ([0, 0, 7], 2, 1)  # with 7 masked the target's argmax is 0


def test_token_mask_rejects_an_invalid_draft() -> None:
    params = SamplingParams(temperature=0, max_tokens=9)
    sampling, seq = SamplingState(1, VOCAB), new_sequence(0, PROMPT, params)
    sampling.add(seq)
    likes = int(toy_logits(PROMPT, VOCAB).argmax())
    mask = torch.ones(2, VOCAB, dtype=torch.bool)
    mask[0, likes] = False
    verdict = toy_step(Verifier(), sampling, [seq], [([3, likes], [-1, 0], None)], token_mask=mask)
    assert int(verdict.num_accepted[0]) == 0
    assert seq.output == [int(toy_logits(PROMPT, VOCAB).masked_fill(~mask[0], -torch.inf).argmax())]


# -- synthetic, configuration, logprobs ------------------------------------------------------------------------------------


def test_synthetic_acceptance_follows_the_rates() -> None:
    """4,000 sequences, rates 0.8 and 0.3: four standard deviations are 0.026 and 0.029. Second children are never taken."""
    count, rates = 4000, (0.8, 0.3)
    params = SamplingParams(temperature=0.0, max_tokens=50)
    sampling = SamplingState(count, VOCAB)
    seqs = [new_sequence(b, [3], params, seed=b) for b in range(count)]
    for seq in seqs:
        sampling.add(seq)
    tree = ([3, 5, 6, 7, 8], [-1, 0, 1, 0, 2], None)
    flat = torch.zeros(VOCAB)
    verdict = toy_step(Verifier("synthetic", synthetic_acceptance=rates), sampling, seqs, [tree] * count, logits_of=lambda _: flat)
    for depth, rate in enumerate(rates, start=1):
        assert abs((verdict.num_accepted >= depth).double().mean().item() - rate) < 0.03
    assert int(verdict.num_accepted.max()) == 2, "no rate is given for the third position"
    full = verdict.num_accepted == 2
    assert (verdict.path[full, :2] == torch.tensor([1, 2])).all() and (verdict.committed[full, :2] == torch.tensor([5, 6])).all()


def test_modes_that_cannot_work_are_refused() -> None:
    for mode in ("rejection", "block"):
        with pytest.raises(ConfigError, match="draft_model"):
            Verifier(mode, noise_coupled=["draft_model"])
    with pytest.raises(ConfigError, match="unknown"):
        Verifier("typical")
    with pytest.raises(ConfigError, match="synthetic_acceptance"):
        Verifier("synthetic")
    assert Verifier("coupled", noise_coupled=["draft_model"]).mode == "coupled"


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs_come_from_the_rows_that_produced_the_tokens(mode: str) -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5, logprobs=3, logprobs_mode=mode, max_tokens=12)
    off = decode(params, root_drafts, prompt=PROMPT, vocab=VOCAB)
    sampling, seq = SamplingState(2, VOCAB), new_sequence(1, PROMPT, params)
    other = new_sequence(0, PROMPT, SamplingParams(temperature=0.0, max_tokens=50))
    sampling.add(seq)
    sampling.add(other)
    ahead = off.output[:4]
    trees = [([3, 9], [-1, 0], None), ([3, 0, *ahead], [-1, 0, 0, 2, 3, 4], None)]
    if ahead[0] == 0:
        trees[1][0][1] = 1
    verdict = toy_step(Verifier(), sampling, [other, seq], trees)
    assert verdict.logprobs is not None and verdict.logprobs[0] == () and len(verdict.logprobs[1]) == 5
    for i, entry in enumerate(verdict.logprobs[1]):
        row = toy_logits(PROMPT + off.output[:i], VOCAB)
        if mode == "processed":
            for v in set(PROMPT + off.output[:i]):
                row[v] = row[v] / 1.5 if row[v] > 0 else row[v] * 1.5
        law = row.log_softmax(-1)
        assert entry.token == off.output[i]
        assert entry.logprob == pytest.approx(law[entry.token].item(), abs=1e-6)
        assert entry.rank == 1 + int((row > row[entry.token]).sum())
        best = sorted(range(VOCAB), key=lambda v: (-law[v].item(), v))[:3]
        assert [v for _, v in entry.top] == pytest.approx([law[v].item() for v in best], abs=1e-6)
    assert all(a.top != b.top for a, b in itertools.pairwise(verdict.logprobs[1]))
