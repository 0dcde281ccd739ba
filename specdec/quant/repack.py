"""From the tensors of a quantised checkpoint to the storages the kernels read. Once, at load; values do not change.

Every function takes a weight's tensors by their last name and its shape (N, K), and raises UnsupportedCheckpoint naming the tensor that
does not fit. Formats: reference §8.2 to §8.4.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specdec.errors import UnsupportedCheckpoint
from specdec.kernels.fp8_linear.weight import BLOCK, Fp8Weight
from specdec.kernels.int4_linear.weight import PER_WORD, Int4Weight, pack_words, unpack_words
from specdec.quant.scheme import Fp8Scheme, Int4Scheme

Tensors = Mapping[str, Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of nibble i inside its word
SYMMETRIC = 8  # the zero point of symmetric codes
E4M3_NAN = 0x7F  # without the sign
FP8_SCALES = ("weight_scale", "weight_scale_inv")  # in spite of the second name both multiply


def fp8_weight(tensors: Tensors, scheme: Fp8Scheme, shape: tuple[int, int]) -> Fp8Weight:
    """`weight` and its scale."""
    data, scale = tensors["weight"], next(tensors[name] for name in FP8_SCALES if name in tensors)
    _expect("weight", data, shape, torch.float8_e4m3fn)
    if bool((data.view(torch.uint8) & E4M3_NAN == E4M3_NAN).any()):
        raise UnsupportedCheckpoint("weight holds NaN; the checkpoint is damaged, quantise it again")
    if "weight_zero_point" in tensors and bool(tensors["weight_zero_point"].float().any()):
        raise UnsupportedCheckpoint("weight_zero_point is not zero, which floats cannot have; the checkpoint is damaged, quantise it again")
    return Fp8Weight(data, fp8_scale(scale, scheme.layout, shape))


def fp8_scale(scale: Tensor, layout: str, shape: tuple[int, int]) -> Tensor:
    """A checkpoint's scale as `Fp8Weight` has it: a scalar or a column becomes a vector."""
    rows, cols = shape
    wanted = {"tensor": (1,), "channel": (rows,), "block": (-(-rows // BLOCK), -(-cols // BLOCK))}[layout]
    if layout != "block" and scale.numel() == max(scale.shape, default=1):
        scale = scale.reshape(-1)
    if tuple(scale.shape) != wanted:
        raise UnsupportedCheckpoint(f"weight_scale has shape {list(scale.shape)}, one per {layout} is {list(wanted)}")
    return _checked("weight_scale", scale.float())


def int4_weight(tensors: Tensors, scheme: Int4Scheme, shape: tuple[int, int]) -> Int4Weight:
    """The tensors of a 4-bit weight in any packing."""
    rows, cols = shape
    group = cols if scheme.group == -1 else scheme.group
    if cols % PER_WORD or cols % group:
        raise UnsupportedCheckpoint(f"{cols} columns are no multiple of {PER_WORD} or of the group size {group}; use another group size")
    read = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}[scheme.packing]
    words, scale, zero = read(tensors, scheme, rows, cols, group)
    return Int4Weight(words, _checked("scale", scale), zero, group)


Parts = tuple[Tensor, Tensor, Tensor]  # words, scale and zero of an Int4Weight


def _awq(tensors: Tensors, scheme: Int4Scheme, rows: int, cols: int, group: int) -> Parts:
    """qweight int32 [K, N/8], qzeros int32 [K/g, N/8], scales [K/g, N]: packed along N, in AWQ's order."""
    _expect("qweight", tensors["qweight"], (cols, rows // PER_WORD), torch.int32)
    _expect("qzeros", tensors["qzeros"], (cols // group, rows // PER_WORD), torch.int32)
    _expect("scales", tensors["scales"], (cols // group, rows))
    codes, zeros = (_unpack_awq(tensors[name]) for name in ("qweight", "qzeros"))
    return pack_words(codes.T.contiguous()), tensors["scales"].T.contiguous(), zeros.T.contiguous()


def _unpack_awq(words: Tensor) -> Tensor:
    """int32 [R, C/8] -> uint8 [R, C], nibble i of a word at column ORDER[i]."""
    codes = words.new_empty((*words.shape, PER_WORD), dtype=torch.uint8)
    for nibble, column in enumerate(AWQ_ORDER):
        codes[..., column] = words >> 4 * nibble & 15
    return codes.flatten(1)


def _gptq(tensors: Tensors, scheme: Int4Scheme, rows: int, cols: int, group: int) -> Parts:
    """qweight int32 [K/8, N] packed along K, qzeros int32 [K/g, N/8] packed along N and perhaps less one, scales [K/g, N]."""
    _expect("qweight", tensors["qweight"], (cols // PER_WORD, rows), torch.int32)
    _expect("qzeros", tensors["qzeros"], (cols // group, rows // PER_WORD), torch.int32)
    _expect("scales", tensors["scales"], (cols // group, rows))
    _check_order(tensors.get("g_idx"), "g_idx", cols, group)
    zero = unpack_words(tensors["qzeros"]).T.contiguous() + scheme.zero_shift
    return tensors["qweight"].T.contiguous(), tensors["scales"].T.contiguous(), zero


def _compressed(tensors: Tensors, scheme: Int4Scheme, rows: int, cols: int, group: int) -> Parts:
    """weight_packed int32 [N, K/8], which is our order; weight_scale [N, K/g]; weight_zero_point int32 [ceil(N/8), K/g] packed along
    N, or int8 [N, K/g] from older writers, or none. Codes and packed zero points are stored plus 8."""
    words, scale = tensors["weight_packed"], tensors["weight_scale"]
    _expect("weight_packed", words, (rows, cols // PER_WORD), torch.int32)
    _expect("weight_scale", scale, (rows, cols // group))
    if "weight_shape" in tensors and tensors["weight_shape"].tolist() != [rows, cols]:
        raise UnsupportedCheckpoint(f"weight_shape says {tensors['weight_shape'].tolist()}, the model needs {[rows, cols]}")
    _check_order(tensors.get("weight_g_idx"), "weight_g_idx", cols, group)
    if "weight_zero_point" not in tensors:
        return words, scale, torch.full(scale.shape, SYMMETRIC, dtype=torch.uint8, device=words.device)
    zero = tensors["weight_zero_point"]
    if zero.dtype is torch.int8:
        _expect("weight_zero_point", zero, (rows, cols // group))
        return words, scale, (zero + SYMMETRIC).to(torch.uint8)
    _expect("weight_zero_point", zero, (-(-rows // PER_WORD), cols // group), torch.int32)
    return words, scale, unpack_words(zero.T.contiguous())[:, :rows].T.contiguous()


def _check_order(index: Tensor | None, name: str, cols: int, group: int) -> None:
    """Columns of a group must be neighbours: a permuted order would need permuted activations."""
    if index is None:
        return
    _expect(name, index, (cols,))
    if not torch.equal(index.long(), torch.arange(cols, device=index.device) // group):
        raise UnsupportedCheckpoint(
            f"{name} permutes the columns (desc_act / activation order), which is not supported; use a checkpoint quantised without it"
        )


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    if dtype not in (None, tensor.dtype):
        raise UnsupportedCheckpoint(f"{name} has dtype {tensor.dtype}, {dtype} is supported")
    if tuple(tensor.shape) != shape:
        raise UnsupportedCheckpoint(f"{name} has shape {list(tensor.shape)}, the model and the group size need {list(shape)}")


def _checked(name: str, scale: Tensor) -> Tensor:
    """A scale that nobody filled in, or that overflowed, would look like a fast model that writes nonsense."""
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise UnsupportedCheckpoint(f"{name} has entries that are not finite and positive; the checkpoint is damaged, quantise it again")
    return scale
