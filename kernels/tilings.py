"""Which backend and which tiling runs a GEMM of M rows: a measured table per card, and a rule for what nobody measured.

Three numbers choose the shape of a tile. Bytes in flight: 4.05 TB/s × 0.7 µs of loaded latency is 2.8 MB, 21 KB a multiprocessor of
132, and twice that to be safe; a program keeps (stages - 1) tiles of W on the way. Rows of x come out of L2 again for every tile, rows /
features × bytes of x / bytes of w of what it reads of W, and L2 gave 6.1 TB/s in all: tiles want 128 features or more, 256 from 64 rows on.
Issue: at full speed a multiprocessor gets 17.5 bytes a cycle and issues 128 lanes, so 4 instructions a byte leave half of the slots free.
Beyond 64 rows the product is bound by arithmetic and tiles get as tall as registers allow.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

BUCKETS = (16, 32, 64, 128, 256, 512)  # M is rounded up to one of these; the last holds everything larger
FIXED = 0  # in place of a bucket: the one tiling for all M of the fixed-order backends
_CARD = 132  # multiprocessors of Hopper; a constant, so that bits do not depend on the card
_WARPS = 8  # a multiprocessor holds at 255 registers a thread
_OVERHEAD = 4  # steps that filling the pipeline and adding up the splits cost
_LEAST_STEPS = 4  # of a split, below which filling the pipeline costs more than the split gains
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True, slots=True)
class Tiling:
    """features: rows of W a tile has; depth: columns of K a step; rows: rows of x; splits: parts of K; Triton's warps and stages."""

    features: int
    depth: int
    rows: int
    splits: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Choice:
    """What was fastest: a backend's name, its tiling where it has one, and the microseconds of a call at the bucket's M."""

    backend: str
    tiling: Tiling | None
    microseconds: float


def _tall(*shapes: tuple[int, int, int, int]) -> tuple[Tiling, ...]:
    """(features, depth, warps, stages), each at 16, 32 and 64 rows."""
    return tuple(Tiling(f, d, rows, 1, warps, stages) for rows in (16, 32, 64) for f, d, warps, stages in shapes)


def inner(op: str, scales_inside: bool) -> str:
    """The name of `op` in lists and tables. With scales inside the sum over K (blocks of e4m3, 4-bit groups below 128) a tile holds two
    sums and the scales too, so it has tilings of its own."""
    return f"{op} inner" if scales_inside else op


def _at(rows: int, *shapes: tuple[int, int, int, int]) -> tuple[Tiling, ...]:
    """(features, depth, warps, stages), for this many rows."""
    return tuple(Tiling(f, d, rows, 1, warps, stages) for f, d, warps, stages in shapes)


_FP8 = ((64, 128, 4, 5), (128, 128, 8, 4))
# The hand-written lists. No entry spills on sm_80 or sm_90 or wants more than 160 KB (tests/kernels/test_gemm_compiles.py). The first
# of so many rows is the usual one, the last that for many. Two warps multiply each for itself, four and more as Hopper's warpgroups.
CANDIDATES: dict[str, tuple[Tiling, ...]] = {
    "dense_linear": (*_tall((64, 128, 4, 4), (64, 64, 4, 6), (128, 64, 4, 4), (128, 64, 8, 5)), Tiling(128, 64, 128, 1, 8, 4)),
    "fp8_linear": (
        *_at(16, (128, 128, 4, 4), (64, 128, 2, 5), (256, 128, 8, 4)),
        *_at(32, (128, 128, 4, 4), (256, 128, 8, 4), (64, 128, 2, 4)),
        *_at(64, (256, 64, 8, 5), (128, 64, 4, 5), (64, 128, 4, 5)),
        Tiling(128, 64, 128, 1, 8, 4),
    ),
    "fp8_linear inner": (
        *_at(16, (128, 128, 4, 4), (64, 128, 2, 5), (128, 128, 8, 4)),
        *_at(32, (128, 128, 8, 4), (64, 128, 4, 5)),
        *_at(64, (256, 64, 8, 4), (128, 128, 8, 4), (64, 128, 4, 5)),
        Tiling(128, 64, 128, 1, 8, 4),
    ),
    "fp8_fp8_linear": (*_tall(*_FP8, (128, 128, 4, 4), (256, 128, 8, 3)), Tiling(128, 128, 128, 1, 8, 3)),
    "fp8_fp8_linear inner": (*_tall(*_FP8), Tiling(64, 128, 128, 1, 8, 4)),
    "int4_linear": (
        *_at(16, (128, 128, 2, 4), (64, 128, 2, 5), (128, 128, 4, 5)),
        *_at(32, (128, 128, 4, 4), (128, 128, 2, 4), (256, 128, 8, 4)),
        *_at(64, (256, 128, 8, 3), (128, 128, 4, 4)),
        Tiling(128, 128, 128, 1, 8, 3),
    ),
    "int4_linear inner": (*_tall((64, 128, 4, 5), (128, 128, 8, 5)), Tiling(64, 128, 128, 1, 8, 4)),
}


def bucket(m: int) -> int:
    """The bucket of M rows."""
    return next((size for size in BUCKETS if m <= size), BUCKETS[-1])


def resident(op: str, tile: Tiling) -> int:
    """Programs of the tiling that a multiprocessor holds at once: as registers and shared memory have it, both at their worst."""
    halves = {"dense_linear": 4, "int4_linear": 1}.get(op.split()[0], 2)  # of a byte, a weight
    shared = tile.stages * tile.depth * (tile.features * halves // 2 + tile.rows * 2)
    return max(1, min(_WARPS // tile.warps, 227_000 // shared))


def _cost(op: str, tile: Tiling, tiles: int, k: int, splits: int) -> float:
    """Of a launch, in steps of the multiprocessor that has most to do; more where there are too few programs to hide latency."""
    steps = -(-k // tile.depth)
    programs, own = tiles * splits, -(-steps // splits)
    return -(-programs // _CARD) * (own + _OVERHEAD) / min(1.0, programs / (_CARD * resident(op, tile)))


def _splits(tile: Tiling, k: int) -> list[int]:
    return [s for s in _SPLITS if s == 1 or -(-k // tile.depth) >= _LEAST_STEPS * s]


def _tiles(tile: Tiling, m: int, n: int) -> int:
    """Of an output, those of M's bucket; one row of them for FIXED."""
    return -(-n // tile.features) * (1 if m == FIXED else -(-bucket(m) // tile.rows))


def usual(op: str, m: int, n: int, k: int) -> Tiling:
    """What runs where nothing was measured: the first tile of the list that is as tall as M's bucket, K split for the least `_cost`.

    Of M only `bucket(m)` counts, FIXED included.
    """
    rows = 64 if m == FIXED else bucket(m)
    tile = CANDIDATES[op][-1] if rows > 64 else next(tile for tile in CANDIDATES[op] if tile.rows == rows)
    tiles = _tiles(tile, m, n)
    return replace(tile, splits=min(_splits(tile, k), key=lambda s: _cost(op, tile, tiles, k, s)))


def candidates(op: str, m: int, n: int, k: int) -> list[Tiling]:
    """The tilings worth measuring at M rows (FIXED: for all of them): every tile of the list, with the two best numbers of splits.

    Tiles taller than M's bucket waste arithmetic and are left out, and shorter ones where there are some of 64 rows.
    """
    tallest = 64 if m == FIXED else min(bucket(m), 128)
    found = []
    for tile in CANDIDATES[op]:
        if min(tallest, 64) <= tile.rows <= tallest:
            tiles = _tiles(tile, m, n)
            best = sorted(_splits(tile, k), key=lambda s: _cost(op, tile, tiles, k, s))
            found += [replace(tile, splits=splits) for splits in best[:2]]
    return found


class Table:
    """What was measured on one card. Empty until `load`ed."""

    def __init__(self) -> None:
        self.card: str | None = None
        self.choices: dict[tuple[str, int, int, int], Choice] = {}  # op, N, K, bucket or FIXED

    def load(self, path: Path) -> None:
        """Replaces the table by a file's. OSError or ValueError where there is no good one; the table is then unchanged."""
        written = json.loads(path.read_text(encoding="utf-8"))
        try:
            choices = {
                (e["op"], e["n"], e["k"], e["bucket"]): Choice(
                    e["backend"], None if e["tiling"] is None else Tiling(**e["tiling"]), e["microseconds"]
                )
                for e in written["choices"]
            }
            self.card, self.choices = written["card"], choices
        except (KeyError, TypeError) as err:
            raise ValueError(f"{path.name} is no table of tilings: {err!r}") from err

    def save(self, path: Path) -> None:
        """Writes what `load` reads, whole or not at all."""
        entries = [
            {"op": op, "n": n, "k": k, "bucket": size, "backend": c.backend, "tiling": c.tiling and asdict(c.tiling)}
            | {"microseconds": c.microseconds}
            for (op, n, k, size), c in sorted(self.choices.items())
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        lines = ",\n".join(json.dumps(entry) for entry in entries)
        part.write_text(f'{{"card": {json.dumps(self.card)}, "choices": [\n{lines}\n]}}\n', encoding="utf-8")
        part.replace(path)

    def choice(self, op: str, m: int, n: int, k: int) -> Choice | None:
        """What was measured for M rows (or FIXED) of an N × K weight, or None."""
        return self.choices.get((op, n, k, FIXED if m == FIXED else bucket(m)))

    def tiling(self, op: str, m: int, n: int, k: int) -> Tiling:
        """The measured tiling, or the `usual` one."""
        found = self.choice(op, m, n, k)
        return found.tiling if found is not None and found.tiling is not None else usual(op, m, n, k)

    def microseconds(self, op: str, m: int, n: int, k: int) -> float | None:
        """Of the fastest backend at M's bucket, where measured: what a policy may plan with."""
        found = self.choice(op, m, n, k)
        return None if found is None else found.microseconds

    def explain(self, op: str) -> str:
        """How many shapes of `op` are measured, for how many of them which backend won, and on which card; empty where none is."""
        wins: dict[str, int] = {}
        for (name, *_), choice in self.choices.items():
            if name.split()[0] == op:
                wins[choice.backend] = wins.get(choice.backend, 0) + 1
        return f"measured on {self.card}: " + ", ".join(f"{b} {count}" for b, count in sorted(wins.items())) if wins else ""


MEASURED = Table()  # of this process's card


def file_name(card: str) -> str:
    """Of a card's table: its name in lower case, letters and digits only."""
    return "".join(c if c.isalnum() else "-" for c in card.lower()) + ".json"
