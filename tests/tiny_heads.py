"""Random tiny draft heads for any tiny target, and the same head written in every layout."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.models.config import ModelConfig, RopeConfig
from specdec.models.draft_heads import DraftHead
from specdec.models.head_config import HeadConfig
from specdec.models.head_export import export_head
from specdec.models.llama import LlamaModel
from specdec.models.weights import DictWeights

MASK_TOKEN = 3  # the tiny tokenizer's first plain byte


def tiny_head(kind: str, target: ModelConfig, *, seed: int = 0, **flags: Any) -> tuple[HeadConfig, dict[str, Tensor]]:
    """A random head of `kind` for `target`, and its tensors (float32, internal names, maps included).

    flags: fields of HeadConfig that differ from: the target's sizes, 1 layer, a draft vocabulary of a quarter of the
    target's, taps at the start, middle and end, own lm_head, shared embedding, all norms and biases off.
    """
    unknown = set(flags) - {f.name for f in fields(HeadConfig)}
    assert not unknown, f"no such fields: {unknown}"
    config = HeadConfig(
        kind=kind,
        hidden_size=flags.pop("hidden_size", target.hidden_size),
        target_hidden_size=target.hidden_size,
        intermediate_size=flags.pop("intermediate_size", target.intermediate_size),
        num_layers=flags.pop("num_layers", 1),
        num_heads=flags.pop("num_heads", target.num_heads),
        num_kv_heads=flags.pop("num_kv_heads", target.num_kv_heads),
        head_dim=flags.pop("head_dim", target.head_dim),
        eps=target.eps,
        rope=flags.pop("rope", RopeConfig(5000.0)),  # not the target's
        vocab_size=target.vocab_size,
        draft_vocab_size=flags.pop("draft_vocab_size", target.vocab_size // 4),
        taps=flags.pop("taps", (0, target.num_layers // 2, target.num_layers)),
        mask_token_id=flags.pop("mask_token_id", MASK_TOKEN if kind == "peagle" else None),
    )
    config = replace(config, **flags)
    return config, head_tensors(config, seed=seed)


def head_shapes(c: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Every floating-point tensor of the head with its shape, in a fixed order."""
    hidden, inner = c.hidden_size, c.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, c.tap_size), "norm.weight": (hidden,)}
    if c.own_embedding:
        shapes["embed_tokens.weight"] = (c.vocab_size, hidden)
    if c.own_lm_head:
        shapes["lm_head.weight"] = (c.draft_vocab_size, hidden)
    if c.norm_before_fc:
        shapes["input_norm.weight"] = (c.tap_size,)
    if c.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (c.target_hidden_size,) for i in range(len(c.taps))}
    if c.kind == "peagle":
        shapes["mask_hidden"] = (1, 1, c.tap_size)
    if c.transition:
        sizes = {"token_norm": (hidden,), "token_proj": (c.transition, hidden), "hidden_proj": (c.transition, hidden)}
        shapes |= {f"transition.{n}.weight": size for n, size in {**sizes, "out_proj": (hidden, c.transition)}.items()}
    for i in range(c.num_layers):
        prefix, columns = f"layers.{i}.", hidden * (2 if i == 0 else 1)
        if i == 0:
            shapes[f"{prefix}hidden_norm.weight"] = (hidden,)
        shapes |= {f"{prefix}{n}.weight": (hidden,) for n in ("input_layernorm", "post_attention_layernorm")}
        linears = {f"self_attn.{n}_proj": (rows, columns) for n, rows in (("q", c.q_size), ("k", c.kv_size), ("v", c.kv_size))}
        linears["self_attn.o_proj"] = (hidden, c.q_size)
        linears |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        for name, shape in linears.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if c.mlp_bias if "mlp" in name else c.o_bias if "o_proj" in name else c.qkv_bias:
                shapes[f"{prefix}{name}.bias"] = shape[:1]
        if c.qk_norm:
            shapes |= {f"{prefix}self_attn.{n}_norm.weight": (c.head_dim,) for n in "qk"}
    return shapes


def head_tensors(c: HeadConfig, *, seed: int = 0) -> dict[str, Tensor]:
    """Random weights under which every path matters, and a random increasing vocabulary map."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in head_shapes(c).items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1 and name.endswith(".weight"):
            tensors[name] = 1.0 + 0.2 * noise
        elif name.endswith(".bias"):
            tensors[name] = 0.2 * noise
        elif name == "mask_hidden":
            tensors[name] = noise
        elif name in ("lm_head.weight", "embed_tokens.weight"):
            tensors[name] = 3.0 * noise / shape[1] ** 0.5
        else:
            tensors[name] = 1.5 * noise / shape[1] ** 0.5
    kept = torch.randperm(c.vocab_size, generator=generator)[: c.draft_vocab_size].sort().values
    if c.draft_vocab_size < c.vocab_size:
        tensors["d2t"] = kept - torch.arange(c.draft_vocab_size)
        tensors["t2d"] = torch.zeros(c.vocab_size, dtype=torch.bool).index_fill_(0, kept, True)
    return tensors


def build_head(config: HeadConfig, tensors: dict[str, Tensor], target: LlamaModel) -> DraftHead:
    """The head on its target, without files."""
    return DraftHead(
        config, DictWeights(tensors, "tiny head"), target, device=target.device, dtype=target.dtype, deterministic=target.deterministic
    )


def write_head(directory: Path, layout: str, config: HeadConfig, tensors: dict[str, Tensor], **options: Any) -> Path:
    """The head in one of the exporter's layouts; options are those of `export_head`."""
    return export_head(directory, config, tensors, layout, **options)


def rotate_basis(checkpoint: Path, *, seed: int = 0) -> None:
    """Rewrite an untied Llama checkpoint so that it computes the same function with its residual stream in another basis.

    Norm weights are folded into the matrices that read the stream (an RMSNorm without weights commutes with rotations).
    """
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    size = tensors["model.norm.weight"].shape[0]
    rotation = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(seed)))[0]
    for name in [n for n in tensors if n.endswith(".weight") and tensors[n].dim() == 2]:
        weight = tensors[name]
        layer = name.split(".self_attn")[0].split(".mlp")[0]
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = rotation.T @ weight
        elif "embed_tokens" in name:
            tensors[name] = weight @ rotation
        else:
            norm = (
                "model.norm" if "lm_head" in name else f"{layer}.input_layernorm" if "attn" in name else f"{layer}.post_attention_layernorm"
            )
            tensors[name] = weight * tensors[f"{norm}.weight"] @ rotation
    norms = {n: torch.ones(size) for n in tensors if n.endswith("norm.weight")}
    save_file({n: t.contiguous() for n, t in (tensors | norms).items()}, file)
