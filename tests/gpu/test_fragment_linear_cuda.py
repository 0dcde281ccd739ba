"""The CUDA linear layers on a card, as `python -m bench.check_marlin` checks them, with new memory poisoned."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.matrix import poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_agree_with_the_reference_and_are_exact_where_numbers_are() -> None:
    from bench.check_marlin import check

    with poisoned():
        check(small=True)
