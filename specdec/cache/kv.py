"""`KVCache`: the tensors behind the block ids.

Layout per layer: K and V, each `[num_blocks, block_size, num_kv_heads, head_dim]`; position p of a sequence with block
table t lies at block `t[p // block_size]`, offset `p % block_size`; the flat *slot* is `block * block_size + offset`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from specdec import memory, ops
from specdec.cache.pool import BlockPool
from specdec.errors import ConfigError
from specdec.kernels.kv_fp8 import raw
from specdec.types import KVGroup


class _Store:
    """K and V of `num_layers` layers in one allocation `[layers, 2, NB, bs, nkv, hd]`, zeroed: a slot that was never
    written must not hold a NaN, which would survive the multiplication with a masked weight of 0."""

    def __init__(self, num_layers: int, layer_shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device):
        self.data = memory.zeros((num_layers, 2, *layer_shape), dtype, device)
        self.keys = [self.data[i, 0] for i in range(num_layers)]
        self.values = [self.data[i, 1] for i in range(num_layers)]

    def copy_blocks(self, src: Tensor, dst: Tensor) -> None:
        data = raw(self.data)
        data[:, :, dst] = data[:, :, src]


class Companion:
    """KV of a drafter that uses the block ids of a target group: same table, same hashes, own layers.

    Its content may be older than the drafter, or absent, where the target's is fine. `mark` records for which drafter
    (`epoch`, e.g. the id of a draft head) a block is valid, and how far; a block handed out anew loses the record.
    """

    def __init__(self, store: _Store, pool: BlockPool):
        self._store = store
        self._pool = pool
        self._marks: dict[int, tuple[int, str, int]] = {}  # block -> (generation, epoch, leading slots that are right)

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        """(K, V) of the drafter's layer i, each [NB, bs, nkv, hd]."""
        return self._store.keys[i], self._store.values[i]

    @property
    def block_size(self) -> int:
        return self._store.data.shape[3]

    def mark(self, blocks: Iterable[int], epoch: str, filled: int | None = None) -> None:
        """The first `filled` slots (None = all) of these blocks now belong to drafter `epoch`."""
        filled = self.block_size if filled is None else filled
        for block in blocks:
            self._marks[block] = (self._pool.generation[block], epoch, filled)

    def filled(self, block: int, epoch: str) -> int:
        """Leading slots of the block whose companion content was written for `epoch` since the block was last handed out."""
        generation, owner, filled = self._marks.get(block, (-1, "", 0))
        return filled if (generation, owner) == (self._pool.generation[block], epoch) else 0

    def valid(self, block: int, epoch: str) -> bool:
        """True when that is the whole block."""
        return self.filled(block, epoch) == self.block_size

    def copied(self, src: int, dst: int) -> None:
        """The block was copied: its record goes with it."""
        generation, epoch, filled = self._marks.get(src, (-1, "", 0))
        if generation == self._pool.generation[src]:
            self._marks[dst] = (self._pool.generation[dst], epoch, filled)


class KVCache:
    """KV tensors of all groups of a model. Knows nothing about sequences; block ids come from the scheduler.

    layer_group[i], layer_in_group[i]: group of model layer i and its index there; by default the groups' layers follow
    one another. num_blocks: per group, the null block included.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        layer_group: Sequence[int] | None = None,
        layer_in_group: Sequence[int] | None = None,
    ):
        if len(groups) != len(num_blocks):
            raise ConfigError(f"{len(groups)} KV groups but {len(num_blocks)} pool sizes", param="num_kv_blocks")
        self.groups = tuple(groups)
        self.num_blocks = tuple(num_blocks)
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        in_order = [(g, i) for g, group in enumerate(groups) for i in range(group.num_layers)]
        self._layer_group = [g for g, _ in in_order] if layer_group is None else list(layer_group)
        self._layer_in_group = [i for _, i in in_order] if layer_in_group is None else list(layer_in_group)
        self._stores = [self._store(g, group.num_layers, group.num_kv_heads, group.head_dim, dtype) for g, group in enumerate(groups)]
        self._companions: dict[str, tuple[int, _Store, Companion]] = {}

    def _store(self, group: int, layers: int, heads: int, head_dim: int, dtype: torch.dtype) -> _Store:
        return _Store(layers, (self.num_blocks[group], self.block_size, heads, head_dim), dtype, self.device)

    def group_of(self, layer: int) -> int:
        """KV group of a model layer."""
        return self._layer_group[layer]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """(K, V) of a model layer, each [NB, bs, nkv, hd]: views, written in place."""
        store, i = self._stores[self._layer_group[layer]], self._layer_in_group[layer]
        return store.keys[i], store.values[i]

    def move(self, group: int, src: Tensor, dst: Tensor) -> None:
        """Copy slots src → dst ([n] i64, flat; all reads before all writes) in every layer of the group: compaction."""
        store = self._stores[group]
        ops.move_kv(store.keys, store.values, src, dst)

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (src, dst) in every layer of the group and in its companions: copy-on-write at a fork."""
        if not pairs:
            return
        src, dst = (torch.tensor(ids, dtype=torch.int64, device=self.device) for ids in zip(*pairs, strict=True))
        self._stores[group].copy_blocks(src, dst)
        for owner, store, companion in self._companions.values():
            if owner == group:
                store.copy_blocks(src, dst)
                for a, b in pairs:
                    companion.copied(a, b)

    def attach(
        self,
        name: str,
        pool: BlockPool,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        group: int = 0,
        dtype: torch.dtype | None = None,
    ) -> Companion:
        """Add a companion to `group`, whose block ids come from `pool`. ConfigError when the name is taken."""
        if name in self._companions:
            raise ConfigError(f"KV companion {name!r} is attached already; use another name", param="speculation")
        store = self._store(group, num_layers, num_kv_heads, head_dim, dtype or self.dtype)
        companion = Companion(store, pool)
        self._companions[name] = (group, store, companion)
        return companion

    def detach(self, name: str) -> None:
        """Give up a companion, and with it its memory as soon as nobody holds it. Does nothing where there is none of this name."""
        self._companions.pop(name, None)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, companions included."""
        stores = self._stores + [store for _, store, _ in self._companions.values()]
        return sum(s.data.numel() * s.data.element_size() for s in stores)
