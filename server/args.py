"""Command line of the server: flags mirror the arguments of `LLM`, dashes for underscores."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import Any

from specdec.config import METHODS, VERIFY_MODES, EngineConfig, SpecConfig
from specdec.errors import ConfigError
from specdec.models.config import DTYPES
from specdec.server.service import Settings


def _port(text: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give a number from 0 to 65535")
    return int(text)


def _key(text: str) -> str:
    """A key that a client can send as a bearer token and that is compared as it is."""
    if not re.fullmatch("[!-~]+", text):
        raise argparse.ArgumentTypeError(
            "the key must be printable ASCII without blanks, at least one character; leave the flag out to serve openly"
        )
    return text


def _whole(least: int) -> Callable[[str], int]:
    """Type of a flag: a whole number ≥ `least`."""

    def convert(text: str) -> int:
        if not re.fullmatch("[0-9]{1,18}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return convert


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds; give 0 or more")
    return value


def _device(text: str) -> str:
    if not re.fullmatch("auto|cpu|cuda(:[0-9]+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a device; choose auto, cpu, cuda or cuda:N")
    return text


_MAX_QUEUE = (
    "unfinished sequences (prompts × n) held beyond the --max-num-seqs that can run; a request that would make them more gets 429, "
    "one that is larger by itself 400 (default: %(default)s)"
)
DTYPE_CHOICES = ("auto", *DTYPES)
_ENGINE_FLAGS: tuple[tuple[str, Callable[[str], Any], str], ...] = (
    ("device", _device, "auto, cpu, cuda or cuda:N"),
    ("dtype", str, "auto = float32 on the CPU, the checkpoint's on CUDA"),
    ("quantization", str, "fp8 converts unquantised weights at load, none makes any dense; absent = the checkpoint's own storage"),
    ("act_dtype", str, "fp8 = FP8 weights meet activations rounded to FP8 (W8A8); auto = activations stay as they are"),
    ("kv_dtype", str, "auto = the activation dtype; fp8 halves the KV"),
    ("block_size", int, "tokens per KV block"),
    ("num_kv_blocks", int, "size of the KV pool in blocks"),
    ("kv_cache_bytes", int, "size of the KV pool in bytes"),
    ("max_model_len", int, "longest prompt plus output, in tokens"),
    ("max_num_seqs", int, "sequences that run at the same time"),
    ("max_num_batched_tokens", int, "most rows of one step"),
    ("gpu_memory_utilization", float, "share of the GPU's memory to use"),
    ("tensor_parallel_size", int, "GPUs to split the model over"),
    ("load_format", str, "auto, or dummy for random weights"),
    ("seed", int, "seed of dummy weights"),
)
_SPEC_FLAGS: tuple[tuple[str, str, type, str], ...] = (
    ("head", "head", str, "draft head: directory, hub id, or a shipped one"),
    ("draft-quantization", "draft_quantization", str, "precision of the draft head's weights"),
    ("draft-model", "model", str, "checkpoint for --speculation draft_model"),
    ("nodes", "nodes", int, "largest draft tree, root included"),
    ("depth", "depth", int, "longest path of a draft tree"),
    ("width", "width", int, "most children of a node"),
    ("corpus", "corpus", str, "text file for the n-gram and suffix index"),
)


def parser() -> argparse.ArgumentParser:
    """The parser; defaults of engine flags are those of `EngineConfig`."""
    p = argparse.ArgumentParser(prog="python -m specdec.server", description="OpenAI-compatible server with speculative decoding")
    p.add_argument("--model", default=EngineConfig().model, help="known name, directory, .gguf file or hub id (default: %(default)s)")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=_port, default=8000, help="0 = any free one (default: %(default)s)")
    p.add_argument("--served-model-name", nargs="+", default=[], metavar="NAME", help="names clients may use; the first is reported")
    p.add_argument("--api-key", type=_key, help="clients must send it as a bearer token; default: open")
    p.add_argument("--max-queue", type=_whole(0), default=256, help=_MAX_QUEUE)
    p.add_argument("--drain-timeout", type=_seconds, default=120.0, help="seconds to finish requests after SIGTERM (default: %(default)s)")
    p.add_argument("--strict", action="store_true", help="refuse unknown request fields instead of naming them in a header")
    p.add_argument(
        "--max-body-bytes", type=_whole(1), default=Settings().max_body_bytes, help="largest request body (default: %(default)s)"
    )
    p.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    p.add_argument("--access-log", action="store_true", help="log every request")
    spec = p.add_argument_group("speculation")
    spec.add_argument("--speculation", default="auto", choices=METHODS)
    spec.add_argument("--verify", choices=[m for m in VERIFY_MODES if m != "synthetic"])
    spec.add_argument("--policy", choices=("auto", "fixed"))
    for flag, dest, convert, text in _SPEC_FLAGS:
        spec.add_argument(f"--{flag}", dest=f"spec_{dest}", metavar=dest.upper(), type=convert, help=text)
    engine = p.add_argument_group("engine (absent = the default of LLM)")
    for name, kind, text in _ENGINE_FLAGS:
        choices = {"dtype": DTYPE_CHOICES, "kv_dtype": (*DTYPE_CHOICES, "fp8")}.get(name)
        engine.add_argument(f"--{name.replace('_', '-')}", type=kind, choices=choices, help=text)
    engine.add_argument("--deterministic", action="store_true", help="bit-identical output whatever the batch and the drafts")
    engine.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs: slower at few rows, less memory")
    engine.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="reuse the KV of equal prefixes"
    )
    return p


def speculation(args: argparse.Namespace) -> SpecConfig:
    """The SpecConfig of the command line; only flags that were given. ConfigError for a method that cannot draft."""
    if args.speculation == "draft_model" and args.spec_model is None:
        raise ConfigError("--speculation draft_model needs --draft-model PATH, a small model with the same vocabulary", param="model")
    fields = {dest: value for _, dest, _, _ in _SPEC_FLAGS if (value := getattr(args, f"spec_{dest}")) is not None}
    fields |= {name: value for name in ("verify", "policy") if (value := getattr(args, name)) is not None}
    return SpecConfig(method=args.speculation, **fields)


def llm_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for `LLM`. ConfigError for what can be refused without loading anything."""
    given = {name: value for name, _, _ in _ENGINE_FLAGS if (value := getattr(args, name)) is not None}
    flags = {"deterministic": args.deterministic, "enforce_eager": args.enforce_eager, "enable_prefix_caching": args.enable_prefix_caching}
    options = {"model": args.model, "speculation": speculation(args)} | flags | given
    EngineConfig(**options)
    return options


def settings(args: argparse.Namespace) -> Settings:
    """The HTTP layer's part of the command line."""
    return Settings(tuple(args.served_model_name), args.api_key, args.strict, args.max_body_bytes, args.max_queue)
