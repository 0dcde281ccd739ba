"""The head in training computes what the head in service does: teacher-forced chains and parallel drafts, every flag."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.models.draft_heads import DraftHead
from specdec.models.head_config import HeadConfig
from specdec.models.load import LoadedModel, load_model
from specdec.train.capture import DenseTarget
from specdec.train.model import TrainableHead
from specdec.train.recipe import exported_tensors
from specdec.train.rollouts import arrange
from tests.oracle import PlainKV
from tests.tiny import write_tiny
from tests.tiny_heads import MASK_TOKEN, build_head, tiny_head

IDS = [(11 * i * i + 3 * i + 7) % 512 for i in range(24)]
EAGLE31 = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eagle31": EAGLE31,
    "fc_norm": {"fc_norm": True, "norm_output": True},
    "three layers": {"num_layers": 3, **EAGLE31},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "qk_norm": {"qk_norm": True},
    "window": {"num_layers": 2, "windows": (6, None)},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_tiny(tmp_path_factory.mktemp("target"), seed=1, num_hidden_layers=4))


def pair(target: LoadedModel, kind: str, **flags: Any) -> tuple[TrainableHead, DraftHead]:
    """One random head in both forms."""
    config, tensors = tiny_head(kind, target.config, **flags)
    served = build_head(config, tensors, target.model)
    trained = TrainableHead(config, target.model.embedding.dequantize(), served.target_ids)
    trained.load_state_dict({name: t for name, t in tensors.items() if name not in ("d2t", "t2d")})
    return trained, served


def taps_of(target: LoadedModel, config: HeadConfig) -> Tensor:
    return DenseTarget(target.model, config.taps)(torch.tensor([IDS]))[0]


class Served:
    """The served head over its cache, one share of rows after the other; slot 0 is masked."""

    def __init__(self, head: DraftHead):
        self.head, self.next, self.kv = head, 1, PlainKV(head.config, len(IDS) + 12)

    def feed(self, ids: list[int], features: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            batch = replace(self.kv.batch(ids, self.next), first_key=torch.ones(1, dtype=torch.int32))
            hidden, feedback = self.head.forward(batch, features, self.kv)
        self.next += len(ids)
        return self.head.logits(hidden), feedback


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_chain_from_every_kind_of_place(target: LoadedModel, variant: str) -> None:
    trained, served = pair(target, "eagle3", **VARIANTS[variant])
    taps, steps = taps_of(target, served.config), 5
    with torch.no_grad():
        logits = trained.lm_head(trained.unroll(torch.tensor([IDS]), taps, steps))[:, 0]
    for anchor in (0, 1, 9, 18):
        run = Served(served)
        found, feedback = run.feed(IDS[1 : anchor + 2], served.fuse(taps[0, : anchor + 1]))
        for step in range(steps):
            torch.testing.assert_close(logits[step, anchor], found[-1], rtol=1e-4, atol=1e-4)
            if step + 1 < steps:
                found, feedback = run.feed([IDS[anchor + 2 + step]], feedback[-1:])


@pytest.mark.parametrize("variant", [v for v in VARIANTS])
def test_a_parallel_draft_from_every_kind_of_place(target: LoadedModel, variant: str) -> None:
    trained, served = pair(target, "peagle", **VARIANTS[variant])
    taps = taps_of(target, served.config)
    kept = torch.zeros(1, len(IDS), dtype=torch.int64)
    kept[0, [0, 1, 9, 18]] = torch.tensor([2, 0, 4, 3])
    place, counts = arrange(kept, 5)
    with torch.no_grad():
        hidden, rollouts = trained.parallel(torch.tensor([IDS]), taps, place, counts)
        logits = trained.lm_head(hidden)[0]
    assert served.mask_feature is not None
    for anchor in (0, 1, 9, 18):
        depth = int(kept[0, anchor])
        masks = served.mask_feature.expand(depth, -1)
        features = torch.cat([served.fuse(taps[0, : anchor + 1]), masks])
        found, _ = Served(served).feed([*IDS[1 : anchor + 2], *[MASK_TOKEN] * depth], features)
        rows = [
            anchor,
            *(len(IDS) + i for i in range(len(rollouts.depth)) if rollouts.anchor[0, i] == anchor and rollouts.depth[i] <= depth),
        ]
        assert len(rows) == depth + 1
        torch.testing.assert_close(logits[rows], found[anchor:], rtol=1e-4, atol=1e-4)


def test_the_transition_trained_is_the_one_served(target: LoadedModel) -> None:
    trained, served = pair(target, "peagle", transition=24, **EAGLE31)
    hidden = torch.randn(5, served.config.hidden_size, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor(IDS[:5])
    with torch.no_grad():
        wanted = trained.follow(hidden, ids)
        found = served.follow(hidden, ids)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert float((wanted - hidden).abs().min(1).values.max()) > 0
    assert trained.state_dict().keys() >= {f"transition.{n}.weight" for n in ("token_norm", "token_proj", "hidden_proj", "out_proj")}


def test_rows_of_a_batch_do_not_meet(target: LoadedModel) -> None:
    trained, served = pair(target, "eagle3", **EAGLE31)
    other = list(reversed(IDS))
    taps = DenseTarget(target.model, served.config.taps)(torch.tensor([IDS, other]))[0]
    with torch.no_grad():
        both = trained.unroll(torch.tensor([IDS, other]), taps, 3)
        alone = trained.unroll(torch.tensor([other]), taps[1:], 3)
    torch.testing.assert_close(both[:, 1:], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_every_parameter_is_exported_and_learns(target: LoadedModel, kind: str) -> None:
    trained, _ = pair(target, kind, num_layers=2, **EAGLE31)
    config, tensors = tiny_head(kind, target.config, num_layers=2, **EAGLE31)
    assert {name: t.shape for name, t in exported_tensors(trained).items()} == {name: t.shape for name, t in tensors.items()}
    taps = taps_of(target, config)
    if kind == "eagle3":
        hidden = trained.unroll(torch.tensor([IDS]), taps, 3)
    else:
        kept = torch.full((1, len(IDS)), 2)
        hidden = trained.parallel(torch.tensor([IDS]), taps, *arrange(kept, 3))[0]
    trained.lm_head(hidden).square().mean().backward()
    assert [name for name, p in trained.named_parameters() if p.grad is None or not bool(p.grad.any())] == []


def test_bfloat16_taps_give_bfloat16_states(target: LoadedModel) -> None:
    """The dtypes of CUDA, on any device: float32 weights and gradients, states in the dtype of the taps."""
    trained, served = pair(target, "eagle3", **EAGLE31)
    taps = taps_of(target, served.config)
    exact = trained.unroll(torch.tensor([IDS]), taps, 3)
    rounded = trained.unroll(torch.tensor([IDS]), taps.bfloat16(), 3)
    assert rounded.dtype == torch.bfloat16
    assert float(torch.nn.functional.cosine_similarity(exact, rounded.float(), dim=-1).detach().min()) > 0.99
    rounded.float().square().mean().backward()
    assert {p.grad.dtype for p in trained.parameters() if p.grad is not None} == {torch.float32}
