"""The scales of an FP8 KV cache as checkpoints store them: one number for K and one for V per layer (reference §8.8)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from specdec.errors import UnsupportedCheckpoint
from specdec.models.weights import Weights


def kv_scales(weights: Weights, prefix: str, used: set[str]) -> tuple[float, float]:
    """(K's, V's) of the attention block `prefix`, 1 where the checkpoint has none; the tensors read are added to `used`."""
    names = {name for name in weights.names() if name.startswith(prefix) and name.endswith("_scale")}
    found = []
    for side in "kv":
        present = [name for name in _names(prefix, side) if name in names]
        used.update(present)
        found.append(_number(weights, present[0]) if present else 1.0)
    return found[0], found[1]


def _names(prefix: str, side: str) -> Iterator[str]:
    """Where the scale of K or V may be, the first that is there counts; the last is the old form, one number for both."""
    yield f"{prefix}.{side}_scale"
    yield f"{prefix}.attn.{side}_scale"
    yield f"{prefix}.{side}_proj.{side}_scale"
    yield f"{prefix}.{side}_proj.output_scale"
    yield f"{prefix}.kv_scale"


def _number(weights: Weights, name: str) -> float:
    for shape in ((), (1,)):
        try:
            tensor = weights.get(name, shape)
        except UnsupportedCheckpoint:
            continue
        if isinstance(tensor, Tensor) and tensor.isfinite().all() and float(tensor) > 0.0:
            return float(tensor)
    raise UnsupportedCheckpoint(f"{weights.origin}: {name} must be one positive number, the scale of an FP8 KV cache")
