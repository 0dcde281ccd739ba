"""The draft model on tiny checkpoints: its KV against recomputation, coupling, laws for rejection, refusals."""

from __future__ import annotations

import random

import pytest
import torch

from specdec import ops, rng
from specdec.cache.kv import KVCache
from specdec.cache.pool import BlockPool
from specdec.config import SamplingParams
from specdec.errors import ConfigError
from specdec.models.load import LoadedModel, load_model
from specdec.sampling import SamplingState
from specdec.sequence import Sequence
from specdec.spec.draft_model import DraftModel
from specdec.spec.tree import check_tree
from specdec.types import DraftTree, StepPlan
from tests.spec.drafting import NO_FORWARD, context, decode, judge, lists, paths, share
from tests.tiny import write_tiny

BLOCK = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("draft"), seed=3))


@pytest.fixture(scope="module")
def loaded(checkpoint: str) -> LoadedModel:
    return load_model(checkpoint)


class Rig:
    """A draft model over a KV cache of its own size, sequences with blocks, and a sampling state."""

    def __init__(self, loaded: LoadedModel, checkpoint: str, **config):
        self.loaded = loaded
        groups = loaded.config.kv_groups()
        self.pool = BlockPool(200, groups[0].name)
        self.kv = KVCache(groups, [200] * len(groups), BLOCK, dtype=torch.float32, device="cpu")
        self.sampling = SamplingState(4, loaded.config.vocab_size)
        made = context(
            loaded.config.vocab_size, method="draft_model", model=checkpoint, kv=self.kv, pools=[self.pool], load=lambda _: loaded, **config
        )
        self.drafter = DraftModel(made)
        self._slots = iter(range(4))

    def sequence(self, tokens: list[int], *, blocks: list[int] | None = None, **params) -> Sequence:
        params.setdefault("temperature", 0.0)
        seq = Sequence("r", list(tokens), len(tokens), SamplingParams(**params), 11, 256, request_slot=next(self._slots))
        seq.num_computed = len(tokens) - 1
        shared = blocks or []
        self.pool.incref(shared)
        seq.block_tables = [[*shared, *self.pool.allocate(40 - len(shared))]]
        self.sampling.add(seq)
        return seq

    def propose(self, seqs: list[Sequence], nodes: int = 6, depth: int = 5, width: int = 1) -> DraftTree:
        return self.drafter.propose(tuple(share(s, nodes, depth, width, "draft_model") for s in seqs), self.sampling)

    def commit(self, seq: Sequence, new: list[int], accepted: int) -> None:
        seq.append(new, accepted)
        self.sampling.advance([seq.request_slot], torch.tensor([len(new)]))
        self.sampling.commit(seq, new)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[V] after `tokens`, by a fresh pass over all of them in blocks nobody uses."""
        rig = Rig(self.loaded, "again")
        return rig.drafter._runner.catch_up([rig.sequence(tokens)])[0]

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        text = list(tokens)
        for _ in range(count):
            text.append(int(self.logits(text).argmax()))
        return text[len(tokens) :]


@pytest.fixture
def rig(loaded: LoadedModel, checkpoint: str) -> Rig:
    return Rig(loaded, checkpoint)


def test_drafts_its_own_greedy_continuation(rig: Rig):
    prompts = [[5, 17, 42, 99, 3], [250, 17, 42]]
    tree = rig.propose([rig.sequence(p) for p in prompts])
    for b, prompt in enumerate(prompts):
        assert lists(tree, b)[0] == [prompt[-1], *rig.greedy(prompt, 5)]
    check_tree(tree, vocab_size=512)


def test_draft_kv_survives_any_verdict(rig: Rig):
    """After random accepted counts, corrections and pauses the next draft is that of a fresh computation."""
    dice = random.Random(5)
    seq = rig.sequence([5, 17, 42])
    for step in range(12):
        if step % 4 == 3:  # a step without drafting: dormant
            rig.commit(seq, [dice.randrange(512)], 0)
            continue
        tokens, _ = lists(rig.propose([seq], nodes=6, depth=5, width=2))
        assert tokens[1] == rig.greedy(seq.tokens, 1)[0]
        accepted = dice.randrange(5)
        chain = lists(rig.propose([seq]))[0][1:]  # asking twice changes nothing
        rig.commit(seq, [*chain[:accepted], dice.randrange(512)], accepted)


def test_fed_tokens_are_not_computed_again(rig: Rig):
    seq = rig.sequence([5, 17, 42, 99])
    chain = lists(rig.propose([seq]))[0][1:]
    rig.commit(seq, [*chain[:4], 7], 4)
    progress = rig.drafter._runner._updated(seq)
    assert progress.seen == 4 + 4  # prompt and the four accepted drafts; the correction is new


def test_marked_blocks_serve_the_next_sequence(rig: Rig):
    """A prefix hit whose blocks carry draft KV starts behind them; blocks handed out anew do not count."""
    prompt = list(range(20, 33))
    first = rig.sequence(prompt)
    expected = lists(rig.propose([first]))
    again = rig.sequence(prompt, blocks=first.block_tables[0][:3])
    assert rig.drafter._runner._updated(again).seen == 3 * BLOCK
    assert lists(rig.propose([again])) == expected
    stale = rig.sequence(prompt)
    assert rig.drafter._runner._updated(stale).seen == 0


def test_long_catch_up_is_chunked(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("specdec.spec.draft_kv.MAX_ROWS", 7)
    prompts = [[(3 * i + 1) % 512 for i in range(19)], [5, 17], [9] * 9]
    tree = rig.propose([rig.sequence(p) for p in prompts], nodes=2, depth=1)
    for b, prompt in enumerate(prompts):
        assert lists(tree, b)[0][1:] == rig.greedy(prompt, 1)


def test_siblings_are_the_next_best_tokens(rig: Rig):
    seq = rig.sequence([5, 17, 42])
    tree = rig.propose([seq], nodes=4, depth=1, width=3)
    best = rig.logits(seq.tokens).topk(3).indices.tolist()
    assert {p[0] for p in paths(tree)} == set(best)
    check_tree(tree, vocab_size=512)


def test_coupled_drafts_win_the_noisy_race(rig: Rig):
    """The draft model as its own target: with shared noise every coupled draft is accepted, at any temperature."""
    seq = rig.sequence([5, 17, 42], temperature=0.9, top_k=50, frequency_penalty=0.5)
    chain = lists(rig.propose([seq]))[0][1:]
    text = list(seq.tokens)
    for drafted in chain:
        counts = torch.bincount(torch.tensor(text[3:], dtype=torch.long), minlength=512)
        scores = (rig.logits(text) - 0.5 * counts) / 0.9
        scores = scores.masked_fill(scores < scores.topk(50).values[-1], -torch.inf)
        one = torch.tensor([0])
        won = ops.gumbel_argmax(scores[None], torch.tensor([11]), torch.tensor([len(text)]), one, torch.tensor([True]), rng.TARGET)
        assert drafted == int(won[0])
        text.append(drafted)


def test_rejection_drafts_carry_the_law_they_were_drawn_from(loaded: LoadedModel, checkpoint: str):
    rig = Rig(loaded, checkpoint, verify="rejection")
    assert rig.drafter.noise_coupled is False
    sampled, greedy = rig.sequence([5, 17, 42], temperature=0.7, top_k=20), rig.sequence([9, 9])
    tree = rig.propose([sampled, greedy], nodes=8, depth=3, width=3)
    assert tree.log_q is not None
    tokens, parents = lists(tree)
    for i, parent in enumerate(parents[1:], start=1):
        assert torch.isfinite(tree.log_q[0, parent, tokens[i]])  # q > 0 for whatever was drawn
    assert torch.isneginf(tree.log_q[1]).all()  # greedy drafts are point masses
    law = tree.log_q[0, 0]
    torch.testing.assert_close(law.exp().sum(), torch.tensor(1.0))
    assert int(torch.isfinite(law).sum()) == 20
    assert parents[1:4] == [0, 1, 2]  # the chain first, siblings after it


def test_rejection_shape_does_not_depend_on_the_draw(loaded: LoadedModel, checkpoint: str):
    rig = Rig(loaded, checkpoint, verify="rejection")
    shapes = set()
    seq = rig.sequence([5, 17, 42], temperature=1.0)
    for seed in range(6):
        rig.sampling.seed[seq.request_slot] = seed
        shapes.add(tuple(lists(rig.propose([seq], nodes=7, depth=3, width=3))[1]))
    assert len(shapes) == 1


def test_coupled_draft_stops_at_an_end_token_and_at_the_limit(rig: Rig):
    seq = rig.sequence([5, 17, 42])
    chain = rig.greedy(seq.tokens, 5)
    ending = rig.sequence([5, 17, 42])
    ending.end_ids = frozenset([chain[1]])
    assert lists(rig.propose([ending]))[0][1:] == chain[:2]
    seq.max_total = len(seq.tokens) + 3
    assert lists(rig.propose([seq]))[0][1:] == chain[:2]


def test_scores_follow_acceptance(rig: Rig):
    """A target that never agrees drives the scores down."""
    seq = rig.sequence([5, 17, 42])
    before = float(rig.propose([seq], nodes=2, depth=1).score[0, 1])
    for _ in range(30):
        shares = (share(seq, 2, 1, 1, "draft_model"),)
        tree = rig.drafter.propose(shares, rig.sampling)
        rig.drafter.observe(StepPlan(shares), tree, NO_FORWARD, judge(tree, [[(lists(tree)[0][1] + 1) % 512]]))
    assert float(rig.propose([seq], nodes=2, depth=1).score[0, 1]) < 0.5 * before


def test_observe_through_whole_decoding(rig: Rig):
    seq = rig.sequence([5, 17, 42])
    future = rig.greedy(seq.tokens, 12)
    counts = decode(_Bound(rig), seq, future, nodes=4, depth=3)
    assert counts == [3, 3, 3]
    rig.drafter.reset(seq)
    assert not rig.drafter._runner._progress


class _Bound:
    """The drafter with its sampling state filled in, for `decode`."""

    name = "draft_model"

    def __init__(self, rig: Rig):
        self.rig = rig

    def propose(self, shares, _sampling):
        for s in shares:
            self.rig.sampling.length[s.seq.request_slot] = len(s.seq.tokens)
        return self.rig.drafter.propose(shares, self.rig.sampling)

    def observe(self, *step):
        self.rig.drafter.observe(*step)


def test_refusals_name_both_sizes_and_the_remedy(loaded: LoadedModel, checkpoint: str):
    groups = loaded.config.kv_groups()
    kv = KVCache(groups, [8], BLOCK, dtype=torch.float32, device="cpu")
    fit = {"kv": kv, "pools": [BlockPool(8, "full")], "load": lambda _: loaded, "method": "draft_model"}
    with pytest.raises(ConfigError, match="512 tokens, the target 600"):
        DraftModel(context(600, model=checkpoint, **fit))
    with pytest.raises(ConfigError, match="`model`"):
        DraftModel(context(512, **fit))
    with pytest.raises(ConfigError, match="KV cache"):
        DraftModel(context(512, model=checkpoint, method="draft_model"))
    with pytest.raises(ConfigError, match="differently"):
        DraftModel(context(512, model=checkpoint, tokenize=lambda text: [1], **fit))


@pytest.mark.parametrize("short", [0, 1, 2, 3, 7])
def test_the_depth_is_cut_where_the_draft_positions_end(rig: Rig, loaded: LoadedModel, short: int):
    """A sequence `short` of the draft's last position still gets the guesses that its positions allow, and their siblings."""
    limit = loaded.config.max_positions
    assert rig.drafter.max_len == limit
    prompt = [5 + i % 300 for i in range(limit - short)]
    seq = rig.sequence(prompt[:9])
    seq.tokens, seq.num_prompt, seq.max_total = list(prompt), len(prompt), limit + 20
    rig.sampling.add(seq)
    seq.block_tables = [list(range(1, 1 + (limit + 64) // BLOCK))]
    tokens, _ = lists(rig.propose([seq], nodes=16, depth=5, width=2))
    deepest = max(len(path) for path in paths(rig.propose([seq], nodes=6, depth=5, width=1)))
    assert deepest == min(5, short + 1)
    assert len(tokens) == 1 + 2 * deepest
