// Sixteen lanes of float or int32, and sixteen lanes of four bytes, on AVX-512, AVX2 or plain C++.
// Included inside a namespace per instruction set, after SPECDEC_AVX512, SPECDEC_AVX2 or neither was defined. The compiler
// never fuses on its own (-ffp-contract=off): what an op computes for a row is the sequence written down, whatever the unrolling.

#define SPECDEC_INLINE static inline __attribute__((always_inline))

#if defined(SPECDEC_AVX512)

struct Float16 { __m512 v; };
struct Int16 { __m512i v; };
struct Bytes64 { __m512i v; };

SPECDEC_INLINE Float16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
SPECDEC_INLINE Float16 load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p)}; }
SPECDEC_INLINE void store(float* p, Float16 a) { _mm512_storeu_ps(p, a.v); }
SPECDEC_INLINE void store_n(float* p, Float16 a, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), a.v); }
SPECDEC_INLINE Float16 all(float x) { return {_mm512_set1_ps(x)}; }
SPECDEC_INLINE Float16 add(Float16 a, Float16 b) { return {_mm512_add_ps(a.v, b.v)}; }
SPECDEC_INLINE Float16 sub(Float16 a, Float16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
SPECDEC_INLINE Float16 mul(Float16 a, Float16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
SPECDEC_INLINE Float16 div(Float16 a, Float16 b) { return {_mm512_div_ps(a.v, b.v)}; }
SPECDEC_INLINE Float16 fma(Float16 a, Float16 b, Float16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
SPECDEC_INLINE Float16 max(Float16 a, Float16 b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where a is NaN
SPECDEC_INLINE Float16 min(Float16 a, Float16 b) { return {_mm512_min_ps(a.v, b.v)}; }
SPECDEC_INLINE Float16 magnitude(Float16 a) { return {_mm512_abs_ps(a.v)}; }
SPECDEC_INLINE Float16 zero_below(Float16 a, Float16 x, float limit) {  // a where x >= limit, else 0
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_GE_OQ), a.v)};
}
SPECDEC_INLINE Float16 load_half(const uint8_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
SPECDEC_INLINE Float16 load_bfloat(const uint8_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
SPECDEC_INLINE Float16 load_fp8(const uint8_t* p) {  // e4m3 without NaN, times 2^-8: sign, exponent and mantissa as half has them
  __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 8);
  return {_mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16((short)0xbfff)))};
}
SPECDEC_INLINE Float16 to_float(Int16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
SPECDEC_INLINE Int16 to_int(Float16 a) { return {_mm512_cvtps_epi32(a.v)}; }  // round to nearest even
SPECDEC_INLINE Float16 times_power(Float16 a, Int16 n) {  // a * 2^n through the exponent; result must be normal
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(n.v, 23)))};
}
SPECDEC_INLINE Int16 all_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
SPECDEC_INLINE Int16 add(Int16 a, Int16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
SPECDEC_INLINE Int16 sub(Int16 a, Int16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
template <int n> SPECDEC_INLINE Int16 left(Int16 a) { return {_mm512_slli_epi32(a.v, n)}; }
template <int n> SPECDEC_INLINE Int16 right(Int16 a) { return {_mm512_srai_epi32(a.v, n)}; }
SPECDEC_INLINE void store_low_bytes(int8_t* p, Int16 a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }
SPECDEC_INLINE Int16 load_int(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
SPECDEC_INLINE void store_int(uint32_t* p, Int16 a) { _mm512_storeu_si512(p, a.v); }
SPECDEC_INLINE Int16 bit_and(Int16 a, Int16 b) { return {_mm512_and_si512(a.v, b.v)}; }
SPECDEC_INLINE Int16 bit_xor(Int16 a, Int16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
SPECDEC_INLINE Int16 bits_of(Float16 a) { return {_mm512_castps_si512(a.v)}; }
SPECDEC_INLINE void wide_product(Int16 a, Int16 b, Int16* high, Int16* low) {  // unsigned 32 × 32 -> 64
  __m512i even = _mm512_mul_epu32(a.v, b.v), odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), b.v);
  high->v = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
  low->v = _mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32));
}
SPECDEC_INLINE Bytes64 load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
SPECDEC_INLINE Bytes64 low_nibbles(Bytes64 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
SPECDEC_INLINE Bytes64 high_nibbles(Bytes64 a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
// acc[lane] += sum of 4 products unsigned byte of w × signed byte of x4. `wide`: bytes of w may exceed 15.
template <bool wide> SPECDEC_INLINE Int16 dot4(Int16 acc, Bytes64 w, const int8_t* x4) {
  int32_t word;
  __builtin_memcpy(&word, x4, 4);
  return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(word))};
}
SPECDEC_INLINE float sum(Float16 a) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
SPECDEC_INLINE float largest(Float16 a) { return _mm512_reduce_max_ps(a.v); }
// Sixteen horizontal sums: lane i of the result = sum of the lanes of p[i].
SPECDEC_INLINE Float16 sums(const Float16 p[16]) {
  __m512 a[8], b[4], c[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(p[2 * i].v, p[2 * i + 1].v), _mm512_unpackhi_ps(p[2 * i].v, p[2 * i + 1].v));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  for (int i = 0; i < 2; i++)
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88), _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
  return {_mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd))};
}

#elif defined(SPECDEC_AVX2)

struct Float16 { __m256 lo, hi; };
struct Int16 { __m256i lo, hi; };
struct Bytes64 { __m256i lo, hi; };

SPECDEC_INLINE Float16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
SPECDEC_INLINE void store(float* p, Float16 a) { _mm256_storeu_ps(p, a.lo); _mm256_storeu_ps(p + 8, a.hi); }
SPECDEC_INLINE Float16 all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
SPECDEC_INLINE Float16 add(Float16 a, Float16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
SPECDEC_INLINE Float16 sub(Float16 a, Float16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
SPECDEC_INLINE Float16 mul(Float16 a, Float16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
SPECDEC_INLINE Float16 div(Float16 a, Float16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
SPECDEC_INLINE Float16 fma(Float16 a, Float16 b, Float16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
SPECDEC_INLINE Float16 max(Float16 a, Float16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
SPECDEC_INLINE Float16 min(Float16 a, Float16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
SPECDEC_INLINE Float16 magnitude(Float16 a) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
SPECDEC_INLINE Float16 zero_below(Float16 a, Float16 x, float limit) {
  __m256 l = _mm256_set1_ps(limit);
  return {_mm256_and_ps(a.lo, _mm256_cmp_ps(x.lo, l, _CMP_GE_OQ)), _mm256_and_ps(a.hi, _mm256_cmp_ps(x.hi, l, _CMP_GE_OQ))};
}
SPECDEC_INLINE Float16 load_half(const uint8_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 16)))};
}
SPECDEC_INLINE __m256 bfloat_half(const uint8_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
SPECDEC_INLINE Float16 load_bfloat(const uint8_t* p) { return {bfloat_half(p), bfloat_half(p + 16)}; }
SPECDEC_INLINE Float16 load_fp8(const uint8_t* p) {
  __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 8);
  __m256i half = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16((short)0xbfff));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
}
SPECDEC_INLINE Float16 to_float(Int16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
SPECDEC_INLINE Int16 to_int(Float16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
SPECDEC_INLINE Float16 times_power(Float16 a, Int16 n) {
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.lo), _mm256_slli_epi32(n.lo, 23))),
          _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.hi), _mm256_slli_epi32(n.hi, 23)))};
}
SPECDEC_INLINE Int16 all_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
SPECDEC_INLINE Int16 add(Int16 a, Int16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
SPECDEC_INLINE Int16 sub(Int16 a, Int16 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
template <int n> SPECDEC_INLINE Int16 left(Int16 a) { return {_mm256_slli_epi32(a.lo, n), _mm256_slli_epi32(a.hi, n)}; }
template <int n> SPECDEC_INLINE Int16 right(Int16 a) { return {_mm256_srai_epi32(a.lo, n), _mm256_srai_epi32(a.hi, n)}; }
SPECDEC_INLINE Int16 load_int(const uint32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
SPECDEC_INLINE void store_int(uint32_t* p, Int16 a) {
  _mm256_storeu_si256((__m256i*)p, a.lo);
  _mm256_storeu_si256((__m256i*)(p + 8), a.hi);
}
SPECDEC_INLINE Int16 bit_and(Int16 a, Int16 b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
SPECDEC_INLINE Int16 bit_xor(Int16 a, Int16 b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
SPECDEC_INLINE Int16 bits_of(Float16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
SPECDEC_INLINE void wide_half(__m256i a, __m256i b, __m256i* high, __m256i* low) {
  __m256i even = _mm256_mul_epu32(a, b), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b);
  *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}
SPECDEC_INLINE void wide_product(Int16 a, Int16 b, Int16* high, Int16* low) {
  wide_half(a.lo, b.lo, &high->lo, &low->lo);
  wide_half(a.hi, b.hi, &high->hi, &low->hi);
}
SPECDEC_INLINE void store_low_bytes(int8_t* p, Int16 a) {
  alignas(32) int32_t t[16];
  _mm256_store_si256((__m256i*)t, a.lo);
  _mm256_store_si256((__m256i*)(t + 8), a.hi);
  for (int i = 0; i < 16; i++) p[i] = (int8_t)t[i];
}
SPECDEC_INLINE Bytes64 load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
SPECDEC_INLINE Bytes64 low_nibbles(Bytes64 a) {
  __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.lo, m), _mm256_and_si256(a.hi, m)};
}
SPECDEC_INLINE Bytes64 high_nibbles(Bytes64 a) {
  __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(a.lo, 4), m), _mm256_and_si256(_mm256_srli_epi16(a.hi, 4), m)};
}
template <bool wide> SPECDEC_INLINE __m256i dot4_half(__m256i acc, __m256i w, __m256i x) {
  if (!wide)  // products of nibbles: pairs stay below 2^15
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
  __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
  __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
template <bool wide> SPECDEC_INLINE Int16 dot4(Int16 acc, Bytes64 w, const int8_t* x4) {
  int32_t word;
  __builtin_memcpy(&word, x4, 4);
  __m256i x = _mm256_set1_epi32(word);
  return {dot4_half<wide>(acc.lo, w.lo, x), dot4_half<wide>(acc.hi, w.hi, x)};
}
SPECDEC_INLINE float sum(Float16 a) {
  __m256 h = _mm256_add_ps(a.lo, a.hi);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
SPECDEC_INLINE float largest(Float16 a) {
  __m256 h = _mm256_max_ps(a.lo, a.hi);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

#else

// Vector extensions of GCC and Clang: the compiler picks SSE2, NEON or whatever there is. No fused multiply-add (on plain
// x86-64 it would be a library call per lane), and the heavier helpers are calls, to keep the code small.
struct Float16 { float v __attribute__((vector_size(64))); };
struct Int16 { int32_t v __attribute__((vector_size(64))); };
struct Bytes64 { uint8_t v __attribute__((vector_size(64))); };

SPECDEC_INLINE Float16 load(const float* p) { Float16 r; __builtin_memcpy(&r.v, p, 64); return r; }
SPECDEC_INLINE void store(float* p, Float16 a) { __builtin_memcpy(p, &a.v, 64); }
SPECDEC_INLINE Float16 all(float x) { return {x - (Float16{}).v}; }
SPECDEC_INLINE Float16 add(Float16 a, Float16 b) { return {a.v + b.v}; }
SPECDEC_INLINE Float16 sub(Float16 a, Float16 b) { return {a.v - b.v}; }
SPECDEC_INLINE Float16 mul(Float16 a, Float16 b) { return {a.v * b.v}; }
SPECDEC_INLINE Float16 div(Float16 a, Float16 b) { return {a.v / b.v}; }
SPECDEC_INLINE Float16 fma(Float16 a, Float16 b, Float16 c) { return {a.v * b.v + c.v}; }
SPECDEC_INLINE Float16 max(Float16 a, Float16 b) { return {a.v > b.v ? a.v : b.v}; }
SPECDEC_INLINE Float16 min(Float16 a, Float16 b) { return {a.v < b.v ? a.v : b.v}; }
SPECDEC_INLINE Float16 magnitude(Float16 a) { return {a.v < 0.0f ? -a.v : a.v}; }
SPECDEC_INLINE Float16 zero_below(Float16 a, Float16 x, float limit) { return {x.v >= limit ? a.v : (Float16{}).v}; }
SPECDEC_INLINE Float16 to_float(Int16 a) { return {__builtin_convertvector(a.v, decltype(Float16::v))}; }
SPECDEC_INLINE Int16 all_int(int32_t x) { return {x - (Int16{}).v}; }
SPECDEC_INLINE Int16 add(Int16 a, Int16 b) { return {a.v + b.v}; }
SPECDEC_INLINE Int16 sub(Int16 a, Int16 b) { return {a.v - b.v}; }
template <int n> SPECDEC_INLINE Int16 left(Int16 a) { return {a.v << n}; }
template <int n> SPECDEC_INLINE Int16 right(Int16 a) { return {a.v >> n}; }
SPECDEC_INLINE Int16 load_int(const uint32_t* p) { Int16 r; __builtin_memcpy(&r.v, p, 64); return r; }
SPECDEC_INLINE void store_int(uint32_t* p, Int16 a) { __builtin_memcpy(p, &a.v, 64); }
SPECDEC_INLINE Int16 bit_and(Int16 a, Int16 b) { return {a.v & b.v}; }
SPECDEC_INLINE Int16 bit_xor(Int16 a, Int16 b) { return {a.v ^ b.v}; }
SPECDEC_INLINE Int16 bits_of(Float16 a) { Int16 r; __builtin_memcpy(&r, &a, 64); return r; }
SPECDEC_INLINE void wide_product(Int16 a, Int16 b, Int16* high, Int16* low) {
  for (int i = 0; i < 16; i++) {
    uint64_t p = (uint64_t)(uint32_t)a.v[i] * (uint32_t)b.v[i];
    high->v[i] = (int32_t)(p >> 32);
    low->v[i] = (int32_t)p;
  }
}
SPECDEC_INLINE Bytes64 load_bytes(const uint8_t* p) { Bytes64 r; __builtin_memcpy(&r.v, p, 64); return r; }
SPECDEC_INLINE Bytes64 low_nibbles(Bytes64 a) { return {a.v & 15}; }
SPECDEC_INLINE Bytes64 high_nibbles(Bytes64 a) { return {a.v >> 4}; }
SPECDEC_INLINE Float16 times_power(Float16 a, Int16 n) {
  Int16 bits;
  __builtin_memcpy(&bits, &a, 64);
  bits.v += n.v << 23;
  __builtin_memcpy(&a, &bits, 64);
  return a;
}
static float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023, bits;
  if (exponent == 31) bits = sign | 0x7f800000 | (mantissa << 13);
  else if (exponent) bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  else {  // zero or subnormal: mantissa * 2^-24 is exact in float
    float value = (float)mantissa * 5.9604644775390625e-8f;
    return sign ? -value : value;
  }
  float out;
  __builtin_memcpy(&out, &bits, 4);
  return out;
}
static __attribute__((noinline)) Float16 load_half(const uint8_t* p) {
  uint16_t h[16];
  __builtin_memcpy(h, p, 32);
  Float16 r;
  for (int i = 0; i < 16; i++) r.v[i] = half_to_float(h[i]);
  return r;
}
static __attribute__((noinline)) Float16 load_bfloat(const uint8_t* p) {
  uint16_t high[16];
  __builtin_memcpy(high, p, 32);
  Int16 bits;
  for (int i = 0; i < 16; i++) bits.v[i] = (int32_t)((uint32_t)high[i] << 16);
  Float16 r;
  __builtin_memcpy(&r, &bits, 64);
  return r;
}
static __attribute__((noinline)) Float16 load_fp8(const uint8_t* p) {
  Float16 r;
  for (int i = 0; i < 16; i++) r.v[i] = half_to_float((uint16_t)((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7));
  return r;
}
static __attribute__((noinline)) Int16 to_int(Float16 a) {
  Int16 r;
  for (int i = 0; i < 16; i++) r.v[i] = (int32_t)__builtin_rintf(a.v[i]);
  return r;
}
static __attribute__((noinline)) void store_low_bytes(int8_t* p, Int16 a) { for (int i = 0; i < 16; i++) p[i] = (int8_t)a.v[i]; }
template <bool wide> static __attribute__((noinline)) Int16 dot4(Int16 acc, Bytes64 w, const int8_t* x4) {
  Int16 words;
  __builtin_memcpy(&words, &w, 64);
  acc.v += (words.v & 255) * x4[0] + (words.v >> 8 & 255) * x4[1];  // little-endian bytes
  acc.v += (words.v >> 16 & 255) * x4[2] + (words.v >> 24 & 255) * x4[3];
  return acc;
}
static __attribute__((noinline)) float sum(Float16 a) {
  float t[16];
  store(t, a);
  for (int n = 8; n; n /= 2) for (int i = 0; i < n; i++) t[i] += t[i + n];
  return t[0];
}
static __attribute__((noinline)) float largest(Float16 a) {
  float m = a.v[0];
  for (int i = 1; i < 16; i++) m = a.v[i] > m ? a.v[i] : m;
  return m;
}

#endif

#if !defined(SPECDEC_AVX512)
SPECDEC_INLINE Float16 load_n(const float* p, int n) {
  float t[16] = {0};
  for (int i = 0; i < n; i++) t[i] = p[i];
  return load(t);
}
SPECDEC_INLINE void store_n(float* p, Float16 a, int n) {
  float t[16];
  store(t, a);
  for (int i = 0; i < n; i++) p[i] = t[i];
}
SPECDEC_INLINE Float16 sums(const Float16 p[16]) {
  float t[16];
  for (int i = 0; i < 16; i++) t[i] = sum(p[i]);
  return load(t);
}
#endif

// e^x within 2 units in the last place on [-87.3, 88.7]; 0 below -87.3, saturated above 88.7.
SPECDEC_INLINE Float16 exponential(Float16 x) {
  Float16 bounded = min(max(x, all(-87.3f)), all(88.0f));
  Int16 n = to_int(mul(bounded, all(1.44269504f)));
  Float16 whole = to_float(n);
  Float16 r = fma(whole, all(-0.693145752f), bounded);  // ln 2 in two parts: the first exact in 17 bits
  r = fma(whole, all(-1.42860677e-6f), r);
  Float16 p = fma(all(1.9875691500e-4f), r, all(1.3981999507e-3f));  // Cephes expf
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), all(1.0f));
  return zero_below(times_power(p, n), x, -87.3f);
}
