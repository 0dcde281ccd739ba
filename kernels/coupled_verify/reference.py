"""Coupled verification of one step: the target's own token of every row, from logits, in one op."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.kernels.noise import reference as noise


def coupled_verify(
    logits: Tensor,
    slots: Tensor,
    depths: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    lengths: Tensor,
    choices: Tensor,
    noisy: Tensor | None,
    purpose: int,
    *,
    lse: bool = False,
    argmax: Callable[..., Tensor] = noise.gumbel_argmax,
) -> tuple[Tensor, Tensor | None]:
    """(`gumbel_argmax` of logits / temperature [R] i64, log-sum-exp of the logits [R] f32 where asked for).

    logits [R, V] f32, NaN counts as -inf; slots, depths [R] i64; the tables [S] by request slot: temperature f32 > 0, the rest as in
    `gumbel_argmax` of the position lengths + depth, noisy None = nowhere. argmax: a backend of that op; over the compiled one this is the
    compiled op.
    """
    own = temperature[slots]
    scores = logits if bool((own == 1.0).all()) else logits / own[:, None]
    if noisy is None:  # nobody's key is read
        keys: tuple[Tensor, ...] = (slots, slots, slots, torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device))
    else:
        keys = seeds[slots], lengths[slots] + depths, choices[slots], noisy[slots]
    token = argmax(scores, *keys, purpose)
    if not lse:
        return token, None
    # in float64, since the library parts the row among its threads and float32 sums would show it
    wide = logits.double().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return token, wide.logsumexp(-1).float()
