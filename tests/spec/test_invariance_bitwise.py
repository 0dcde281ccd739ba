"""Promise 3: with `deterministic=True` KV and logits of a position have the same bits whoever computed them.

A position's KV is read through the block table of its sequence before it finishes; its logits where verification sees
them. Prefill, chunked prefill, plain decode, chains, trees and recomputation after preemption are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import ops
from specdec.config import SamplingParams, SpecConfig
from specdec.engine import Engine
from tests.harness import SHAPES, P, R, chain, engine, oracle_of, run, tree

PARAMS = SamplingParams(temperature=0.7, seed=21, max_tokens=30, ignore_eos=True)
WIDE = {name: SHAPES[name] for name in ("oracle-tree", "wrong-tree", "mix-chain", "mix-tree", "ngram-tree", "draft-tree")} | {
    "long chain": chain("oracle", 29),
    "60 nodes": tree("oracle", 20, 3),
    "63 leaves": SpecConfig(method="oracle", nodes=64, depth=1, width=63, policy="fixed"),
}


@pytest.fixture(params=["installed", "references"], autouse=True)
def backends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The promise holds with the kernels of this installation and with the PyTorch references alone."""
    with ExitStack() as stack:
        if request.param == "references":
            monkeypatch.setattr(ops, "compiled", lambda: False)
            for name, op in ops.TABLE.ops.items():
                stack.enter_context(ops.override(name, op.backends[-1].name))  # the reference, or what another op's reference does
        yield


@dataclass
class Bits:
    """Of one sequence: kv[(layer, "k" | "v", position)] and logits[position of the token they choose]."""

    kv: dict[tuple[int, str, int], Tensor] = field(default_factory=dict)
    logits: dict[int, Tensor] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)


def observe(target: Engine, request_id: str) -> Bits:
    """Record the bits of a request while the engine runs. A position that is computed twice must come out twice the same."""
    bits, verify, commit = Bits(), target.verifier.verify, target._commit

    def seen_verify(tree: Any, logits: Tensor, shares: Any, *rest: Any) -> Any:
        verdict = verify(tree, logits, shares, *rest)
        for b, share in enumerate(shares):
            if share.seq.request_id == request_id:
                for j in range(int(verdict.num_committed[b])):
                    bits.logits[len(share.seq.tokens) + j] = logits[verdict.rows[b, j]].clone()
        return verdict

    def seen_commit(plan: Any, *rest: Any) -> Any:
        settle = target._settle

        def read_then_settle(plan: Any) -> None:
            for share in plan.scheduled:
                if share.seq.request_id == request_id:
                    _read_kv(target, share.seq, bits)
            settle(plan)

        target._settle = read_then_settle  # type: ignore[method-assign]
        try:
            return commit(plan, *rest)
        finally:
            target._settle = settle  # type: ignore[method-assign]

    target.verifier.verify = seen_verify  # type: ignore[method-assign]
    target._commit = seen_commit  # type: ignore[method-assign]
    return bits


def _read_kv(target: Engine, seq: Any, bits: Bits) -> None:
    size = target.kv.block_size
    bits.tokens = list(seq.tokens)
    for layer in range(target.model_config.num_layers):
        table = seq.block_tables[target.kv.group_of(layer)]
        for name, store in zip("kv", target.kv.layer(layer), strict=True):
            for position in range(seq.num_computed):
                block = table[position // size]
                if block:
                    value = store[block, position % size].clone()
                    known = bits.kv.setdefault((layer, name, position), value)
                    assert torch.equal(known, value), f"layer {layer} {name}: position {position} changed after it was committed"


def assert_equal_bits(found: Bits, expected: Bits, *, everything: bool = True) -> None:
    assert found.tokens == expected.tokens
    shared = found.kv.keys() & expected.kv.keys()
    if everything:
        assert shared == expected.kv.keys()
    assert len(shared) > 100
    for key in shared:
        assert torch.equal(found.kv[key], expected.kv[key]), f"KV of layer, part, position {key} has other bits"
    for position in found.logits.keys() & expected.logits.keys():
        assert torch.equal(found.logits[position], expected.logits[position]), f"logits for position {position} have other bits"


def reference(kind: str, prompt: list[int] = R) -> tuple[Bits, Any]:
    """Plain decoding, alone."""
    target = engine(kind=kind, deterministic=True)
    bits = observe(target, "r")
    return bits, run(target, {"r": (prompt, PARAMS)})


@pytest.mark.parametrize("kind", ["t0", "two_groups"])
@pytest.mark.parametrize("shape", WIDE)
def test_verified_positions(kind: str, shape: str) -> None:
    """Chains and trees, 63-leaf star included: same KV after compaction, same logits at every committed position."""
    expected, outputs = reference(kind)
    target = engine(WIDE[shape], kind=kind, oracle=oracle_of(outputs), deterministic=True)
    bits = observe(target, "r")
    run(target, {"r": (R, PARAMS)})
    assert expected.logits.keys() == bits.logits.keys()
    assert_equal_bits(bits, expected, everything=False)


@pytest.mark.parametrize("kind", ["t0", "two_groups"])
@pytest.mark.parametrize("rows", [1, 5, 16, 256])
def test_prefill_of_what_was_decoded(kind: str, rows: int) -> None:
    """Prompt and output fed back as one prompt, in chunks: prefill computes the bits that decoding computed."""
    expected, outputs = reference(kind)
    whole = [*R, *outputs["r"].outputs[0].token_ids]
    target = engine(kind=kind, deterministic=True, max_num_batched_tokens=rows, enable_prefix_caching=False)
    bits, seen, forward = observe(target, "r"), [], target.runner.forward

    def kept(batch: Any) -> Any:
        result = forward(batch)
        seen.append(result.prompt_logits)
        return result

    target.runner.forward = kept  # type: ignore[method-assign]
    run(target, {"r": (whole, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))})
    prompt_logits = torch.cat([rows for rows in seen if rows is not None])
    for key, value in expected.kv.items():
        if key in bits.kv:
            assert torch.equal(bits.kv[key], value), f"KV {key}"
    for position, row in expected.logits.items():
        assert torch.equal(prompt_logits[position - 1], row), f"logits for position {position}"


@pytest.mark.parametrize("kind", ["t0", "two_groups"])
@pytest.mark.parametrize("caching", [True, False])
def test_recomputation(kind: str, caching: bool) -> None:
    """A preempted sequence computes its own past again, beside others, and gets the bits it had."""
    expected, outputs = reference(kind)
    crowd = {f"older{i}": (P, SamplingParams(temperature=1, seed=i, max_tokens=60, ignore_eos=True)) for i in range(2)}
    target = engine(
        tree("mix"),
        kind=kind,
        oracle=oracle_of(outputs),
        deterministic=True,
        num_kv_blocks=25,
        max_model_len=80,
        enable_prefix_caching=caching,
        max_num_batched_tokens=20,
    )
    bits = observe(target, "r")
    found = run(target, {**crowd, "r": (R, PARAMS)})["r"]
    assert found.metrics.preemptions > 0
    assert_equal_bits(bits, expected, everything=False)


def test_neighbours() -> None:
    """Eight neighbours with trees of their own leave the bits alone."""
    expected, outputs = reference("t0")
    crowd = {f"n{i}": (R[i:], SamplingParams(temperature=1, seed=i, max_tokens=25, ignore_eos=True)) for i in range(8)}
    known = run(engine(deterministic=True), crowd) | outputs
    target = engine(tree("mix"), oracle=oracle_of(known), deterministic=True)
    bits = observe(target, "r")
    run(target, {**crowd, "r": (R, PARAMS)})
    assert_equal_bits(bits, expected, everything=False)
