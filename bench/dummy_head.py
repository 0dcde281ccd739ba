"""A draft head of random weights for any target: what drafting costs does not depend on what is drafted.

What the policy makes of a draft does: it believes heads that say how likely their tokens are. So the output layer is as large as it takes
to promise, in the mean, what acceptance is forced to.
"""

from __future__ import annotations

from pathlib import Path

import torch

from specdec.models.head_config import HeadConfig, default_taps
from specdec.models.head_export import export_head
from specdec.models.load import LoadedModel
from specdec.train.model import TrainableHead
from specdec.train.recipe import exported_tensors

HEADS = ("eagle3", "peagle")
DRAFT_VOCAB = 32_000  # of the heads published for models of 128,256 tokens


def spread(promise: float, vocab: int) -> float:
    """Standard deviation of normal logits [vocab] whose likeliest token has the probability `promise`, from 0.05 to 0.95, in the mean."""
    logits = torch.randn(128, vocab, generator=torch.Generator().manual_seed(0), device="cpu")
    low, high = 0.0, 100.0
    for _ in range(12):
        middle = (low + high) / 2
        most = torch.softmax(middle * logits, dim=-1).amax(dim=-1).mean()
        low, high = (middle, high) if most < promise else (low, middle)
    return high


def dummy_head(target: LoadedModel, kind: str, directory: Path, promise: float = 0.8) -> str:
    """Writes a head of one layer of the target's own sizes into `directory`, in bfloat16, and returns the directory's name.

    promise: the probability, in the mean, that it gives its likeliest token.
    """
    c = target.config
    config = HeadConfig.of_target(
        kind,
        c,
        draft_vocab_size=min(DRAFT_VOCAB, c.vocab_size),
        taps=default_taps(c.num_layers) if c.num_layers > 4 else (0, c.num_layers),
        windows=(None,),
        mask_token_id=0 if kind == "peagle" else None,
    )
    torch.manual_seed(0)
    with torch.device(target.model.device):
        head = TrainableHead(config, torch.zeros(1, c.hidden_size), torch.arange(config.draft_vocab_size))
        # what the output layer reads is normed, so its rows' standard deviation times the root of their length is that of the logits
        head.lm_head.weight.data.normal_(0.0, spread(promise, config.draft_vocab_size) / c.hidden_size**0.5)
    return str(export_head(directory, config, exported_tensors(head), storage="bfloat16"))
