"""Seconds from starting Python to the first token, in fresh processes over a warm cache (the model is pulled and parsed).

    python -m bench.start --runs 5 --speculation auto off

Parts: interpreter and import, `LLM(...)`, and the first token of a short prompt. The total is seen from outside, so it includes
what the process does before its own clock starts. One run of each configuration fills the cache and is not counted; the
rest are interleaved. `--speculation auto` measures step costs at its first start and checks the kept ones at the later ones.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from bench.schema import ROOT, append, environment, quantiles
from specdec.paths import without_path

PROMPT = "What is the capital of France?"
PARTS = ("import_s", "load_s", "first_token_s", "total_s")

CHILD = """
import json, sys, time
begin = time.perf_counter()
from specdec import LLM, SamplingParams
imported = time.perf_counter()
options = json.loads(sys.argv[1])
llm = LLM(options.pop("model"), **options)
loaded = time.perf_counter()
next(llm.stream(sys.argv[2], SamplingParams(temperature=0.0, max_tokens=1)))
first = time.perf_counter()
print(json.dumps({"import_s": imported - begin, "load_s": loaded - imported, "first_token_s": first - loaded}), flush=True)
"""


def run_once(options: dict[str, Any]) -> dict[str, float]:
    """Seconds of every part in one fresh process; the total ends when its report arrives."""
    begin = time.perf_counter()
    command = [sys.executable, "-c", CHILD, json.dumps(options), PROMPT]
    with subprocess.Popen(command, cwd=ROOT.parent, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        total = time.perf_counter() - begin
    if not line:
        raise RuntimeError(f"the measured process died with exit code {process.returncode}")
    return {**json.loads(line), "total_s": total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--speculation", nargs="+", default=["auto", "off"])
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    configurations = {s: {"model": args.model, "device": args.device, "speculation": s} for s in args.speculation}
    seconds: dict[str, list[dict[str, float]]] = {s: [] for s in configurations}
    for options in configurations.values():
        run_once(options)
    for _ in range(args.runs):
        for name, options in configurations.items():
            seconds[name].append(run_once(options))
    base = environment() | {"bench": "start", "model": without_path(args.model), "device": args.device}
    print(f"{'speculation':14s} " + " ".join(f"{part:>14s}" for part in PARTS) + "   (medians)")
    for name, runs in seconds.items():
        parts = {part: quantiles([run[part] for run in runs]) for part in PARTS}
        append("start", base | {"speculation": name, **parts})
        print(f"{name:14s} " + " ".join(f"{parts[part]['p50']:14.3f}" for part in PARTS), flush=True)


if __name__ == "__main__":
    main()
