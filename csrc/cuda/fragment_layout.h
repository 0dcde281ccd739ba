// Index functions of the fragment linear layer (fragment_linear.h): where a weight lies after repacking, which unit of work belongs to
// which CTA, where partial sums go. All of them run on the host too, where tests/kernels/cuda checks them exhaustively.
//
// y[m][n] = sum over k of x[m][k] w[n][k]. The weight is the *left* operand of mma.m16n8k16, so one instruction multiplies 16 output
// channels by 8 tokens, and a batch of 1 wastes 7/8 of an instruction instead of 15/16.
//
//   strip   64 channels, what one warp computes: 4 channel tiles of 16
//   tile    4 strips = 256 channels, what one CTA computes: 4 warps side by side, times 2 for the two halves of every unit's columns
//   unit    tile × 128 columns, what one pipeline stage holds; units are numbered along K first, then tile by tile
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define SPECDEC_BOTH __host__ __device__
#else
#define SPECDEC_BOTH
#endif

namespace specdec::fragment {

constexpr int STRIP = 64;        // channels of a warp
constexpr int STRIPS = 4;        // strips of a tile
constexpr int TILE = STRIP * STRIPS;
constexpr int DEPTH = 128;       // columns of a unit
constexpr int HALVES = 2;        // warps of one strip, each takes half a unit's columns
constexpr int CHANNEL_TILES = STRIP / 16;
constexpr int WARPS = STRIPS * HALVES;
constexpr int THREADS = 32 * WARPS;
constexpr int MAX_TOKENS = 64;   // of one launch; more rows are several launches
constexpr int MAX_STAGES = 6;

SPECDEC_BOTH constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Token tiles (of 8) that kernels are compiled for; the fewest that hold `rows` rows, at most MAX_TOKENS.
SPECDEC_BOTH constexpr int token_tiles(int rows) {
  const int tiles = ceil_div(rows < MAX_TOKENS ? rows : MAX_TOKENS, 8);
  return tiles <= 1 ? 1 : tiles <= 4 ? tiles : tiles <= 6 ? 6 : 8;
}

// Number i of the four that a lane holds of an mma result: its column (a token) in the 16 × 8 tile. Its row is lane / 4 + 8 (i / 2).
SPECDEC_BOTH constexpr int sum_column(int lane, int i) { return 2 * (lane % 4) + i % 2; }

// ---- Which channel of its strip a row of a channel tile is. Rows may be assigned freely; this way the 8 sums that a lane holds for a
// token are 8 neighbouring channels, one 16-byte store.
SPECDEC_BOTH constexpr int channel_in_strip(int channel_tile, int row) { return 8 * (row % 8) + 2 * channel_tile + row / 8; }

// ---- Repacked codes: 16-byte vectors, each one lane's share of two mma steps (a pair, 32 columns) of one channel tile (fp8) or two
// (int4). Those of a (strip, block of DEPTH columns) are contiguous, those of a half of it too: `vectors` a lane, 32 apart.
SPECDEC_BOTH constexpr int64_t first_vector(int strip, int block, int blocks, int half, int vectors, int lane) {
  return ((int64_t(strip) * blocks + block) * HALVES + half) * vectors * 32 + lane;
}
constexpr int PAIRS = 2;  // of a half
constexpr int FP8_VECTORS = PAIRS * CHANNEL_TILES, INT4_VECTORS = PAIRS * CHANNEL_TILES / 2;  // of a lane, per unit

struct Place {  // of a code: vector, word 0..3, 16-bit half of the word 0..1, and where in that half
  int64_t vector;
  int word, half, index;
};

// Where (n, k) meets the mma: which of its strip, block and half, and who holds it in the left operand.
struct Meeting {
  int strip, block, half, pair, step, channel_tile, lane, reg, element;
  SPECDEC_BOTH constexpr Meeting(int n, int k)
      : strip(n / STRIP), block(k / DEPTH), half(k / 64 % 2), pair(k / 32 % 2), step(k / 16 % 2), channel_tile(n % 8 / 2),
        lane(n % STRIP / 8 * 4 + k % 8 / 2), reg(n % 2 + 2 * (k / 8 % 2)), element(k % 2) {}
};

// fp8: word 2s + h of a vector serves step s and rows 8h to 8h + 7 of the channel tile; of each half word the first code (index 0) is
// register h of the left operand, the second register h + 2.
SPECDEC_BOTH constexpr Place fp8_place(int n, int k, int K) {
  const Meeting m(n, k);
  const int64_t first = first_vector(m.strip, m.block, K / DEPTH, m.half, FP8_VECTORS, m.lane);
  return {first + (m.pair * CHANNEL_TILES + m.channel_tile) * 32, 2 * m.step + m.reg % 2, m.element, m.reg / 2};
}

// int4: word 2j + s of a vector serves step s of its channel tile j; nibble r of each half word is register r.
SPECDEC_BOTH constexpr Place int4_place(int n, int k, int K) {
  const Meeting m(n, k);
  const int64_t first = first_vector(m.strip, m.block, K / DEPTH, m.half, INT4_VECTORS, m.lane);
  return {first + (m.pair * 2 + m.channel_tile / 2) * 32, m.channel_tile % 2 * 2 + m.step, m.element, m.reg};
}

// ---- Scales and zero points of groups of columns (int4): a word per group and channel, the scale in its lower half, minus the number
// that `widen.h` makes of the zero point in its upper. A warp copies what its half of a unit needs, one or two groups of 64 channels.
constexpr int GROUP_VECTORS = STRIP * 4 / 16, MOST_GROUPS = 2;
SPECDEC_BOTH constexpr int groups_of_half(int group) { return group < 64 ? 64 / group : 1; }
SPECDEC_BOTH constexpr int first_group(int block, int half, int group) { return (block * DEPTH + half * 64) / group; }

// ---- Activations of a stage: rows of 128 columns (256 bytes) in 16 granules of 16 bytes. Granule g of row r lies at g ^ (r mod 8):
// the 8 rows that ldmatrix reads at one g then lie in 8 different groups of banks.
constexpr int GRANULES = DEPTH * 2 / 16;
SPECDEC_BOTH constexpr int x_granule(int row, int granule) { return row * GRANULES + (granule ^ (row & 7)); }

// The granule whose address lane `lane` hands to ldmatrix.x4: matrix lane / 8, row lane % 8 of token tile `tile`. The four matrices are
// the 32 columns of a pair of steps.
SPECDEC_BOTH constexpr int x_granule_of_lane(int lane, int token_tile, int half, int pair) {
  return x_granule(8 * token_tile + lane % 8, half * 8 + pair * 4 + lane / 8);
}

// ---- Shared memory, bytes
SPECDEC_BOTH constexpr int weight_bytes(int vectors) { return THREADS * vectors * 16; }
SPECDEC_BOTH constexpr int x_bytes(int token_tiles) { return 8 * token_tiles * GRANULES * 16; }
SPECDEC_BOTH constexpr int group_bytes(int vectors) { return vectors == INT4_VECTORS ? WARPS * MOST_GROUPS * GROUP_VECTORS * 16 : 0; }
SPECDEC_BOTH constexpr int stage_bytes(int vectors, int token_tiles) {
  return weight_bytes(vectors) + group_bytes(vectors) + x_bytes(token_tiles);
}
SPECDEC_BOTH constexpr int exchange_tiles(int token_tiles) { return token_tiles < 2 ? token_tiles : 2; }
SPECDEC_BOTH constexpr int exchange_bytes(int token_tiles) { return STRIPS * CHANNEL_TILES * exchange_tiles(token_tiles) * 32 * 16; }

// Stages that fit, at most MAX_STAGES. By Little's law 4.5 TB/s × about 1 µs of loaded latency is 4.5 MB in flight, 34 KB on each of 132
// SMs. A stage holds 32 KB of fp8, so three stages (two in flight while one is computed on) are the least that can saturate the memory;
// 227 KB give 6 stages to 8 tokens (160 KB in flight) and 4 to 64 (96 KB), which also covers the time a tile's end takes. int4 has half
// of that in flight, and twice the instructions per byte to hide it behind.
SPECDEC_BOTH constexpr int stages_that_fit(int limit, int vectors, int token_tiles) {
  int fit = (limit - exchange_bytes(token_tiles)) / stage_bytes(vectors, token_tiles);
  return fit < MAX_STAGES ? fit : MAX_STAGES;
}
SPECDEC_BOTH constexpr int shared_bytes(int stages, int vectors, int token_tiles) {
  return stages * stage_bytes(vectors, token_tiles) + exchange_bytes(token_tiles);
}

// Tokens of a launch: fewer than MAX_TOKENS where shared memory is too small for two stages of so many.
SPECDEC_BOTH constexpr int tokens_that_fit(int limit, int vectors) {
  int tiles = MAX_TOKENS / 8;
  while (tiles > 0 && stages_that_fit(limit, vectors, tiles) < 2) tiles /= 2;
  return 8 * tiles;
}

// ---- The partition: CTA c of `ctas` takes units [first_unit(c), first_unit(c + 1)), as even as integers allow, wherever tiles begin.
// It does not depend on the number of tokens, and so neither does the order in which a row's products are added.
struct Work {
  int N, K, ctas;
  SPECDEC_BOTH constexpr int blocks() const { return K / DEPTH; }
  SPECDEC_BOTH constexpr int strips() const { return N / STRIP; }
  SPECDEC_BOTH constexpr int tiles() const { return ceil_div(N, TILE); }
  SPECDEC_BOTH constexpr int units() const { return tiles() * blocks(); }
  SPECDEC_BOTH constexpr int first_unit(int cta) const { return int(int64_t(units()) * cta / ctas); }
  SPECDEC_BOTH constexpr int owner(int unit) const { return int((int64_t(unit + 1) * ctas - 1) / units()); }
  SPECDEC_BOTH constexpr int first_owner(int tile) const { return owner(tile * blocks()); }
  SPECDEC_BOTH constexpr int last_owner(int tile) const { return owner((tile + 1) * blocks() - 1); }
  SPECDEC_BOTH constexpr int owners(int tile) const { return last_owner(tile) - first_owner(tile) + 1; }
  // Partial sums of a tile that several CTAs share. A CTA shares at most two tiles, its first (slot 2c) and its last (2c + 1).
  SPECDEC_BOTH constexpr int slot(int cta, int tile) const { return 2 * cta + (first_unit(cta) / blocks() != tile); }
};

// Index (in vectors of four sums) inside the partial sums: slot, strip, channel tile, token tile, lane.
SPECDEC_BOTH constexpr int64_t partial_vector(int slot, int strip, int channel_tile, int token_tile, int token_tiles, int lane) {
  return (((int64_t(slot) * STRIPS + strip) * CHANNEL_TILES + channel_tile) * token_tiles + token_tile) * 32 + lane;
}
SPECDEC_BOTH constexpr int64_t partial_floats(int ctas, int token_tiles) { return partial_vector(2 * ctas, 0, 0, 0, token_tiles, 0) * 4; }

}  // namespace specdec::fragment
