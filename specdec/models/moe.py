"""From checkpoint tensors to layers with experts: Qwen3-MoE (one tensor an expert, or stacked) and GPT-OSS (stacked, MXFP4 or plain).

GPT-OSS interleaves the rows of gate and up; here the gate's come first, in weights and biases alike, as in every other model.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specdec import ops
from specdec.errors import UnsupportedCheckpoint
from specdec.kernels.moe_experts.weight import Experts, ExpertWeight
from specdec.kernels.mxfp4.weight import Mxfp4Weight
from specdec.layers.decoder import Layer, MoELayer
from specdec.layers.linear import Linear, make_linear
from specdec.layers.moe import MoE
from specdec.models.builder import Builder
from specdec.models.config import ModelConfig
from specdec.models.moe_config import MoEConfig
from specdec.models.weights import BLOCKS
from specdec.quant.experts import place, stack_experts


def build_layer(build: Builder, config: ModelConfig, index: int) -> Layer | MoELayer:
    """Decoder layer `index` of a target, with or without experts."""
    prefix, moe = f"model.layers.{index}", config.moe
    if moe is None or not moe.layers[index]:
        return build.layer(prefix, index)
    attention = build.attention(f"{prefix}.self_attn", index, config.hidden_size)
    if config.sinks:
        attention = replace(attention, sinks=build.dense(f"{prefix}.self_attn.sinks", config.num_heads))
    router = f"{prefix}.mlp.{'router' if moe.bias else 'gate'}"
    experts = _gpt_oss if moe.bias else _qwen3
    return MoELayer(
        input_norm=build.norm(f"{prefix}.input_layernorm"),
        attention=attention,
        post_norm=build.norm(f"{prefix}.post_attention_layernorm"),
        moe=MoE(
            router=_router(build, router, moe, config.hidden_size),
            experts=experts(build, f"{prefix}.mlp.experts", moe, config.hidden_size),
            per_token=moe.per_token,
            renormalise=moe.renormalise,
        ),
    )


def _router(build: Builder, name: str, moe: MoEConfig, hidden: int) -> Linear:
    """In float32 whatever the activations are."""
    bias = _tensor(build, f"{name}.bias", moe.experts) if moe.bias else None
    weight = build.raw(f"{name}.weight", moe.experts, hidden)
    return make_linear([weight], bias, device=build.device, dtype=torch.float32, deterministic=build.deterministic)


def _tensor(build: Builder, name: str, *shape: int) -> Tensor:
    raw = build.raw(name, *shape)
    if not isinstance(raw, Tensor):
        raise UnsupportedCheckpoint(f"{build.weights.origin}: tensor {name} is packed; expected plain numbers")
    return raw


def _qwen3(build: Builder, prefix: str, moe: MoEConfig, hidden: int) -> Experts:
    if f"{prefix}.gate_up_proj" in build.names:
        gate_up = _tensor(build, f"{prefix}.gate_up_proj", moe.experts, 2 * moe.inner, hidden)
        down = _tensor(build, f"{prefix}.down_proj", moe.experts, hidden, moe.inner)
        # copies, since the bits of the library's products depend on where a weight begins, and in a file that is anywhere
        return Experts(place(gate_up, build.device, build.dtype).clone(), place(down, build.device, build.dtype).clone())

    def shards(names: tuple[str, ...], rows: int, columns: int) -> ExpertWeight:
        single = [[build.raw(f"{prefix}.{e}.{name}.weight", rows, columns) for name in names] for e in range(moe.experts)]
        return stack_experts(single, build.device, build.dtype)

    return Experts(shards(("gate_proj", "up_proj"), moe.inner, hidden), shards(("down_proj",), hidden, moe.inner))


def _gpt_oss(build: Builder, prefix: str, moe: MoEConfig, hidden: int) -> Experts:
    halves = torch.cat((torch.arange(0, 2 * moe.inner, 2), torch.arange(1, 2 * moe.inner, 2)))
    gate_up_bias = _tensor(build, f"{prefix}.gate_up_proj_bias", moe.experts, 2 * moe.inner)[:, halves].to(build.device, build.dtype)
    down_bias = _tensor(build, f"{prefix}.down_proj_bias", moe.experts, hidden).to(build.device, build.dtype)
    experts = Experts(
        _stacked(build, f"{prefix}.gate_up_proj", (moe.experts, 2 * moe.inner, hidden), halves, moe.mxfp4),
        _stacked(build, f"{prefix}.down_proj", (moe.experts, hidden, moe.inner), None, moe.mxfp4),
        gate_up_bias,
        down_bias,
        limit=moe.limit,
        alpha=moe.alpha,
    )
    return ops.prepare_experts(experts)


def _stacked(build: Builder, name: str, shape: tuple[int, int, int], order: Tensor | None, packed: bool) -> ExpertWeight:
    """All experts E × N × K: MXFP4 blocks, or plain numbers, which are stored [E,K,N]. order: of the rows, None = as they are.

    packed: the config promises MXFP4."""
    experts, rows, columns = shape
    if packed or name + BLOCKS in build.names:
        weight = build.raw(name + BLOCKS, *shape)
        if isinstance(weight, Mxfp4Weight):
            return (weight if order is None else weight.rows(order)).to(build.device)
        dense = weight if isinstance(weight, Tensor) else weight.dequantize()
    else:
        dense = _tensor(build, name, experts, columns, rows).transpose(1, 2)
    return place(dense if order is None else dense[:, order], build.device, build.dtype).contiguous()
