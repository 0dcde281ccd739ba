"""Compiles every Triton kernel for a card that need not be there: `python compile_triton.py CAPABILITY`, prints JSON.

Run as a process of its own, without TRITON_INTERPRET. The ops are called on CPU tensors with a driver that names the target, and
launches stop after compilation, so each kernel gets exactly the arguments and constants that its launcher gives it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from specdec.kernels.cases import CASES
from specdec.kernels.fp8_linear.weight import Fp8Weight
from specdec.kernels.inputs import Rows, attention_batch, random_tree
from specdec.kernels.moe_experts import triton as experts
from specdec.kernels.moe_experts.cases import KINDS, experts_of
from specdec.kernels.tilings import usual
from specdec.kernels.triton_gemm import stream
from specdec.kernels.triton_table import BACKENDS
from tests.kernels.walk_cases import walk_cases

_EARLY = ("add_rms_norm", "silu_mul", "rope_write_kv", "add_rms_norm_fp8", "silu_mul_fp8", "quantize_fp8")
_IN_REGISTERS = ("_route", "_sort", "_gate_up", "_down", "_combine")


def compiling(capability: int, kernels: list[tuple[str, Any]]) -> None:
    """From here on a launch compiles for `capability` and adds its (name, compiled kernel) to `kernels`."""
    target = GPUTarget("cuda", capability, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0)
    )
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, warmup=True, **kwargs)
        kernels.append((self.__name__, kernel))
        if self.__name__ in _IN_REGISTERS:
            assert stack_bytes(kernel.asm["cubin"]) == 0, f"{self.__name__} spills registers"
        return kernel

    JITFunction.run = compile_only


def stack_bytes(cubin: bytes) -> int:
    """Local memory a thread needs: what did not fit into registers."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return max(int(size) for size in re.findall(r"STACK:(\d+)", usage))


def attention_calls() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Decode, trees and prefill; bf16 and fp32; plain, and with window, sinks and first."""
    for heads, kv_heads, hd, dtype, rows in (
        (9, 3, 64, torch.bfloat16, [Rows(100)] * 4),
        (9, 3, 64, torch.float32, [Rows(70, tree=tuple(random_tree(64, 0)))]),
        (32, 8, 128, torch.bfloat16, [Rows(0, 300)]),
    ):
        batch = attention_batch(rows, heads, kv_heads, hd, 16)
        batch |= {name: batch[name].to(dtype) for name in ("q", "k_cache", "v_cache")}
        yield tuple(batch.values()), {"scale": 0.125}
        extra = {"window": 64, "sinks": torch.zeros(heads, dtype=dtype), "first": torch.ones(len(rows), dtype=torch.int32)}
        yield tuple(batch.values()), {"scale": 0.125} | extra


def small_calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(op, arguments) of the other ops, bf16 where the op has a choice."""
    x, weight = torch.zeros(5, 576, dtype=torch.bfloat16), torch.zeros(576, dtype=torch.bfloat16)
    cache = torch.zeros(2, 4, 16, 3, 64, dtype=torch.bfloat16)
    table, slots = torch.zeros(32, 32), torch.arange(5)
    keys = (slots, slots, slots)
    yield "rms_norm", (x, weight, 1e-5)
    yield "add_rms_norm", (x, x, weight, 1e-5)
    yield "silu_mul", (torch.zeros(5, 3072, dtype=torch.bfloat16),)
    yield "rope_write_kv", (torch.zeros(5, 960, dtype=torch.bfloat16), slots, table, table, cache[0], cache[1], slots)
    yield "move_kv", ([cache[0]], [cache[1]], slots, slots)
    yield "moe_route", (torch.zeros(5, 128), 8, True)
    yield "moe_route", (torch.zeros(5, 32, dtype=torch.bfloat16), 4, False)
    yield "gumbel_argmax", (torch.zeros(5, 49152), *keys, slots > 2, 0)
    yield "gumbel_noise", (*keys, torch.zeros(5, 40, dtype=torch.int64), 0)
    yield "philox_uniform", (*keys, torch.zeros(5, 40, dtype=torch.int64), 0)
    yield "quantize_fp8", (x,)
    yield "quantize_fp8", (torch.zeros(5, 28672, dtype=torch.bfloat16),)
    w = torch.zeros(32000, 4096, dtype=torch.bfloat16)
    for rows in (5, 80):
        row = torch.zeros(rows, dtype=torch.int64)
        law = torch.ones(rows), torch.arange(32000), row, row, row, row > 2, 0, 0.7, 10
        yield "draft_topk", (w[:rows], w, *law)
        yield "draft_topk", (w[:rows], Fp8Weight(w.to(torch.float8_e4m3fn), torch.ones(32000)), *law)
    yield "mass_cut", (torch.zeros(5, 128256), torch.zeros(5, 128256), torch.zeros(5))
    yield "rms_norm_fp8", (x, weight, 1e-5)
    yield "add_rms_norm_fp8", (*torch.zeros(2, 5, 8192, dtype=torch.bfloat16), torch.zeros(8192, dtype=torch.bfloat16), 1e-5)
    yield "silu_mul_fp8", (torch.zeros(5, 57344, dtype=torch.bfloat16),)
    yield "clamped_swiglu", (torch.zeros(5, 5760, dtype=torch.bfloat16), 1.702, 7.0)
    wide = torch.zeros(2, 4, 16, 8, 128, dtype=torch.bfloat16)
    head, angles = torch.zeros(128, dtype=torch.bfloat16), torch.zeros(32, 64)
    qkv = torch.zeros(5, 6144, dtype=torch.bfloat16)
    for caches in (wide, wide.to(torch.float8_e4m3fn)):
        yield "norm_rope_write_kv", (qkv, head, head, 1e-6, slots, angles, angles, *caches, slots)
    for op in ("draft_grow", "draft_layout", "accepted_pairs"):
        yield op, list(CASES[op]())[3].args
    pool = torch.zeros(5, 710, dtype=torch.int64)
    yield "tree_build", (pool, pool, pool.float(), slots, slots, 64, 8)
    for op in ("tree_layout", "compaction_slots", "pad_batch", "gather_pairs"):
        for case in CASES[op]():
            yield op, case.args
    for forced in (False, True):
        yield "tree_walk", next(c.args for c in walk_cases() if c.args[2].tree.tokens.shape[1] == 64 and (len(c.args) > 4) == forced)


def verify_calls() -> Iterator[tuple[tuple[Any, ...], bool]]:
    """Arguments of coupled_verify and whether it also sums up the logits: few rows and many, with and without noise."""
    for rows, sampled, lse in product((5, 64), (True, False), (False, True)):
        slots, depths = torch.zeros(2, rows, dtype=torch.int64)
        noisy = torch.ones(1, dtype=torch.bool) if sampled else None
        yield (torch.zeros(rows, 128256), slots, depths, torch.ones(1), *slots[:3, None], noisy, 0), lse


def moe_calls() -> Iterator[tuple[Any, ...]]:
    """Arguments of moe_experts: every storage, few rows and many, the shapes of Qwen3-30B-A3B; MXFP4 with biases and cut, as GPT-OSS."""
    for kind, tokens, dtype in (
        *((kind, 4, torch.bfloat16) for kind in ("dense", "fp8 block", "int4 32", "mxfp4 units")),
        ("fp8 block", 8192, torch.bfloat16),
        ("fp8 channel", 4, torch.float16),
        ("dense", 4, torch.float32),
    ):
        made = experts_of(KINDS[kind], 1, 2048, 768, cut=kind == "mxfp4 units", bias=kind == "mxfp4 units")
        if kind == "dense":
            made = replace(made, gate_up=made.gate_up.to(dtype), down=made.down.to(dtype))
        ids = torch.zeros(tokens, 1, dtype=torch.int32)
        yield torch.zeros(tokens, 2048, dtype=dtype), ids, torch.zeros(tokens, 1), made


def moe_plans() -> Iterator[tuple[tuple[Any, ...], experts.Plan]]:
    """Few rows and more of them, one product and splits, launches that begin early, tall tiles."""
    for kind, (tokens, plan) in product(
        ("fp8 block", "mxfp4 units"),
        ((4, experts.Plan(8, early=True)), (72, experts.Plan(8, splits=(1, 1))), (72, experts.Plan(16, 128, 3, early=True))),
    ):
        x, ids = torch.zeros(tokens, 2048, dtype=torch.bfloat16), torch.zeros(tokens, 1, dtype=torch.int32)
        yield (x, ids, torch.zeros(tokens, 1), experts_of(KINDS[kind], 1, 2048, 768)), plan


def early_launches(kernels: list[tuple[str, Any]]) -> None:
    """The kernels of a decode pass, launched early: before they wait they touch no memory."""
    before = len(kernels)
    for op, args in small_calls():
        if op in _EARLY:
            BACKENDS[op].fn(*args)
    args, kwargs = next(attention_calls())
    BACKENDS["tree_attention"].fn(*args, **kwargs)
    w = torch.zeros(576, 1536, dtype=torch.bfloat16)
    stream(w[:1], w, None, None, w.dtype, usual("dense_linear", 1, *w.shape))
    for name, kernel in kernels[before:]:
        first, *_ = re.split(r"griddepcontrol\.wait", kernel.asm["ptx"])
        assert kernel.asm["ptx"].count("griddepcontrol.wait") == kernel.asm["ptx"].count("griddepcontrol.launch") == 1, name
        assert not re.search(r"(ld|st|atom|red)\.global|prefetch|cp\.async", first.split(".entry")[-1]), name
    del kernels[before:]


if __name__ == "__main__":
    found: list[tuple[str, Any]] = []
    compiling(int(sys.argv[1]), found)
    for args, kwargs in attention_calls():
        BACKENDS["tree_attention"].fn(*args, **kwargs)
    for op, args in small_calls():
        BACKENDS[op].fn(*args)
    for args, lse in verify_calls():
        BACKENDS["coupled_verify"].fn(*args, lse=lse)
    for args in moe_calls():
        BACKENDS["moe_experts"].fn(*args)
    for args, plan in moe_plans():
        experts.run(*args, plan)
    if int(sys.argv[1]) >= 90:
        early_launches(found)
    print(json.dumps({f"{i} {name}": kernel.metadata.shared for i, (name, kernel) in enumerate(found)}))
