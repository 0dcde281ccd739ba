"""`coupled_verify` from the compiled `gumbel_argmax`: on a CPU a pass for the temperature costs little beside the noise."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.kernels.coupled_verify.reference import log_mass


def with_argmax(argmax: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The op, given the compiled `gumbel_argmax`."""

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
        scores = logits if bool((temperature == 1.0).all()) else logits / temperature[:, None]
        silent = torch.zeros(len(logits), dtype=torch.bool) if noisy is None else noisy
        return argmax(scores, seeds, positions, choices, silent, purpose), log_mass(logits) if lse else None

    return coupled_verify
