"""Curves as an SVG picture, drawn without a plotting library; those of a training run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#8d6a9f", "#edae49", "#00798c", "#6b4226", "#555555", "#c71585", "#3f88c5")
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 420, 260, 56, 36, 70

Curve = tuple[str, Sequence[float], Sequence[float]]
"""Name, x and y of its points; x rises."""
Panel = tuple[str, Sequence[Curve]]
"""Title, and at least one curve."""


def plot_metrics(directory: Path, picture: Path) -> bool:
    """Draw loss and accuracy by depth (metrics.jsonl), and acceptance on held-out texts (validation.jsonl), over steps.

    False, and no picture, when there are fewer than two lines of metrics.
    """
    lines = _read(directory / "metrics.jsonl")
    if len(lines) < 2:
        return False
    depths, steps = range(len(lines[0]["joint"])), [float(line["step"]) for line in lines]
    panels: list[Panel] = [
        ("loss", [("loss", steps, [line["loss"] for line in lines])]),
        ("right at depth d, given all before", [(f"d = {d + 1}", steps, [line["conditional"][d] for line in lines]) for d in depths]),
        ("right down to depth d", [(f"d = {d + 1}", steps, [line["joint"][d] for line in lines]) for d in depths]),
    ]
    walks = _read(directory / "validation.jsonl")
    if len(walks) > 1:
        steps = [float(walk["step"]) for walk in walks]
        panels.append(("held-out acceptance length", [(f"K = {d + 1}", steps, [w["lengths"][d] for w in walks]) for d in depths]))
    draw(panels, picture)
    return True


def draw(panels: Sequence[Panel], picture: Path) -> None:
    """Write the panels side by side. Axes run from 0 to 1 where all values lie there, else from the least to the largest."""
    width, body = _LEFT + len(panels) * (_WIDTH + _GAP), ""
    for i, (title, curves) in enumerate(panels):
        body += _panel(_LEFT + i * (_WIDTH + _GAP), title, curves)
    style = '<style>text{font:12px sans-serif;fill:#333}</style><rect width="100%" height="100%" fill="white"/>'
    size = f'width="{width}" height="{_TOP + _HEIGHT + 40}"'
    picture.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{body}</svg>\n', encoding="utf-8")


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def _panel(left: int, title: str, curves: Sequence[Curve]) -> str:
    """One set of axes at `left`, with every curve in its colour."""
    values, places = [y for _, _, ys in curves for y in ys], [x for _, xs, _ in curves for x in xs]
    begin = min(places)
    low, high = (0.0, 1.0) if max(values) <= 1.0 else (min(values), max(values))
    span, reach = (high - low) or 1.0, (max(places) - begin) or 1.0
    parts = [f'<text x="{left}" y="{_TOP - 12}" font-weight="bold">{title}</text>']
    for tick in range(5):
        y = _TOP + _HEIGHT * (1 - tick / 4)
        parts.append(f'<line x1="{left}" x2="{left + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{low + span * tick / 4:.3g}</text>')
        x = left + _WIDTH * tick / 4
        parts.append(f'<text x="{x:.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">{begin + reach * tick / 4:.4g}</text>')
    for number, (name, xs, ys) in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(
            f"{left + _WIDTH * (x - begin) / reach:.1f},{_TOP + _HEIGHT * (1 - (y - low) / span):.1f}" for x, y in zip(xs, ys, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"><title>{name}</title></polyline>')
        parts.append(f'<text x="{left + _WIDTH + 4}" y="{_TOP + 12 + 15 * number}" style="fill:{colour}">{name}</text>')
    return "".join(parts)
