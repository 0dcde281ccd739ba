"""User-facing configuration: `SamplingParams`, `SpecConfig`, `EngineConfig`. Validated when built, immutable after.

Field names follow vLLM's offline API where the meaning is the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

from specdec import check
from specdec.errors import ConfigError

METHODS = ("auto", "off", "ngram", "suffix", "draft_model", "eagle3", "peagle")
TEST_METHODS = ("oracle", "wrong", "mix")  # ordinary proposers, for tests and benchmarks of the machinery
ACT_DTYPES = ("auto", "fp8")  # what meets quantised weights
VERIFY_MODES = ("coupled", "rejection", "block", "synthetic")
GREEDY_BELOW = 1e-6  # temperatures that count as 0
FORBIDDEN = -100.0  # the bias that OpenAI's interface bans a token with
MAX_NODES = 64  # one 64-bit ancestor word per node, root included
_USERS = {  # fields of SpecConfig that only some methods read
    **dict.fromkeys(("head", "draft_quantization"), ("auto", "eagle3", "peagle")),
    "model": ("draft_model",),
    "corpus": ("auto", "ngram", "suffix"),
    "mix_p": ("mix",),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Every field acts at every node of a draft tree, with that node's own path as history.

    Order of processing (the same with and without speculation): raw logits → allowed_token_ids, bad_words, min_tokens
    masks, logit_bias → repetition, frequency, presence penalties → temperature → min_p → top_k → top_p → typical_p.

    allowed_token_ids, bad_words, min_tokens (end tokens) and a logit_bias of -100 forbid tokens; a forbidden token never comes
    out. Rules that leave none to begin with are refused. Where they leave none later, because bad words of several tokens meet
    the others, that output ends there: finish reason "stop", stop reason "nothing_allowed", be it shorter than min_tokens.

    temperature: 0 = greedy. top_k: 0 or -1 = off. max_tokens: None = up to `max_model_len`.
    seed: None draws one at admission; the same seed always gives the same text, with any drafter or none.
    logprobs / prompt_logprobs: number of top alternatives (0 = only the token's own), None = off. `logprobs_mode`
    "raw" is the log-softmax of the row before temperature and penalties, "processed" after all of them.
    prediction: text the output is expected to resemble (OpenAI `prediction`), a source for the n-gram drafters.
    speculation: per-request override, e.g. {"method": "ngram", "nodes": 8}, or a method name such as "off" for {"method": "off"};
    it can only narrow what the engine was started with.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    bad_words: Seq[str] | None = None
    allowed_token_ids: Seq[int] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: str | Seq[str] | None = None
    stop_token_ids: Seq[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    prediction: str | Seq[int] | None = None
    speculation: Any = None  # dict of fields, method name, or None; kept as a dict

    def __post_init__(self) -> None:
        if isinstance(self.speculation, str):
            object.__setattr__(self, "speculation", {"method": self.speculation})
        check.integer(self.n, "n", 1, 128)
        check.number(self.temperature, "temperature", 0.0, 100.0)
        check.integer(self.top_k, "top_k", -1, 2**31 - 1)
        check.number(self.top_p, "top_p", 0.0, 1.0, low_open=True)
        check.number(self.min_p, "min_p", 0.0, 1.0)
        check.number(self.typical_p, "typical_p", 0.0, 1.0, low_open=True)
        for name in ("presence_penalty", "frequency_penalty"):
            check.number(getattr(self, name), name, -2.0, 2.0)
        check.number(self.repetition_penalty, "repetition_penalty", 0.01, 100.0)  # nothing in the range takes a score out of float32
        check.integer(self.min_tokens, "min_tokens", 0, 2**31 - 1)
        if self.max_tokens is not None:
            check.integer(self.max_tokens, "max_tokens", 1, 2**31 - 1)
            check.require(self.min_tokens <= self.max_tokens, "min_tokens is larger than max_tokens", "min_tokens")
        if self.seed is not None:
            check.integer(self.seed, "seed", -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check.integer(getattr(self, name), name, 0, 100)
        check.require(self.logprobs_mode in ("raw", "processed"), "logprobs_mode must be 'raw' or 'processed'", "logprobs_mode")
        self._check_collections()

    def _check_collections(self) -> None:
        if self.logit_bias is not None:
            check.require(isinstance(self.logit_bias, dict), "logit_bias must map token ids to numbers", "logit_bias")
            for token, value in self.logit_bias.items():
                check.integer(token, "logit_bias", 0, 2**31 - 1)
                check.number(value, "logit_bias", FORBIDDEN, 100.0)
        check.ids(self.stop_token_ids, "stop_token_ids")
        check.ids(self.allowed_token_ids, "allowed_token_ids")
        check.require(self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "allowed_token_ids is empty", "allowed_token_ids")
        check.words((self.stop,) if isinstance(self.stop, str) else self.stop, "stop")
        check.words(self.bad_words, "bad_words")
        if not isinstance(self.prediction, str):
            check.ids(self.prediction, "prediction")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, in the order given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """Temperature 0, or so small that scores divided by it would leave float32 (the noise then decides nothing anyway)."""
        return self.temperature < GREEDY_BELOW


def forbids(bias: float) -> bool:
    """Whether a `logit_bias` bans its token, instead of making it less likely."""
    return bias <= FORBIDDEN


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """What may draft, how wide, and how drafts are verified.

    nodes: largest draft tree, root included (2…64). depth: longest path below the root. width: most children a node gets.
    policy: "auto" picks drafter, nodes and depth per sequence and step from measured cost and live acceptance, off included;
    "fixed" asks for exactly these numbers every step (acceptance tables use it).
    verify: "coupled" (default, same text as off), "rejection", "block" (exact in distribution), "synthetic" (benchmarks only).
    synthetic_acceptance: unconditional acceptance rate per draft position, non-increasing, for verify="synthetic".
    head: draft head for eagle3/peagle, a directory, hub id or shipped name; draft_quantization: storage of its weights (None =
    the file's). model: checkpoint for draft_model. corpus: text file for the n-gram/suffix index. mix_p: ORACLE share of MIX.
    """

    method: str = "auto"
    head: str | None = None
    draft_quantization: str | None = None
    model: str | None = None
    nodes: int = 16
    depth: int = 12
    width: int = 2
    policy: str = "auto"
    verify: str = "coupled"
    synthetic_acceptance: Seq[float] | None = None
    ngram_min: int = 2
    ngram_max: int = 5
    corpus: str | None = None
    mix_p: float = 0.7

    def __post_init__(self) -> None:
        if self.method not in METHODS + TEST_METHODS:
            raise ConfigError(f"speculation method {self.method!r} is unknown; choose one of {', '.join(METHODS)}", param="method")
        if self.verify not in VERIFY_MODES:
            raise ConfigError(f"verify {self.verify!r} is unknown; choose one of {', '.join(VERIFY_MODES)}", param="verify")
        check.require(self.policy in ("auto", "fixed"), f"policy must be 'auto' or 'fixed', got {self.policy!r}", "policy", ConfigError)
        for name in ("nodes", "depth", "width"):
            check.integer(getattr(self, name), name, 2 if name == "nodes" else 1, MAX_NODES - (name != "nodes"), ConfigError)
        for name in ("ngram_min", "ngram_max"):
            check.integer(getattr(self, name), name, 1, 64, ConfigError)
        if self.ngram_min > self.ngram_max:
            raise ConfigError(f"ngram_min {self.ngram_min} is larger than ngram_max {self.ngram_max}", param="ngram_min")
        check.number(self.mix_p, "mix_p", 0.0, 1.0, ConfigError)
        self._check_users()
        self._check_synthetic()

    def _check_users(self) -> None:
        """Refuse what the method would ignore."""
        for name, methods in _USERS.items():
            value = getattr(self, name)
            ok = name == "mix_p" or value is None or (isinstance(value, (str, PathLike)) and value != "")
            check.require(ok, f"{name} must be a name or path, got {value!r}", name, ConfigError)
            used = self.method in methods or value == SpecConfig.__dataclass_fields__[name].default
            check.require(used, f"method {self.method!r} does not use {name}; drop it, or choose {' or '.join(methods)}", name, ConfigError)

    def _check_synthetic(self) -> None:
        rates = self.synthetic_acceptance
        if (self.verify == "synthetic") != (rates is not None):
            raise ConfigError("synthetic_acceptance and verify='synthetic' go together", param="synthetic_acceptance")
        if rates is not None:
            ok = isinstance(rates, (list, tuple)) and len(rates) > 0 and all(isinstance(r, (int, float)) for r in rates)
            ok = ok and all(0.0 <= r <= 1.0 for r in rates) and all(a >= b for a, b in itertools.pairwise(rates))
            if not ok:
                raise ConfigError("synthetic_acceptance must be non-increasing rates in [0, 1]", param="synthetic_acceptance")

    @classmethod
    def of(cls, value: str | dict[str, Any] | SpecConfig | None) -> SpecConfig:
        """Normalise `speculation=`: a method name, a dict of fields, a SpecConfig, or None (off)."""
        if isinstance(value, SpecConfig):
            return value
        if value is None:
            return cls(method="off")
        if isinstance(value, str):
            return cls(method=value)
        try:
            return cls(**value)
        except TypeError as err:
            raise ConfigError(f"speculation: {err}", param="speculation") from None


_SIZES = (  # integers of EngineConfig: least and largest value
    ("block_size", 1, 1024),
    ("num_kv_blocks", 1, 2**31 - 1),
    ("kv_cache_bytes", 1, 2**50),
    ("max_model_len", 2, 2**31 - 1),
    ("max_num_seqs", 1, 4096),
    ("max_num_batched_tokens", 1, 2**20),
    ("tensor_parallel_size", 1, 1),  # more than one is not supported yet
    ("seed", -(2**63), 2**64 - 1),
    ("max_queue", 0, 2**31 - 1),
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to run a model. Sizes: tokens, sequences, bytes as named.

    device: "auto" | "cpu" | "cuda". dtype: "auto" = float32 on the CPU, the checkpoint's (else bfloat16) on CUDA.
    quantization: None = the checkpoint's own storage, "fp8" converts an unquantised one at load, "none" makes any dense.
    act_dtype: what FP8 weights are multiplied by: "auto" = activations as they are (W8A16), "fp8" = rounded to e4m3, each row by its own
    largest magnitude (W8A8: faster from some hundred rows on, further from the unquantised model). It is fixed here and never
    depends on the number of rows.
    kv_dtype: "auto" = activation dtype; "fp8" halves the KV (e4m3, the checkpoint's scales or 1; on the CPU by the references,
    slowly). block_size: tokens per KV block.
    num_kv_blocks: None sizes the pool from `kv_cache_bytes`, or on CUDA from `gpu_memory_utilization`.
    max_model_len: None = the model's limit, lowered to what the pool can hold.
    deterministic: bitwise identity with speculation off, whatever the batch (promise 3).
    enforce_eager: no CUDA graphs: every kernel of a pass is launched by itself, slowly; saves their memory.
    overlap: begin a decode step before the host knows the tokens of the one before, where it is plain (`specdec.overlap`) or everybody
    drafts with a head alike (`specdec.behind`); None = on CUDA.
    max_queue: unfinished sequences beyond those that can run before `QueueFull` (see `admission`); None = any number (offline use).
    """

    model: str = "smollm2-135m-instruct"
    speculation: SpecConfig = field(default_factory=SpecConfig)
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    act_dtype: str = "auto"
    kv_dtype: str = "auto"
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_bytes: int = 1 << 30
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    deterministic: bool = False
    enforce_eager: bool = False
    overlap: bool | None = None
    tensor_parallel_size: int = 1
    load_format: str = "auto"
    seed: int = 0
    max_queue: int | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        for name, low, high in _SIZES:
            value = getattr(self, name)
            if value is None and EngineConfig.__dataclass_fields__[name].default is None:
                continue
            if name == "max_model_len" and value == 1:
                raise ConfigError("max_model_len must be at least 2: one token of prompt and one of output", param=name)
            check.integer(value, name, low, high, ConfigError)
        check.number(self.gpu_memory_utilization, "gpu_memory_utilization", 0.0, 1.0, ConfigError, low_open=True)
        self._check_kinds()

    def _check_kinds(self) -> None:
        ok = isinstance(self.model, (str, PathLike)) and str(self.model) != ""
        check.require(ok, f"model must be a known name, a path or a hub id, got {self.model!r}", "model", ConfigError)
        kinds: dict[str, tuple[type | tuple[type, ...], str]] = {
            "speculation": (SpecConfig, "a SpecConfig (see SpecConfig.of)"),
            **dict.fromkeys(("enable_prefix_caching", "deterministic", "enforce_eager", "trace"), (bool, "True or False")),
            **dict.fromkeys(("device", "dtype", "kv_dtype"), (str, "a string")),
            "quantization": ((str, type(None)), "a string or None"),
            "overlap": ((bool, type(None)), "True, False or None"),
        }
        for name, (kind, wanted) in kinds.items():
            value = getattr(self, name)
            check.require(isinstance(value, kind), f"{name} must be {wanted}, got {value!r}", name, ConfigError)
        check.require(self.act_dtype in ACT_DTYPES, f"act_dtype must be one of {', '.join(ACT_DTYPES)}", "act_dtype", ConfigError)
        check.require(self.load_format in ("auto", "dummy"), "load_format must be 'auto' or 'dummy'", "load_format", ConfigError)

    def overlaps(self, device: str) -> bool:
        """Whether steps are begun behind others on this type of device."""
        return self.overlap if self.overlap is not None else device == "cuda"

    def with_(self, **changes: Any) -> EngineConfig:
        """A copy with these fields replaced."""
        return replace(self, **changes)
