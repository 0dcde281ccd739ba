"""Token embedding, and the output head that shares its storage when they are tied."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec import ops
from specdec.layers.linear import Linear, Method, RawWeight, make_method
from specdec.quant.none import Dense
from specdec.quant.packed import Packed


class Embedding:
    """ids [T] i64 -> [T,H] in the activation dtype. Holds a method whose weight rows are the token vectors."""

    def __init__(self, method: Method):
        self.method = method

    @property
    def num_embeddings(self) -> int:
        return self.method.out_features

    @property
    def embedding_dim(self) -> int:
        return self.method.in_features

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] i64 in [0, vocab) -> [T,H]."""
        if isinstance(self.method, Dense):
            return F.embedding(ids, self.method.weight)
        if isinstance(self.method, Packed):
            return ops.tiled_embedding(ids, self.method.stored[0]).to(self.method.dtype)
        return ops.tiled_embedding(ids, self.method.parts[0])

    def head(self) -> Linear:
        """The tied output projection on the same storage; logits are float32 in every mode."""
        return Linear(self.method, out_dtype=torch.float32)

    def dequantize(self) -> Tensor:
        """float32 [V,H]."""
        return self.method.dequantize()


def make_embedding(
    raw: RawWeight, *, device: torch.device | str, dtype: torch.dtype, deterministic: bool = False, keep: bool = False
) -> Embedding:
    """From a [V,H] weight in any storage, which it stays in where `make_linear` would let it."""
    return Embedding(make_method([raw], torch.device(device), dtype, rowwise=deterministic, keep=keep))
