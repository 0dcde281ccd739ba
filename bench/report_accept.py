"""The acceptance table of README.md and its plots, from the newest records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from bench.cells import MACHINE, Shape
from specdec.train.plot import Curve, Panel, draw

Record = dict[str, Any]
_CELL = ("drafter", "source", "nodes", "depth", "width", "mode", "temperature", "domain", "texts")


def latest(rows: list[Record], times: bool = True) -> list[Record]:
    """The newest record of every cell that counted a pass, with the newest weights of each drafter and as many and as long texts as there
    were last; where times are shown, on the machine of the newest alone. The code may have changed between them: `accept_table` names
    the commits. By drafter, chains before trees, small before large."""
    rows = [r for r in rows if "texts" in r and r["steps"]]
    machine, weights = [rows[-1][name] for name in MACHINE[1:]] if rows else [], {r["drafter"]: r["digest"] for r in rows}
    sizes = {r["texts"]: (r["count"], r["max_tokens"]) for r in rows}
    cells = {}
    for r in rows:
        fits = weights[r["drafter"]] == r["digest"] and sizes[r["texts"]] == (r["count"], r["max_tokens"])
        if fits and (not times or [r[name] for name in MACHINE[1:]] == machine):
            cells[tuple(r[name] for name in _CELL)] = r
    return sorted(cells.values(), key=lambda r: (r["drafter"], r["width"] > 1, r["nodes"]))


def grouped(rows: Iterable[Record], *names: str) -> dict[tuple[Any, ...], list[Record]]:
    """Records by the values of `names`, in order of first appearance."""
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return dict(groups)


def length(rows: list[Record]) -> float:
    """Acceptance length: mean over domains, each weighing the same."""
    return mean(mean(r["acceptance_length"] for r in own) for own in grouped(rows, "domain").values())


def milliseconds(rows: list[Record], *names: str) -> float:
    """Sum of the medians of these times, mean over the records."""
    return 1e3 * mean(sum(r[name]["p50"] for name in names) for r in rows)


def position(rows: list[Record], index: int) -> float:
    """Acceptance at position index + 1, mean over the records."""
    return mean([*r["positions"], *[0.0] * (index + 1)][index] for r in rows)


def free_table(rows: list[Record], times: bool = True) -> list[str]:
    """A line per drafter and shape: acceptance length by temperature, by position at the lowest one, and what a step costs (`times`)."""
    rows = [r for r in rows if r["texts"] == "free" and r["mode"] == "coupled"]
    if not rows:
        return []
    temperatures = sorted({r["temperature"] for r in rows})
    titles = ["drafter", "draft", *(f"length, T = {t:g}" for t in temperatures), "at position 1, 2, 3, 4"]
    lines = header([*titles, "draft, ms", "pass + verify, ms"] if times else titles)
    for (drafter, _, _, nodes, depth, width), own in grouped(rows, "drafter", "source", "digest", "nodes", "depth", "width").items():
        by_temperature = grouped(own, "temperature")
        cells = [f"{length(by_temperature[t,]):.2f}" if (t,) in by_temperature else "" for t in temperatures]
        coolest = by_temperature[min(by_temperature)]
        shares = " ".join(f"{position(coolest, i):.2f}" for i in range(min(4, depth)))
        costs = [milliseconds(own, "draft_seconds"), milliseconds(own, "forward_seconds", "verify_seconds")] if times else []
        lines.append(line([drafter, str(Shape(nodes, depth, width)), *cells, shares, *(f"{c:.1f}" for c in costs)]))
    return lines


def forced_table(rows: list[Record]) -> list[str]:
    """A line per drafter and shape: tokens that one step commits on the same contexts, by temperature and mode."""
    rows = [r for r in rows if r["texts"] == "forced"]
    if not rows:
        return []
    columns = sorted({(r["temperature"], r["mode"]) for r in rows})
    lines = header(["drafter", "draft", *(f"T = {t:g}, {mode}" for t, mode in columns)])
    for (drafter, _, _, nodes, depth, width), own in grouped(rows, "drafter", "source", "digest", "nodes", "depth", "width").items():
        found = grouped(own, "temperature", "mode")
        lines.append(line([drafter, str(Shape(nodes, depth, width)), *(f"{length(found[c]):.2f}" if c in found else "" for c in columns)]))
    return lines


def header(titles: list[str]) -> list[str]:
    return [line(titles), "|" + "---|" * len(titles)]


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def accept_table(rows: list[Record], times: bool = True) -> str:
    """Both tables and what they rest on; "" without records."""
    rows = latest(rows, times)
    if not rows:
        return ""
    parts = []
    for lines, texts, what in ((free_table(rows, times), "free", "prompts"), (forced_table(rows), "forced", "contexts")):
        if lines:
            own = [r for r in rows if r["texts"] == texts]
            domains, counts = len({r["domain"] for r in own}), "/".join(map(str, sorted({r["count"] for r in own})))
            seeds = max(r["seeds"] for r in own)
            how = "free runs" if texts == "free" else "one step on each of the same contexts, prefixes of greedy answers"
            parts.append(
                "\n".join([*lines, "", f"Means over {domains} domains, {counts} {what} each, seeds a {what[:-1]}: {seeds}; {how}."])
            )
    commits = " and ".join(commit for (commit,) in grouped(rows, "commit"))
    machines = " and ".join(dict.fromkeys(f"{r['gpu'] or r['cpu']}, {r['threads']} threads" for r in rows))
    parts.append(f"{rows[0]['model']}, {machines}, commit {commits}, {max(r['time'] for r in rows)[:10]}.")
    return "\n\n".join(parts)


def panels(rows: list[Record], times: bool = True) -> list[Panel]:
    """Length over K and over nodes, acceptance by position of the longest chains, and draft and pass time over K (`times`)."""
    rows = [r for r in latest(rows, times) if r["texts"] == "free" and r["mode"] == "coupled"]
    chains, trees = [r for r in rows if r["width"] == 1], [r for r in rows if r["width"] > 1]
    longest: list[Curve] = []
    for (drafter, t, _), own in grouped(chains, "drafter", "temperature", "digest").items():
        depth = max(r["depth"] for r in own)
        deep = [r for r in own if r["depth"] == depth]
        longest.append((f"{drafter} T = {t:g}", range(1, depth + 1), [position(deep, i) for i in range(depth)]))
    found: list[Panel] = [
        ("acceptance length of chains over K", curves(chains, "depth", length)),
        ("acceptance length of trees over nodes", curves(trees, "nodes", length)),
        ("accepted at position i, longest chains", longest),
    ]
    if times:
        found.append(("draft, ms a step, chains over K", curves(chains, "depth", lambda own: milliseconds(own, "draft_seconds"))))
        found.append(("target pass and verification, ms, chains over K", curves(chains, "depth", pass_time)))
    return [panel for panel in found if panel[1]]


def pass_time(rows: list[Record]) -> float:
    return milliseconds(rows, "forward_seconds", "verify_seconds")


def curves(rows: list[Record], x: str, value: Callable[[list[Record]], float]) -> list[Curve]:
    """A curve per drafter, temperature and width (trees), over the sizes `x` that are recorded."""
    names = ("drafter", "temperature", "digest", "width")
    found: list[Curve] = []
    for (drafter, t, _, width), own in grouped(rows, *names).items():
        sizes = sorted(grouped(own, x))
        wide = f", {width} wide" if width > 1 else ""
        found.append((f"{drafter} T = {t:g}{wide}", [s for (s,) in sizes], [value([r for r in own if r[x] == s]) for (s,) in sizes]))
    return found


def accept_plot(rows: list[Record], picture: Path, times: bool = True) -> bool:
    """Draw `panels`; False, and no picture, where there are none."""
    found = panels(rows, times)
    if found:
        draw(found, picture)
    return bool(found)
