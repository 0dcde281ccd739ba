"""A draft head of random weights for any target: what drafting costs does not depend on what is drafted."""

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


def dummy_head(target: LoadedModel, kind: str, directory: Path) -> str:
    """Writes a head of one layer of the target's own sizes into `directory`, in bfloat16, and returns the directory's name."""
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
    return str(export_head(directory, config, exported_tensors(head), storage="bfloat16"))
