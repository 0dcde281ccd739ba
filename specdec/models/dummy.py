"""What `load_format="dummy"` puts in the place of files: random weights, and token ids for text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from specdec.errors import InvalidRequest
from specdec.kernels.fp8_linear.weight import BLOCK, LARGEST, Fp8Weight
from specdec.kernels.int4_linear.weight import PER_WORD, Int4Weight
from specdec.kernels.mxfp4.weight import BLOCK as GROUP
from specdec.kernels.mxfp4.weight import Mxfp4Weight
from specdec.layers.linear import RawWeight
from specdec.models.weights import BLOCKS
from specdec.quant.repack import SYMMETRIC
from specdec.quant.scheme import Fp8Scheme, Int4Scheme, Quantization
from specdec.tokenizer import Tokenizer

_PEAK = 4.5  # largest of some thousand normal numbers, in standard deviations
_CODE_STD = 4.18  # of 4-bit codes from 1 to 15, 8 twice as likely as any other
_LOWEST_BITS = 0x11111111  # of the nibbles of a word


class DummyWeights:
    """Seeded random weights for any shape asked for, in the storage of `quantization`, made on `device` one tensor at a time.

    Standard deviation 0.02·√(768 / in), so activations stay finite at any width; norms are 1, biases 0. FP8 numbers and 4-bit
    codes fill their range, as in real checkpoints: matrix units run faster on zeros. Bits differ between devices.
    """

    def __init__(
        self,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        *,
        quantization: Quantization | None = None,
        device: torch.device | None = None,
    ):
        self.origin = f"dummy weights (seed {seed})"
        self.quantization = quantization
        self._seed, self._dtype = seed, dtype
        self._device = device or torch.device("cpu")

    def names(self) -> Iterable[str]:
        return ()

    def get(self, name: str, shape: tuple[int, ...]) -> RawWeight:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        if len(shape) == 1:
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        if name.endswith(BLOCKS):
            return self._mxfp4(shape, self._generator(name))
        generator, std = self._generator(name), 0.02 * (768 / shape[1]) ** 0.5
        module = name.removesuffix(".weight")
        linear = len(shape) == 2 and module.endswith("_proj")
        scheme = self.quantization.scheme_of(module) if linear and self.quantization is not None else None
        if isinstance(scheme, Fp8Scheme):
            return self._fp8(scheme, shape[0], shape[1], std, generator)
        if isinstance(scheme, Int4Scheme):
            return self._int4(scheme, shape[0], shape[1], std, generator)
        return torch.randn(shape, generator=generator, device=self._device).mul_(std).to(self._dtype)

    def _generator(self, name: str) -> torch.Generator:
        key = int.from_bytes(hashlib.sha256(f"{self._seed}/{name}".encode()).digest()[:7], "little")
        return torch.Generator(self._device).manual_seed(key)

    def _fp8(self, scheme: Fp8Scheme, rows: int, cols: int, std: float, generator: torch.Generator) -> Fp8Weight:
        numbers = torch.randn(rows, cols, generator=generator, device=self._device).mul_(LARGEST / _PEAK).clamp_(-LARGEST, LARGEST)
        sizes = {"tensor": (1,), "channel": (rows,), "block": (-(-rows // BLOCK), -(-cols // BLOCK))}
        return Fp8Weight(numbers.to(torch.float8_e4m3fn), torch.full(sizes[scheme.layout], std * _PEAK / LARGEST, device=self._device))

    def _int4(self, scheme: Int4Scheme, rows: int, cols: int, std: float, generator: torch.Generator) -> Int4Weight:
        group = cols if scheme.group == -1 else scheme.group
        words = torch.randint(-(2**31), 2**31, (rows, cols // PER_WORD), generator=generator, device=self._device).int()
        empty = ~(words | words >> 1 | words >> 2 | words >> 3) & _LOWEST_BITS
        words |= empty << 3  # 0 becomes 8: the codes' mean is their zero point, as that of trained weights
        zero = torch.full((rows, cols // group), SYMMETRIC, dtype=torch.uint8, device=self._device)
        if not scheme.symmetric:
            zero += torch.randint(-1, 2, zero.shape, generator=generator, device=self._device).to(torch.uint8)
        return Int4Weight(words, torch.full(zero.shape, std / _CODE_STD, dtype=torch.float16, device=self._device), zero, group)

    def _mxfp4(self, shape: tuple[int, ...], generator: torch.Generator) -> Mxfp4Weight:
        """Codes fill their range; their root mean square, 2.7, times 2^-8 is about what the other weights have."""
        *rows, cols = shape
        data = torch.randint(0, 256, (*rows, cols // 2), generator=generator, device=self._device, dtype=torch.uint8)
        scales = torch.randint(118, 120, (*rows, cols // GROUP), generator=generator, device=self._device, dtype=torch.uint8)
        return Mxfp4Weight(data, scales)


class IdTokenizer(Tokenizer):
    """For a model without a tokenizer: token 17 is written " <17>". Prompts must be token ids."""

    def __init__(self, *, vocab_size: int, eos_ids: Iterable[int] = ()):
        from tokenizers import Tokenizer as Backend
        from tokenizers.models import WordLevel

        super().__init__(Backend(WordLevel({}, unk_token="")), vocab_size=vocab_size, eos_ids=eos_ids)
        self.byte_level = True  # the text of a sequence is that of its tokens, joined

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        raise InvalidRequest("this model was started without a tokenizer; give the prompt as token ids", param="prompt")

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(self.token_text, ids))

    def token_bytes(self, token: int) -> bytes:
        return f" <{self._check(token)}>".encode()
