// Codes of a weight to the 16-bit numbers that the tensor cores take, two at a time.
#pragma once

#include "fragment_layout.h"

namespace specdec {

struct Bf16 {};  // the kinds of activations, as template arguments
struct F16 {};

// e4m3 is s eeee mmm with bias 7. Put at the low end of a wider format's exponent, its bits mean the value times a power of two, subnormals
// included (they stay linear), and one multiplication repairs that exactly. The factor could be folded into the scales instead; it is
// spent here, one instruction per two weights, because w 2^-120 x is subnormal in float32 wherever |w x| < 2^-6, and small activations
// would lose bits.
//
// A word holds four codes, two in each half: `a` lies where bf16 wants it, so that one AND yields two weights; the bits of `b` fill the
// gaps such that two shifts do.
//
//   bit   15   14 13 12   11   10 9 8 7 6 5 4   3 2 1 0
//         a7   b6 b5 b4   b7   a6 . . . . . a0  b3 . b0
//
// The NaN codes 0x7f and 0xff would come out as ±480: packing replaces them and makes the channel's scale NaN (fragments.py).
SPECDEC_BOTH constexpr uint32_t e4m3_half(uint32_t a, uint32_t b) {
  return (a & 0x80) << 8 | (a & 0x7f) << 4 | (b & 0x80) << 4 | (b & 0x70) << 8 | (b & 0x0f);
}

template <class Number>
struct E4m3;

template <>
struct E4m3<Bf16> {
  static constexpr uint32_t FACTORS = 0x7b807b80;  // 2^120 twice
  static SPECDEC_BOTH constexpr uint32_t a(uint32_t word) { return word & 0x87f087f0u; }
  static SPECDEC_BOTH constexpr uint32_t b(uint32_t word) { return (word << 4 & 0x80f080f0u) | (word >> 4 & 0x07000700u); }
};

template <>
struct E4m3<F16> {
  static constexpr uint32_t FACTORS = 0x5c005c00;  // 2^8 twice
  static SPECDEC_BOTH constexpr uint32_t a(uint32_t word) { return (word & 0x80008000u) | (word << 3 & 0x3f803f80u); }
  static SPECDEC_BOTH constexpr uint32_t b(uint32_t word) {
    return (word << 4 & 0x80008000u) | (word << 7 & 0x07800780u) | (word >> 1 & 0x38003800u);
  }
};

// ---- Four bits: under the exponent of 2^7 (bf16) or 2^10 (f16) a code c reads as 128 + c or 1024 + c. Taking 128 or 1024 plus the zero
// point from that is exact, and multiplying by the group's scale is the one rounding.
template <class Number>
struct Nibble;

template <>
struct Nibble<Bf16> {
  static constexpr uint32_t BASE = 0x43004300, ONE = 0x3f803f80;
};

template <>
struct Nibble<F16> {
  static constexpr uint32_t BASE = 0x64006400, ONE = 0x3c003c00;
};

// Nibbles r of both halves of `word` as two numbers, BASE included.
template <class Number>
SPECDEC_BOTH constexpr uint32_t nibbles(uint32_t word, int r) {
  return (word >> 4 * r & 0x000f000fu) | Nibble<Number>::BASE;
}

}  // namespace specdec
