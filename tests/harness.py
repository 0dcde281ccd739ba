"""Real engines over tiny checkpoints, and runs of the same requests with and without speculation.

Words of the case collection: T0 the tiny target, P the base prompt, R six times P, OFF and ON a run without and with
speculation, ORACLE/WRONG/MIX the test drafters. Every run checks the scheduler after each step and that nothing is
held at the end.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specdec.boot import build_engine
from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.sequence import Sequence
from specdec.types import CompletionOutput, RequestOutput
from tests.tiny import GPT_OSS, QWEN3_MOE, write_tiny

P = [5, 17, 42, 99, 3, 250, 17, 42]
R = P * 6
VOCAB = 512
BUMPED = 9  # the token that the "bump" checkpoint likes best everywhere
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)

Requests = Mapping[str, tuple[list[int] | str, SamplingParams]]
Oracle = Callable[[Sequence], Seq[int]]


# -- checkpoints ----------------------------------------------------------------------------------------------------------


@cache
def _root() -> Path:
    path = Path(tempfile.mkdtemp(prefix="specdec-tests-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@cache
def checkpoint(kind: str = "t0") -> str:
    """Directory of a tiny checkpoint, written once per test run: "t0", "two_groups" (full and sliding window of 24), "bump"
    (T0 with an added logit bump on token BUMPED), "draft" (one layer, other weights, same tokenizer), "short_draft" (T0's weights,
    32 positions), "last" (T0 without attention and MLP, with larger logits: the next token depends on the newest alone),
    "qwen3_moe" and "gpt_oss" (T0 with experts)."""
    path = _root() / kind
    if kind == "draft":
        write_tiny(path, seed=1, num_hidden_layers=1)
    else:
        more: dict[str, Any] = {"max_position_embeddings": 32} if kind == "short_draft" else {}
        more |= {"qwen3_moe": QWEN3_MOE, "gpt_oss": GPT_OSS}.get(kind, {})
        write_tiny(path, two_groups=kind == "two_groups", **more)
    if kind == "bump":
        _add_bump(path / "model.safetensors")
    if kind == "last":
        _silence_layers(path / "model.safetensors")
    return str(path)


def _silence_layers(file: Path) -> None:
    """Nothing is added to the residual stream after the embedding; the laws are as sharp as those of a real model."""
    weights = load_file(file)
    weights["lm_head.weight"] *= 2.0
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.zero_()
    save_file(weights, file, metadata={"format": "pt"})


def _add_bump(file: Path) -> None:
    """Dimension 0 of the residual stream becomes a constant that only the output row of BUMPED reads."""
    weights = load_file(file)
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value[0] = 0.0
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            value[:, 0] = 4.0 if name.startswith("model") else 0.0
    weights["model.norm.weight"][0] = 1.0
    weights["lm_head.weight"][BUMPED, 0] = 12.0
    save_file(weights, file, metadata={"format": "pt"})


# -- drafters -------------------------------------------------------------------------------------------------------------


def chain(method: str, depth: int = 4, **fields: Any) -> SpecConfig:
    """A chain of `depth` drafts every step (K = depth)."""
    return SpecConfig(method=method, nodes=depth + 1, depth=depth, width=1, policy="fixed", **fields)


def tree(method: str, width: int = 3, depth: int = 3, **fields: Any) -> SpecConfig:
    """`width` branches of `depth` drafts every step; TREE of the cases is 3 × 3."""
    return SpecConfig(method=method, nodes=1 + width * depth, depth=depth, width=width, policy="fixed", **fields)


SHAPES: dict[str, SpecConfig] = {
    "oracle-chain": chain("oracle"),
    "oracle-tree": tree("oracle"),
    "wrong-chain": chain("wrong"),
    "wrong-tree": tree("wrong"),
    "mix-chain": chain("mix", 6),
    "mix-tree": tree("mix"),
    "ngram-chain": chain("ngram", ngram_min=1),
    "ngram-tree": tree("ngram", ngram_min=1),
    "suffix-tree": tree("suffix"),
    "draft-chain": chain("draft_model", model=checkpoint()),  # T0 drafts for itself
    "draft-tree": tree("draft_model", model=checkpoint("draft")),
}
"""Fixed shapes that identity is tested with, one per drafter and kind of tree."""


# -- engines --------------------------------------------------------------------------------------------------------------


def engine(speculation: SpecConfig | str = "off", *, kind: str = "t0", oracle: Oracle | None = None, **options: Any) -> Engine:
    """An engine in some milliseconds: float32, CPU, blocks of 4 tokens, 128 positions. `options` are fields of EngineConfig."""
    options = {"block_size": 4, "device": "cpu", "max_model_len": 128, "max_num_seqs": 16, "kv_cache_bytes": 1 << 24} | options
    config = EngineConfig(model=checkpoint(kind), speculation=SpecConfig.of(speculation), **options)
    return build_engine(config, oracle=oracle)


def oracle_of(outputs: Mapping[str, RequestOutput]) -> Oracle:
    """The recorded future by request id and choice: for requests that share a prompt but not their parameters."""
    known = {(request_id, c.index): c.token_ids for request_id, output in outputs.items() for c in output.outputs}
    return lambda seq: known.get((seq.request_id, seq.choice), ())[seq.num_output :]


@dataclass
class Log:
    """What a run showed on the way: every delta, and the sums of the step statistics."""

    deltas: dict[str, list[RequestOutput]] = field(default_factory=dict)
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    preempted: int = 0
    skipped: dict[str, int] = field(default_factory=dict)


def run(target: Engine, requests: Requests, *, log: Log | None = None, trace: bool = False) -> dict[str, RequestOutput]:
    """Serve all requests together to their end; the deltas of each joined. Raises AssertionError on any leak."""
    for request_id, (prompt, params) in requests.items():
        target.add_request(request_id, prompt, params, trace=trace)
    outputs = drain(target, log or Log())
    assert set(outputs) == set(requests)
    return outputs


def drain(target: Engine, log: Log) -> dict[str, RequestOutput]:
    """Step until there is no work, checking invariants after every step."""
    seen_step = -1 if target.stats is None else target.stats.step
    while target.has_work():
        for delta in target.step():
            log.deltas.setdefault(delta.request_id, []).append(delta)
        log.steps += 1
        assert log.steps < 20_000, "the engine makes no progress"
        target.scheduler.check()
        if target.stats is not None and target.stats.step != seen_step:
            seen_step = target.stats.step
            _add_stats(log, target)
    check_idle(target)
    return {request_id: join(deltas) for request_id, deltas in log.deltas.items() if deltas[-1].finished}


def _add_stats(log: Log, target: Engine) -> None:
    stats = target.stats
    assert stats is not None
    log.drafted += sum(stats.drafted.values())
    log.accepted += sum(stats.accepted.values())
    log.committed += stats.committed
    log.preempted += stats.preempted
    for reason, count in stats.skipped.items():
        log.skipped[reason] = log.skipped.get(reason, 0) + count


def check_idle(target: Engine) -> None:
    """Nothing runs, waits or holds a block."""
    target.scheduler.check()
    assert (target.num_running, target.num_waiting, target.kv_usage) == (0, 0, 0.0)


def join(deltas: Seq[RequestOutput]) -> RequestOutput:
    """One whole output from a stream, written independently of the library's own joining."""
    indexes = sorted({c.index for delta in deltas for c in delta.outputs})
    choices = []
    for index in indexes:
        parts = [c for delta in deltas for c in delta.outputs if c.index == index]
        logprobs = [entry for c in parts for entry in c.logprobs or ()] if parts[-1].logprobs is not None else None
        ids = [token for c in parts for token in c.token_ids]
        reasons = [c.finish_reason for c in parts]
        assert all(reason is None for reason in reasons[:-1]), "a choice went on after its end"
        text = "".join(c.text for c in parts)
        choices.append(CompletionOutput(index, text, ids, reasons[-1], parts[-1].stop_reason, logprobs))
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [deltas[-1].finished]
    return replace(deltas[-1], outputs=choices)


# -- comparison -----------------------------------------------------------------------------------------------------------


def visible(output: RequestOutput) -> list[tuple[Any, ...]]:
    """Everything a client can tell two runs apart by, but log-probabilities: per choice ids, text, reasons; then usage."""
    assert output.finished
    assert output.metrics.generated == sum(len(c.token_ids) for c in output.outputs)
    choices: list[tuple[Any, ...]] = [(c.index, c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.outputs]
    return [*choices, ("usage", output.metrics.prompt_tokens, output.metrics.generated)]


def assert_same(found: RequestOutput, expected: RequestOutput, *, tolerance: float = 1e-4) -> None:
    """Equal outputs; log-probabilities within `tolerance` (0 = bitwise)."""
    assert visible(found) == visible(expected)
    for a, b in zip(found.outputs, expected.outputs, strict=True):
        _assert_logprobs(a.logprobs, b.logprobs, tolerance)
    _assert_logprobs(found.prompt_logprobs, expected.prompt_logprobs, tolerance)


def _assert_logprobs(found: Seq[Any] | None, expected: Seq[Any] | None, tolerance: float) -> None:
    assert (found is None) == (expected is None)
    for a, b in zip(found or (), expected or (), strict=True):
        assert (a is None) == (b is None)
        if a is None:
            continue
        assert a.token == b.token and abs(a.logprob - b.logprob) <= tolerance
        assert len(a.top) == len(b.top)
        assert all(abs(x - y) <= tolerance for (_, x), (_, y) in zip(a.top, b.top, strict=True))
        if tolerance == 0:
            assert (a.rank, a.top) == (b.rank, b.top)


NOISE = 1e-4  # of a logit of standard deviation 3; float32 rows computed in other batches differ by some 1e-6


def assert_same_or_tie(
    found: RequestOutput, expected: RequestOutput, request: tuple[list[int] | str, SamplingParams], kind: str = "t0"
) -> int:
    """The rule of the default mode: a choice may differ from OFF from a near-tie on, and only from there.

    A position is a near-tie when noise of size NOISE on the raw logits changes OFF's own token there. Returns the number
    of choices that differ.
    """
    ties = 0
    for a, b in zip(found.outputs, expected.outputs, strict=True):
        if a.token_ids == b.token_ids:
            assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason)
            continue
        pairs = zip([*a.token_ids, None], [*b.token_ids, None], strict=False)
        first = next(i for i, (x, y) in enumerate(pairs) if x != y)
        assert is_tie(request, b.index, first, b.token_ids[first], kind), f"choice {b.index} differs from OFF at output {first}"
        ties += 1
    return ties


def is_tie(request: tuple[list[int] | str, SamplingParams], choice: int, index: int, token: int, kind: str = "t0", tries: int = 16) -> bool:
    """Whether small noise on the logits of output `index` changes OFF's `token` there."""
    for attempt in range(tries):
        target = engine("off", kind=kind, deterministic=True)
        generator = torch.Generator().manual_seed(attempt)
        forward = target.runner.forward

        def shaken(batch: Any, forward: Any = forward, generator: Any = generator, target: Engine = target) -> Any:
            result = forward(batch)
            rows = [s for s in target.scheduler.running if s.choice == choice and s.num_output == index]
            return replace(result, logits=result.logits + NOISE * torch.randn(result.logits.shape, generator=generator)) if rows else result

        target.runner.forward = shaken  # type: ignore[method-assign]
        output = run(target, {"r": request})["r"]
        ids = output.outputs[choice].token_ids
        if index >= len(ids) or ids[index] != token:
            return True
    return False
