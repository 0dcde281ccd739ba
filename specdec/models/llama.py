"""The Llama decoder: also Mistral, Qwen2 and Qwen3, which differ in biases, windows and head norms, and their kin with experts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from specdec import ops
from specdec.layers.attention import KVStore
from specdec.layers.decoder import DecoderStack, Layer, MoELayer
from specdec.layers.embedding import make_embedding
from specdec.layers.norm import RMSNorm
from specdec.layers.rotary import SLACK, Rotary
from specdec.models.builder import Builder
from specdec.models.config import ModelConfig
from specdec.models.moe import build_layer
from specdec.models.weights import Weights, check_all_used
from specdec.quant.tiled import gather
from specdec.types import Batch


class LlamaModel:
    """Weights and forward pass. All tensors on `device`; activations in `dtype`; logits always float32. act_fp8: see `make_linear`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        device: torch.device,
        dtype: torch.dtype,
        deterministic: bool = False,
        act_fp8: bool = False,
    ):
        self.config = config
        self.device = device
        self.dtype = dtype
        self.deterministic = deterministic
        rotary = Rotary(config.rope, config.head_dim, config.max_positions + SLACK, device=device)
        build = Builder(config, weights, rotary, device=device, dtype=dtype, deterministic=deterministic, act_fp8=act_fp8)
        self.embedding = make_embedding(
            build.raw("model.embed_tokens.weight", config.vocab_size, config.hidden_size),  # no name keeps the file's copy alive
            device=device,
            dtype=dtype,
            deterministic=deterministic,
        )
        layers = [build_layer(build, config, i) for i in range(config.num_layers)]
        self.lm_head = self.embedding.head() if config.tied else build.linear(["lm_head"], [config.vocab_size], config.hidden_size)
        linears = [linear for layer in layers for linear in layer.linears]
        gather(dict.fromkeys([*(linear.method for linear in linears), self.lm_head.method, self.embedding.method]))
        self.stack = DecoderStack(layers, build.norm("model.norm"))
        check_all_used(weights, build.used, tied=config.tied)

    def forward(self, batch: Batch, kv: KVStore, *, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """(hidden [T, H] after the final norm, tapped [T, len(taps)·H] or None); K and V of the rows go into `kv`.

        Tap j is the residual stream on entry to layer j (j = number of layers: before the final norm), concatenated in
        the order given.
        """
        with self._numerics():
            return self.stack(self.embedding(batch.input_ids), batch, kv, taps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] hidden states after the final norm -> [R, V] f32."""
        with self._numerics():
            return self.lm_head(hidden).float()

    def _numerics(self) -> AbstractContextManager[None]:
        """In deterministic mode, only backends with a fixed order of reduction may run."""
        return ops.deterministic(self.device.type) if self.deterministic else nullcontext()

    @property
    def layers(self) -> Sequence[Layer | MoELayer]:
        return self.stack.layers

    @property
    def norm(self) -> RMSNorm:
        """The final norm."""
        return self.stack.norm
