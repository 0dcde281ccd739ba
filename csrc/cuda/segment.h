// What lies between two attentions of a decoder, for few rows, as one launch:
//
//   mid   = residual + out(mixed)                      phase OUT
//   inner = silu(gate) * up of gate_up(norm(mid))      phase GATE_UP
//   last  = mid + down(inner)                          phase DOWN
//   next  = qkv(norm(last)) of the layer behind        phase QKV (left out behind the last layer)
//
// and where it is told how, the rotation of those queries and keys by position, keys and values going into their cache.
//
// Two numbers. Weights of 8B FP8 are 218 MB a layer, 48 us at 4.5 TB/s; as launches of their own, the four products and what lies between
// take 85: each waits for the one before, then for its first weights, and at its end memory idles while sums are added up. Here one thread
// block a multiprocessor stays for all phases, and a warp of its own asks for weights in the order in which they are needed, as far ahead
// as shared memory reaches (some 130 KB, 4 us of memory's time). Weights depend on nothing, so it never waits for a phase to end; barriers
// between phases, activations on their way and sums cost no time as long as they are shorter than what is under way.
//
// A unit is 16 rows of a weight by one chunk of their columns, as they lie in the checkpoint: row by row. Warps divide its columns between
// them, 64 bytes a step; a lane's 16 bytes of a row are its share of the tensor core's left operand. Which columns a step of the product
// takes is free as long as both operands agree, so nothing is repacked. Tokens are the right operand, in shared memory in bf16.
//
// Order of reduction. Per row and feature: steps of a warp by rising column, then warps by number. Hence bits depend on the weight's shape
// and the number of warps alone, not on the rows.
//
// Needs all its thread blocks on the card at once: at most one a multiprocessor, and nobody else's that wait for these.
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

constexpr int TILE = 16;   // rows of a weight in a unit
constexpr int STEP = 64;   // bytes of a row that a warp multiplies at once
constexpr int TILES = 2;   // whose sums a CTA keeps at once
constexpr int MAX_STAGES = 16;
constexpr int SUMS = 2;    // rooms for the warps' sums, by turns: a group's are added up while the next group is multiplied
constexpr int PHASES = 4;
enum Phase { OUT, GATE_UP, DOWN, QKV };

// What the copy engine knows of a weight: chunks of 16 rows come with one instruction, where row by row would take sixteen of some 60 ns each.
struct alignas(64) Map {
  uint64_t words[16];
};

// A weight [rows, columns], rows without gaps. scale [rows] f32, null = 1. chunk: bytes of a row in a unit, a multiple of STEP that divides
// a row. window: columns of the tokens that are in shared memory at a time, all or whole chunks of them; all where the phase begins with a
// norm. rows = 0: the phase is left out.
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

// bf16 all of them: mixed [M, columns of OUT], residual, mid, last [M, H], inner [M, columns of DOWN], next [M, rows of QKV, or of its queries], norms [H].
// barrier: one counter for all launches of a grid of this size, only ever rising. stages: units under way. window: the widest.
struct Call {
  const void *mixed, *residual, *post_norm, *next_norm;
  void *mid, *inner, *last, *next;
  unsigned long long* barrier;
  Map map[PHASES];  // set at the launch
  Matrix matrix[PHASES];
  Rotary rotary;
  float post_eps, next_eps;
  int M, stages, window;
};

SPECDEC_BOTH constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }

// A weight's numbers as operands. BYTES: of one; PRODUCTS: in a step; X: bytes of tokens that a lane reads with its 16 of the weight.
struct Plain {
  static constexpr int BYTES = 2, X = 16, PRODUCTS = 2;
  static SPECDEC_BOTH constexpr int token_pitch(int columns) { return round_up(2 * columns, 128) + 64; }
  // Two words, four neighbouring columns of a token, as the products read them.
  static SPECDEC_DEVICE void order(uint32_t&, uint32_t&) {}
  static SPECDEC_DEVICE void left(uint32_t (&out)[4], const uint4& low, const uint4& high, int product) {
    out[0] = product ? low.z : low.x, out[1] = product ? high.z : high.x;
    out[2] = product ? low.w : low.y, out[3] = product ? high.w : high.y;
  }
};

// e4m3, two codes at a time: put at the low end of bf16's exponent, and 2^120 makes up for that (widen.h). A word's codes 1 and 3 come
// first, then 0 and 2, and so must the tokens' columns.
struct E4m3Rows {
  static constexpr int BYTES = 1, X = 32, PRODUCTS = 4;
  static SPECDEC_BOTH constexpr int token_pitch(int columns) { return round_up(2 * columns, 128) + 16; }
  static SPECDEC_DEVICE void order(uint32_t& low, uint32_t& high) {
    const uint32_t odd = upper_halves(low, high), even = lower_halves(low, high);
    low = odd, high = even;
  }
  static SPECDEC_DEVICE uint32_t widened(uint32_t word) {
    return times_pair((word & 0x80008000u) | (word >> 4 & 0x07f007f0u), E4m3<Bf16>::FACTORS, Bf16());
  }
  static SPECDEC_DEVICE uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
  static SPECDEC_DEVICE void left(uint32_t (&out)[4], const uint4& low, const uint4& high, int product) {
    const uint32_t a = word(low, product), b = word(high, product);
    out[0] = widened(a), out[1] = widened(b), out[2] = widened(a << 8), out[3] = widened(b << 8);
  }
};

// Shared memory: barriers, sums of all warps, tokens, then the ring of units.
struct Room {
  int sums, tokens, ring, stage, bytes;
  // Tokens take as many rows as there are: a lane whose token is none reads the last one, and nobody its sums.
  SPECDEC_BOTH Room(const Call& call, int token_pitch, int token_tiles, int warps) {
    stage = 0;
    for (int p = 0; p < PHASES; p++) {
      const int size = TILE * call.matrix[p].chunk;
      stage = size > stage ? size : stage;
    }
    stage = round_up(stage, 128);
    sums = 512;
    tokens = sums + SUMS * warps * TILES * token_tiles * 512;
    ring = tokens + round_up(call.M * token_pitch, 128);
    bytes = ring + call.stages * stage;
  }
};

// A place in the ring and how often it has been round.
struct Cursor {
  int stage = 0, parity = 0;
  SPECDEC_DEVICE void advance(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// One CTA's work. 8 * TOKEN_TILES >= call.M.
template <class Weight, int TOKEN_TILES, int WARPS>
struct Kernel {
  static constexpr int CONSUMERS = 32 * WARPS, THREADS = CONSUMERS + 32, ROWS = 8 * TOKEN_TILES;

  const Call& call;
  char* const shared;
  const int thread, cta, ctas;
  const int token_pitch = Weight::token_pitch(call.window);
  const Room room{call, token_pitch, TOKEN_TILES, WARPS};
  const int lane = thread % 32, warp = thread / 32, group = lane / 4, quad = lane % 4;

  SPECDEC_DEVICE Kernel(const Call& call, char* shared, int thread, int cta, int ctas)
      : call(call), shared(shared), thread(thread), cta(cta), ctas(ctas) {}

  SPECDEC_DEVICE void run() const {
    if (thread == 0) {
      for (int s = 0; s < call.stages; s++) init_barrier(full(s), 1), init_barrier(empty(s), WARPS);
      publish_barriers();
    }
    block_barrier();
    if (warp < WARPS) compute();
    else if (lane == 0) fetch();
  }

  // ---- Places

  SPECDEC_DEVICE uint64_t* full(int stage) const { return reinterpret_cast<uint64_t*>(shared) + stage; }
  SPECDEC_DEVICE uint64_t* empty(int stage) const { return reinterpret_cast<uint64_t*>(shared) + MAX_STAGES + stage; }
  // What goes with a sum: asked for before its group is multiplied, since it comes from memory.
  struct Beside {
    float scale[TILES], residual;
  };
  static constexpr int OUTPUTS = TOKEN_TILES * 128, OWN = (TILES * OUTPUTS + CONSUMERS - 1) / CONSUMERS;  // sums of a tile, results of a thread

  SPECDEC_DEVICE float* row_sums() const { return reinterpret_cast<float*>(shared + room.sums); }  // [ROWS][WARPS], before the warps' sums
  SPECDEC_DEVICE char* tokens() const { return shared + room.tokens; }
  SPECDEC_DEVICE char* unit(int stage) const { return shared + room.ring + stage * room.stage; }

  // ---- Division of work: tiles of a phase, or pairs of tiles whose rows belong together, in runs of neighbours

  SPECDEC_DEVICE bool rotates(int phase) const { return phase == QKV && call.rotary.cos != nullptr; }
  SPECDEC_DEVICE bool pairs(int phase) const { return phase == GATE_UP || rotates(phase); }
  SPECDEC_DEVICE int items(int phase) const { return call.matrix[phase].rows / (pairs(phase) ? 2 * TILE : TILE); }
  SPECDEC_DEVICE int first(int phase, int of) const { return int(int64_t(items(phase)) * of / ctas); }
  // Items whose sums are kept together, and tiles of a group that starts at `item`.
  SPECDEC_DEVICE int stride(int phase) const { return pairs(phase) ? TILES / 2 : TILES; }
  SPECDEC_DEVICE int tiles(int phase, int item, int end) const { return pairs(phase) || item + 1 < end ? TILES : 1; }
  SPECDEC_DEVICE int tile(int phase, int item, int t) const {
    if (phase == GATE_UP) return item + t * items(phase);
    if (!rotates(phase)) return item + t;
    const int half = call.rotary.size / (2 * TILE);  // tiles of half a head
    return item / half * 2 * half + item % half + t * half;
  }

  // ---- The thread that fetches

  SPECDEC_DEVICE void fetch() const {
    const uint64_t policy = evict_first();
    Cursor cursor;
#pragma unroll 1
    for (int phase = 0; phase < PHASES; phase++) {
      const Matrix& matrix = call.matrix[phase];
      const int end = first(phase, cta + 1), row = matrix.columns * Weight::BYTES;
#pragma unroll 1
      for (int item = first(phase, cta); item < end; item += stride(phase)) {
        const int count = tiles(phase, item, end);
#pragma unroll 1
        for (int start = 0; start < row; start += matrix.chunk)
#pragma unroll 1
          for (int t = 0; t < count; t++) {
            wait_barrier(empty(cursor.stage), cursor.parity ^ 1);
            expect_bytes(full(cursor.stage), TILE * matrix.chunk);
            const Box box{matrix.data, row, start, tile(phase, item, t) * TILE, matrix.chunk, TILE};
            copy_box(unit(cursor.stage), call.map[phase].words, box, full(cursor.stage), policy);
            cursor.advance(call.stages);
          }
      }
    }
  }

  // ---- The warps that compute

  SPECDEC_DEVICE void compute() const {
    Cursor cursor;
    prefetch(call.post_norm, call.matrix[GATE_UP].columns);
    if (call.matrix[QKV].rows != 0) prefetch(call.next_norm, call.matrix[QKV].columns);
    wait_for_launches();
    phase<OUT>(cursor, call.mixed);
    grid_barrier();
    phase<GATE_UP>(cursor, call.mid);
    grid_barrier();
    phase<DOWN>(cursor, call.inner);
    if (call.matrix[QKV].rows == 0) return;
    grid_barrier();
    release_launches();
    phase<QKV>(cursor, call.last);
  }

  // A norm's weights, on their way from memory before they are needed.
  SPECDEC_DEVICE void prefetch(const void* weights, int columns) const {
    if (thread < columns / 64) send_for(static_cast<const char*>(weights) + 128 * thread);
  }

  SPECDEC_DEVICE void grid_barrier() const {
    named_barrier(cta, CONSUMERS);
    if (thread == 0) grid_arrive_and_wait(call.barrier, ctas);
    named_barrier(cta, CONSUMERS);
  }

  template <int PHASE>
  SPECDEC_DEVICE void phase(Cursor& cursor, const void* input) const {
    const Matrix& matrix = call.matrix[PHASE];
    const int begin = first(PHASE, cta), end = first(PHASE, cta + 1), row = matrix.columns * Weight::BYTES;
    const int window = matrix.window;
    int room_of_sums = 0;
#pragma unroll 1
    for (int item = begin; item < end; item += stride(PHASE)) {
      const int count = tiles(PHASE, item, end);
      float sums[TILES][TOKEN_TILES][4];
      clear(sums);
      Beside beside[OWN];
      look_beside<PHASE>(beside, item, count);
      int loaded = item == begin || window < matrix.columns ? 0 : matrix.columns;  // columns up to here are there
#pragma unroll 1
      for (int start = 0; start < row; start += matrix.chunk) {
        const int column = start / Weight::BYTES;
        if (column == loaded) load_tokens<PHASE>(input, column, window), loaded += window;
        const int offset = column % window;
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          if (t == count) break;
          wait_barrier(full(cursor.stage), cursor.parity);
          multiply(sums[t], unit(cursor.stage), matrix.chunk, offset);
          warp_barrier();
          if (lane == 0) arrive_barrier(empty(cursor.stage));
          cursor.advance(call.stages);
        }
      }
      finish<PHASE>(sums, beside, item, count, room_of_sums);
      room_of_sums ^= 1;
    }
  }

  static SPECDEC_DEVICE void clear(float (&sums)[TILES][TOKEN_TILES][4]) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[t][n][i] = 0.0f;
  }

  // Adds this warp's steps of a unit; tokens' columns of its chunk begin at `offset`.
  SPECDEC_DEVICE void multiply(float (&sums)[TOKEN_TILES][4], const char* codes, int chunk, int offset) const {
    const char* own = codes + group * chunk + 16 * quad;
    const char* x[TOKEN_TILES];
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) {
      const int token = 8 * n + group;
      x[n] = tokens() + (token < call.M ? token : call.M - 1) * token_pitch + 2 * offset + Weight::X * quad;
    }
    const int eight = 8 * chunk;
#pragma unroll 2
    for (int step = warp; step < chunk / STEP; step += WARPS) {
      const uint4 low = *reinterpret_cast<const uint4*>(own + step * STEP);
      const uint4 high = *reinterpret_cast<const uint4*>(own + eight + step * STEP);
      uint4 right[TOKEN_TILES][Weight::X / 16];
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
        for (int i = 0; i < Weight::X / 16; i++)
          right[n][i] = *reinterpret_cast<const uint4*>(x[n] + step * 4 * Weight::X + 16 * i);
#pragma unroll
      for (int p = 0; p < Weight::PRODUCTS; p++) {
        uint32_t left[4];
        Weight::left(left, low, high, p);
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
          const uint4& r = right[n][p / 2];
          multiply_add(sums[n], left, p % 2 ? r.z : r.x, p % 2 ? r.w : r.y, Bf16());
        }
      }
    }
  }

  // ---- Tokens into shared memory

  template <int PHASE>
  SPECDEC_DEVICE void load_tokens(const void* input, int column, int window) const {
    const int columns = call.matrix[PHASE].columns, vectors = (columns - column < window ? columns - column : window) / 8;
    named_barrier(cta, CONSUMERS);  // nobody reads the columns before any more
    if (PHASE == GATE_UP || PHASE == QKV) {
      load_normed(input, PHASE == QKV ? call.next_norm : call.post_norm, PHASE == QKV ? call.next_eps : call.post_eps, columns);
    } else {
      const uint4* from = static_cast<const uint4*>(input) + column / 8;
#pragma unroll 1
      for (Share share(call.M, warp, lane); share.row < call.M; share.next())
        for (int v = share.begin; v < vectors; v += HELD * share.apart) {
          uint4 held[HELD];
          hold(held, from + int64_t(share.row) * (columns / 8), v, share.apart, vectors);
#pragma unroll
          for (int i = 0; i < HELD; i++)
            if (v + i * share.apart < vectors) put(share.row, v + i * share.apart, held[i]);
        }
    }
    named_barrier(cta, CONSUMERS);
  }

  SPECDEC_DEVICE char* place(int row, int vector) const { return tokens() + row * token_pitch + 16 * vector; }

  SPECDEC_DEVICE void put(int row, int vector, uint4 value) const {
    Weight::order(value.x, value.y), Weight::order(value.z, value.w);
    *reinterpret_cast<uint4*>(place(row, vector)) = value;
  }

  // A warp's part of the tokens' rows: as many warps a row as there are, in vectors of 8 numbers. Loads go out together, HELD at a time,
  // because a row comes from the second level cache, which answers late.
  static constexpr int HELD = 4;
  struct Share {
    int row, begin, apart, rows;
    SPECDEC_DEVICE Share(int rows_, int warp, int lane) {
      int together = 1;
      while (2 * together * rows_ <= WARPS) together *= 2;
      row = warp / together, begin = warp % together * 32 + lane, apart = 32 * together, rows = WARPS / together;
    }
    SPECDEC_DEVICE void next() { row += rows; }
  };
  static SPECDEC_DEVICE void hold(uint4 (&held)[HELD], const uint4* row, int v, int apart, int vectors) {
#pragma unroll
    for (int i = 0; i < HELD; i++)
      if (v + i * apart < vectors) held[i] = load_fresh(row + v + i * apart);
  }

  // weight · x / √(mean(x²) + eps), rounded after the quotient and after the product. Numbers wait where they will be for the squares of all.
  SPECDEC_DEVICE void load_normed(const void* input, const void* weight, float eps, int columns) const {
    const uint4* w = static_cast<const uint4*>(weight);
    const int vectors = columns / 8;
    float* partial = row_sums();
#pragma unroll 1
    for (Share share(call.M, warp, lane); share.row < call.M; share.next()) {
      float squares = 0.0f;
#pragma unroll 1
      for (int v = share.begin; v < vectors; v += HELD * share.apart) {
        uint4 held[HELD];
        hold(held, static_cast<const uint4*>(input) + int64_t(share.row) * vectors, v, share.apart, vectors);
#pragma unroll
        for (int i = 0; i < HELD; i++)
          if (v + i * share.apart < vectors) {
            squares += squared(held[i]);
            *reinterpret_cast<uint4*>(place(share.row, v + i * share.apart)) = held[i];
          }
      }
      squares = warp_sum(squares);
      if (lane == 0) partial[share.row * WARPS + warp % (share.apart / 32)] = squares;
    }
    named_barrier(cta, CONSUMERS);
#pragma unroll 1
    for (Share share(call.M, warp, lane); share.row < call.M; share.next()) {
      float total = 0.0f;
      for (int i = 0; i < share.apart / 32; i++) total += partial[share.row * WARPS + i];
      const float factor = inverse_root(total / float(columns) + eps);
#pragma unroll 4
      for (int v = share.begin; v < vectors; v += share.apart) {
        const uint4 a = *reinterpret_cast<const uint4*>(place(share.row, v)), b = w[v];
        put(share.row, v, {normed(a.x, b.x, factor), normed(a.y, b.y, factor), normed(a.z, b.z, factor), normed(a.w, b.w, factor)});
      }
    }
  }

  static SPECDEC_DEVICE float low(uint32_t pair) { return bits_float(pair << 16); }
  static SPECDEC_DEVICE float high(uint32_t pair) { return bits_float(pair & 0xffff0000u); }
  static SPECDEC_DEVICE float squared(const uint4& v) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) sum += low(words[i]) * low(words[i]) + high(words[i]) * high(words[i]);
    return sum;
  }
  static SPECDEC_DEVICE uint32_t normed(uint32_t x, uint32_t weight, float factor) {
    const uint32_t scaled = round_pair(low(x) * factor, high(x) * factor, Bf16());
    return round_pair(low(scaled) * low(weight), high(scaled) * high(weight), Bf16());
  }

  // ---- Sums to results

  // A result of this thread: sum `sum` of tile `tile` of a group, where `there`.
  struct Result {
    int tile, sum;
    bool there;
    SPECDEC_DEVICE Result(int index, int count) : tile(index / OUTPUTS), sum(index % OUTPUTS), there(index < count * OUTPUTS) {}
    // Of the tile, the row, and the token, as the tensor core lays sums out.
    SPECDEC_DEVICE int feature() const { return sum % 128 / 16 + sum / 2 % 2 * 8; }
    SPECDEC_DEVICE int token() const { return sum / 128 * 8 + sum / 4 % 4 * 2 + sum % 2; }
  };
  // The j-th result of a thread in a group of `count` tiles, which in pairs give one result together.
  SPECDEC_DEVICE Result result(int phase, int j, int count) const { return Result(thread + j * CONSUMERS, pairs(phase) ? 1 : count); }
  SPECDEC_DEVICE int row_of(int phase, int item, int t, const Result& one) const { return tile(phase, item, t) * TILE + one.feature(); }

  template <int PHASE>
  SPECDEC_DEVICE void look_beside(Beside (&beside)[OWN], int item, int count) const {
    const float* scale = call.matrix[PHASE].scale;
#pragma unroll
    for (int j = 0; j < OWN; j++) {
      const Result one = result(PHASE, j, count);
      if (!one.there || one.token() >= call.M) continue;
      const bool both = pairs(PHASE);
      beside[j].scale[0] = scale == nullptr ? 1.0f : scale[row_of(PHASE, item, one.tile, one)];
      if (both) beside[j].scale[1] = scale == nullptr ? 1.0f : scale[row_of(PHASE, item, 1, one)];
      if (PHASE == OUT || PHASE == DOWN) {
        const uint16_t* stream = static_cast<const uint16_t*>(PHASE == OUT ? call.residual : call.mid);
        const int64_t place = int64_t(one.token()) * call.matrix[PHASE].rows + row_of(PHASE, item, one.tile, one);
        beside[j].residual = bits_float(uint32_t(load_fresh(stream + place)) << 16);
      }
    }
  }

  template <int PHASE>
  SPECDEC_DEVICE void finish(
      const float (&sums)[TILES][TOKEN_TILES][4], const Beside (&beside)[OWN], int item, int count, int room_of_sums) const {
    float* all = row_sums() + room_of_sums * WARPS * TILES * OUTPUTS;  // [tile][token tile][warp][lane][4]
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; n++)
        *reinterpret_cast<float4*>(all + ((t * TOKEN_TILES + n) * WARPS + warp) * 128 + 4 * lane) =
            make_float4(sums[t][n][0], sums[t][n][1], sums[t][n][2], sums[t][n][3]);
    named_barrier(cta, CONSUMERS);
#pragma unroll
    for (int j = 0; j < OWN; j++) {
      const Result one = result(PHASE, j, count);
      if (!one.there || one.token() >= call.M) continue;
      const float value = rounded(total(all, one.tile, one.sum) * beside[j].scale[0]);
      if (pairs(PHASE)) {
        const float other = rounded(total(all, 1, one.sum) * beside[j].scale[1]);
        PHASE == GATE_UP ? write_activation(one, item, value, other) : write_rotated(one, item, value, other);
      } else {
        write<PHASE>(one, tile(PHASE, item, one.tile), value, beside[j].residual);
      }
    }
  }

  // Sum `i` of tile `t` of the group over all warps.
  static SPECDEC_DEVICE float total(const float* all, int t, int i) {
    const float* from = all + (t * TOKEN_TILES + i / 128) * WARPS * 128 + i % 128;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += from[w * 128];
    return sum;
  }

  static SPECDEC_DEVICE float rounded(float value) { return low(round_pair(value, 0.0f, Bf16())); }
  static SPECDEC_DEVICE void store(void* to, int64_t place, float value) {
    static_cast<uint16_t*>(to)[place] = uint16_t(round_pair(value, 0.0f, Bf16()));
  }

  SPECDEC_DEVICE void write_activation(const Result& one, int item, float gate, float up) const {
    const int inner = call.matrix[GATE_UP].rows / 2;
    store(call.inner, int64_t(one.token()) * inner + item * TILE + one.feature(), gate / (1.0f + exponential(-gate)) * up);
  }

  // A number of the first half of a head, and the one that turns with it in the second.
  SPECDEC_DEVICE void write_rotated(const Result& one, int item, float a, float b) const {
    const Rotary& rotary = call.rotary;
    const int half = rotary.size / 2, head = item / (half / TILE), place = item % (half / TILE) * TILE + one.feature(), who = one.token();
    const int keys = head - rotary.heads, values = keys - rotary.kv_heads;
    const int64_t slot = keys < 0 ? 0 : rotary.slots[who];
    if (slot < 0) return;
    void* const to = keys < 0 ? call.next : values < 0 ? rotary.keys : rotary.values;
    const int64_t first = keys < 0 ? int64_t(who) * rotary.heads + head : slot * rotary.kv_heads + (values < 0 ? keys : values);
    float c = 1.0f, s = 0.0f;
    if (values < 0) c = rotary.cos[rotary.positions[who] * half + place], s = rotary.sin[rotary.positions[who] * half + place];
    store(to, first * rotary.size + place, a * c - b * s);
    store(to, first * rotary.size + place + half, b * c + a * s);
  }

  template <int PHASE>
  SPECDEC_DEVICE void write(const Result& one, int tile, float value, float residual) const {
    const int64_t place = int64_t(one.token()) * call.matrix[PHASE].rows + tile * TILE + one.feature();
    if (PHASE == QKV) store(call.next, place, value);
    else store(PHASE == OUT ? call.mid : call.last, place, value + residual);
  }
};

}  // namespace specdec::segment
