"""Weights in another storage than the checkpoint's, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from specdec.errors import ConfigError
from specdec.layers.linear import RawWeight
from specdec.models.weights import Weights
from specdec.quant.fp8 import to_fp8


class UnpackedWeights:
    """Weights with every packed tensor dequantised to float32."""

    def __init__(self, packed: Weights):
        self.origin = packed.origin
        self._packed = packed

    def names(self) -> Iterable[str]:
        return self._packed.names()

    def get(self, name: str, shape: tuple[int, ...]) -> RawWeight:
        raw = self._packed.get(name, shape)
        return raw if isinstance(raw, torch.Tensor) else raw.dequantize()


class Fp8OnLoad:
    """Weights whose decoder layers' matrices become e4m3 with a scale a row, on `device`; embedding and output head stay as they are.

    A row belongs to one logical shard, so a fused layer of a small and a large part loses nothing of the small one.
    """

    def __init__(self, dense: Weights, device: torch.device):
        self.origin = dense.origin
        self._dense, self._device = dense, device

    def names(self) -> Iterable[str]:
        return self._dense.names()

    def get(self, name: str, shape: tuple[int, ...]) -> RawWeight:
        raw = self._dense.get(name, shape)
        if not (name.endswith("_proj.weight") and len(shape) == 2):
            return raw
        if not isinstance(raw, torch.Tensor):
            raise ConfigError(
                f"quantization 'fp8' needs plain numbers and {name} is {raw.kind}; leave it out to use the {raw.kind} weights",
                param="quantization",
            )
        return to_fp8(raw.to(self._device))
