"""Benchmark records: one JSON object a line in `bench/results/*.jsonl`, appended, never edited."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from specdec.paths import without_path

ROOT = Path(__file__).resolve().parent
DOMAINS = tuple(sorted(p.stem for p in (ROOT / "data").glob("*.jsonl")))


def load_prompts(domain: str, limit: int | None = None) -> list[str]:
    """First user turns of a domain, in file order."""
    lines = (ROOT / "data" / f"{domain}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["turns"][0] for line in lines[:limit]]


def environment() -> dict[str, Any]:
    """What a number depends on besides the code: commit, machine, versions."""
    import torch

    from specdec.version import __version__

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": commit(),
        "argv": [without_path(arg) for arg in sys.argv],
        "specdec": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": gpu,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
    }


def commit() -> str:
    """Short hash of HEAD, with "+" when tracked files other than results differ from it."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "-uno", "--", ":(top)", ":(top,exclude)bench/results"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if dirty else "")


def cpu_name() -> str:
    try:
        names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        return f"{names[0]} x{len(names)}"
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


def quantiles(values: list[float]) -> dict[str, float]:
    """n, p20, p50, p80 of a sample."""
    if len(values) < 2:
        return {"n": len(values), "p50": values[0] if values else float("nan")}
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return {"n": len(values), "p20": cuts[1], "p50": statistics.median(values), "p80": cuts[7]}


def append(name: str, record: dict[str, Any]) -> None:
    """Append one record to `bench/results/<name>.jsonl`."""
    path = ROOT / "results" / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


def records(name: str) -> list[dict[str, Any]]:
    """Every record of `bench/results/<name>.jsonl`, oldest first."""
    path = ROOT / "results" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
