// y = x Wᵀ over 16-row tiles (layout: kernels/linear/tiles.py). Included once per instruction set.
//
// Block formats run on byte dot products. Each 32-column block of x becomes fixed point: x ≈ s * (65536 a + 256 b + c), three signed
// bytes a column, s = max|x| / 8355584. That keeps 24 bits, what float32 holds, so it is not activation quantisation in
// any sense that shows: logits of the default model move less than between two float32 libraries. Inside a block sums are exact
// integers; across blocks one fused multiply-add sequence in K order. Scales belong to a row and a block: rows never meet.

constexpr int kTile = 16;
constexpr int kRows = 4;        // rows of x per micro-kernel: 12 integer + 4 float accumulators + 8 weight registers
constexpr int kRowChunk = 32;   // rows of x whose digits stay in L2 while all tiles pass
constexpr float kLevels = 8355584.0f;  // 127 * 65536 + 127 * 256, so that rounding up cannot overflow the high digit

struct alignas(64) Digits {  // one row, one block
  int8_t digit[3][32];       // high, middle, low
  float scale;               // s
  float total;               // sum over the block of the fixed-point integers
  int32_t offset[3];         // -(zero point) * sum of each digit
  int32_t pad[3];
};
static_assert(sizeof(Digits) == 128, "two cache lines");

template <int kind> struct Format;
template <> struct Format<Q4_0> { static constexpr int bytes = 288, zero = 8; };
template <> struct Format<Q4_1> { static constexpr int bytes = 320, zero = 0; };
template <> struct Format<Q8_0> { static constexpr int bytes = 544, zero = 128; };

SPECDEC_INLINE void to_digits(const float* x, Digits* out, int zero) {
  Float16 part[2] = {load(x), load(x + 16)};
  float top = largest(max(magnitude(part[0]), magnitude(part[1])));
  bool finite = top < __builtin_inff() && sum(add(sub(part[0], part[0]), sub(part[1], part[1]))) == 0.0f;
  out->scale = finite ? top / kLevels : __builtin_nanf("");  // NaN or infinity in: NaN out, for this row only
  Float16 inverse = all(finite && top > 1e-30f ? kLevels / top : 0.0f);
  Int16 total[3] = {all_int(0), all_int(0), all_int(0)};
  for (int h = 0; h < 2; h++) {
    Int16 value = to_int(finite ? mul(part[h], inverse) : all(0.0f));
    Int16 low = right<24>(left<24>(value));
    Int16 rest = right<8>(sub(value, low));
    Int16 middle = right<24>(left<24>(rest));
    Int16 digit[3] = {right<8>(sub(rest, middle)), middle, low};
    for (int d = 0; d < 3; d++) {
      store_low_bytes(out->digit[d] + 16 * h, digit[d]);
      total[d] = add(total[d], digit[d]);
    }
  }
  int sums[3];
  for (int d = 0; d < 3; d++) {
    sums[d] = (int)sum(to_float(total[d]));  // at most 4096: exact
    out->offset[d] = -zero * sums[d];
  }
  out->total = __builtin_fmaf((float)sums[0], 65536.0f, (float)(sums[1] * 256 + sums[2]));
}

template <int kind> SPECDEC_INLINE void unpack(const uint8_t* block, Bytes64 w[8]) {
  if constexpr (kind == Q8_0) {
#pragma GCC unroll 8
    for (int v = 0; v < 8; v++) w[v] = load_bytes(block + 64 * v);
  } else {
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
      Bytes64 pair = load_bytes(block + 64 * v);
      w[2 * v] = low_nibbles(pair);
      w[2 * v + 1] = high_nibbles(pair);
    }
  }
}

// One tile times `rows` rows of x (stride: Digits per row). out: rows × N, `width` columns valid.
template <int kind, int rows>
static void block_tile(const Digits* x, int64_t stride, const uint8_t* tile, int64_t blocks, float* out, int64_t N, int width) {
  Float16 acc[rows];
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++) acc[r] = all(0.0f);
  for (int64_t b = 0; b < blocks; b++, tile += Format<kind>::bytes) {
    Bytes64 w[8];
    unpack<kind>(tile, w);
    const uint8_t* scales = tile + (kind == Q8_0 ? 512 : 256);
    Float16 d = load_half(scales);
    Int16 dot[rows][3];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
      for (int i = 0; i < 3; i++) dot[r][i] = all_int(Format<kind>::zero ? x[r * stride + b].offset[i] : 0);
#pragma GCC unroll 8
    for (int v = 0; v < 8; v++)
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int i = 0; i < 3; i++) dot[r][i] = dot4<kind == Q8_0>(dot[r][i], w[v], x[r * stride + b].digit[i] + 4 * v);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
      const Digits& xb = x[r * stride + b];
      Float16 value = fma(to_float(dot[r][0]), all(65536.0f), to_float(add(left<8>(dot[r][1]), dot[r][2])));
      value = mul(value, d);
      if constexpr (kind == Q4_1) value = fma(load_half(scales + 32), all(xb.total), value);
      acc[r] = fma(value, all(xb.scale), acc[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++) store_n(out + r * N, acc[r], width);
}

template <int kind> static void block_rows(const Digits* x, int64_t rows, int64_t stride, const uint8_t* tile, int64_t blocks, float* out, int64_t N, int width) {
  for (int64_t r = 0; r < rows; r += kRows) {
    const Digits* xr = x + r * stride;
    float* o = out + r * N;
    switch (rows - r) {
      case 1: block_tile<kind, 1>(xr, stride, tile, blocks, o, N, width); break;
      case 2: block_tile<kind, 2>(xr, stride, tile, blocks, o, N, width); break;
      case 3: block_tile<kind, 3>(xr, stride, tile, blocks, o, N, width); break;
      default: block_tile<kind, 4>(xr, stride, tile, blocks, o, N, width);
    }
  }
}

// Tiles of plain numbers, widened to float32 as they are loaded: partial sums of 64 columns, added in K order.
template <int kind> SPECDEC_INLINE Float16 numbers(const uint8_t* tile, int64_t k) {
  if constexpr (kind == F16) return load_half(tile + 32 * k);
  if constexpr (kind == BF16) return load_bfloat(tile + 32 * k);
  if constexpr (kind == F8) return load_fp8(tile + 16 * k);
  return load((const float*)(tile + 64 * k));
}

// What the numbers of a tile's rows are to be multiplied by: the scales behind them, without the 2^-8 of `load_fp8`.
SPECDEC_INLINE Float16 fp8_scales(const uint8_t* tile, int64_t K) { return mul(load((const float*)(tile + 16 * K)), all(256.0f)); }

template <int kind, int rows> static void dense_tile(const float* x, int64_t K, const uint8_t* tile, float* out, int64_t N, int width) {
  Float16 acc[rows];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) acc[r] = all(0.0f);
  for (int64_t start = 0; start < K; start += 64) {
    int64_t stop = start + 64 < K ? start + 64 : K;
    Float16 part[rows];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) part[r] = all(0.0f);
    for (int64_t k = start; k < stop; k++) {
      Float16 w = numbers<kind>(tile, k);
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) part[r] = fma(w, all(x[r * K + k]), part[r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) acc[r] = add(acc[r], part[r]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) {
    if constexpr (kind == F8) acc[r] = mul(acc[r], fp8_scales(tile, K));
    store_n(out + r * N, acc[r], width);
  }
}

template <int kind> static void dense_rows(const float* x, int64_t rows, int64_t K, const uint8_t* tile, float* out, int64_t N, int width) {
  int64_t r = 0;
  for (; r + 8 <= rows; r += 8) dense_tile<kind, 8>(x + r * K, K, tile, out + r * N, N, width);
  for (; r + 4 <= rows; r += 4) dense_tile<kind, 4>(x + r * K, K, tile, out + r * N, N, width);
  for (; r + 2 <= rows; r += 2) dense_tile<kind, 2>(x + r * K, K, tile, out + r * N, N, width);
  for (; r < rows; r++) dense_tile<kind, 1>(x + r * K, K, tile, out + r * N, N, width);
}

template <int kind> static void tile_rows(const LinearArgs& a, int64_t tile, int64_t row, int64_t rows) {
  int64_t left = a.N - tile * kTile;
  int width = left < kTile ? (int)left : kTile;
  float* out = a.out + row * a.stride + tile * kTile;
  if constexpr (!in_blocks(kind)) {
    dense_rows<kind>(a.x + row * a.K, rows, a.K, a.tiles + tile * tile_bytes(a.K, (WeightKind)kind), out, a.stride, width);
  } else {
    int64_t blocks = a.K / 32;
    const Digits* x = (const Digits*)a.scratch + row * blocks;
    block_rows<kind>(x, rows, blocks, a.tiles + tile * blocks * Format<kind>::bytes, blocks, out, a.stride, width);
  }
  if (!a.bias) return;
  for (int64_t r = 0; r < rows; r++)
    for (int i = 0; i < width; i++) out[r * a.stride + i] += a.bias[tile * kTile + i];
}

// Thread `id` of `count`: its run of tiles, for all rows.
template <int kind> static void tile_share(const LinearArgs& a, int id, int count) {
  int64_t tiles = (a.N + kTile - 1) / kTile;
  for (int64_t row = 0; row < a.M; row += kRowChunk) {
    int64_t rows = a.M - row < kRowChunk ? a.M - row : kRowChunk;
    for (int64_t t = tiles * id / count; t < tiles * (id + 1) / count; t++) tile_rows<kind>(a, t, row, rows);
  }
}

template <int kind> static void digit_rows(const LinearArgs& a, int64_t first, int64_t last) {
  if constexpr (in_blocks(kind)) {
    Digits* out = (Digits*)a.scratch;
    int64_t blocks = a.K / 32;
    for (int64_t b = first * blocks; b < last * blocks; b++) to_digits(a.x + b * 32, out + b, Format<kind>::zero);
  }
}

template <int kind> static void run_linear(const LinearArgs& a) {
  int threads = a.M * a.N * a.K < 65536 ? 1 : a.threads;
  bool ahead = a.M * a.K <= 4096 || threads == 1;  // cheaper than a barrier
  if (ahead) digit_rows<kind>(a, 0, a.M);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    int id = threads > 1 ? omp_get_thread_num() : 0, count = threads > 1 ? omp_get_num_threads() : 1;
    if (!ahead) {
      digit_rows<kind>(a, a.M * id / count, a.M * (id + 1) / count);
#pragma omp barrier
    }
    tile_share<kind>(a, id, count);
  }
}

// f<kind>() for a kind known at run time.
template <class F> static void with_kind(WeightKind kind, F f) {
  switch (kind) {
    case F32: return f.template operator()<F32>();
    case Q4_0: return f.template operator()<Q4_0>();
    case Q4_1: return f.template operator()<Q4_1>();
    case Q8_0: return f.template operator()<Q8_0>();
    case F16: return f.template operator()<F16>();
    case BF16: return f.template operator()<BF16>();
    case F8: return f.template operator()<F8>();
  }
}

static void linear(const LinearArgs& a) {
  with_kind(a.kind, [&]<int kind>() { run_linear<kind>(a); });
}

// Row `lane` of a tile, dequantised: d * q (+ m), rounded after each operation like the reference.
template <int kind> static void embed_row(const uint8_t* tile, int lane, int64_t K, float* out) {
  if constexpr (!in_blocks(kind)) {
    for (int64_t k = 0; k < K; k++) {
      float values[16];
      Float16 w = numbers<kind>(tile, k);
      if constexpr (kind == F8) w = mul(w, fp8_scales(tile, K));
      store(values, w);
      out[k] = values[lane];
    }
  } else {
    for (int64_t b = 0; b < K / 32; b++, tile += Format<kind>::bytes, out += 32) {
      float d[16], m[16] = {0};
      const uint8_t* scales = tile + (kind == Q8_0 ? 512 : 256);
      store(d, load_half(scales));
      if (kind == Q4_1) store(m, load_half(scales + 32));
      for (int k = 0; k < 32; k++) {
        int byte = kind == Q8_0 ? tile[64 * (k / 4) + 4 * lane + k % 4] : tile[64 * (k / 8) + 4 * lane + k % 4];
        int q = kind == Q8_0 ? byte : (k % 8 < 4 ? byte & 15 : byte >> 4);
        float value = (float)(q - Format<kind>::zero) * d[lane];
        out[k] = kind == Q4_1 ? value + m[lane] : value;
      }
    }
  }
}

static void embedding(const EmbeddingArgs& a) {
  int64_t bytes = tile_bytes(a.K, a.kind);
  for (int64_t t = 0; t < a.T; t++) {
    const uint8_t* tile = a.tiles + a.ids[t] / kTile * bytes;
    int lane = (int)(a.ids[t] % kTile);
    float* out = a.out + t * a.K;
    with_kind(a.kind, [&]<int kind>() { embed_row<kind>(tile, lane, a.K, out); });
  }
}
