"""Which backend and which tiling runs a GEMM of M rows: a measured table per card, and a rule for what nobody measured.

Two numbers choose the shape of a tile. Bytes in flight: 4.5 TB/s × about 1 µs of loaded latency is 4.5 MB, 34 KB a multiprocessor of
132; a program keeps (stages - 1) tiles of W on the way, so 64 × 128 bytes × 4 with two programs a multiprocessor, or 128 × 128 × 3 with
one, are enough. Rate: a tensor core that multiplies 64 padded rows does 2 · 64 FLOP a weight, at 790 TFLOP/s 6.2e12 weights a second,
more than memory delivers in e4m3 (4.5e12): up to 64 rows are free, beyond it the product is bound by arithmetic and tiles get
as tall as registers allow. Each tile also reads its rows of x, out of L2: rows / features × bytes of x / bytes of w of what it reads of W.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

BUCKETS = (16, 32, 64, 128, 256, 512)  # M is rounded up to one of these; the last holds everything larger
FIXED = 0  # in place of a bucket: the one tiling for all M of the fixed-order backends
_PROGRAMS = 264  # two a multiprocessor of Hopper; a constant, so that bits do not depend on the card
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


_FP8 = ((64, 128, 4, 5), (128, 128, 8, 4))
# The hand-written lists. No entry spills on sm_80 or sm_90 or wants more than 160 KB (tests/kernels/test_gemm_compiles.py). The first
# is the usual one for few rows, the last for many.
CANDIDATES: dict[str, tuple[Tiling, ...]] = {
    "dense_linear": (*_tall((64, 128, 4, 4), (64, 64, 4, 6), (128, 64, 4, 4), (128, 64, 8, 5)), Tiling(128, 64, 128, 1, 8, 4)),
    "fp8_linear": (*_tall(*_FP8, (256, 128, 8, 3)), Tiling(128, 64, 128, 1, 8, 4)),
    "fp8_linear inner": (*_tall(*_FP8), Tiling(128, 64, 128, 1, 8, 4)),
    "fp8_fp8_linear": (*_tall(*_FP8, (128, 128, 4, 4), (256, 128, 8, 3)), Tiling(128, 128, 128, 1, 8, 3)),
    "fp8_fp8_linear inner": (*_tall(*_FP8), Tiling(64, 128, 128, 1, 8, 4)),
    "int4_linear": (
        *_tall((64, 128, 4, 5), (256, 128, 8, 4)),
        *(Tiling(128, 128, 16, 1, 4, 5), Tiling(128, 128, 32, 1, 8, 5), Tiling(128, 128, 64, 1, 8, 5)),
        Tiling(128, 128, 128, 1, 8, 3),
    ),
    "int4_linear inner": (*_tall((64, 128, 4, 5), (128, 128, 8, 5)), Tiling(64, 128, 128, 1, 8, 4)),
}


def bucket(m: int) -> int:
    """The bucket of M rows."""
    return next((size for size in BUCKETS if m <= size), BUCKETS[-1])


def usual(op: str, m: int, n: int, k: int) -> Tiling:
    """What runs where nothing was measured: few rows in thin tiles, K split until two programs a multiprocessor are there.

    Of M only `bucket(m)` counts, FIXED included.
    """
    if m != FIXED and bucket(m) > 64:
        tile = CANDIDATES[op][-1]
        row_tiles = bucket(m) // tile.rows
    else:
        tile, row_tiles = replace(CANDIDATES[op][0], rows=64 if m == FIXED else bucket(m)), 1
    tiles = -(-n // tile.features) * row_tiles
    fitting = [s for s in _SPLITS if s == 1 or (tiles * s <= 1.5 * _PROGRAMS and -(-k // tile.depth) >= _LEAST_STEPS * s)]
    return replace(tile, splits=min(fitting, key=lambda s: abs(tiles * s - _PROGRAMS)))


def candidates(op: str, m: int, n: int, k: int) -> list[Tiling]:
    """Every tiling of the list worth measuring at M rows (FIXED: for all of them), with every sensible number of splits.

    Tiles taller than M's bucket waste arithmetic and are left out; shorter ones read W once per row tile, out of L2.
    """
    tallest = 64 if m == FIXED else max(16, min(bucket(m), 128))
    found = []
    for tile in CANDIDATES[op]:
        if tile.rows > tallest or tile.rows < min(tallest, 64):
            continue
        tiles = -(-n // tile.features) * (1 if m == FIXED else -(-bucket(m) // tile.rows))
        for splits in _SPLITS:
            programs = tiles * splits
            if splits == 1 or (_PROGRAMS / 4 <= programs <= 4 * _PROGRAMS and -(-k // tile.depth) >= _LEAST_STEPS * splits):
                found.append(replace(tile, splits=splits))
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
