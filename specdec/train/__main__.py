"""`specdec train` and `python -m specdec.train`: write answers, train a head, evaluate it, draw its curves."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError, SpecdecError
from specdec.models.head_config import KINDS

SMOKE = {
    "steps": 60,
    "depths": 3,
    "batch_tokens": 1024,
    "lr": 5e-3,
    "log_every": 5,
    "draft_vocab": 256,
    "max_len": 128,
    "validation": 0.2,
    "storage": "float32",
}
"""Sizes for a tiny model on a CPU: --smoke. What is typed beside it wins."""
OWN: dict[str, dict[str, Any]] = {"eagle3": {}, "peagle": {"decay": 1.0, "depths": 8}}
"""Defaults that belong to a kind of head."""


def main(argv: list[str] | None = None, *, program: str = "python -m specdec.train") -> int:
    """Run one command; errors specdec raises on purpose become one line on stderr and exit code 1.

    argv: its arguments, by default the process's own. program: what was typed before them, for help texts and the record
    of a run.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = _parser(program).parse_args(argv)
    args.typed = [*program.split(), *argv]
    try:
        args.run(args)
    except SpecdecError as err:
        print(f"specdec train: {err}", file=sys.stderr)
        return 1
    return 0


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description="Train EAGLE-3 and P-EAGLE draft heads")
    commands = parser.add_subparsers(dest="command", required=True)
    _generate_flags(commands.add_parser("generate", help="let the target answer prompts"))
    for kind in KINDS:
        _train_flags(commands.add_parser(kind, help=f"train a head on the answers: {kind}"), kind)
    _evaluate_flags(commands.add_parser("evaluate", help="walk a trained head over answers of temperature 0, or serve prompts with it"))
    plot = commands.add_parser("plot", help="draw the curves of a run")
    plot.add_argument("run_directory", type=Path, help="the --out of a training run")
    plot.add_argument("picture", type=Path, help="the SVG file to write")
    plot.set_defaults(run=_plot)
    return parser


def _shared_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", default="smollm2-135m-instruct", help="the target: a name, a directory or a .gguf file")
    command.add_argument("--device", default="auto")


def _generate_flags(command: argparse.ArgumentParser) -> None:
    _shared_flags(command)
    command.add_argument("--prompts", nargs="+", required=True, help="*.jsonl(.gz) files of {id, domain, turns}, or directories")
    command.add_argument("--out", type=Path, required=True, help="directory for the shards")
    command.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    command.add_argument("--max-tokens", type=int, default=512)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--shard-size", type=int, default=4096, help="conversations a shard")
    command.add_argument("--limit", type=int, default=0, help="only the first prompts")
    command.add_argument("--part", default="0/1", metavar="I/N", help="this process writes every N-th shard, from the I-th (0 … N-1)")
    command.add_argument("--max-model-len", type=int, default=2048)
    command.add_argument("--max-num-seqs", type=int, default=512)
    command.add_argument("--max-num-batched-tokens", type=int, default=4096)
    command.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    command.set_defaults(run=_generate)


def _evaluate_flags(command: argparse.ArgumentParser) -> None:
    _shared_flags(command)
    command.add_argument("--head", type=Path, required=True, help="directory of the exported head")
    command.add_argument("--data", type=Path, nargs="+", help="directories of answers to walk over")
    command.add_argument("--depths", type=int, default=8, help="longest chain")
    command.add_argument("--max-len", type=int, default=1024)
    command.add_argument("--ended-only", action="store_true", help="only answers that came to their natural end")
    command.add_argument("--prompts", nargs="+", help="prompts to serve with the engine")
    command.add_argument("--nodes", type=int, default=32, help="tree size with the root")
    command.add_argument("--width", type=int, default=4, help="1 = chain")
    command.add_argument("--limit", type=int, default=0, help="only the first prompts")
    command.add_argument("--temperature", type=float, default=0.0)
    command.add_argument("--max-tokens", type=int, default=256)
    command.add_argument("--max-num-seqs", type=int, default=32)
    command.add_argument("--max-model-len", type=int, default=2048)
    command.set_defaults(run=_evaluate)


def _train_flags(command: argparse.ArgumentParser, kind: str) -> None:
    """Flags for every field of `HeadOptions` and `TrainConfig`. They are in the namespace only when typed: see `_settings`."""
    _shared_flags(command)
    command.add_argument("--data", type=Path, nargs="+", required=True, help="directories of answers")
    command.add_argument("--out", type=Path, required=True, help="directory for state, metrics, report and the head")
    command.add_argument("--resume", action="store_true", help="go on from the state in --out")
    command.add_argument("--pause", type=float, metavar="MINUTES", help="stop early after so many minutes, to be resumed")
    sizes = " ".join(f"{_flag(name)} {value}" for name, value in SMOKE.items())
    command.add_argument("--smoke", action="store_true", help=f"sizes for a tiny model on a CPU, where not given: {sizes}")
    kinds = {"int": int, "float": float, "str": str}
    for name, (of, default) in _fields(kind).items():
        if name == "taps":
            command.add_argument("--taps", type=int, nargs="+", default=argparse.SUPPRESS, help="target layers whose input is tapped")
        elif name != "kind":
            known = "" if default is None else f"default: {default}"
            command.add_argument(_flag(name), type=kinds[of], default=argparse.SUPPRESS, help=known)
    command.set_defaults(run=_train, kind=kind)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _fields(kind: str) -> dict[str, tuple[str, Any]]:
    """Every field of `HeadOptions` and `TrainConfig`: its type, without "| None", and its default for a kind of head."""
    from specdec.train.loop import TrainConfig
    from specdec.train.recipe import HeadOptions

    both = (*fields(HeadOptions), *fields(TrainConfig))
    return {f.name: (str(f.type).split(" ")[0], OWN[kind].get(f.name, f.default)) for f in both}


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What was typed, else --smoke's sizes, else the defaults. A run's length is one setting in two units."""
    typed = vars(args)
    values = {name: default for name, (_, default) in _fields(args.kind).items()}
    if args.smoke:
        values |= SMOKE | ({"steps": None} if "minutes" in typed else {})
    return values | typed


def _generate(args: argparse.Namespace) -> None:
    from specdec.train.generate import GenerateConfig, generate, open_target
    from specdec.train.prompts import read_prompts

    prompts = read_prompts(args.prompts)
    prompts = prompts[: args.limit] if args.limit else prompts
    llm = open_target(
        args.model,
        device=args.device,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        gpu_memory_utilization=args.gpu_memory_utilization,
    )
    config = GenerateConfig(tuple(args.temperatures), args.max_tokens, args.seed, args.shard_size)
    total = generate(llm, prompts, args.out, config, part=_part(args.part))
    print(json.dumps({"prompts": len(prompts), "answer_tokens_written": total}))


def _part(text: str) -> tuple[int, int]:
    try:
        index, count = (int(number) for number in text.split("/"))
    except ValueError:
        index, count = 0, 0
    if not 0 <= index < count:
        raise ConfigError(f"part must be I/N with 0 ≤ I < N, got {text!r}", param="part")
    return index, count


def _load(args: argparse.Namespace) -> Any:
    from specdec.boot import resolve_device
    from specdec.models.load import load_model

    return load_model(args.model, device=resolve_device(args.device))


def _train(args: argparse.Namespace) -> None:
    from specdec.train.loop import TrainConfig
    from specdec.train.recipe import HeadOptions, Recipe

    values = _settings(args)
    values["taps"] = tuple(values["taps"]) if values["taps"] else None
    options = HeadOptions(**{f.name: values[f.name] for f in fields(HeadOptions)})
    config = TrainConfig(**{f.name: values[f.name] for f in fields(TrainConfig)})
    recipe = Recipe(_load(args), args.data, args.out, options, config, command=args.typed)
    report = recipe.run(resume=args.resume, pause=args.pause)
    if report is None:
        print(json.dumps({"paused": str(args.out)}))
        return
    lengths = {domain: a["lengths"] for domain, a in report["acceptance"].items()}
    keys = ("steps", "seconds", "answer_tokens", "coverage", "parameters")
    print(json.dumps({key: report[key] for key in keys} | {"chain_lengths": lengths}))


def _evaluate(args: argparse.Namespace) -> None:
    """Print one JSON object: "walked" from --data, "served" from --prompts."""
    if not args.data and not args.prompts:
        raise ConfigError("evaluate needs --data or --prompts", param="data")
    result: dict[str, Any] = {}
    if args.data:
        from specdec.train.recipe import evaluate_exported

        limits = {"depths": args.depths, "max_len": args.max_len, "ended_only": args.ended_only}
        walked = evaluate_exported(_load(args), args.head, args.data, **limits)
        result["walked"] = {domain: acceptance.to_json() for domain, acceptance in walked.items()}
    if args.prompts:
        result["served"] = _serve(args)
    print(json.dumps(result))


def _serve(args: argparse.Namespace) -> dict[str, Any]:
    from specdec.config import SpecConfig
    from specdec.llm import LLM
    from specdec.models.jsonfile import read_json
    from specdec.train.evaluate import served
    from specdec.train.prompts import read_prompts

    kind = read_json(args.head / "config.json")["speculators_model_type"]
    nodes = args.depths + 1 if args.width == 1 else args.nodes
    speculation = SpecConfig(method=kind, head=str(args.head), nodes=nodes, depth=args.depths, width=args.width, policy="fixed")
    sizes = {"max_num_seqs": args.max_num_seqs, "max_model_len": args.max_model_len}
    llm = LLM(args.model, speculation=speculation, device=args.device, **sizes)
    prompts = read_prompts(args.prompts)
    return served(llm, prompts[: args.limit] if args.limit else prompts, temperature=args.temperature, max_tokens=args.max_tokens)


def _plot(args: argparse.Namespace) -> None:
    from specdec.train.plot import plot_metrics

    if not plot_metrics(args.run_directory, args.picture):
        raise ConfigError(f"{args.run_directory}/metrics.jsonl holds fewer than two lines", param="run_directory")


if __name__ == "__main__":
    sys.exit(main())
