"""What a head learns from: the target's tapped states and its own law of the next token, computed online.

The target runs here as a dense causal model over padded batches (no paged cache): at training sizes the library's fused
attention is several times faster than the paged op. tests/train holds it equal to `LlamaModel.forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.errors import ConfigError
from specdec.layers.decoder import Layer, MoELayer
from specdec.models.llama import LlamaModel
from specdec.train.data import Corpus, TokenBatch, pad


@dataclass(frozen=True, slots=True)
class Capture:
    """Of every token: taps [.., n·H], final hidden state [.., H] (after the final norm), log_z [..] f32 the log-sum-exp of
    its logits over the whole vocabulary, and top [..] i64 their argmax. Taps and hidden in the target's dtype."""

    taps: Tensor
    hidden: Tensor
    log_z: Tensor
    top: Tensor


@dataclass(frozen=True, slots=True)
class _Weights:
    """One layer's matrices, dense: qkv [(nh + 2 nkv) hd, H], out [H, nh hd], gate_up [2 I, H], down [H, I]."""

    layer: Layer
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


class DenseTarget:
    """The target's layers over [B, L] padded tokens. `dtype`: of its weights and states."""

    def __init__(self, model: LlamaModel, taps: Sequence[int], *, dtype: torch.dtype | None = None):
        """taps: indices of the hidden states wanted (j = residual entering layer j; the number of layers = before the final norm)."""
        self.config = model.config
        self.taps = tuple(taps)
        if not all(0 <= tap <= self.config.num_layers for tap in self.taps):
            raise ConfigError(f"taps {self.taps} must lie in [0, {self.config.num_layers}], the target's layers", param="taps")
        self.device = model.device
        self.dtype = model.dtype if dtype is None else dtype
        self.embedding = model.embedding.dequantize().to(self.dtype)
        self.lm_head = self.embedding if self.config.tied else model.lm_head.dequantize().to(self.dtype)
        self.norm = model.norm.weight.to(self.dtype)
        self._layers = [self._dense(layer) for layer in model.layers]

    def _dense(self, layer: Layer | MoELayer) -> _Weights:
        if isinstance(layer, MoELayer):
            raise ConfigError(f"training on {self.config.architecture}: targets with experts are not supported yet", param="model")
        return _Weights(layer, *(linear.dequantize().to(self.dtype) for linear in layer.linears))

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [B, L] i64 -> (taps [B, L, n·H], hidden [B, L, H] after the final norm). Causal, so right padding is harmless."""
        x, tapped = F.embedding(tokens, self.embedding), []
        for index, weights in enumerate(self._layers):
            if index in self.taps:
                tapped.append((index, x))
            x = self._block(x, weights)
        tapped.append((self.config.num_layers, x))
        states = dict(tapped)
        return torch.cat([states[tap] for tap in self.taps], -1), self._normed(x, self.norm)

    def _block(self, x: Tensor, w: _Weights) -> Tensor:
        layer = w.layer
        x = x + F.linear(self._attend(self._normed(x, layer.input_norm.weight), w), w.out, _bias(layer.attention.out.bias, x))
        gate, up = F.linear(self._normed(x, layer.post_norm.weight), w.gate_up, _bias(layer.gate_up.bias, x)).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, w.down, _bias(layer.down.bias, x))

    def _attend(self, x: Tensor, w: _Weights) -> Tensor:
        """[B, L, H] normed -> [B, L, nh·hd]."""
        c, attention = self.config, w.layer.attention
        b, length, _ = x.shape
        qkv = F.linear(x, w.qkv, _bias(attention.qkv.bias, x))
        q, k, v = (t.unflatten(-1, (-1, c.head_dim)).transpose(1, 2) for t in qkv.split([c.q_size, c.kv_size, c.kv_size], -1))
        if attention.head_norms is not None:
            q, k = (self._normed(t, norm.weight) for t, norm in zip((q, k), attention.head_norms, strict=True))
        cos, sin = attention.rotary.cos[:length], attention.rotary.sin[:length]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mask = None
        if attention.window is not None and length > attention.window:
            row = torch.arange(length, device=x.device)
            distance = row[:, None] - row
            mask = (distance >= 0) & (distance < attention.window)
        groups = c.num_heads // c.num_kv_heads
        k, v = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=attention.scale)
        return mixed.transpose(1, 2).reshape(b, length, c.q_size)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), self.config.eps)

    @torch.no_grad()
    def capture(self, tokens: Tensor, *, rows: int = 8192) -> Capture:
        """Everything a head learns from, for [B, L] tokens. The vocabulary-wide logits exist for `rows` tokens at a time."""
        taps, hidden = self(tokens)
        flat, lm_head = hidden.flatten(0, 1), self.lm_head.float()  # bfloat16 logits would tie
        log_z = torch.empty(len(flat), dtype=torch.float32, device=flat.device)
        top = torch.empty(len(flat), dtype=torch.int64, device=flat.device)
        for start in range(0, len(flat), rows):
            logits = F.linear(flat[start : start + rows].float(), lm_head)
            log_z[start : start + rows] = logits.logsumexp(-1)
            top[start : start + rows] = logits.argmax(-1)
        return Capture(taps, hidden, log_z.view(tokens.shape), top.view(tokens.shape))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout: x [.., hd] with cos, sin broadcast to [.., hd / 2], in float32."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _bias(bias: Tensor | None, like: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(like.dtype)


class FeatureStore:
    """Captures of a whole corpus on the device, so that many epochs run the target once. Nothing goes to disk.

    It costs `bytes_per_token` of device memory a token; `Online` runs the target again for every batch instead.
    """

    def __init__(self, target: DenseTarget, corpus: Corpus, *, max_tokens: int = 65_536):
        width, n, device = target.config.hidden_size, len(corpus.tokens), target.device
        self._taps = torch.empty(n, len(target.taps) * width, dtype=target.dtype, device=device)
        self._hidden = torch.empty(n, width, dtype=target.dtype, device=device)
        self._log_z = torch.empty(n, dtype=torch.float32, device=device)
        self._top = torch.empty(n, dtype=torch.int64, device=device)
        order, lengths, start = corpus.lengths.argsort().tolist(), corpus.lengths.tolist(), 0
        while start < len(order):
            stop = start + 1
            while stop < len(order) and (stop + 1 - start) * lengths[order[stop]] <= max_tokens:
                stop += 1
            self._fill(target, pad(corpus, order[start:stop], stop - start, lengths[order[stop - 1]]).to(device))
            start = stop

    def _fill(self, target: DenseTarget, batch: TokenBatch) -> None:
        got = target.capture(batch.tokens)
        real = torch.arange(batch.tokens.shape[1], device=target.device) < batch.lengths[:, None]
        place = batch.index[real]
        for store, value in ((self._taps, got.taps), (self._hidden, got.hidden), (self._log_z, got.log_z), (self._top, got.top)):
            store[place] = value[real]

    @staticmethod
    def bytes_per_token(target: DenseTarget) -> int:
        return (len(target.taps) + 1) * target.config.hidden_size * target.dtype.itemsize + 12

    def __call__(self, batch: TokenBatch) -> Capture:
        """The captures of a batch of this corpus, each [B, L, …]; padding repeats the corpus' first token."""
        return Capture(self._taps[batch.index], self._hidden[batch.index], self._log_z[batch.index], self._top[batch.index])


class Online:
    """Runs the target for every batch."""

    def __init__(self, target: DenseTarget):
        self._target = target

    def __call__(self, batch: TokenBatch) -> Capture:
        return self._target.capture(batch.tokens)
