"""The ledger's account against what tables and pools really do."""

from __future__ import annotations

import pytest

from specdec.cache.ledger import Ledger
from specdec.cache.pool import BlockPool
from specdec.cache.prefix import Reuse
from specdec.cache.tables import BlockTables
from specdec.config import SamplingParams
from specdec.errors import OutOfBlocks
from specdec.sequence import Sequence
from specdec.types import KVGroup

SIZE = 4


class House:
    """Two groups, three sequences: a has 10 computed tokens and a block of lookahead, b shares a's first two blocks and has
    9 tokens, c has none yet."""

    def __init__(self) -> None:
        groups = [KVGroup("full", 1, 1, 4), KVGroup("sliding", 1, 1, 4, window=200)]
        self.pools = [BlockPool(12, "full"), BlockPool(10, "sliding")]
        self.tables = BlockTables(groups, self.pools, SIZE, 3, 64)
        self.a, self.b, self.c = (Sequence(name, [0] * 30, 30, SamplingParams(), 0, 40, request_slot=i) for i, name in enumerate("abc"))
        self.tables.open(self.a, Reuse(0, ((), ())))
        self.tables.reserve(self.a, 14)
        self.tables.open(self.b, self.shared())
        self.tables.reserve(self.b, 9)
        self.a.num_computed, self.b.num_computed = 10, 9
        self.ledger = Ledger(self.pools, SIZE, [self.a, self.b])

    def shared(self) -> Reuse:
        return Reuse(8, tuple(tuple(t[:2]) for t in self.a.block_tables))

    def really_free(self) -> list[int]:
        return [pool.num_free for pool in self.pools]


def test_lookahead_counts_as_free_from_the_start() -> None:
    house = House()
    before = list(house.ledger.free)
    house.tables.trim(house.a, 10)
    assert before == house.really_free() == [12 - 1 - 4, 10 - 1 - 4]


def test_release_gives_back_what_was_charged_and_what_nobody_else_holds() -> None:
    house = House()
    assert house.ledger.charge(house.b, 17)
    house.ledger.release(house.b)
    house.tables.trim(house.a, 10)
    house.tables.close(house.b)
    assert house.ledger.free == house.really_free() and house.b not in house.ledger
    house.ledger.release(house.a)
    house.tables.close(house.a)
    assert house.ledger.free == house.really_free() == [11, 9]


def test_adopting_held_blocks_is_free_and_cached_ones_cost() -> None:
    house = House()
    house.tables.trim(house.a, 10)
    reuse = house.shared()
    assert house.ledger.cost(reuse) == [0, 0]
    for g, pool in enumerate(house.pools):
        for i, block in enumerate(reuse.blocks[g]):
            pool.register(block, bytes([i]))
    house.tables.close(house.a)
    house.tables.close(house.b)
    ledger = Ledger(house.pools, SIZE, [])
    assert ledger.cost(reuse) == [2, 2]
    ledger.adopt(house.c, reuse)
    assert ledger.cost(reuse) == [0, 0], "a second one to share them takes nothing more"
    assert ledger.charge(house.c, 13)
    house.tables.open(house.c, reuse)
    house.tables.reserve(house.c, 13)
    assert ledger.free == house.really_free() and ledger.length(house.c) == 4


def test_charge_stops_exactly_where_the_pools_do() -> None:
    house = House()
    house.tables.trim(house.a, 10)
    reach = house.ledger.reach(house.a)
    assert reach == (3 + 5) * SIZE
    assert not house.ledger.charge(house.a, reach + 1)
    with pytest.raises(OutOfBlocks, match="sliding"):
        house.tables.reserve(house.a, reach + 1)
    assert house.ledger.free == house.really_free(), "neither changed anything"
    assert house.ledger.charge(house.a, reach)
    house.tables.reserve(house.a, reach)
    assert house.ledger.free == house.really_free()
