"""From an `EngineConfig` to a running `Engine`: load, size the memory, build the parts, measure costs. Boot does the failing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from specdec import ops
from specdec.batch import BatchBuilder
from specdec.cache.kv import KVCache
from specdec.cache.pool import BlockPool
from specdec.cache.sizing import PoolSize, block_bytes, host_memory, size_pool
from specdec.config import MAX_NODES, EngineConfig, SpecConfig
from specdec.engine import Engine
from specdec.errors import ConfigError
from specdec.kernels.kv_fp8 import FP8
from specdec.live_heads import LiveHeads
from specdec.models.config import ModelConfig
from specdec.models.hub import cache_dir
from specdec.models.load import LoadedModel, find_checkpoint, load_model, resolve_dtype
from specdec.runner.graphs import ROWS, CudaRecorder, Recorder
from specdec.runner.runner import ModelRunner
from specdec.sampling import SamplingState
from specdec.scheduler import Scheduler
from specdec.spec.heads import load_heads, taps_of, wants_hidden
from specdec.spec.make import make_policy
from specdec.spec.policy import SpecPolicy
from specdec.spec.proposer import DrafterContext, Proposer, create_for
from specdec.spec.verify import Verifier
from specdec.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specdec.models.draft_heads import DraftHead
    from specdec.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything an engine is made of; each part knows nothing of the engine."""

    name: str
    quantization: str | None
    model_config: ModelConfig
    tokenizer: Tokenizer
    max_model_len: int
    scheduler: Scheduler
    builder: BatchBuilder
    runner: ModelRunner
    kv: KVCache
    sampling: SamplingState
    verifier: Verifier
    policy: SpecPolicy
    proposers: dict[str, Proposer]
    heads: LiveHeads


def build_engine(
    config: EngineConfig, *, oracle: Callable[[Sequence], Seq[int]] | None = None, target: LoadedModel | None = None
) -> Engine:
    """Load the model and build an engine that is ready to step.

    oracle: future tokens of a sequence, for the test drafters. target: what `load_target` gave for a config of the same model;
    engines may share it, none changes it. Raises ConfigError, ModelNotFound or UnsupportedCheckpoint.
    """
    loaded, device = load_target(config) if target is None else target, resolve_device(config.device)
    if device.type == "cuda":
        ops.load_tilings(cache_dir() / "tilings", torch.cuda.get_device_name(device))
    return Engine(config, _parts(config, loaded, device, oracle))


def load_target(config: EngineConfig) -> LoadedModel:
    """The model of `config` on its device. Raises as `build_engine`."""
    return load_model(
        config.model,
        device=resolve_device(config.device),
        dtype=config.dtype,
        quantization=config.quantization,
        act_dtype=config.act_dtype,
        deterministic=config.deterministic,
        load_format=config.load_format,
        seed=config.seed,
    )


def resolve_device(name: str) -> torch.device:
    """ "auto" is CUDA where there is one. ConfigError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as err:
        raise ConfigError(f"device {name!r} is not a device: {err}", param="device") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"device {name!r} is not available here; use 'cpu'", param="device")
    return device


def _parts(config: EngineConfig, loaded: LoadedModel, device: torch.device, oracle: Callable[[Sequence], Seq[int]] | None) -> Parts:
    kv_dtype = loaded.model.dtype if config.kv_dtype == "auto" else _kv_dtype(config.kv_dtype)
    groups, spec, heads = loaded.config.kv_groups(), config.speculation, load_heads(config.speculation, loaded)
    size = _pool_size(config, loaded.config, kv_dtype, device, _companion_bytes(config, device, heads))
    pools = [BlockPool(n, group.name) for n, group in zip(size.num_blocks, groups, strict=True)]
    kv = KVCache(
        groups,
        size.num_blocks,
        config.block_size,
        dtype=kv_dtype,
        device=device,
        layer_group=loaded.config.layer_group,
        layer_in_group=loaded.config.layer_in_group,
    )
    namespace = f"{loaded.fingerprint}/{kv_dtype}".encode()
    scheduler = Scheduler(config, groups, pools, max_model_len=size.max_model_len, namespace=namespace, wants_hidden=wants_hidden(heads))
    taps, recorder = taps_of(heads.values()), _recorder(config, device)
    runner = ModelRunner(loaded.model, kv, device, taps=taps, recorder=recorder, blocks=scheduler.tables.tensor.shape[2])
    context = DrafterContext(
        config=spec,
        vocab_size=loaded.config.vocab_size,
        max_model_len=size.max_model_len,
        max_num_seqs=config.max_num_seqs,
        device=device,
        tokenize=loaded.tokenizer.encode,
        oracle=oracle,
        kv=kv,
        pools=pools,
        load=lambda name: load_model(name, device=device, dtype=config.dtype, deterministic=config.deterministic),
        heads=heads,
        taps=taps,
        tables=scheduler.tables.tensor,
        recorder=recorder,
    )
    proposers = create_for(context)
    return Parts(
        name=os.path.basename(os.path.normpath(config.model)),
        quantization=loaded.quantization,
        model_config=loaded.config,
        tokenizer=loaded.tokenizer,
        max_model_len=size.max_model_len,
        scheduler=scheduler,
        builder=BatchBuilder(scheduler.tables.tensor, config.block_size, device),
        runner=runner,
        kv=kv,
        sampling=SamplingState(config.max_num_seqs, loaded.config.vocab_size, device=device),
        verifier=_verifier(spec, proposers),
        policy=make_policy(
            spec,
            proposers,
            runner.measure,
            key=_costs_key(loaded, kv_dtype, device),
            max_model_len=size.max_model_len,
            cache=cache_dir() / "costs",
            sizes=() if recorder is None else ROWS,
            max_rows=_most_rows(config, device, recorder),
        ),
        proposers=proposers,
        heads=LiveHeads(loaded, context, runner, heads, proposers),
    )


def _recorder(config: EngineConfig, device: torch.device) -> Callable[[], Recorder] | None:
    """Passes are recorded where the ops are kernels of ours, which ask nothing of the host; the references do."""
    if device.type != "cuda" or config.enforce_eager or ops.WHY_NO_TRITON is not None:
        return None
    return partial(CudaRecorder, device)


def _most_rows(config: EngineConfig, device: torch.device, recorder: Callable[[], Recorder] | None) -> int | None:
    """Of a step that follows another: beyond what is recorded passes are slow. None: no step does."""
    if not config.overlaps(device.type):
        return None
    most = min(config.max_num_batched_tokens, config.max_num_seqs * MAX_NODES)
    return most if recorder is None else min(most, ROWS[-1])


def _costs_key(loaded: LoadedModel, kv_dtype: torch.dtype, device: torch.device) -> str:
    """What the measured costs of a step depend on."""
    other_kv = "" if kv_dtype is loaded.model.dtype else f"-{kv_dtype}"
    return f"{loaded.fingerprint}-{loaded.model.dtype}{other_kv}-{device.type}"


def _verifier(config: SpecConfig, proposers: dict[str, Proposer]) -> Verifier:
    coupled = [name for name, proposer in proposers.items() if getattr(proposer, "noise_coupled", False)]
    return Verifier(config.verify, synthetic_acceptance=config.synthetic_acceptance or (), noise_coupled=coupled)


def _kv_dtype(name: str) -> torch.dtype:
    dtypes = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "fp8": FP8}
    if name not in dtypes:
        raise ConfigError(f"kv_dtype must be auto, {', '.join(dtypes)}, got {name!r}", param="kv_dtype")
    return dtypes[name]


def _pool_size(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, companion_bytes: int) -> PoolSize:
    """Blocks per group: given, from `kv_cache_bytes`, or on CUDA from what the weights left of the card."""
    limit = model.max_positions
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len={config.max_model_len} is beyond the model's {limit} positions", param="max_model_len")
    budget, memory, source = config.kv_cache_bytes, host_memory(), "kv_cache_bytes"
    if device.type == "cuda":
        memory, total = torch.cuda.mem_get_info(device)
        source = "gpu_memory_utilization"
        budget = max(0, int(memory - (1 - config.gpu_memory_utilization) * total))
    return size_pool(
        model.kv_groups(),
        config.block_size,
        dtype,
        budget,
        config.max_model_len or limit,
        config.max_num_seqs,
        source=source,
        max_num_batched_tokens=config.max_num_batched_tokens,
        explicit_len=config.max_model_len is not None,
        num_kv_blocks=config.num_kv_blocks,
        memory=memory,
        companion_bytes=companion_bytes,
    )


def _companion_bytes(config: EngineConfig, device: torch.device, heads: Mapping[str, DraftHead]) -> int:
    """Bytes that a draft model's or the heads' KV adds to every block of the target's full-attention group."""
    if heads:
        return sum(block_bytes(group, config.block_size, head.dtype) for head in heads.values() for group in head.config.kv_groups())
    if config.speculation.method != "draft_model" or config.speculation.model is None:
        return 0
    draft = find_checkpoint(config.speculation.model).config
    dtype = resolve_dtype(config.dtype, draft, device)
    return sum(block_bytes(group, config.block_size, dtype) for group in draft.kv_groups())
