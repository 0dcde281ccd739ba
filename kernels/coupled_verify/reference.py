"""Coupled verification of one step: the target's own token of every row, from logits, in one op."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.kernels.noise import reference as noise


def coupled_verify(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    choices: Tensor,
    noisy: Tensor | None,
    purpose: int,
    *,
    lse: bool = False,
    argmax: Callable[..., Tensor] = noise.gumbel_argmax,
) -> tuple[Tensor, Tensor | None]:
    """(`gumbel_argmax` of logits / temperature [R] i64, log-sum-exp of the logits [R] f32 where asked for).

    logits [R, V] f32, NaN counts as -inf; temperature [R] f32 > 0; the rest as in `gumbel_argmax`, noisy None = nowhere. argmax: a backend
    of that op; over the compiled one this is the compiled op.
    """
    if noisy is None:
        noisy = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    scores = logits if bool((temperature == 1.0).all()) else logits / temperature[:, None]
    token = argmax(scores, seeds, positions, choices, noisy, purpose)
    return token, logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).logsumexp(-1) if lse else None
