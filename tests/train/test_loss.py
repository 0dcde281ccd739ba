"""What is scored against what: alignment of labels, the loss and its gradient, counts of right chains."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.train.attention import Rollouts
from specdec.train.capture import Capture
from specdec.train.data import Answer, TokenBatch, make_corpus, pad
from specdec.train.loss import (
    TRANSITION_STRIDE,
    Entries,
    Labels,
    chain_entries,
    hits,
    label_mask,
    make_labels,
    rollout_entries,
    soft_cross_entropy,
    token_before,
    transition_loss,
)
from specdec.train.rollouts import arrange, sample_depths

SHAPES = ((9, 4), (6, 1), (7, 6))  # (length, prompt length)
LENGTH = 10


def batch() -> TokenBatch:
    """Sequence b has token 100 b + i at place i."""
    answers = [Answer([100 * b + i for i in range(n)], p, 0.0, True, f"p{b}", "x") for b, (n, p) in enumerate(SHAPES)]
    return pad(make_corpus(answers), [0, 1, 2], 3, LENGTH)


def empty_labels(made: TokenBatch) -> Labels:
    """Labels without laws: `best` is the text's own next token."""
    mask = label_mask(made).flatten()
    following = made.tokens.flatten().roll(-1)[mask]
    return Labels(mask.nonzero().squeeze(1), torch.zeros(0, 0), following, torch.where(mask, mask.cumsum(0) - 1, -1))


def expected(depths: int) -> set[tuple[int, int, int, int]]:
    """Every (sequence, anchor t, depth d, token) to be learned: the chain from t predicts the token at t + 2 + d, the target's own."""
    found = set()
    for b, (n, p) in enumerate(SHAPES):
        for t in range(n):
            for d in range(depths):
                if p <= t + 2 + d < n:
                    found.add((b, t, d, 100 * b + t + 2 + d))
    return found


def test_a_chain_predicts_the_answers_own_tokens_and_no_others() -> None:
    made, depths = batch(), 3
    labels = empty_labels(made)
    entries = chain_entries(labels, LENGTH, depths)
    rows = len(SHAPES) * LENGTH
    got = set()
    for row, label, depth, place in zip(*(t.tolist() for t in (entries.row, entries.label, entries.depth, entries.place)), strict=True):
        assert row == depth * rows + place
        got.add((place // LENGTH, place % LENGTH, depth, int(labels.best[label])))
    assert got == expected(depths)


def test_rollouts_predict_the_same_tokens() -> None:
    made, depths = batch(), 4
    labels, mask = empty_labels(made), label_mask(made)
    kept = sample_depths(mask, depths, 1.0, 1.0, torch.Generator())
    place, counts = arrange(kept, depths)
    rollouts = Rollouts((None,), LENGTH, place, counts)
    entries = rollout_entries(labels, rollouts, kept, LENGTH)
    wide = LENGTH + len(rollouts.depth)
    got = set()
    for row, label, depth, at in zip(*(t.tolist() for t in (entries.row, entries.label, entries.depth, entries.place)), strict=True):
        b, column = divmod(row, wide)
        if column < LENGTH:
            assert (depth, column) == (0, at % LENGTH)
        else:
            assert (int(rollouts.depth[column - LENGTH]), int(rollouts.anchor[b, column - LENGTH])) == (depth, at % LENGTH)
        got.add((b, at % LENGTH, depth, int(labels.best[label])))
    # a rollout is kept whole: it needs the shallower mask rows to be worth learning too
    whole = {e for e in expected(depths) if all((e[0], e[1], d, e[3] - e[2] + d) in expected(depths) for d in range(e[2]))}
    assert got == whole


def test_rollouts_are_nested_and_of_the_asked_size() -> None:
    mask = torch.zeros(2, 200, dtype=torch.bool)
    mask[0, 20:180] = True
    mask[1, 5:25] = True
    kept = sample_depths(mask, 6, 0.7, 0.3, torch.Generator().manual_seed(1))
    for depth in range(1, 6):
        alive = kept >= depth
        assert not bool((alive[:, : 200 - 1 - depth] & ~mask[:, 1 + depth :]).any())
        wanted = [int((n - depth) * max(0.7**depth, 0.3)) for n in (160, 20)]
        assert alive.sum(1).tolist() == wanted
    again = sample_depths(mask, 6, 0.7, 0.3, torch.Generator().manual_seed(1))
    other = sample_depths(mask, 6, 0.7, 0.3, torch.Generator().manual_seed(2))
    assert torch.equal(kept, again) and not torch.equal(kept, other)
    place, counts = arrange(kept, 6)
    assert counts == sorted(counts, reverse=True) and counts[0] == place.shape[1] == int((kept >= 1).sum(1).max())
    assert bool((kept.gather(1, place).diff(dim=1) <= 0).all())


def test_no_rollouts_when_nothing_counts() -> None:
    kept = sample_depths(torch.zeros(2, 8, dtype=torch.bool), 4, 1.0, 1.0, torch.Generator())
    place, counts = arrange(kept, 4)
    assert (place.shape, counts) == ((2, 0), [])
    q = torch.randn(2, 8, 4, 16)
    assert Rollouts((None,), 8, place, counts)(0, q, q[:, :, :2], q[:, :, :2]).shape == q.shape


def test_labels_are_the_targets_law_over_the_draft_vocabulary() -> None:
    made, generator = batch(), torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(3, LENGTH, 8, generator=generator), torch.randn(50, 8, generator=generator)
    kept = torch.tensor([3, 4, 10, 49])
    law = (hidden @ weight.T).softmax(-1)
    logits = hidden @ weight.T
    captured = Capture(hidden, hidden, logits.logsumexp(-1), logits.argmax(-1))
    labels = make_labels(made, captured, weight[kept], rows=5)
    mask = label_mask(made)
    torch.testing.assert_close(labels.law, law[mask][:, kept])
    assert torch.equal(labels.best, law.argmax(-1)[mask])
    assert torch.equal(labels.rank.view(3, LENGTH) >= 0, mask)


def test_loss_and_gradients_are_those_of_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 8, generator=generator, requires_grad=True)
    weight = torch.randn(12, 8, generator=generator, requires_grad=True)
    law = 0.7 * torch.rand(9, 12, generator=generator).softmax(-1)
    label, scale = torch.randint(9, (23,), generator=generator), torch.rand(23, generator=generator)
    loss, best = soft_cross_entropy(hidden, weight, law, label, scale, rows=5)
    found = torch.autograd.grad(2 * loss, [hidden, weight])
    naive = -((hidden @ weight.T).log_softmax(-1) * law[label]).sum(-1) @ scale
    torch.testing.assert_close(loss, naive)
    for a, b in zip(found, torch.autograd.grad(2 * naive, [hidden, weight]), strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(best, (hidden @ weight.T).argmax(-1))


def test_a_transition_learns_from_the_token_before_and_teaches_nothing_else() -> None:
    """The token before the predicted one, for mask rows only; the head's own weights and states get no gradient."""
    made, depths = batch(), 4
    labels, mask = empty_labels(made), label_mask(made)
    kept = sample_depths(mask, depths, 1.0, 1.0, torch.Generator())
    place, counts = arrange(kept, depths)
    rollouts = Rollouts((None,), LENGTH, place, counts)
    entries = rollout_entries(labels, rollouts, kept, LENGTH)
    before = token_before(entries, made.tokens)
    assert torch.equal(before + 1, labels.best[entries.label])  # the batch counts upwards
    seen: list[Tensor] = []

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head = torch.nn.Linear(4, 3, bias=False)
            self.scale = torch.nn.Parameter(torch.ones(()))

        def follow(self, hidden: Tensor, ids: Tensor) -> Tensor:
            seen.append(ids)
            return hidden * self.scale

    head, generator = Head(), torch.Generator().manual_seed(0)
    law = torch.rand(len(labels.where), 3, generator=generator).softmax(-1)
    labels = Labels(labels.where, law, labels.best, labels.rank)
    hidden = torch.randn(len(entries.row), 4, generator=generator, requires_grad=True)
    scale = torch.ones(len(entries.row))
    total = sum(transition_loss(head, hidden, entries, labels, made.tokens, scale, step) for step in range(TRANSITION_STRIDE))
    total.backward()
    assert hidden.grad is None and head.lm_head.weight.grad is None and head.scale.grad is not None
    assert sorted(torch.cat(seen).tolist()) == sorted(before[entries.depth > 0].tolist())
    deep = entries.depth > 0
    whole, _ = soft_cross_entropy(hidden[deep], head.lm_head.weight, law, entries.label[deep], scale[deep])
    torch.testing.assert_close(total / TRANSITION_STRIDE, whole)


def test_counts_of_chains() -> None:
    """Anchor 0: right, right, wrong. Anchor 1: wrong, right. Anchor 2: only depth 1 scored, right."""
    place = torch.tensor([0, 0, 0, 1, 1, 2])
    depth = torch.tensor([0, 1, 2, 0, 1, 1])
    right = torch.tensor([True, True, False, False, True, True])
    counts = hits(Entries(place, place, depth, place), right, 3, 3)
    assert counts.tolist() == [[2, 3, 1], [1, 3, 0], [2, 2, 1], [1, 1, 0]]
