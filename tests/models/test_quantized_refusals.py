"""What a quantised checkpoint may not say or hold: refused with the name of field or tensor, its value, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.errors import ConfigError, UnsupportedCheckpoint
from specdec.models.load import load_model
from specdec.quant.declared import read_quantization
from tests.models.tiny_quantized import (
    AWQ,
    BLOCKS,
    DYNAMIC,
    FORMATS,
    GPTQ,
    compressed,
    edit_config,
    edit_tensors,
    floats,
    gptq,
    ints,
    write_quantized,
)
from tests.oracle import run_logits
from tests.tiny import write_tiny

CHANNEL = compressed(floats("channel"), DYNAMIC, "float-quantized")
CT_INT4 = compressed(ints("group", group_size=64), None, "pack-quantized")
CONFIGS: list[tuple[Any, str]] = [
    ("awq", "must be an object, got 'awq'"),
    ({"bits": 4}, "quant_method None is not supported .supported: fp8, fbgemm_fp8, modelopt, awq, gptq, compressed-tensors"),
    ({"quant_method": ["awq"]}, "quant_method"),
    ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported .*use an unquantised checkpoint"),
    ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
    (BLOCKS | {"fmt": "e5m2"}, "fmt 'e5m2' is not supported .supported: 'e4m3'"),
    (BLOCKS | {"activation_scheme": "none"}, "activation_scheme 'none'"),
    (BLOCKS | {"weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
    (BLOCKS | {"weight_block_size": 128}, "weight_block_size 128"),
    (BLOCKS | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of module names"),
    (AWQ | {"bits": 3}, "bits 3 is not supported"),
    (AWQ | {"bits": 4.0}, "bits 4.0"),
    (AWQ | {"zero_point": False}, "zero_point False"),
    (AWQ | {"version": "gemv"}, "version 'gemv' is not supported .*convert it with AutoAWQ"),
    (AWQ | {"group_size": 0}, "group_size 0"),
    (AWQ | {"group_size": None}, "group_size is missing"),
    (AWQ | {"group_size": True}, "group_size True"),
    (GPTQ | {"bits": 8}, "bits 8"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported .*convert it to checkpoint_format 'gptq'"),
    (GPTQ | {"dynamic": {"-:.*down.*": {}}}, "dynamic"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
    ({"quant_method": "modelopt", "quantization": "FP8"}, "quantization must be an object"),
    (CHANNEL | {"config_groups": {}}, "config_groups is missing or empty"),
    (CHANNEL | {"config_groups": {"g": {"weights": floats("channel")}}}, "g has no targets"),
    (CHANNEL | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    (CHANNEL | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    (compressed(floats("block", block_structure=[64, 128]), DYNAMIC, "float-quantized"), r"block_structure \[64, 128\]"),
    (compressed(floats("tensor_group"), DYNAMIC, "float-quantized"), "strategy 'tensor_group'"),
    (compressed(floats("channel"), ints("token"), "float-quantized"), "input_activations"),
    (compressed(floats("channel"), DYNAMIC, "marlin-24"), "format 'marlin-24'"),
    (compressed(ints("channel", num_bits=8), DYNAMIC, "int-quantized"), "int of 8 bits, format int-quantized"),
    (compressed(floats("tensor_group", num_bits=4), None, "nvfp4-pack-quantized"), "float of 4 bits"),
    (compressed(ints("group", group_size=64), DYNAMIC, "pack-quantized"), "input_activations .* is not supported .supported with 4-bit"),
    (compressed(ints("group", group_size=64), None, "marlin-24"), "format marlin-24"),
    (compressed(ints("group", group_size=63), None, "pack-quantized"), "group_size 63"),
    (compressed(ints("group", group_size=64, symmetric="yes"), None, "pack-quantized"), "symmetric 'yes'"),
]


@pytest.mark.parametrize(("config", "named"), CONFIGS, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_configs(config: Any, named: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=named) as caught:
        read_quantization(config)
    assert caught.value.message.startswith("quantization_config: ")


def test_a_bad_regular_expression_and_a_bad_file_are_named(tmp_path: Path) -> None:
    write_quantized(tmp_path / "q", FORMATS["ct fp8 dynamic"])
    edit_config(tmp_path / "q", quantization_config=CHANNEL | {"ignore": ["re:*"]})
    with pytest.raises(UnsupportedCheckpoint, match=r"q: .*'re:\*' is not a regular expression"):
        load_model(tmp_path / "q")
    edit_config(tmp_path / "q", quantization_config=None)
    (tmp_path / "q" / "hf_quant_config.json").write_text("[")
    with pytest.raises(UnsupportedCheckpoint, match=r"hf_quant_config\.json: not valid JSON"):
        load_model(tmp_path / "q")


K, UP = "model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj"


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def put(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = value(tensors[name]).contiguous()

    return change


def spoilt(bad: float) -> Callable[[Tensor], Tensor]:
    def change(scale: Tensor) -> Tensor:
        scale = scale.clone()
        scale.view(-1)[-1] = bad
        return scale

    return change


def with_nan(codes: Tensor) -> Tensor:
    raw = codes.view(torch.uint8).clone()
    raw[3, 5] = 0xFF
    return raw.view(torch.float8_e4m3fn)


TENSORS: list[tuple[str, Callable[[dict[str, Tensor]], None], str]] = [
    ("ct fp8 dynamic", drop(f"{K}.weight_scale"), f"tensor {K}.weight_scale is missing"),
    ("ct fp8 dynamic", drop(f"{UP}.weight"), f"tensor {UP}.weight is missing"),
    ("ct fp8 dynamic", put(f"{UP}.weight_scale", lambda s: s[:5]), r"weight_scale has shape \[5\], one per channel is \[320\]"),
    ("ct fp8 dynamic", put(f"{UP}.weight_scale", lambda s: s[0]), r"weight_scale has shape \[1\], one per channel is \[320\]"),
    ("fp8 blocks", put(f"{UP}.weight_scale_inv", lambda s: s[:, :1]), r"weight_scale has shape \[3, 1\], one per block is \[3, 2\]"),
    ("ct fp8 static", put(f"{UP}.weight_scale", lambda s: s.expand(4)), "one per tensor is"),
    ("ct fp8 dynamic", put(f"{UP}.weight_scale", spoilt(torch.nan)), f"{UP}: weight_scale has entries that are not finite and positive"),
    ("ct fp8 static", put(f"{UP}.weight_scale", spoilt(-torch.inf)), "not finite and positive"),
    ("awq", put(f"{UP}.scales", spoilt(0.0)), f"{UP}: scale has entries that are not finite and positive"),
    (
        "ct fp8 static",
        lambda t: t.update({f"{UP}.weight_zero_point": torch.ones(1, dtype=torch.int8)}),
        f"{UP}: weight_zero_point is not zero",
    ),
    ("fp8 static", put(f"{UP}.weight", with_nan), f"{UP}: weight holds NaN"),
    ("fp8 static", put(f"{UP}.weight", lambda w: w[:-1]), r"up_proj\.weight has shape \[319, 192\], config\.json asks for \[320, 192\]"),
    ("fp8 static", put(f"{UP}.weight", lambda w: w.float().to(torch.float8_e5m2)), "weight has dtype torch.float8_e5m2"),
    ("fp8 static", put(f"{UP}.weight", lambda w: w.float().to(torch.int8)), "weight has dtype torch.int8"),
    ("awq", drop(f"{UP}.qzeros"), f"tensor {UP}.qzeros is missing"),
    ("awq", put(f"{UP}.qweight", lambda w: w[:-1]), r"qweight has shape \[191, 40\], the model and the group size need \[192, 40\]"),
    ("awq", put(f"{UP}.qweight", lambda w: w.long()), "qweight has dtype torch.int64"),
    ("awq", put(f"{UP}.qzeros", lambda z: z[:1]), "qzeros has shape"),
    ("gptq", put(f"{UP}.g_idx", lambda g: g.flip(0)), f"{UP}: g_idx permutes the columns .*use a checkpoint quantised without it"),
    ("gptq", put(f"{UP}.g_idx", lambda g: g[1:]), "g_idx has shape"),
    ("gptq", put(f"{UP}.bias", lambda b: b + 1), f"1 tensors do not belong to this architecture: {UP}.bias"),
    ("ct int4", drop(f"{UP}.weight_scale"), f"tensor {UP}.weight_scale is missing"),
    ("ct int4", put(f"{UP}.weight_shape", lambda s: s + 1), r"weight_shape says \[321, 193\]"),
    ("ct int4, asymmetric", drop(f"{UP}.weight_zero_point"), f"tensor {UP}.weight_zero_point is missing"),
    ("ct int4, asymmetric", put(f"{UP}.weight_zero_point", lambda z: z[1:]), "weight_zero_point has shape"),
]


@pytest.mark.parametrize(("name", "change", "named"), TENSORS)
def test_tensors(tmp_path: Path, name: str, change: Callable[[dict[str, Tensor]], None], named: str) -> None:
    write_quantized(tmp_path / "q", FORMATS[name])
    edit_tensors(tmp_path / "q", change)
    with pytest.raises(UnsupportedCheckpoint, match=named) as caught:
        load_model(tmp_path / "q")
    assert str(tmp_path / "q") in caught.value.message


@pytest.mark.parametrize(
    ("name", "config", "named"),
    [
        (
            "awq",
            AWQ | {"modules_to_not_convert": ["up_proj"]},
            "up_proj: it holds qweight, qzeros, scales, but its config says that it is not",
        ),
        ("awq", AWQ | {"group_size": 32}, r"qzeros has shape \[3, 24\], the model and the group size need \[6, 24\]"),
        ("awq", AWQ | {"group_size": 128}, "192 columns are no multiple of 8 or of the group size 128"),
        ("awq", GPTQ, "qweight has shape"),
        ("gptq", AWQ, "qweight has shape"),
        ("awq", BLOCKS, "tensor model.layers.0.self_attn.q_proj.weight is missing"),
        ("fp8 blocks", CHANNEL, r"weight_scale has shape \[2, 2\], one per channel is \[192\]"),
        ("ct fp8 dynamic", CHANNEL | {"ignore": ["lm_head", "re:.*down_proj"]}, "down_proj: it holds weight, weight_scale, but its config"),
        ("ct fp8 dynamic", CT_INT4, r"tensor model\.layers\.0\.self_attn\.q_proj\.weight_packed is missing"),
    ],
)
def test_config_and_tensors_must_agree(tmp_path: Path, name: str, config: dict[str, Any], named: str) -> None:
    write_quantized(tmp_path / "q", FORMATS[name])
    edit_config(tmp_path / "q", quantization_config=config)
    with pytest.raises(UnsupportedCheckpoint, match=named):
        load_model(tmp_path / "q")


def test_a_plain_weight_where_the_config_promises_another(tmp_path: Path) -> None:
    write_tiny(tmp_path, seed=3)
    edit_config(tmp_path, quantization_config=CHANNEL)
    with pytest.raises(UnsupportedCheckpoint, match=r"q_proj: its weight is plain, but its config says e4m3 per channel; list it"):
        load_model(tmp_path)


@pytest.mark.parametrize(("name", "value"), [("ct fp8 static", torch.zeros(1, dtype=torch.int8)), ("ct int4", None)])
def test_zero_points_that_say_nothing_are_no_harm(tmp_path: Path, name: str, value: Tensor | None) -> None:
    """Older writers of compressed-tensors keep them where the scheme is symmetric."""
    write_quantized(tmp_path / "q", FORMATS[name])
    expected = run_logits(load_model(tmp_path / "q").model, [3, 5, 8, 13])
    zero = value if value is not None else torch.zeros(320, 3, dtype=torch.int8)
    edit_tensors(tmp_path / "q", lambda t: t.update({f"{UP}.weight_zero_point": zero}))
    assert torch.equal(run_logits(load_model(tmp_path / "q").model, [3, 5, 8, 13]), expected)


def test_left_out_modules_and_scales_of_the_kv_cache(tmp_path: Path) -> None:
    """k_scale and v_scale say how to store K and V in FP8; here they are stored as they are, so the model is the same."""
    write_quantized(tmp_path / "q", FORMATS["ct fp8 dynamic"])
    expected = run_logits(load_model(tmp_path / "q").model, [3, 5, 8, 13])

    def plain_down(tensors: dict[str, Tensor]) -> None:
        for i in range(2):
            prefix = f"model.layers.{i}."
            scale = tensors.pop(f"{prefix}mlp.down_proj.weight_scale").float()
            tensors[f"{prefix}mlp.down_proj.weight"] = tensors[f"{prefix}mlp.down_proj.weight"].float() * scale
            tensors |= {f"{prefix}self_attn.{name}": torch.tensor(0.5) for name in ("k_scale", "v_scale", "k_proj.output_scale")}

    edit_tensors(tmp_path / "q", plain_down)
    edit_config(
        tmp_path / "q", quantization_config=CHANNEL | {"ignore": ["lm_head", "re:.*down_proj"], "kv_cache_scheme": floats("tensor")}
    )
    torch.testing.assert_close(run_logits(load_model(tmp_path / "q").model, [3, 5, 8, 13]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "param", "named"),
    [
        ("awq", {"quantization": "fp8"}, "quantization", r"'fp8' does not fit: .* is quantised by awq \(int4 awq, groups of 64\)"),
        ("awq", {"quantization": "gptq"}, "quantization", "'gptq' does not fit"),
        (None, {"quantization": "awq"}, "quantization", "is not quantised"),
        (None, {"quantization": "q3"}, "quantization", "must be None or one of none, fp8"),
        (None, {"act_dtype": "fp8"}, "act_dtype", "needs FP8 weights"),
        ("awq", {"act_dtype": "fp8"}, "act_dtype", "needs FP8 weights"),
        ("ct fp8 dynamic", {"act_dtype": "fp8", "quantization": "none"}, "act_dtype", "needs FP8 weights"),
        ("ct fp8 dynamic", {"act_dtype": "int8"}, "act_dtype", "must be one of auto, fp8"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, name: str | None, options: dict[str, str], param: str, named: str) -> None:
    if name is None:
        write_tiny(tmp_path / "q")
    else:
        write_quantized(tmp_path / "q", FORMATS[name])
    with pytest.raises(ConfigError, match=named) as caught:
        load_model(tmp_path / "q", **options)
    assert caught.value.param == param


def test_a_permuted_order_is_told_by_the_indices_not_by_the_config(tmp_path: Path) -> None:
    """desc_act without a permutation (one group a row) is served."""
    dense = write_quantized(tmp_path / "q", FORMATS["gptq"])
    edit_config(tmp_path / "q", quantization_config=GPTQ | {"desc_act": True})
    ids = [3, 5, 8, 13]
    torch.testing.assert_close(
        run_logits(load_model(tmp_path / "q").model, ids), run_logits(load_model(dense).model, ids), atol=1e-3, rtol=1e-3
    )
    assert gptq(torch.randn(8, 64), 64, index="reversed")[0]["g_idx"].tolist() == [0] * 64
