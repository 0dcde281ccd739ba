"""Without a card, Triton kernels run in Triton's interpreter, which must be asked for before anything imports Triton. With one, the
library's products are those that tolerances are about: float32 not rounded to TF32, the same bits every time."""

from __future__ import annotations

import os

import torch

from tests.kernels import interpreter

if torch.cuda.is_available():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    interpreter.install()


def pytest_report_header() -> str | None:
    """Which numbers kernels are tested with, where they are not the usual ones."""
    fresh = os.environ.get("SPECDEC_FRESH_INPUTS")
    return f"SPECDEC_FRESH_INPUTS={fresh}" if fresh else None
