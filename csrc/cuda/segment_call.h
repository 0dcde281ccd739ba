// What the decoder segment (segment.h) is told, how it divides a thread block, and the weights that it reads.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#include "ptx.h"
#include "ptx_hopper.h"
#else
#include "emulator.h"
#include "emulator_hopper.h"
#endif

namespace specdec::segment {

constexpr int TILE = 16;   // rows of a weight that are multiplied together
constexpr int HALF = 8;    // of them lie side by side in the weight
constexpr int TILES = 2;   // that share a window of tokens
constexpr int MAX_STAGES = 16;
constexpr int SUMS = 2;    // rooms for the warps' sums, by turns: a tile's are added up while the next tile is multiplied
constexpr int FINISHERS = 3;  // warps that add them up; with 16 that multiply and one that fetches, five a scheduler
constexpr int MAX_ROWS = 16;
constexpr int HEADER = 640;  // bytes of shared memory for barriers and small things, behind which lie scales
constexpr int SCALES = MAX_STAGES * TILE * 4;
constexpr int PHASES = 4;
enum Phase { OUT, GATE_UP, DOWN, QKV };

// Of a weight HALF rows of a chunk come with one instruction, piece by piece: the 16 byte part p of row r lies where p ^ r would, so that eight lanes read 16
// bytes each from banks of their own.
// A weight [rows, columns], rows without gaps. scale [rows] f32, null = 1. chunk: bytes of a row in a unit, a multiple of PIECE that divides
// a row. window: columns of the tokens that are in shared memory at a time, all of them, or, where the phase is DOWN, whole chunks.
// rows = 0: the phase is left out.
struct Matrix {
  const void* data;
  const float* scale;
  int rows, columns, chunk, window;
};

// How QKV's rows become queries, keys and values of heads of SIZE numbers: cos, sin [positions, size / 2] f32; positions, slots [M], slot -1 =
// no write; caches [slots, kv_heads, size] bf16. cos = null: not at all, `next` gets the rows as they are.
struct Rotary {
  const float *cos, *sin;
  const int64_t *positions, *slots;
  void *keys, *values;
  int heads, kv_heads, size;
};

// A norm's weights [H] bf16, the largest of them without its sign, and eps.
struct Norm {
  const void* weight;
  float peak, eps;
};

// What blocks tell each other, zero at first and only ever rising. Each on lines of its own.
struct Counters {
  unsigned long long barrier, to_line[15];  // blocks that came to the barriers between phases
  unsigned long long tickets[PHASES], to_next_line[12];  // tiles taken, by phase
};

// bf16 all of them: mixed [M, columns of OUT], residual, mid, last [M, H], next [M, rows of QKV, or of its queries]. inner [M, columns of DOWN]
// are DOWN's operands: for E4m3Rows f16 and times inner_grown, a power of two for which none can be too large; inner_shrunk undoes it.
// counters: of launches that never overlap, with a grid of one size. stages: units under way.
struct Call {
  const void *mixed, *residual;
  void *mid, *inner, *last, *next;
  Counters* counters;
  Map map[PHASES];  // set at the launch
  Matrix matrix[PHASES];
  Norm post_norm, next_norm;
  Rotary rotary;
  float inner_grown, inner_shrunk;
  int M, stages;
};

SPECDEC_BOTH constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }

// A weight's numbers as operands. BYTES: of one; PRODUCTS: in a step; X: bytes of tokens that a lane reads with its 16 of the weight;
// Number: what both operands are multiplied as.
struct Plain {
  static constexpr int BYTES = 2, X = 16, PRODUCTS = 2;
  static constexpr bool SCALES_TOKENS = false;
  using Number = Bf16;
  static SPECDEC_BOTH constexpr int token_pitch(int columns) { return round_up(2 * columns, 128) + 64; }
  static SPECDEC_DEVICE void left(uint32_t (&out)[4], const uint4& low, const uint4& high, int product) {
    out[0] = product ? low.z : low.x, out[1] = product ? high.z : high.x;
    out[2] = product ? low.w : low.y, out[3] = product ? high.w : high.y;
  }
};

// e4m3: the card widens two codes to f16 with one instruction, where bit tricks towards bf16 take four and a half (of another unit, and which
// is faster here has not been settled: bench/LOG.md). So tokens are f16 too, each row times a power of two that brings its largest number
// below 2^15: then nothing is rounded but what is 2^-29 of that.
struct E4m3Rows {
  static constexpr int BYTES = 1, X = 32, PRODUCTS = 4;
  static constexpr bool SCALES_TOKENS = true;
  using Number = F16;
  static SPECDEC_BOTH constexpr int token_pitch(int columns) { return round_up(2 * columns, 128) + 16; }
  static SPECDEC_DEVICE uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
  static SPECDEC_DEVICE void left(uint32_t (&out)[4], const uint4& low, const uint4& high, int product) {
    widen_codes(out[0], out[2], word(low, product));
    widen_codes(out[1], out[3], word(high, product));
  }
};

// Shared memory: barriers, sums, tokens, then the ring of units. Made by the host, so that it takes no registers.
struct Room {
  int sums, sum, tokens, ring, stage, bytes;
  template <class Weight>
  SPECDEC_BOTH Room(const Call& call, Weight, int token_tiles, int warps) {
    stage = 0;
    int widest = 0;
    for (int p = 0; p < PHASES; p++) {
      const Matrix& matrix = call.matrix[p];
      const int size = TILE * matrix.chunk, width = Weight::token_pitch(matrix.window) * (matrix.window < matrix.columns ? 2 : 1);
      stage = size > stage ? size : stage;
      if (matrix.rows != 0) widest = width > widest ? width : widest;
    }
    stage = round_up(stage, HALF * PIECE);
    sum = (warps + 1) * token_tiles * 512 + 128;  // of all warps, and beside them residuals and a tile's scales
    sums = HEADER + SCALES;
    tokens = sums + SUMS * sum;
    ring = round_up(tokens + call.M * widest, HALF * PIECE);
    bytes = ring + call.stages * stage;
  }
};

// A place in a ring and how often it has been round.
struct Cursor {
  int stage = 0, parity = 0;
  SPECDEC_DEVICE void advance(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

}  // namespace specdec::segment
