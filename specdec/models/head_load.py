"""From a path or name to a `DraftHead` on its target: read, translate, validate, quantise, compare fingerprints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.errors import ConfigError, UnsupportedCheckpoint
from specdec.layers.linear import RawWeight
from specdec.models.draft_heads import DraftHead
from specdec.models.head_dialect import read_head_config
from specdec.models.head_files import SIDE_FILE, find_head, read_tensors
from specdec.models.head_fingerprint import mismatch
from specdec.models.jsonfile import read_json
from specdec.models.weights import DictWeights
from specdec.quant.fp8 import to_fp8
from specdec.quant.quantize import BLOCK_KINDS, quantize

if TYPE_CHECKING:
    from specdec.models.llama import LlamaModel
    from specdec.models.load import LoadedModel

_ROUNDED = ("float32", "bfloat16", "float16")
DRAFT_QUANTIZATIONS = (*_ROUNDED, "fp8", *BLOCK_KINDS)


def load_head(
    source: str | os.PathLike[str],
    target: LoadedModel,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    draft_quantization: str | None = None,
) -> DraftHead:
    """Load a draft head for `target`; device and dtype default to the target's.

    draft_quantization: storage of the weights, one of DRAFT_QUANTIZATIONS: "fp8" is e4m3 with a scale a row, "int8" and "int4"
    are blocks of 32. Weights are held in it on every device, unless `dtype` is no larger; where no kernel multiplies it (all
    but float32 on the CPU with the compiled extension) they are made dense for each product: small, not fast. None keeps the
    file's storage on the CPU, and `dtype` elsewhere.
    A head of another target loads with `trusted` False and a `warning`. Raises ModelNotFound, ConfigError, and
    UnsupportedCheckpoint naming the field and both sizes.
    """
    _check_precision(draft_quantization)
    path = find_head(source)
    tensors = _without_copies(read_tensors(path), target.model)
    extra = read_json(path / SIDE_FILE) if (path / SIDE_FILE).is_file() else {}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    try:
        config = read_head_config(read_json(path / "config.json"), shapes, target.config, extra=extra, origin=str(path))
    except UnsupportedCheckpoint as err:
        raise err if str(path) in err.message else UnsupportedCheckpoint(f"{path}: {err.message}") from err
    tensors = {name: converted(tensor, draft_quantization) for name, tensor in tensors.items()}
    model = target.model
    head = DraftHead(
        config,
        DictWeights(tensors, str(path)),
        model,
        device=torch.device(device) if device is not None else model.device,
        dtype=dtype or model.dtype,
        deterministic=model.deterministic,
        keep=draft_quantization is not None,
    )
    head.warning = _distrust(config.fingerprint, model, str(path))
    head.trusted = head.warning is None
    return head


def _check_precision(draft_quantization: str | None) -> None:
    if draft_quantization is not None and draft_quantization not in DRAFT_QUANTIZATIONS:
        raise ConfigError(
            f"draft_quantization must be None or one of {', '.join(DRAFT_QUANTIZATIONS)}, got {draft_quantization!r}",
            param="draft_quantization",
        )


def _without_copies(tensors: dict[str, RawWeight], model: LlamaModel) -> dict[str, RawWeight]:
    """The tensors less an embedding that is a copy of the target's: writers save frozen ones too."""
    name, size = "embed_tokens.weight", (model.config.vocab_size, model.config.hidden_size)
    own = tensors.get(name)
    if not isinstance(own, Tensor) or tuple(own.shape) != size:
        return tensors
    same = torch.equal(model.embedding.dequantize().to(own.device, own.dtype), own)
    return {key: tensor for key, tensor in tensors.items() if not (same and key == name)}


def converted(tensor: RawWeight, precision: str | None) -> RawWeight:
    """A matrix in the storage asked for, one of DRAFT_QUANTIZATIONS; vectors (norms, biases, maps) stay as they are, None keeps all."""
    if precision is None or len(tensor.shape) != 2:
        return tensor
    dense = tensor if isinstance(tensor, Tensor) else tensor.dequantize()
    if precision == "fp8":
        return to_fp8(dense)
    return quantize(dense, BLOCK_KINDS[precision]) if precision in BLOCK_KINDS else dense.to(getattr(torch, precision))


def _distrust(stored: Mapping[str, Any] | None, model: LlamaModel, origin: str) -> str | None:
    """Why the head should not draft for this target, or None (also when its file has no fingerprint to compare)."""
    reason = None if stored is None else mismatch(stored, model)
    return None if reason is None else f"{origin}: this head was trained on another target ({reason}); it will not be used for drafting"
