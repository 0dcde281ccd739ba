"""The padding of recorded passes, without a card: passes are run where a card would replay them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from specdec import boot
from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.runner.graphs import ROWS, SEQUENCES, Outputs, fitting
from specdec.types import Batch
from tests.harness import GREEDY, SHAPES, Log, P, R, engine, oracle_of, run, tree
from tests.spec import heads

SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=24, ignore_eos=True)
REQUESTS = {"greedy": (P, GREEDY), "repetitive": (R, GREEDY), "sampled": (P, SAMPLED)}


@dataclass
class Recordings:
    """Stands for the card: a replay is the pass itself. made: passes recorded so far."""

    made: list[Callable[[], Outputs]] = field(default_factory=list)

    def __call__(self, run: Callable[[], Outputs]) -> Callable[[], Outputs]:
        self.made.append(run)
        return run


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Recordings:
    """Engines built from now on record their passes here."""
    recordings = Recordings()
    monkeypatch.setattr(boot, "_recorder", lambda config, device: None if config.enforce_eager else lambda: recordings)
    return recordings


@pytest.mark.parametrize("kind", ["t0", "two_groups"])
@pytest.mark.parametrize("shape", ["off", "mix-chain", "mix-tree"])
def test_padding_changes_no_token(kind: str, shape: str, recordings: Recordings) -> None:
    plain = run(engine(kind=kind, enforce_eager=True), REQUESTS)
    assert not recordings.made
    padded = run(engine(SHAPES[shape] if shape != "off" else "off", kind=kind, oracle=oracle_of(plain)), REQUESTS)
    assert len(recordings.made) > 1
    for name in REQUESTS:
        assert padded[name].outputs[0].token_ids == plain[name].outputs[0].token_ids, name


@pytest.mark.parametrize("method", ["eagle3", "peagle"])
@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_heads_draft_the_same(method: str, verify: str, recordings: Recordings) -> None:
    """Op by op both times: the compiled draft of one sequence is not what a card runs."""
    spec = heads.tree(method, verify=verify)
    logs = [Log(), Log()]
    outputs = [
        run(engine(spec, dtype="bfloat16", enforce_eager=eager), REQUESTS, log=log) for eager, log in zip((True, False), logs, strict=True)
    ]
    assert recordings.made
    assert logs[0].drafted == logs[1].drafted > 0
    assert logs[0].accepted == logs[1].accepted
    for name in REQUESTS:
        assert outputs[0][name].outputs[0].token_ids == outputs[1][name].outputs[0].token_ids, name


DRAFTED = {
    "tree": heads.tree("eagle3"),
    "chain": heads.chain("eagle3"),
    "wide": heads.tree("eagle3", nodes=24, depth=4, width=5),
    "parallel chain": heads.chain("peagle"),
    "following": heads.tree("peagle", head=heads.random_head("peagle", transition=24)),
}


@pytest.mark.parametrize("shape", DRAFTED.values(), ids=DRAFTED)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_recorded_draft_is_the_same_draft(shape: SpecConfig, temperature: float, recordings: Recordings) -> None:
    """Three sequences, padded to four, then fewer as they end: as many drafts, as many of them right, the same tokens."""
    params = SamplingParams(temperature=temperature, seed=11, ignore_eos=True)
    requests = {f"r{n}": ([n, *P], replace(params, max_tokens=n)) for n in (18, 24, 30)}
    logs, found = [Log(), Log()], []
    for eager, log in zip((True, False), logs, strict=True):
        target = engine(shape, dtype="bfloat16", enforce_eager=eager)
        found.append(run(target, requests, log=log))
    made = target.proposers[shape.method]._recorded._made
    assert {shape.batch for shape in made} == {1, 2, 4}
    assert {shape.samples for shape in made} == {temperature > 0}
    assert logs[1].drafted == logs[0].drafted > 0
    assert abs(logs[1].accepted - logs[0].accepted) <= (0 if temperature == 0 else 2), "the race is over all tokens there"
    for name in requests:
        assert found[1][name].outputs[0].token_ids == found[0][name].outputs[0].token_ids, name


def test_prompt_logprobs_and_long_prompts_go_without(recordings: Recordings) -> None:
    asked = {"prompt logprobs": (P, SamplingParams(temperature=0.0, prompt_logprobs=2, max_tokens=4))}
    plain, other = run(engine(enforce_eager=True), asked), run(engine(), asked)
    assert other["prompt logprobs"].prompt_logprobs == plain["prompt logprobs"].prompt_logprobs
    recordings.made.clear()
    once = SamplingParams(max_tokens=1)
    run(engine(max_num_batched_tokens=2 * ROWS[-1]), {f"r{n}": ([n] * 100, once) for n in range(ROWS[-1] // 100 + 1)})
    assert not recordings.made


def test_a_batch_of_more_than_128_rows_is_recorded(recordings: Recordings) -> None:
    """Thirteen trees of thirteen nodes: the passes of 192 rows change no token either."""
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=12, ignore_eos=True)
    requests = {f"r{n}": ([n, *P], params) for n in range(1, 14)}
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 512}
    plain = run(engine(enforce_eager=True, **options), requests)
    padded = engine(tree("oracle", 4, 3), oracle=oracle_of(plain), **options)
    found = run(padded, requests)
    assert any(rows > 128 for rows, _ in padded.runner._passes[padded.runner.taps]._recorded)
    for name in requests:
        assert found[name].outputs[0].token_ids == plain[name].outputs[0].token_ids, name


def test_a_shape_is_recorded_once(recordings: Recordings) -> None:
    target = engine(enable_prefix_caching=False)
    run(target, REQUESTS)
    made = len(recordings.made)
    run(target, {f"{name} again": request for name, request in REQUESTS.items()})
    assert len(recordings.made) == made


def test_a_size_that_holds_it() -> None:
    assert [fitting(ROWS, n) for n in (1, 3, 17, 128, 129, 193, 257)] == [1, 4, 24, 128, 192, 256, None]
    assert fitting(SEQUENCES, 33) == 64


def test_the_padding_writes_nothing_and_belongs_to_nobody(recordings: Recordings, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    seen: list[Batch] = []
    forward = one.runner.model.forward

    def watched(batch: Batch, *args: object, **options: object) -> object:
        seen.append(batch)
        return forward(batch, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(one.runner.model, "forward", watched)
    run(one, {"three": ([5, 6, 7], SamplingParams(max_tokens=1))})
    batch = seen[-1]
    assert len(batch.input_ids) == 4
    assert batch.cu_query.tolist() == [0, 3]
    assert (batch.slot_mapping[:, 3] == -1).all()
    assert (batch.slot_mapping[:, :3] >= 0).all()


def test_passes_are_recorded_where_kernels_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, card = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(boot.ops, "WHY_NO_TRITON", None)
    assert boot._recorder(EngineConfig(), card) is not None
    assert boot._recorder(EngineConfig(enforce_eager=True), card) is None
    assert boot._recorder(EngineConfig(), cpu) is None
    monkeypatch.setattr(boot.ops, "WHY_NO_TRITON", "not installed")
    assert boot._recorder(EngineConfig(), card) is None
