"""Without a card, Triton kernels run in Triton's interpreter. It must be asked for before anything imports Triton."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
