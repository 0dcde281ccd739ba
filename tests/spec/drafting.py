"""Helpers for drafter tests: sequences without an engine, trees as lists, and a verdict from a known future."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch

from specdec.config import SamplingParams, SpecConfig
from specdec.sequence import Sequence
from specdec.spec.proposer import DrafterContext, Proposer
from specdec.types import DraftTree, Forward, Scheduled, SpecBudget, StepPlan, Verdict

NO_FORWARD = Forward(torch.zeros(0, 0), torch.zeros(0, 0))  # host drafters look at no hidden state


def context(vocab_size: int = 1000, **changes: Any) -> DrafterContext:
    """A drafter context on the CPU; keyword arguments that SpecConfig knows go there."""
    own = {k: changes.pop(k) for k in ("tokenize", "oracle", "kv", "pools", "load") if k in changes}
    return DrafterContext(config=SpecConfig(**changes), vocab_size=vocab_size, max_model_len=4096, **own)


def sequence(prompt: Seq[int], output: Seq[int] = (), *, max_total: int = 4096, end_ids: Seq[int] = (), **fields: Any) -> Sequence:
    """A decoding sequence that holds these tokens."""
    seed = fields.pop("seed", 7)
    seq = Sequence("r", [*prompt, *output], len(prompt), SamplingParams(), seed, max_total, end_ids=frozenset(end_ids), **fields)
    seq.num_computed = len(seq.tokens) - 1
    return seq


def share(seq: Sequence, nodes: int = 16, depth: int = 12, width: int = 1, drafter: str = "ngram") -> Scheduled:
    """A decode share with this budget."""
    return Scheduled(seq, 1, True, SpecBudget(drafter, nodes, depth, width))


def lists(tree: DraftTree, b: int = 0) -> tuple[list[int], list[int]]:
    """(tokens, parents) of one tree, padding removed."""
    n = int(tree.num_nodes[b])
    return tree.tokens[b, :n].tolist(), tree.parents[b, :n].tolist()


def paths(tree: DraftTree, b: int = 0) -> set[tuple[int, ...]]:
    """Root-to-leaf token paths, root excluded."""
    tokens, parents = lists(tree, b)
    leaves = set(range(len(tokens))) - set(parents)
    result = set()
    for leaf in leaves - {0}:
        path, node = [], leaf
        while node > 0:
            path.append(tokens[node])
            node = parents[node]
        result.add(tuple(reversed(path)))
    return result


def judge(tree: DraftTree, futures: Seq[Seq[int]]) -> Verdict:
    """The coupled verdict when the target's next tokens are `futures[b]`: walk down while a child matches."""
    rows: list[tuple[list[int], list[int]]] = []
    for b, future in enumerate(futures):
        tokens, parents = lists(tree, b)
        node, path = 0, []
        for token in future:
            child = next((i for i in range(1, len(tokens)) if parents[i] == node and tokens[i] == token), None)
            if child is None:
                break
            path.append(child)
            node = child
        rows.append((path, list(future[: len(path) + 1])))
    depth = max(len(p) for p, _ in rows)
    path = torch.tensor([p + [0] * (depth - len(p)) for p, _ in rows], dtype=torch.long).reshape(len(rows), depth)
    committed = torch.tensor([c + [0] * (depth + 1 - len(c)) for _, c in rows], dtype=torch.long)
    accepted = torch.tensor([len(p) for p, _ in rows])
    zeros = torch.zeros(len(rows), dtype=torch.long)
    return Verdict(committed, torch.tensor([len(c) for _, c in rows]), path, accepted, zeros, torch.zeros_like(committed))


def decode(drafter: Proposer, seq: Sequence, future: Seq[int], *, nodes: int = 16, depth: int = 12, width: int = 1) -> list[int]:
    """Run steps until `future` is used up; returns accepted counts per step. The sequence grows as in the engine."""
    accepted, done = [], 0
    while done < len(future):
        shares = (share(seq, nodes, depth, width, drafter.name),)
        tree = drafter.propose(shares, None)
        verdict = judge(tree, [future[done:]])
        count = int(verdict.num_accepted[0])
        new = list(future[done : done + count + 1])
        seq.append(new, count)
        done += len(new)
        drafter.observe(StepPlan(shares), tree, NO_FORWARD, verdict)
        accepted.append(count)
    return accepted
