"""Attention of training: a causal pass over real rows, and rows that also see the earlier guesses of their own chain.

At inference a guess sees the committed prefix (keys made of the target's features) and its own ancestors. In training every
position starts a chain of its own, so a guess of the chain that starts at row t sees the real rows ≤ t and the guesses
before it in the same chain: one masked matrix product, and a few own keys a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def causal(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Rows among themselves. q [B, L, nh, hd]; k, v [B, L, nkv, hd] -> [B, L, nh, hd]."""
    groups, length, mask = q.shape[2] // k.shape[2], q.shape[1], None
    if window is not None and length > window:
        row = torch.arange(length, device=q.device)
        mask = real_keys(row, row, length, window)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None).transpose(1, 2)


def real_keys(anchor: Tensor, row: Tensor, length: int, window: int | None) -> Tensor:
    """Which real keys a guess sees: those of rows ≤ its anchor, and less than `window` before it.

    anchor, row [.., Q] i64: where its chain starts, and its own place (anchor + depth) -> [.., Q, length] bool.
    """
    key = torch.arange(length, device=anchor.device)
    seen = key <= anchor[..., None]
    return seen if window is None else seen & (row[..., None] - key < window)


def chained(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, own: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Guesses over the real keys they see and over their own chain.

    q [B, Q, nh, hd]; k, v [B, L, nkv, hd] real keys; seen [Q, L] or [B, Q, L] bool; own: (k, v) of each guess of the same
    chain, itself last, each [B, Q, nkv, hd]. -> [B, Q, nh, hd].
    """
    b, rows, heads, hd = q.shape
    length, nkv = k.shape[1], k.shape[2]
    own_k, own_v = (torch.stack([pair[i] for pair in own], 2) for i in (0, 1))
    q = (q * hd**-0.5).view(b, rows, nkv, heads // nkv, hd)
    real = q.permute(0, 2, 3, 1, 4).reshape(b, nkv, -1, hd) @ k.permute(0, 2, 3, 1)
    real = real.view(b, nkv, heads // nkv, rows, length)
    real = real.masked_fill(~(seen if seen.dim() == 2 else seen[:, None, None]), float("-inf"))
    on_chain = F.pad(torch.einsum("bqkgh,bqekh->bkgqe", q, own_k), (0, -len(own) % 8), value=float("-inf"))  # rows stay aligned
    weights = torch.cat([real, on_chain], -1).softmax(-1)  # the library accumulates in float32 for bfloat16 scores
    on_real, on_own = weights[..., :length], weights[..., length : length + len(own)]
    mixed = (on_real.reshape(b, nkv, -1, length) @ v.transpose(1, 2)).view(b, nkv, heads // nkv, rows, hd)
    return mixed.permute(0, 3, 1, 2, 4).reshape(b, rows, heads, hd) + torch.einsum("bkgqe,bqekh->bqkgh", on_own, own_v).flatten(2, 3)


class Unroll:
    """Keys of a training-time test. Step 0 has real rows only; at step s every row t sees real rows ≤ t and its own steps 1 … s."""

    def __init__(self, windows: tuple[int | None, ...], length: int, device: torch.device):
        self.step = 0
        self._windows, self._length = windows, length
        self._row = torch.arange(length, device=device)
        self._keys: list[list[tuple[Tensor, Tensor]]] = [[] for _ in windows]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, L, nh, hd]; k, v [B, L, nkv, hd] of this step, rotated -> [B, L, nh, hd]."""
        keys, window = self._keys[layer], self._windows[layer]
        keys.append((k, v))
        if self.step == 0:
            return causal(q, k, v, window)
        seen = real_keys(self._row, self._row + self.step, self._length, window)
        return chained(q, keys[0][0], keys[0][1], seen, keys[1:])


class Rollouts:
    """Keys of a parallel draft: L real rows, then the mask rows of the rollouts kept.

    place [B, n]: anchors kept, deepest rollout first. counts[d]: how many of them have a mask row of depth d + 1; they are
    laid out depth by depth, so row i of every depth belongs to place[:, i].
    """

    def __init__(self, windows: tuple[int | None, ...], length: int, place: Tensor, counts: list[int]):
        self._windows, self._length, self._counts, self._place = windows, length, counts, place
        none = place.new_zeros(place.shape[0], 0)
        self.anchor = torch.cat([none, *(place[:, :n] for n in counts)], 1)  # [B, Q]
        depths = [torch.full((n,), d + 1, device=place.device) for d, n in enumerate(counts)]
        self.depth = torch.cat([none.new_zeros(0), *depths])  # [Q]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, L + Q, nh, hd]; k, v [B, L + Q, nkv, hd], rotated -> [B, L + Q, nh, hd]."""
        window = self._windows[layer]
        (real_q, *deep_q), (real_k, *deep_k), (real_v, *deep_v) = (t.split([self._length, *self._counts], 1) for t in (q, k, v))
        mixed = [causal(real_q, real_k, real_v, window)]
        for d, n in enumerate(self._counts):
            anchor = self._place[:, :n]
            seen = real_keys(anchor, anchor + d + 1, self._length, window)
            own = [(deep_k[e][:, :n], deep_v[e][:, :n]) for e in range(d + 1)]
            mixed.append(chained(deep_q[d], real_k, real_v, seen, own))
        return torch.cat(mixed, 1)
