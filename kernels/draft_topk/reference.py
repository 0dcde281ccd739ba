"""A draft head's lm_head and its candidates in one op: the race with the target's noise over the whole draft vocabulary.

`specdec/spec/candidates.py` runs the same race among the 256 likeliest tokens only (FIELD). Which those are is not known until all logits
are, so a form that races a tile of tokens as soon as it is there cannot stop at them: here every token runs. The two are the same for rows
without noise, and for vocabularies of up to 256. Elsewhere an outsider wins a place as often as the law sharpened by
the share, q^(1/share), has mass outside the 256, and chances are shares of the whole race instead of the field's: smaller by that mass.
What is committed depends on neither.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.fp8_linear.weight import Fp8Weight
from specdec.kernels.linear.reference import rowwise_linear
from specdec.kernels.noise import reference as noise


def draft_topk(
    hidden: Tensor,
    weight: Tensor | Fp8Weight,
    temperature: Tensor,
    target_ids: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    choices: Tensor,
    noisy: Tensor | None,
    purpose: int,
    share: float,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes in `specdec.ops.draft_topk`. The sums over H are float64, since float32 ones differ with the library's threads; what follows
    is float32; ties to the lowest draft id."""
    each = len(hidden) // max(len(temperature), 1)
    temperature, seeds, positions, choices = (t.repeat_interleave(each) for t in (temperature, seeds, positions, choices))
    wide = weight.dequantize() if isinstance(weight, Fp8Weight) else weight.float()
    scores = rowwise_linear(hidden.float(), wide) / temperature[:, None]
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ids = torch.arange(weight.shape[0], device=hidden.device) if target_ids is None else target_ids
    race = scores
    if noisy is not None:
        g = noise.gumbel_noise(seeds, positions, choices, ids.expand_as(scores), purpose)
        race = scores + torch.where(noisy.repeat_interleave(each)[:, None], share * g, 0.0)
    top = race.sort(dim=-1, descending=True, stable=True)
    values, columns = top.values[:, :width], top.indices[:, :width]
    chances = (values - race.logsumexp(-1, keepdim=True)).exp().nan_to_num(0.0)
    return ids[columns], chances, scores.logsumexp(-1)
