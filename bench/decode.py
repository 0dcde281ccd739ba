"""Milliseconds of a steady decode step on a GPU, at the real size of a model with random weights.

    python -m bench.decode [--model llama-3.1-8b …] [--batch 1 8 32] [--accept 0.853 0.728 0.621] [--head eagle3] [--eager] [--wait]
        [--deterministic] [--policy auto] [--act fp8] [--storage fp8] [--pdl 0 1] [--cut chosen merged=0]

Prompts of 512 random tokens; the clock runs while all sequences decode, from one step's tokens to the next's. Without `--accept`
speculation is off; with it every step verifies a chain of as many drafts, accepted at these unconditional rates per position whatever
they are. They cost nothing to find, the price of verification alone, or with `--head` come from a random draft head of the usual size:
one layer, 32,000 draft tokens. `--eager` goes without CUDA graphs, `--wait` without the host one step behind, `--deterministic` with the
kernels whose bits do not depend on the batch, `--act fp8` with activations in e4m3 too, `--storage fp8` with the head's weights in e4m3.
`--policy auto` drafts what the policy chooses, at most that much, after more steps to learn from; without it every step drafts all. Of
steps that drafted it is told what, and how many waited for the last verdict. Beside the step its parts as the host sees them, the
recorded pass of the target alone, replayed back to back (`pass_ms`), a prompt alone up to its first token (`prefill_ms`), and the time
that the weights of a step take at the rate of a plain read, which no step can be faster than. `--pdl`: whether launches begin before the
last one has ended (`triton_common.early`). `--cut`: fields of the attention's `Tiling` to change, as in `bench.kernels_attention`.
Appends to `bench/results/decode.jsonl`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bench.cuda_timing import read_microseconds
from bench.dummy_head import HEADS, dummy_head
from bench.kernels_attention import cut_as
from bench.schema import ROOT, append, environment
from specdec.boot import build_engine, load_target
from specdec.config import ACT_DTYPES, EngineConfig, SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.models.head_load import DRAFT_QUANTIZATIONS
from specdec.models.load import LoadedModel

MODELS = tuple(sorted(path.parent.name for path in (ROOT / "data" / "models").glob("*/config.json")))
PROMPT, OUTPUT, WARM = 512, 256, 12  # tokens, tokens, steps before the clock starts
LEARNING, LEARNT = 96, 1024  # steps before the clock starts, and tokens, where the policy chooses
REPLAYS = 50


def directory(model: str) -> str:
    """Of a name in MODELS."""
    return str(ROOT / "data" / "models" / model)


def config_of(
    model: str,
    batch: int,
    accept: list[float],
    eager: bool,
    wait: bool = False,
    head: tuple[str, str] | None = None,
    device: str = "cuda",
    deterministic: bool = False,
    policy: str = "fixed",
    act: str = "auto",
    storage: str | None = None,
) -> EngineConfig:
    """head: method and directory of the draft head that finds the drafts, None = they are known. storage: of its weights, as
    `draft_quantization`."""
    spec, longest = SpecConfig(method="off"), PROMPT + 64 + (OUTPUT if policy == "fixed" else LEARNT)
    if accept:
        method, path = head or ("oracle", None)
        forced = {"policy": policy, "verify": "synthetic", "synthetic_acceptance": tuple(accept)}
        spec = SpecConfig(
            method=method,
            head=path,
            nodes=len(accept) + 1,
            depth=len(accept),
            width=1,
            draft_quantization=storage if head else None,
            **forced,
        )
    return EngineConfig(
        model=model,
        speculation=spec,
        device=device,
        load_format="dummy",
        max_model_len=longest,
        max_num_seqs=batch,
        max_num_batched_tokens=2048,
        num_kv_blocks=batch * (-(-longest // 16)) + 64,
        enable_prefix_caching=False,
        enforce_eager=eager,
        overlap=False if wait else None,
        deterministic=deterministic,
        act_dtype=act,
    )


def promising(target: LoadedModel, method: str, accept: list[float]) -> str:
    """Directory of a dummy head whose drafts promise what these rates give them, each on the condition that the one before was taken."""
    return dummy_head(target, method, Path(tempfile.mkdtemp(prefix="specdec-head-")), accept[-1] ** (1 / len(accept)))


def decoding(config: EngineConfig, target: LoadedModel) -> Engine:
    """An engine all of whose sequences, as many as it takes, have been decoding for WARM steps, or LEARNING ones."""
    engine = build_engine(config, oracle=lambda seq: [7] * 64, target=target)
    generator, batch = torch.Generator().manual_seed(0), config.max_num_seqs
    chooses = config.speculation.method != "off" and config.speculation.policy == "auto"
    for i in range(batch):
        prompt = torch.randint(0, target.config.vocab_size, (PROMPT,), generator=generator).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=LEARNT if chooses else OUTPUT, ignore_eos=True)
        engine.add_request(str(i), prompt, params)
    while engine.stats is None or engine.stats.num_sampling < batch:
        engine.step()
    for _ in range(LEARNING if chooses else WARM):
        engine.step()
    return engine


def measure(engine: Engine, steps: int) -> dict[str, Any]:
    """Medians over single steps; tokens a step of all sequences together."""
    whole, parts, committed, drafted = [], [], 0, []
    end = time.perf_counter()
    for _ in range(steps):
        start = end
        engine.step()  # waits for its tokens, and for nothing else
        end = time.perf_counter()
        whole.append(1e3 * (end - start))
        stats = engine.stats
        assert stats is not None
        committed += stats.committed
        parts.append((stats.draft_seconds, stats.forward_seconds, stats.verify_seconds))
        if stats.drafts:
            drafted.append((None if stats.budget is None else (stats.budget.nodes, stats.budget.depth), stats.waited))
    draft, forward, verify = (round(1e3 * statistics.median(part), 3) for part in zip(*parts, strict=True))
    step = statistics.median(whole)
    return {
        "batch": engine.config.max_num_seqs,
        "ms": round(step, 3),
        "ms_p20": round(statistics.quantiles(whole, n=5)[0], 3),
        "ms_p80": round(statistics.quantiles(whole, n=5)[3], 3),
        "host_ms": {"draft": draft, "forward": forward, "verify": verify},
        "tokens_a_step": round(committed / steps, 3),
        "tokens_per_s": round(committed / steps / step * 1e3, 1),
        "steps": steps,
        "drafted": [[shape, count] for shape, count in Counter(shape for shape, _ in drafted).most_common()],
        "waited": Counter(why for _, why in drafted if why is not None),
    }


def pass_ms(engine: Engine) -> float | None:
    """Milliseconds of the last recorded pass, replayed back to back; None where passes are not recorded."""
    replay = engine.runner.replay()
    if replay is None:
        return None
    for _ in range(5):
        replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    engine.runner.synchronize()
    return round(begin.elapsed_time(end) / REPLAYS, 4)


def prefill_ms(config: EngineConfig, target: LoadedModel) -> float:
    """Milliseconds from a prompt to its first token, nothing else running: the median of five after two."""
    engine, took = build_engine(config, oracle=lambda seq: [7] * 64, target=target), []
    generator = torch.Generator().manual_seed(1)
    for i in range(7):
        prompt = torch.randint(0, target.config.vocab_size, (PROMPT,), generator=generator).tolist()
        engine.add_request(str(i), prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        engine.runner.synchronize()
        start = time.perf_counter()
        while engine.has_work():
            engine.step()
        took.append(1e3 * (time.perf_counter() - start))
    engine.close()
    return round(statistics.median(took[2:]), 3)


def floor(target: LoadedModel) -> float:
    """Milliseconds that the weights of a step take at the rate of a plain read of a gigabyte."""
    methods = [linear.method for layer in target.model.layers for linear in layer.linears] + [target.model.lm_head.method]
    gigabyte = statistics.median(read_microseconds(1 << 30, 10)) / 1e3
    return sum(method.nbytes for method in methods) / (1 << 30) * gigabyte


@contextmanager
def launched(pdl: int | None, cut: str) -> Iterator[None]:
    """How kernels are launched within, in passes recorded there too; None and "chosen" = as shipped."""
    from specdec.kernels import triton_common  # needs Triton

    before = triton_common.early_launches
    triton_common.early_launches = before if pdl is None else bool(pdl)
    try:
        with cut_as(cut):
            yield
    finally:
        triton_common.early_launches = before


def records(
    model: str,
    batches: list[int],
    accept: list[float],
    steps: int,
    method: str | None = None,
    launches: Sequence[tuple[int | None, str]] = ((None, "chosen"),),
    **how: Any,
) -> Iterator[dict[str, Any]]:
    """One for each number of sequences and way to launch, as in `launched`. model: a name in MODELS. how: eager, wait, deterministic,
    policy, act, storage."""
    target = load_target(config_of(directory(model), 1, [], **how))
    least, prompt = round(floor(target), 3), prefill_ms(config_of(directory(model), 1, [], **how), target)
    head = None if method is None else (method, promising(target, method, accept))
    for batch, (pdl, cut) in product(batches, launches):
        case = {"bench": "decode", "model": model, "accept": accept, "head": method, **how, "floor_ms": least, "pdl": pdl, "cut": cut}
        case["prefill_ms"] = prompt
        with launched(pdl, cut):
            engine = decoding(config_of(directory(model), batch, accept, head=head, **how), target)
            found = case | measure(engine, steps) | {"pass_ms": pass_ms(engine)}
        yield found
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["llama-3.1-8b"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--accept", type=float, nargs="*", default=[], help="rates per position of forced acceptance; none = speculation off"
    )
    parser.add_argument("--head", choices=HEADS, help="a random draft head of this kind finds the drafts")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--wait", action="store_true", help="every step waits for the verdict of the one before")
    parser.add_argument("--deterministic", action="store_true", help="kernels whose bits do not depend on the batch; what they cost")
    parser.add_argument("--policy", choices=("fixed", "auto"), default="fixed", help="who decides what is drafted")
    parser.add_argument("--act", choices=ACT_DTYPES, default="auto", help="what FP8 weights are multiplied by; fp8 = W8A8")
    parser.add_argument("--storage", choices=DRAFT_QUANTIZATIONS, help="of the head's weights; bfloat16 without")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument(
        "--pdl", type=int, nargs="+", choices=range(2), default=[None], help="0 = launches wait for the end of the one before"
    )
    parser.add_argument("--cut", nargs="+", default=["chosen"], help="fields of the attention's launch to change, as merged=0,alone=0")
    args = parser.parse_args()
    launches = list(product(args.pdl, args.cut))
    ways = {
        "eager": args.eager,
        "wait": args.wait,
        "deterministic": args.deterministic,
        "policy": args.policy,
        "act": args.act,
        "storage": args.storage,
    }
    for model in args.model:
        for record in records(model, args.batch, args.accept, args.steps, args.head, launches, **ways):
            append("decode", environment() | record)
            flags = {
                "eager": args.eager,
                "wait": args.wait,
                "fixed": args.deterministic,
                "a8": args.act == "fp8",
                "auto": args.policy == "auto",
                f"head {args.storage}": args.storage is not None,
            }
            how = " ".join(name for name, on in flags.items() if on) or "graphs"
            line = f"{model:20} {args.head or ''} batch {record['batch']:3} {how:11} {record['ms']:8.3f} ms, floor {record['floor_ms']}"
            line += f", prompt {record['prefill_ms']}"
            print(
                line,
                f"pass {record['pass_ms']} pdl {record['pdl']} {record['cut']}",
                record["host_ms"],
                record["tokens_a_step"],
                record["drafted"],
                dict(record["waited"]),
                flush=True,
            )


if __name__ == "__main__":
    main()
