"""`specdec serve | generate | chat | train | verify | pull | env`. Thin: every command calls the library."""

from __future__ import annotations

import argparse
import platform
import sys
from typing import Any

from specdec.config import METHODS
from specdec.errors import SpecdecError


def main(argv: list[str] | None = None) -> int:
    """Run one command; errors specdec raises on purpose become one line on stderr and exit code 1."""
    args, rest = _parser().parse_known_args(argv)
    if rest and args.command not in ("serve", "train"):
        print(f"specdec: unknown argument {rest[0]}", file=sys.stderr)
        return 2
    try:
        return int(args.run(args, rest) or 0)
    except SpecdecError as err:
        print(f"specdec: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specdec", description="Speculative-decoding inference engine")
    commands = parser.add_subparsers(dest="command", required=True)

    serve = commands.add_parser("serve", help="OpenAI-compatible server (same flags as python -m specdec.server)", add_help=False)
    serve.set_defaults(run=_serve)

    train = commands.add_parser("train", help="train draft heads (same flags as python -m specdec.train)", add_help=False)
    train.set_defaults(run=_train)

    for name, help_text, run in (("generate", "complete a prompt", _generate), ("chat", "talk to the model", _chat)):
        command = commands.add_parser(name, help=help_text)
        _model_flags(command)
        command.add_argument("prompt", nargs="?", help="text; without it lines are read from the keyboard")
        command.add_argument("--max-tokens", type=_positive, default=256)
        command.add_argument("--temperature", type=float, default=0.0)
        command.add_argument("--seed", type=int)
        command.add_argument("--trace", action="store_true", help="draw the draft trees afterwards")
        command.set_defaults(run=run)

    verify = commands.add_parser("verify", help="check that speculation does not change the output of a model")
    _model_flags(verify)
    verify.add_argument("--max-tokens", type=_positive, default=128)
    verify.add_argument("--prompts", type=_positive, default=8)
    verify.set_defaults(run=_verify)

    pull = commands.add_parser("pull", help="fetch a model into the cache")
    pull.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    pull.add_argument("--convert", metavar="DIR", help="also write it as a Hugging Face safetensors directory")
    pull.set_defaults(run=_pull)

    commands.add_parser("env", help="versions, device, and the backend of every op").set_defaults(run=_env)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


_positive.__name__ = "positive integer"  # argparse names the type when `int` fails


def _model_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", default="smollm2-135m-instruct")
    command.add_argument("--speculation", default="auto", choices=METHODS)
    command.add_argument("--device", default="auto")
    command.add_argument("--deterministic", action="store_true")


def _serve(args: argparse.Namespace, rest: list[str]) -> int:
    from specdec.server.__main__ import main as serve

    return int(serve(rest) or 0)


def _train(args: argparse.Namespace, rest: list[str]) -> int:
    from specdec.train.__main__ import main as train

    return train(rest, program="specdec train")


def _llm(args: argparse.Namespace) -> Any:
    from specdec.llm import LLM

    return LLM(args.model, speculation=args.speculation, device=args.device, deterministic=args.deterministic)


def _params(args: argparse.Namespace) -> Any:
    from specdec.config import SamplingParams

    return SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed)


def _stream(llm: Any, prompt: Any, args: argparse.Namespace) -> str:
    text, last = "", None
    for delta in llm.stream(prompt, _params(args), trace=args.trace):
        for choice in delta.outputs:
            text += choice.text
            print(choice.text, end="", flush=True)
        last = delta
    print()
    if last is not None:
        metrics = last.metrics
        print(f"[{metrics.generated} tokens, {metrics.acceptance_length:.2f} per target pass]", file=sys.stderr)
        if args.trace:
            print(last.trace, file=sys.stderr)
    return text


def _generate(args: argparse.Namespace, rest: list[str]) -> int:
    llm = _llm(args)
    for prompt in [args.prompt] if args.prompt is not None else _lines("> "):
        _stream(llm, prompt, args)
    return 0


def _chat(args: argparse.Namespace, rest: list[str]) -> int:
    llm = _llm(args)
    messages: list[dict[str, str]] = []
    for line in [args.prompt] if args.prompt is not None else _lines("you: "):
        messages.append({"role": "user", "content": line})
        reply = _stream(llm, llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True), args)
        messages.append({"role": "assistant", "content": reply})
    return 0


def _lines(mark: str) -> Any:
    while True:
        try:
            line = input(mark if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line


def _verify(args: argparse.Namespace, rest: list[str]) -> int:
    from specdec.selftest import run

    return run(
        args.model,
        speculation=args.speculation,
        device=args.device,
        deterministic=args.deterministic,
        max_tokens=args.max_tokens,
        num_prompts=args.prompts,
    )


def _pull(args: argparse.Namespace, rest: list[str]) -> int:
    from specdec.cli_pull import run_pull

    print(run_pull(args.model, convert=args.convert))
    return 0


def _env(args: argparse.Namespace, rest: list[str]) -> int:
    import torch

    from specdec import ops
    from specdec.version import __version__

    print(f"specdec {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}")
    if torch.cuda.is_available():
        print(f"device: cuda, {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    else:
        print(f"device: cpu, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    for op, backend in ops.explain("cuda" if torch.cuda.is_available() else "cpu").items():
        print(f"  {op:18s} {backend}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
