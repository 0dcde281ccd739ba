"""Write the tables of README.md from `bench/results/*.jsonl`, between markers, and the plot beside the records.

python -m bench.report                   # rewrites README.md and bench/results/accept.svg in place
python -m bench.report --without-times   # leaves out what a busy machine has spoilt in the records of acceptance
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from bench.report_accept import accept_plot, accept_table
from bench.schema import ROOT, records

README = ROOT.parent / "README.md"


def newest(rows: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """The last record for each combination of `keys`, in order of first appearance."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        found[tuple(str(row.get(k)) for k in keys)] = row
    return list(found.values())


def offline_table() -> str:
    """Ratios of interleaved runs, newest full run of `bench.offline` with peers."""
    rows = [r for r in records("offline") if r["peers"]]
    if not rows:
        return ""
    last = [r for r in rows if r["commit"] == rows[-1]["commit"] and r["argv"] == rows[-1]["argv"]]
    rows = sorted(newest(last, "domain"), key=lambda r: r["domain"])
    names = [n for n in rows[0]["tokens_per_s"] if n not in ("off", "on")]
    lines = [
        "| domain | off, tokens/s | on / off | acceptance length | outputs equal | " + " | ".join(f"off / {n}" for n in names) + " |",
        "|---|---|---|---|---|" + "---|" * len(names),
    ]
    for r in rows:
        ratio = r["ratio_to_off"]
        peers = " | ".join(f"{1 / ratio[n]['p50']:.2f}×" for n in names)
        lines.append(
            f"| {r['domain']} | {r['tokens_per_s']['off']['p50']:.0f} | {ratio['on']['p50']:.2f}× | {r['acceptance_length']:.2f} | "
            f"{r['outputs_equal']}/{r['prompts']} | {peers} |"
        )
    r = rows[0]
    lines.append(
        f"\n{r['cpu']}, {r['threads']} threads, commit {r['commit']}, {r['time'][:10]}; medians of {r['prompts']} prompts a domain."
    )
    return "\n".join(lines)


def replace_between(text: str, name: str, body: str) -> str:
    pattern = re.compile(rf"(<!-- table:{name} -->\n).*?(<!-- /table:{name} -->)", re.DOTALL)
    return pattern.sub(lambda m: f"{m[1]}{body}\n{m[2]}" if body else m[0], text)


def main(readme: Path = README, argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-times", action="store_true", help="acceptance alone, no milliseconds beside it")
    times = not parser.parse_args(argv).without_times
    text, accepted = readme.read_text(encoding="utf-8"), records("accept")
    for name, body in (("offline", offline_table()), ("accept", accept_table(accepted, times))):
        text = replace_between(text, name, body)
    readme.write_text(text, encoding="utf-8")
    accept_plot(accepted, ROOT / "results" / "accept.svg", times)


if __name__ == "__main__":
    main()
