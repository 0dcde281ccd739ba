"""From `quantization_config` to a `Quantization`. What is not supported is refused, by the name of field, value and remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specdec.errors import UnsupportedCheckpoint
from specdec.quant import scheme as matching
from specdec.quant.scheme import Fp8Scheme, Int4Scheme, Quantization, Rule, Scheme, everywhere

Config = Mapping[str, Any]
FIELD = "quantization_config"
_LAYOUTS = ("tensor", "channel", "block")
_REMEDY = "use an unquantised checkpoint, or one in FP8 (e4m3) or 4 bits (AWQ, GPTQ, compressed-tensors)"


def refused(key: str, value: object, supported: str, remedy: str = _REMEDY) -> UnsupportedCheckpoint:
    """The error for a value that cannot be served."""
    return UnsupportedCheckpoint(f"{FIELD}: {key} {value!r} is not supported ({supported}); {remedy}")


def _need(config: Config, key: str, allowed: tuple[object, ...], default: object = None, remedy: str = _REMEDY) -> Any:
    """config[key], or `default` where it is absent or null; refused unless it is one of `allowed` (and of its type: True is not 1)."""
    value = config.get(key)
    value = default if value is None else value
    if not any(value == other and type(value) is type(other) for other in allowed):
        raise refused(key, value, f"supported: {', '.join(map(repr, allowed))}", remedy)
    return value


def _names(config: Config, *keys: str) -> tuple[str, ...]:
    """Names of modules, from the first of `keys` that is there."""
    for key in keys:
        value = config.get(key)
        if value is not None:
            if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
                raise UnsupportedCheckpoint(f"{FIELD}: {key} must be a list of module names, got {value!r}")
            return tuple(value)
    return ()


def _object(config: Config, key: str) -> Config:
    """config[key] as an object; {} where it is absent or null."""
    value = config.get(key)
    if not isinstance(value, Mapping | None):
        raise UnsupportedCheckpoint(f"{FIELD}: {key} must be an object, got {value!r}")
    return value or {}


def _group(config: Config, *keys: str) -> int:
    for key in keys:
        value = config.get(key)
        if value is not None:
            if type(value) is not int or not (value == -1 or (value > 0 and value % 8 == 0)):
                raise refused(key, value, "supported: -1 and multiples of 8")
            return value
    raise UnsupportedCheckpoint(f"{FIELD}: {keys[0]} is missing; the checkpoint is incomplete")


def _fp8(config: Config) -> Quantization:
    """DeepSeek's and Qwen's blocks of 128 × 128, AutoFP8's and vLLM's scale per tensor."""
    _need(config, "fmt", ("e4m3",), "e4m3")
    _need(config, "activation_scheme", ("dynamic", "static"), "dynamic")
    block = config.get("weight_block_size")
    if block is not None and (not isinstance(block, (list, tuple)) or list(block) != [128, 128]):
        raise refused("weight_block_size", block, "supported: [128, 128] and none")
    layout = "tensor" if block is None else "block"
    return everywhere("fp8", Fp8Scheme(layout), _names(config, "modules_to_not_convert", "ignored_layers"))


def _fbgemm(config: Config) -> Quantization:
    """Meta's: a scale per channel. Its `activation_scale_ub` cuts outliers when activations are quantised; here they are not, or each
    row by its own largest magnitude."""
    return everywhere("fbgemm_fp8", Fp8Scheme("channel"), _names(config, "modules_to_not_convert"))


def _modelopt(config: Config) -> Quantization:
    """NVIDIA ModelOpt; the settings may stand one level down."""
    config = _object(config, "quantization") or config
    layouts = {"FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "channel"}
    layout = layouts[_need(config, "quant_algo", tuple(layouts))]
    return everywhere("modelopt", Fp8Scheme(layout), _names(config, "exclude_modules", "ignore"), matching.by_glob)


def _awq(config: Config) -> Quantization:
    """AutoAWQ. Older files call bits and group size w_bit and q_group_size."""
    _need({"bits": config.get("bits", config.get("w_bit"))}, "bits", (4,))
    _need(config, "zero_point", (True,), True)
    version = config.get("version")
    if not isinstance(version, str | None) or (version or "gemm").lower() != "gemm":
        raise refused("version", version, "supported: 'gemm'", "convert it with AutoAWQ, version='GEMM'")
    scheme = Int4Scheme("awq", _group(config, "group_size", "q_group_size"))
    return everywhere("awq", scheme, _names(config, "modules_to_not_convert"), matching.by_substring)


def _gptq(config: Config) -> Quantization:
    """AutoGPTQ and GPTQModel. Their first version stores zero points less one; `desc_act` is judged by the group indices themselves."""
    _need(config, "bits", (4,))
    version = _need(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq", "convert it to checkpoint_format 'gptq'")
    if config.get("dynamic"):
        raise refused("dynamic", config["dynamic"], "supported: none, one setting for all modules")
    return everywhere("gptq", Int4Scheme("gptq", _group(config, "group_size"), zero_shift=int(version == "gptq")))


def _compressed_tensors(config: Config) -> Quantization:
    """llm-compressor's. Each group of modules has a scheme of its own."""
    for key in ("sparsity_config", "transform_config"):
        extra = _object(config, key)
        if extra and extra.get("format") != "dense":
            raise refused(key, dict(extra), "supported: none")
    groups = _object(config, "config_groups")
    if not groups:
        raise UnsupportedCheckpoint(f"{FIELD}: config_groups is missing or empty; the checkpoint is incomplete")
    rules = []
    for name in groups:
        group = _object(groups, name)
        targets = _names(group, "targets")
        if not targets:
            raise UnsupportedCheckpoint(f"{FIELD}: {name} has no targets; the checkpoint is incomplete")
        rules.append(Rule(targets, _group_scheme(name, group, group.get("format") or config.get("format"))))
    return Quantization("compressed-tensors", tuple(rules), _names(config, "ignore"), matching.by_name_or_regex)


def _group_scheme(name: str, group: Config, container: object) -> Scheme:
    """The scheme of one entry of config_groups, whose tensors are written in format `container`."""
    weights, inputs = _object(group, "weights"), _object(group, "input_activations")
    kind = weights.get("type"), weights.get("num_bits")
    if group.get("output_activations") is not None:
        raise refused(f"{name}.output_activations", group["output_activations"], "supported: none")
    if kind == ("float", 8):
        if container not in ("float-quantized", "naive-quantized", None):
            raise refused("format", container, "supported for 8-bit floats: 'float-quantized'")
        if inputs and (inputs.get("type"), inputs.get("num_bits")) != ("float", 8):
            raise refused(f"{name}.input_activations", dict(inputs), "supported: none or 8-bit floats")
        layout = _need(weights, "strategy", _LAYOUTS, "tensor")
        if layout == "block" and list(weights.get("block_structure") or ()) != [128, 128]:
            raise refused(f"{name}.weights.block_structure", weights.get("block_structure"), "supported: [128, 128]")
        return Fp8Scheme(layout)
    if kind != ("int", 4) or container != "pack-quantized":
        raise refused(f"{name}.weights", f"{kind[0]} of {kind[1]} bits, format {container}", "supported: 8-bit floats, pack-quantized int4")
    if inputs:
        raise refused(f"{name}.input_activations", dict(inputs), "supported with 4-bit weights: none")
    strategy = _need(weights, "strategy", ("group", "channel"), "group")
    group_size = -1 if strategy == "channel" else _group(weights, "group_size")
    return Int4Scheme("compressed-tensors", group_size, symmetric=_need(weights, "symmetric", (True, False), True))


_READERS: Mapping[str, Callable[[Config], Quantization]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
}
METHODS = tuple(_READERS)


def read_quantization(config: object) -> Quantization:
    """The value of `quantization_config` as a `Quantization`. Raises UnsupportedCheckpoint naming field, value and remedy."""
    if not isinstance(config, Mapping):
        raise UnsupportedCheckpoint(f"{FIELD}: must be an object, got {config!r}")
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        raise refused("quant_method", method, f"supported: {', '.join(METHODS)}")
    return _READERS[method](config)
