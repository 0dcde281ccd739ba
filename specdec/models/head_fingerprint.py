"""Fingerprint of a target: what a draft head reads of it, on a fixed token sequence, in a few numbers.

A head is trained on the hidden states of one set of weights. Per tap the fingerprint keeps mean and deviation of the states
and their projections on fixed directions, after the mean over tokens is removed (a few huge coordinates that hardly depend on
the token would otherwise hide the rest). Quantisation and dtype move the projections a little; other weights, or a rotated
basis, leave no correlation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.cache.kv import KVCache
from specdec.models.config import ModelConfig
from specdec.types import Batch

if TYPE_CHECKING:
    from specdec.models.llama import LlamaModel

VERSION = 1
MIN_CORRELATION = 0.8
MAX_STD_RATIO = 1.25
_TOKENS, _DIRECTIONS = 33, 8  # the first token's states are unlike all others and left out


@torch.inference_mode()
def measure(model: LlamaModel, taps: Sequence[int]) -> dict[str, Any]:
    """The fingerprint of `model` at these taps, ready for JSON. One pass over 33 tokens."""
    _, tapped = model.forward(*_scratch(model), taps=tuple(taps))
    assert tapped is not None  # asked for
    states = tapped.float().cpu()[1:].unflatten(1, (len(taps), -1))
    return {
        "version": VERSION,
        "config": config_digest(model.config),
        "taps": {str(tap): _statistics(states[:, i]) for i, tap in enumerate(taps)},
    }


def mismatch(stored: Mapping[str, Any], model: LlamaModel) -> str | None:
    """Why `model` is not the target that was measured, or None. A fingerprint that cannot be read is a mismatch too."""
    if stored.get("version") != VERSION:
        return f"fingerprint of version {stored.get('version')!r} cannot be compared, this is version {VERSION}"
    if stored.get("config") != config_digest(model.config):
        return f"config hash {stored.get('config')!r} is not the target's {config_digest(model.config)!r}"
    expected = stored.get("taps")
    legal = {str(tap) for tap in range(model.config.num_layers + 1)}
    if not isinstance(expected, Mapping) or not expected or not legal.issuperset(expected) or not all(map(_complete, expected.values())):
        return "its statistics are damaged and cannot be compared"
    found = measure(model, [int(tap) for tap in expected])["taps"]
    for tap, statistics in expected.items():
        reason = _difference(statistics, found[tap])
        if reason is not None:
            return f"hidden states entering layer {tap}: {reason}"
    return None


def _complete(statistics: Any) -> bool:
    """Whether a tap's entry has the fields and types that `_statistics` writes."""
    if not isinstance(statistics, Mapping):
        return False
    numbers = [statistics.get("mean"), statistics.get("std"), *(statistics.get("projections") or [None])]
    return all(isinstance(number, (int, float)) for number in numbers)


def correlation(stored: Mapping[str, Any], found: Mapping[str, Any], tap: int) -> float:
    """Cosine between the projections of two fingerprints at a tap: 1 = same weights, about 0 = unrelated."""
    return _cosine(stored["taps"][str(tap)], found["taps"][str(tap)])


def _cosine(stored: Mapping[str, Any], found: Mapping[str, Any]) -> float:
    a, b = (torch.tensor(tap["projections"], dtype=torch.float64) for tap in (stored, found))
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0)) if a.shape == b.shape else 0.0


def config_digest(config: ModelConfig) -> str:
    """Hex digest of what fixes the architecture; not of dtype, end tokens or limits, which conversions change."""
    keys = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "windows")
    facts = {key: getattr(config, key) for key in keys}
    rope = config.rope
    numbers = (config.eps, rope.theta, rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max_positions)
    facts |= {"rope": rope.kind, "numbers": [f"{number:.5g}" for number in numbers]}  # files round them differently
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _difference(stored: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    cosine = _cosine(stored, found)
    if not cosine >= MIN_CORRELATION:
        return f"correlation {cosine:.2f} is below {MIN_CORRELATION}; other weights, or another basis"
    ratio = found["std"] / stored["std"] if stored["std"] else float("inf")
    if not 1 / MAX_STD_RATIO <= ratio <= MAX_STD_RATIO:
        return f"standard deviation {found['std']:.4g} against {stored['std']:.4g}"
    if abs(found["mean"] - stored["mean"]) > 0.2 * stored["std"]:
        return f"mean {found['mean']:.4g} against {stored['mean']:.4g}"
    return None


def _statistics(states: Tensor) -> dict[str, Any]:
    """states [tokens, H] f32."""
    centred = states - states.mean(0)
    projected = centred @ _directions(states.shape[1]) / (centred.square().mean().sqrt() + 1e-12)
    return {
        "mean": float(states.mean()),
        "std": float(states.std()),
        "projections": [round(v, 4) for v in projected.flatten().tolist()],
    }


def _directions(size: int) -> Tensor:
    """[size, 8] unit columns of signs that no library or version changes: bits of SHA-256 in counter mode."""
    count = size * _DIRECTIONS
    stream = b"".join(hashlib.sha256(f"direction {i}".encode()).digest() for i in range(-(-count // 256)))
    bits = torch.tensor(list(stream), dtype=torch.uint8).unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1
    return (bits.flatten()[:count].view(size, _DIRECTIONS).float() * 2 - 1) / size**0.5


def _scratch(model: LlamaModel) -> tuple[Batch, KVCache]:
    """The fixed tokens as one causal batch, over a cache of their own."""
    config, device, block = model.config, model.device, 16
    groups, count = config.kv_groups(), min(_TOKENS, config.max_positions)
    blocks = -(-count // block)
    kv = KVCache(
        groups,
        [blocks + 1] * len(groups),
        block,
        dtype=model.dtype,
        device=device,
        layer_group=config.layer_group,
        layer_in_group=config.layer_in_group,
    )
    positions = torch.arange(count, device=device)
    batch = Batch(
        input_ids=(positions * positions * 7919 + positions * 104729 + 97) % config.vocab_size,
        positions=positions,
        cu_query=torch.tensor([0, count], dtype=torch.int32, device=device),
        ctx_lens=torch.zeros(1, dtype=torch.int32, device=device),
        tree_len=torch.zeros(1, dtype=torch.int32, device=device),
        tree_mask=torch.zeros(count, dtype=torch.int64, device=device),
        block_tables=torch.arange(1, blocks + 1, dtype=torch.int32, device=device).expand(len(groups), 1, -1).contiguous(),
        slot_mapping=(positions + block).expand(len(groups), -1).contiguous(),
        logit_rows=positions[:0],
    )
    return batch, kv
