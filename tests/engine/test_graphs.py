"""The padding of recorded passes, without a card: passes are run where a card would replay them."""

from __future__ import annotations

import pytest
import torch

from specdec.config import EngineConfig, SamplingParams
from specdec.engine import Engine
from specdec.runner.graphs import ROWS, SEQUENCES, ForwardGraphs, fitting
from specdec.types import Batch
from tests.harness import GREEDY, SHAPES, P, R, engine, oracle_of, run

SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=24, ignore_eos=True)
REQUESTS = {"greedy": (P, GREEDY), "repetitive": (R, GREEDY), "sampled": (P, SAMPLED)}


def recorded(engine: Engine) -> ForwardGraphs:
    """The graphs that `engine` uses from now on."""
    tables = engine.scheduler.tables.tensor
    graphs = ForwardGraphs(engine.runner.model, engine.kv, (tables.shape[0], tables.shape[2]), record=lambda forward: forward)
    engine.runner.graphs = graphs
    return graphs


@pytest.mark.parametrize("kind", ["t0", "two_groups"])
@pytest.mark.parametrize("shape", ["off", "mix-chain", "mix-tree"])
def test_padding_changes_no_token(kind: str, shape: str) -> None:
    plain = run(engine(kind=kind), REQUESTS)
    drafting = engine(SHAPES[shape] if shape != "off" else "off", kind=kind, oracle=oracle_of(plain))
    graphs = recorded(drafting)
    padded = run(drafting, REQUESTS)
    assert len(graphs) > 1
    for name in REQUESTS:
        assert padded[name].outputs[0].token_ids == plain[name].outputs[0].token_ids, name


def test_prompt_logprobs_and_long_prompts_go_without() -> None:
    asked = {"prompt logprobs": (P, SamplingParams(temperature=0.0, prompt_logprobs=2, max_tokens=4))}
    plain, other = run(engine(), asked), engine()
    recorded(other)
    assert run(other, asked)["prompt logprobs"].prompt_logprobs == plain["prompt logprobs"].prompt_logprobs
    long = engine(max_num_batched_tokens=2 * ROWS[-1])
    graphs = recorded(long)
    once = SamplingParams(max_tokens=1)
    run(long, {"one": ([7] * 100, once), "other": ([9] * 100, once)})
    assert len(graphs) == 0


def test_a_size_that_holds_it() -> None:
    assert [fitting(ROWS, n) for n in (1, 3, 17, 128, 129)] == [1, 4, 24, 128, None]
    assert fitting(SEQUENCES, 33) == 64


def test_the_padding_writes_nothing_and_belongs_to_nobody() -> None:
    one = engine()
    seen: list[Batch] = []
    model = one.runner.model
    forward = model.forward

    def watched(batch: Batch, *args: object, **options: object) -> object:
        seen.append(batch)
        return forward(batch, *args, **options)  # type: ignore[arg-type]

    model.forward = watched  # type: ignore[method-assign]
    recorded(one)
    run(one, {"three": ([5, 6, 7], SamplingParams(max_tokens=1))})
    batch = seen[-1]
    assert len(batch.input_ids) == 4
    assert batch.cu_query.tolist() == [0, 3]
    assert (batch.slot_mapping[:, 3] == -1).all()
    assert (batch.slot_mapping[:, :3] >= 0).all()


def test_eager_is_a_choice() -> None:
    assert EngineConfig(enforce_eager=True).enforce_eager
    assert engine().runner.graphs is None  # the CPU has none
    assert not torch.cuda.is_available() or engine(device="cuda", enforce_eager=True).runner.graphs is None
