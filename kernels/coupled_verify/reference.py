"""Coupled verification of one step: the target's own token of every row, from logits, in one op."""

from __future__ import annotations

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
) -> tuple[Tensor, Tensor | None]:
    """(`gumbel_argmax` of logits / temperature [R] i64, log-sum-exp of the logits [R] f32 where asked for).

    logits [R, V] f32, NaN counts as -inf; temperature [R] f32 > 0; the rest as in `gumbel_argmax`, noisy None = nowhere.
    """
    if noisy is None:
        noisy = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    scores = logits / temperature[:, None]
    token = noise.gumbel_argmax(scores, seeds, positions, choices, noisy, purpose)
    return token, log_mass(logits) if lse else None


def log_mass(logits: Tensor) -> Tensor:
    """Log-sum-exp of each row, [R] f32; NaN counts as -inf."""
    return logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).logsumexp(-1)
