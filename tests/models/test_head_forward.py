"""`DraftHead` against a plain float32 oracle: softmax attention over the whole sequence, no cache, no kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.layers.rotary import inverse_frequencies
from specdec.models.config import RopeConfig
from specdec.models.draft_heads import DraftHead
from specdec.models.head_config import HeadConfig
from specdec.models.load import LoadedModel, load_model
from tests.oracle import PlainKV
from tests.tiny import write_tiny
from tests.tiny_heads import build_head, tiny_head

IDS = [(11 * i * i + 3 * i + 7) % 512 for i in range(40)]


def oracle(c: HeadConfig, w: dict[str, Tensor], embedding: Tensor, ids: list[int], taps: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
    """(logits [T, Vd], feedback [T, Hd]) of pairs (taps[i], ids[i]) at positions 1, 2, …, all visible causally."""
    positions = torch.arange(1, len(ids) + 1)
    g = fused(c, w, taps)
    n = norm(g, w["layers.0.hidden_norm.weight"], c.eps)
    x = torch.cat((norm(embedding[torch.tensor(ids)], w["layers.0.input_layernorm.weight"], c.eps), n), dim=1)
    h = (n if c.norm_before_residual else g) + attention(c, w, 0, x, positions)
    h = h + mlp(c, w, 0, norm(h, w["layers.0.post_attention_layernorm.weight"], c.eps))
    for i in range(1, c.num_layers):
        h = h + attention(c, w, i, norm(h, w[f"layers.{i}.input_layernorm.weight"], c.eps), positions)
        h = h + mlp(c, w, i, norm(h, w[f"layers.{i}.post_attention_layernorm.weight"], c.eps))
    hidden = norm(h, w["norm.weight"], c.eps)
    return hidden @ lm_head.T, hidden if c.norm_output else h


def fused(c: HeadConfig, w: dict[str, Tensor], taps: Tensor) -> Tensor:
    if c.norm_before_fc:
        taps = norm(taps, w["input_norm.weight"], c.eps)
    if c.fc_norm:
        size = c.target_hidden_size
        taps = torch.cat([norm(taps[:, i * size : (i + 1) * size], w[f"fc_norm.{i}.weight"], c.eps) for i in range(len(c.taps))], 1)
    return taps @ w["fc.weight"].T


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def mlp(c: HeadConfig, w: dict[str, Tensor], i: int, x: Tensor) -> Tensor:
    p = f"layers.{i}.mlp"
    return linear(w, f"{p}.down_proj", F.silu(linear(w, f"{p}.gate_proj", x)) * linear(w, f"{p}.up_proj", x))


def attention(c: HeadConfig, w: dict[str, Tensor], i: int, x: Tensor, positions: Tensor) -> Tensor:
    p, rows = f"layers.{i}.self_attn", len(positions)
    q, k, v = (linear(w, f"{p}.{n}_proj", x).view(rows, -1, c.head_dim).transpose(0, 1) for n in "qkv")
    if c.qk_norm:
        q, k = norm(q, w[f"{p}.q_norm.weight"], c.eps), norm(k, w[f"{p}.k_norm.weight"], c.eps)
    q, k = rotated(c, q, positions), rotated(c, k, positions)
    k, v = (t.repeat_interleave(c.num_heads // c.num_kv_heads, 0) for t in (k, v))
    distance = positions[:, None] - positions[None]
    hidden = (distance < 0) | (distance >= (c.windows[i] or 1 << 30))
    scores = (q @ k.transpose(1, 2) * c.head_dim**-0.5).masked_fill(hidden, -torch.inf)
    return linear(w, f"{p}.o_proj", (scores.softmax(-1) @ v).transpose(0, 1).reshape(rows, -1))


def rotated(c: HeadConfig, x: Tensor, positions: Tensor) -> Tensor:
    angles = positions[:, None] * inverse_frequencies(c.rope, c.head_dim)
    turn = torch.polar(torch.ones_like(angles), angles)
    half = c.head_dim // 2
    z = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((z.real, z.imag), dim=-1)


def run(head: DraftHead, ids: list[int], features: Tensor, chunks: list[int]) -> tuple[Tensor, Tensor]:
    """(logits, feedback) of the head over its own cache, fed in shares; slot 0 holds no pair and is masked."""
    kv = PlainKV(head.config, len(ids) + 1)
    rows, start = [], 0
    with torch.inference_mode():
        for size in chunks:
            batch = replace(kv.batch(ids[start : start + size], start + 1), first_key=torch.ones(1, dtype=torch.int32))
            hidden, feedback = head.forward(batch, features[start : start + size], kv)
            rows.append((head.logits(hidden), feedback))
            start += size
    logits, feedback = zip(*rows, strict=True)
    return torch.cat(logits), torch.cat(feedback)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_tiny(tmp_path_factory.mktemp("target"), seed=1, num_hidden_layers=4))


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "eagle31": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "two layers": {"num_layers": 2},
    "three layers": {"num_layers": 3, "norm_output": True, "norm_before_residual": True},
    "qk_norm": {"qk_norm": True, "num_layers": 2},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "num_layers": 2},
    "windows": {"num_layers": 2, "windows": (7, None)},
    "own embedding, other width": {"own_embedding": True, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1},
    "full vocabulary": {"draft_vocab_size": 512},
    "shared lm_head": {"draft_vocab_size": 512, "own_lm_head": False},
    "four taps": {"taps": (0, 1, 3, 4)},
    "llama3 rope": {"rope": RopeConfig(1e4, "llama3", 8.0, 1.0, 4.0, 64)},
}


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS.keys())
def test_equals_the_oracle(target: LoadedModel, kind: str, flags: dict[str, Any], deterministic: bool) -> None:
    config, tensors = tiny_head(kind, target.config, **flags)
    head = build_head(config, tensors, target.model)
    head.deterministic = deterministic
    taps = torch.randn(len(IDS), config.tap_size, generator=torch.Generator().manual_seed(5))
    embedding = tensors.get("embed_tokens.weight", target.model.embedding.dequantize())
    lm_head = tensors.get("lm_head.weight", target.model.lm_head.dequantize())
    expected_logits, expected_feedback = oracle(config, tensors, embedding, IDS, taps, lm_head)
    found_logits, found_feedback = run(head, IDS, head.fuse(taps), [1, 17, 3, 19])
    assert found_logits.dtype == torch.float32 and found_logits.shape == (len(IDS), config.draft_vocab_size)
    torch.testing.assert_close(found_logits, expected_logits, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(found_feedback, expected_feedback, atol=1e-3, rtol=1e-3)
    if kind == "peagle":
        torch.testing.assert_close(head.mask_feature, fused(config, tensors, tensors["mask_hidden"].view(1, -1))[0], atol=1e-4, rtol=1e-4)


def test_target_ids_are_the_kept_ids(target: LoadedModel) -> None:
    config, tensors = tiny_head("eagle3", target.config)
    head = build_head(config, tensors, target.model)
    assert torch.equal(head.target_ids, tensors["t2d"].nonzero().flatten())
    full, tensors = tiny_head("eagle3", target.config, draft_vocab_size=512)
    assert torch.equal(build_head(full, tensors, target.model).target_ids, torch.arange(512))


def test_rope_reaches_the_targets_length(target: LoadedModel) -> None:
    """A head trained for 8 positions still computes angles far beyond (policy decides whether to draft there)."""
    config, tensors = tiny_head("eagle3", target.config, max_positions=8)
    short = build_head(config, tensors, target.model)
    long = build_head(replace(config, max_positions=0), tensors, target.model)
    features = torch.randn(len(IDS), config.hidden_size)
    assert torch.equal(run(short, IDS, features, [len(IDS)])[0], run(long, IDS, features, [len(IDS)])[0])


def test_epoch_names_the_weights(target: LoadedModel) -> None:
    config, tensors = tiny_head("eagle3", target.config)
    epoch = build_head(config, tensors, target.model).epoch
    assert build_head(replace(config, dialect="eagle", provenance={"a": 1}), dict(tensors), target.model).epoch == epoch
    changed = tensors | {"fc.weight": tensors["fc.weight"].clone().index_fill_(0, torch.tensor([3]), 0.5)}
    assert build_head(config, changed, target.model).epoch != epoch
    assert build_head(replace(config, norm_output=True), tensors, target.model).epoch != epoch


@pytest.mark.parametrize("flags", [VARIANTS["eagle31"], VARIANTS["three layers"], VARIANTS["qk_norm"]], ids=["eagle31", "deep", "qk_norm"])
def test_deterministic_bits_do_not_depend_on_chunks(target: LoadedModel, flags: dict[str, Any]) -> None:
    """Draft KV of a pair is the same however its rows were fed: drafts cannot depend on chunk sizes."""
    config, tensors = tiny_head("eagle3", target.config, **flags)
    head = build_head(config, tensors, target.model)
    head.deterministic = True
    taps = torch.randn(len(IDS), config.tap_size, generator=torch.Generator().manual_seed(5))
    fused_in_shares = torch.cat([head.fuse(part) for part in taps.split(7)])
    whole = run(head, IDS, head.fuse(taps), [len(IDS)])
    for chunks in ([1] * len(IDS), [3, 16, 21]):
        assert all(torch.equal(a, b) for a, b in zip(run(head, IDS, fused_in_shares, chunks), whole, strict=True))
