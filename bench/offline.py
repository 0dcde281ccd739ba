"""Decode speed at batch 1 on the evaluation prompts: speculation off and on, and peers, interleaved prompt by prompt.

    python -m bench.offline --prompts 5 --hf-dtypes float32 bfloat16 --hf-dir DIR --llama-python PYTHON --gguf FILE

Absolute speeds drift on a shared machine, so every figure is a ratio of runs made within the same seconds; the record keeps
the absolute ones too. Decode time runs from the first output token to the last; end tokens are ignored. Peers run at their
best: transformers in every dtype asked for (the record names the fastest), llama.cpp plain and with its own prompt lookup.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from bench.peers.worker import Peer
from bench.schema import DOMAINS, append, environment, load_prompts, quantiles
from specdec import LLM, SamplingParams
from specdec.paths import without_path


def run_specdec(llm: LLM, ids: list[int], max_tokens: int) -> dict[str, Any]:
    """One greedy run; the prefix cache is bypassed by nobody else using the engine, decode time excludes prefill anyway."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    tokens: list[int] = []
    first_count, last = 0, None
    start = first = end = time.perf_counter()
    for delta in llm.stream(ids, params):
        now = time.perf_counter()
        for choice in delta.outputs:
            tokens += choice.token_ids
        if not first_count and tokens:
            first, first_count = now, len(tokens)
        end, last = now, delta
    assert last is not None
    metrics = last.metrics
    return {
        "tokens": tokens,
        "first_s": first - start,
        "decode_s": end - first,
        "timed": len(tokens) - first_count,
        "acceptance_length": metrics.acceptance_length,
    }


def speed(result: dict[str, Any]) -> float:
    """Tokens per second after the first output."""
    return result.get("timed", len(result["tokens"]) - 1) / result["decode_s"]


def run_domain(domain: str, engines: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """All engines on each prompt in turn, the order rotating so that nobody always runs first."""
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    ratios: dict[str, list[float]] = {name: [] for name in engines}
    same, lengths = [], []
    names = list(engines)
    tokenizer = engines["off"].tokenizer
    for i, prompt in enumerate(load_prompts(domain, args.prompts)):
        ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
        results = {}
        for name in names[i % len(names) :] + names[: i % len(names)]:
            engine = engines[name]
            results[name] = engine.run(ids, args.max_tokens) if isinstance(engine, Peer) else run_specdec(engine, ids, args.max_tokens)
        for name, result in results.items():
            speeds[name].append(speed(result))
            ratios[name].append(speed(result) / speed(results["off"]))
        same.append(results["on"]["tokens"] == results["off"]["tokens"])
        lengths.append(results["on"]["acceptance_length"])
    return {
        "domain": domain,
        "tokens_per_s": {name: quantiles(v) for name, v in speeds.items()},
        "ratio_to_off": {name: quantiles(v) for name, v in ratios.items()},
        "best_dtype": best_dtype(speeds),
        "acceptance_length": statistics.mean(lengths),
        "outputs_equal": sum(same),
        "prompts": len(same),
    }


def best_dtype(speeds: dict[str, list[float]]) -> str | None:
    """The dtype in which transformers had the highest median speed; None where it did not run."""
    medians = {name.removeprefix("transformers-"): statistics.median(v) for name, v in speeds.items() if name.startswith("transformers-")}
    return max(medians, key=medians.__getitem__, default=None)


def make_engines(args: argparse.Namespace) -> dict[str, Any]:
    engines: dict[str, Any] = {
        "off": LLM(args.model, speculation="off", device=args.device, enable_prefix_caching=False),
        "on": LLM(args.model, speculation=args.speculation, device=args.device, enable_prefix_caching=False),
    }
    threads = str(torch.get_num_threads())
    for dtype in args.hf_dtypes:
        import sys

        engines[f"transformers-{dtype}"] = Peer("hf", sys.executable, args.hf_dir, dtype, threads)
    if args.llama_python:
        for mode in args.llama_modes:
            engines[f"llama.cpp-{mode}"] = Peer("llama_cpp_peer", args.llama_python, args.gguf, threads, mode)
    return engines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--speculation", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--domains", nargs="*", default=DOMAINS)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--hf-dtypes", nargs="*", default=[], metavar="DTYPE", help="also run transformers in these dtypes")
    parser.add_argument("--hf-dir", help="the model as a Hugging Face directory (specdec pull --convert)")
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python")
    parser.add_argument("--llama-modes", nargs="*", default=["off", "lookup"], choices=["off", "lookup"])
    parser.add_argument("--gguf", help="the GGUF file for llama.cpp")
    args = parser.parse_args()
    engines = make_engines(args)
    base = environment() | {
        "bench": "offline",
        "model": without_path(args.model),
        "speculation": args.speculation,
        "device": args.device,
        "max_tokens": args.max_tokens,
        "batch": 1,
        "peers": {name: e.info for name, e in engines.items() if isinstance(e, Peer)},
    }
    run_domain("qa", engines, argparse.Namespace(prompts=1, max_tokens=32))  # warm-up
    print(f"{'domain':14s} {'AL':>5s} {'equal':>6s} " + " ".join(f"{n:>22s}" for n in engines) + "   (tokens/s, ratio to off)")
    for domain in args.domains:
        result = run_domain(domain, engines, args)
        append("offline", base | result)
        cells = [f"{result['tokens_per_s'][n]['p50']:9.1f} ({result['ratio_to_off'][n]['p50']:.2f}x)" for n in engines]
        print(
            f"{domain:14s} {result['acceptance_length']:5.2f} {result['outputs_equal']:3d}/{result['prompts']:<2d} "
            + " ".join(f"{c:>22s}" for c in cells),
            flush=True,
        )
    for engine in engines.values():
        engine.close() if isinstance(engine, Peer) else engine.engine.close()


if __name__ == "__main__":
    main()
