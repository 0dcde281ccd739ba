"""Prefill by the flash-attn package, where it is installed and can do what is asked: bfloat16, no sinks, no keys hidden from the front.

Version 3 (module `flash_attn_interface`, for Hopper) reads pages of any size. Version 2 (`flash_attn`) reads pages of multiples of 256
keys: smaller blocks are gathered into such pages first, a copy of the context for every call. Both align the causal edge with the last
key and find lengths and borders of sequences on the device, so that nothing here waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.kv_fp8 import UNSCALED, Scales

PAGE = 256  # version 2: keys of a page, or a multiple
FEW_ROWS = 256  # recorded passes have up to as many; what a library does beside its launches must not get into them
FEW_A_SEQUENCE = 128  # on average; below, most sequences decode, and our kernel packs their query heads and splits their keys
COPIED_A_ROW = 32  # version 2: keys gathered a row, at most, so that copying takes far less time than attention
FUNCTIONS = {3: ("flash_attn_interface", "flash_attn_with_kvcache"), 2: ("flash_attn", "flash_attn_varlen_func")}


@dataclass(frozen=True, slots=True)
class Package:
    """An installed version, and the function of it that attends over pages."""

    version: int
    function: Callable[..., Tensor]

    def rejects(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, cu_query: Tensor, *_: Tensor, **options: Any
    ) -> str | None:
        """Why it does not run the call, or None."""
        block = k_cache.shape[1]
        if options.get("sinks") is not None or options.get("first") is not None:
            return "it knows neither sinks nor keys that are hidden from the front"
        if not q.dtype == k_cache.dtype == v_cache.dtype == torch.bfloat16:
            return f"dtypes {q.dtype} and {k_cache.dtype}; it is used for bfloat16"
        if q.shape[2] % 8 or q.shape[2] > 256:
            return f"head size {q.shape[2]}; it takes multiples of 8 up to 256"
        copies = self.version == 2 and block % PAGE != 0
        if copies and PAGE % block:
            return f"blocks of {block} do not fill pages of {PAGE}"
        return loses(q.shape[0], len(cu_query) - 1, table.numel() * block if copies else 0)

    def prefill_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        cu_query: Tensor,
        ctx_lens: Tensor,
        tree_len: Tensor,
        tree_mask: Tensor,
        positions: Tensor,
        *,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
        first: Tensor | None = None,
        kv_scales: Scales = UNSCALED,
    ) -> Tensor:
        """Shapes in `specdec.ops.prefill_attention`."""
        lengths = ctx_lens + cu_query.diff()
        back = (-1, -1) if window is None else (window - 1, 0)  # how many keys a row sees before its own, and behind it
        attend = self._over_any_pages if self.version == 3 else self._over_large_pages
        out = attend(q, k_cache, v_cache, block_table, cu_query, lengths, softmax_scale=scale, causal=True, window_size=back)
        used = torch.arange(len(q), device=q.device) < cu_query[-1]
        return out.flatten(1).masked_fill(~used[:, None], 0.0)  # the package leaves rows of no sequence as memory was

    def _over_any_pages(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, cu_query: Tensor, lengths: Tensor, **options: Any) -> Tensor:
        """max_seqlen_q sizes the grid: a bound is enough."""
        rows = {"cu_seqlens_q": cu_query, "max_seqlen_q": q.shape[0]}
        return self.function(q, k, v, cache_seqlens=lengths, page_table=table, **rows, **options)

    def _over_large_pages(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, cu_query: Tensor, lengths: Tensor, **options: Any
    ) -> Tensor:
        """With a table, the differences of the borders of the keys are the lengths. The bounds size the grid."""
        if k.shape[1] % PAGE:
            k, v, table = gathered(k, v, table)
        cu_keys = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return self.function(q, k, v, cu_query, cu_keys, q.shape[0], table.shape[1] * k.shape[1], block_table=table, **options)


def load() -> tuple[Package | None, str | None]:
    """(the newest version that is installed and made for this card, None), or (None, why there is none)."""
    installed = [version for version, (module, _) in FUNCTIONS.items() if find_spec(module) is not None]
    if not installed:
        return None, "flash-attn is not installed"
    newest = max((version for version in installed if version < 3 or torch.cuda.get_device_capability() >= (9, 0)), default=None)
    if newest is None:
        return None, "flash_attn_interface is for Hopper, and flash_attn is not installed"
    module, function = FUNCTIONS[newest]
    try:
        return Package(newest, getattr(import_module(module), function)), None
    except (ImportError, OSError, RuntimeError, AttributeError) as err:  # built for another torch, say
        return None, f"{module} not usable ({err})"


def loses(rows: int, sequences: int, copied: int) -> str | None:
    """Why it would not pay, or None."""
    if rows <= max(FEW_ROWS, FEW_A_SEQUENCE * sequences):
        return f"few rows: {rows} of {sequences} sequences"
    return f"few rows: {rows} for {copied} keys to copy" if copied > COPIED_A_ROW * rows else None


def gathered(k_cache: Tensor, v_cache: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """K and V of a table's blocks in pages of their own, [B·P, 256, nkv, hd], and the table [B, P] of these. Blocks divide a page."""
    each = PAGE // k_cache.shape[1]
    padded = F.pad(table, (0, -table.shape[1] % each)).flatten().long()  # what holds no key of a sequence may be any block
    k, v = (cache[padded].view(-1, PAGE, *cache.shape[2:]) for cache in (k_cache, v_cache))
    return k, v, torch.arange(len(k), dtype=torch.int32, device=table.device).view(len(table), len(k) // max(len(table), 1))
