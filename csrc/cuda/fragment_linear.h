// y = x wᵀ for up to 64 tokens and a weight of 8 or 4 bits: the weight is read once, at the speed of memory, and everything else should
// hide behind that.
//
// Two numbers. A weight of N × K fp8 codes is N K bytes over 4.5 TB/s; 64 tokens are 128 N K FLOP over 600 TFLOP/s (an estimate of what
// mma.sync can do on Hopper), 0.96 of the read time: the tensor cores keep up to the last token, if nothing else is in their way. What
// could be, per SM and clock (1.75 GHz), while 19 bytes of weight arrive:
//   shared memory, 128 bytes: each weight byte is written and read once and, with 64 channels a warp, 2 · tokens / 64 bytes of x are read
//   with it; 77 bytes in all for 64 tokens, 116 if a warp had 32 channels.
//   the second level cache: it hands out x once per tile of 256 channels, 2 · tokens / 256 of the weight's bytes, 1/8 at 16 tokens, 1/2 at
//   64. Wider tiles would halve that and double the partial sums, whose way to memory and back nothing hides.
//   instructions: a unit's weights arrive in 1700 clocks, 850 issue slots for each of 8 warps. Read off the SASS, an fp8 unit takes a warp
//   about 380 for 8 tokens, 450 for 32, 620 for 64. An int4 unit takes 550 of only 425 for 8 tokens: it is bound by widening, at 15
//   instructions per eight weights, and not by memory.
//
// Order of reduction. Per row and channel: the products of one mma step, steps by rising column inside half a unit, units by rising column
// inside a CTA's share of the tile, lower half plus upper half, shares by rising column. The shares follow from N, K and the number of CTAs
// (the card's SMs) alone. Hence the bits of a row depend on that row, the weight and the card, not on the other rows or their number.
//
// Shared tiles. The CTAs that share a tile write their sums to `partial` and, when all their units are done, count themselves in `arrived`;
// the last one adds them up in the order above and writes y. Not earlier: adding up inside the loop over units cost its registers, with
// spills from 48 tokens on, and a fence there waits for the copies in flight. What is slow now is that one CTA adds up a tile by itself.
// Nobody waits for anybody, so nothing can deadlock however the CTAs are scheduled. `arrived` is zero before and after each launch. One
// launch at a time may use an `arrived`.
#pragma once

#if defined(__CUDACC__)
#include "ptx.h"
#else
#include "emulator.h"
#endif

#include "widen.h"

namespace specdec::fragment {

// x [M,K] and y [M,N] of `Number`; rows of x start at multiples of 16 bytes. fp8: channel_scale [N]; block_scale [ceil(N/128), K/128] or
// null, none of it zero. int4: groups [K/group, N]. What belongs to the other format is null. arrived [tiles]. partial: see partial_floats.
struct Call {
  const void* x;
  const uint4* codes;
  const float* channel_scale;
  const float* block_scale;
  const uint4* groups;
  void* y;
  float* partial;
  int* arrived;
  int64_t x_stride;  // bytes from row to row
  int M, N, K, group, stages;
};

// fp8 e4m3 codes in the order of fp8_place.
template <class Number_>
struct Fp8 {
  using Number = Number_;
  static constexpr int VECTORS = FP8_VECTORS;
  static constexpr bool GROUPED = false;

  SPECDEC_DEVICE void take_groups(const uint4*, int) {}

  // The left operand of a channel tile in step `step` of the pair that `vector` holds.
  SPECDEC_DEVICE void left(uint32_t (&out)[4], const uint4& vector, int, int step) const {
    const uint32_t words[2] = {step ? vector.z : vector.x, step ? vector.w : vector.y};
#pragma unroll
    for (int h = 0; h < 2; h++) {
      out[h] = times_pair(E4m3<Number>::a(words[h]), E4m3<Number>::FACTORS, Number());
      out[h + 2] = times_pair(E4m3<Number>::b(words[h]), E4m3<Number>::FACTORS, Number());
    }
  }
};

// 4-bit codes in the order of int4_place, with scales and zero points by groups of columns.
template <class Number_>
struct Int4 {
  using Number = Number_;
  static constexpr int VECTORS = INT4_VECTORS;
  static constexpr bool GROUPED = true;

  uint32_t words[2 * CHANNEL_TILES];  // of the lane's channels (channel_in_strip) in the group at hand

  // From a group's 64 words.
  SPECDEC_DEVICE void take_groups(const uint4* from, int lane) {
#pragma unroll
    for (int i = 0; i < CHANNEL_TILES / 2; i++) {
      const uint4 four = from[lane / 4 * 2 + i];
      words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
  }

  // The left operand of channel tile `j` in step `step` of the pair that `vector` holds for it and a neighbour.
  SPECDEC_DEVICE void left(uint32_t (&out)[4], const uint4& vector, int j, int step) const {
    const uint32_t word = j % 2 == 0 ? (step ? vector.y : vector.x) : (step ? vector.w : vector.z);
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const uint32_t group = words[2 * j + r % 2];
      const uint32_t code = fused_pair(nibbles<Number>(word, r), Nibble<Number>::ONE, upper_twice(group), Number());
      out[r] = times_pair(code, lower_twice(group), Number());
    }
  }
};

// The sums of a warp: its strip's channel tiles by token tiles, each in the layout of the mma's result.
template <int TOKEN_TILES>
using Sums = float[CHANNEL_TILES][TOKEN_TILES][4];

// A unit on the way through the CTA's share: its tile and its block of columns.
struct Cursor {
  int unit, tile, block;
  const int blocks;
  SPECDEC_DEVICE Cursor(const Work& work, int unit)
      : unit(unit), tile(unit / work.blocks()), block(unit % work.blocks()), blocks(work.blocks()) {}
  SPECDEC_DEVICE void advance() {
    unit++;
    if (++block == blocks) block = 0, tile++;
  }
};

// One CTA's work. TOKEN_TILES · 8 >= call.M.
template <class Weight, int TOKEN_TILES>
struct Kernel {
  using Number = typename Weight::Number;
  static constexpr int VECTORS = Weight::VECTORS, STAGE = stage_bytes(VECTORS, TOKEN_TILES), GROUPS = weight_bytes(VECTORS);
  static constexpr int X = GROUPS + group_bytes(VECTORS), TILES_OF_VECTOR = PAIRS * CHANNEL_TILES / VECTORS;

  const Call& call;
  char* const shared;
  const int thread, cta;
  const Work work;
  const int lane = thread % 32, warp = thread / 32, strip = warp % STRIPS, half = warp / STRIPS;

  SPECDEC_DEVICE Kernel(const Call& call, char* shared, int thread, int cta, int ctas)
      : call(call), shared(shared), thread(thread), cta(cta), work{call.N, call.K, ctas} {}

  // Units in order, `stages - 1` of them in flight; at the end of every tile (or of the CTA's share of it) its sums are disposed of, and
  // at the very end the tiles that the CTA shares.
  SPECDEC_DEVICE void run() const {
    const int begin = work.first_unit(cta), end = work.first_unit(cta + 1), stages = call.stages;
    const uint64_t policy = evict_first();
    Cursor next(work, begin);  // the unit to load
#pragma unroll 1
    for (int stage = 0; stage < stages - 1; stage++) {
      if (next.unit < end) load(next, stage, policy);
      next.advance();
      commit_copies();
    }
    Cursor now(work, begin);  // the unit to multiply
    float ahead = block_scale(now);
    int stage = 0;
#pragma unroll 1
    while (now.unit < end) {
      const int tile = now.tile;
      float current = ahead;
      Sums<TOKEN_TILES> sums;
      clear(sums);
#pragma unroll 1
      do {
        wait_for_oldest(stages);
        block_barrier();  // this unit is there for all, and nobody reads the one before it any more
        if (next.unit < end) load(next, stage == 0 ? stages - 1 : stage - 1, policy);
        next.advance();
        commit_copies();
        if (!Weight::GROUPED && ahead != current) scale(sums, current / ahead);
        current = ahead;
        now.advance();
        if (now.unit < end) ahead = block_scale(now);
        multiply(sums, stage);
        if (++stage == stages) stage = 0;
      } while (now.tile == tile && now.unit < end);
      if (!Weight::GROUPED && call.block_scale != nullptr) scale(sums, current);
      dispose(sums, tile);
    }
    combine(begin / work.blocks(), (end - 1) / work.blocks());
  }

  // Exactly the copies of the oldest of stages - 1 groups must have landed.
  static SPECDEC_DEVICE void wait_for_oldest(int stages) {
    switch (stages) {
      case 2: return wait_copies<0>();
      case 3: return wait_copies<1>();
      case 4: return wait_copies<2>();
      case 5: return wait_copies<3>();
      default: return wait_copies<MAX_STAGES - 2>();
    }
  }

  // Copies a unit into stage `stage`: each thread the vectors that it will read itself, and all together the tokens' columns.
  SPECDEC_DEVICE void load(const Cursor& unit, int stage, uint64_t policy) const {
    stage = in_a_register(stage);
    const int own = unit.tile * STRIPS + strip;
    if (own < work.strips()) {
      const uint4* from = call.codes + first_vector(own, unit.block, unit.blocks, half, VECTORS, lane);
      uint4* to = const_cast<uint4*>(weights(stage));
#pragma unroll
      for (int i = 0; i < VECTORS; i++) copy_async(to + i * 32, from + i * 32, policy);
      if (Weight::GROUPED && lane < groups_of_half(call.group) * GROUP_VECTORS) {
        const int64_t word = (int64_t(first_group(unit.block, half, call.group)) + lane / GROUP_VECTORS) * call.N + own * STRIP;
        copy_async(const_cast<uint4*>(groups(stage)) + lane, call.groups + word / 4 + lane % GROUP_VECTORS, policy);
      }
    }
    constexpr int STEP = THREADS / GRANULES;  // rows that the CTA copies at a time; a multiple of 8, so the swizzle stays the same
    const int row = thread / GRANULES, granule = thread % GRANULES;
    uint4* to = const_cast<uint4*>(tokens(stage)) + x_granule(row, granule);
    const char* from = static_cast<const char*>(call.x) + row * call.x_stride + (unit.block * GRANULES + granule) * 16;
#pragma unroll
    for (int first = 0; first < 8 * TOKEN_TILES; first += STEP) {
      if (first + STEP > 8 * TOKEN_TILES && first + row >= 8 * TOKEN_TILES) break;
      const bool real = first + row < call.M;
      copy_async_or_zero(to + first * GRANULES, real ? from + first * call.x_stride : call.x, real);
    }
  }

  // This lane's vectors of a stage, 32 apart; this warp's groups; the stage's x.
  SPECDEC_DEVICE const uint4* weights(int stage) const {
    return reinterpret_cast<const uint4*>(shared + stage * STAGE) + warp * VECTORS * 32 + lane;
  }
  SPECDEC_DEVICE const uint4* groups(int stage) const {
    return reinterpret_cast<const uint4*>(shared + stage * STAGE + GROUPS) + warp * MOST_GROUPS * GROUP_VECTORS;
  }
  SPECDEC_DEVICE const uint4* tokens(int stage) const { return reinterpret_cast<const uint4*>(shared + stage * STAGE + X); }

  // The scale of this warp's block of 128 × 128 in `unit`. Sums are kept in units of the current block's scale: at a change they are
  // multiplied by old / new, which costs no registers, where sums of their own for each block would double them.
  SPECDEC_DEVICE float block_scale(const Cursor& unit) const {
    const int own = unit.tile * STRIPS + strip;
    if (Weight::GROUPED || call.block_scale == nullptr || own >= work.strips()) return 1.0f;
    return call.block_scale[int64_t(own / 2) * unit.blocks + unit.block];
  }

  // Adds this warp's half of the unit in `stage` to its sums.
  SPECDEC_DEVICE void multiply(Sums<TOKEN_TILES>& sums, int stage) const {
    const uint4 *codes = weights(stage), *x = tokens(stage);
    Weight weight;
    weight.take_groups(groups(stage), lane);
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
      if (Weight::GROUPED && pair > 0 && call.group < 64) weight.take_groups(groups(stage) + GROUP_VECTORS, lane);
      uint32_t right[TOKEN_TILES][4];
#pragma unroll
      for (int t = 0; t < TOKEN_TILES; t++) load_matrices(right[t], x + x_granule_of_lane(lane, t, half, pair));
#pragma unroll
      for (int v = 0; v < VECTORS / PAIRS; v++) {
        const uint4 vector = codes[(pair * (VECTORS / PAIRS) + v) * 32];
#pragma unroll
        for (int j = v * TILES_OF_VECTOR; j < (v + 1) * TILES_OF_VECTOR; j++)
#pragma unroll
          for (int step = 0; step < 2; step++) {
            uint32_t left[4];
            weight.left(left, vector, j, step);
#pragma unroll
            for (int t = 0; t < TOKEN_TILES; t++) multiply_add(sums[j][t], left, right[t][2 * step], right[t][2 * step + 1], Number());
          }
      }
    }
  }

  // The sums of tile `tile`, or of this CTA's share of it, are complete: they become y, or are left in `partial`.
  SPECDEC_DEVICE void dispose(Sums<TOKEN_TILES>& sums, int tile) const {
    join_halves(sums);
    const int own = tile * STRIPS + strip;
    if (half != 0 || own >= work.strips()) return;
    work.owners(tile) == 1 ? write<TOKEN_TILES>(sums, Factors(call, own, lane), own, 0, TOKEN_TILES) : leave(sums, tile);
  }

  // The lower half's warps add the upper half's sums to their own, two token tiles at a time: the stages stay in flight meanwhile.
  SPECDEC_DEVICE void join_halves(Sums<TOKEN_TILES>& sums) const {
    constexpr int STEP = exchange_tiles(TOKEN_TILES);
    float4* exchange = reinterpret_cast<float4*>(shared + call.stages * STAGE) + strip * CHANNEL_TILES * STEP * 32 + lane;
#pragma unroll
    for (int first = 0; first < TOKEN_TILES; first += STEP) {
      if (half == 1) {
#pragma unroll
        for (int j = 0; j < CHANNEL_TILES; j++)
#pragma unroll
          for (int t = first; t < first + STEP && t < TOKEN_TILES; t++) exchange[(j * STEP + t - first) * 32] = pack(sums[j][t]);
      }
      block_barrier();
      if (half == 0) {
#pragma unroll
        for (int j = 0; j < CHANNEL_TILES; j++)
#pragma unroll
          for (int t = first; t < first + STEP && t < TOKEN_TILES; t++) add(sums[j][t], exchange[(j * STEP + t - first) * 32]);
      }
      block_barrier();
    }
  }

  SPECDEC_DEVICE void leave(const Sums<TOKEN_TILES>& sums, int tile) const {
    float4* to = reinterpret_cast<float4*>(call.partial);
#pragma unroll
    for (int j = 0; j < CHANNEL_TILES; j++)
#pragma unroll
      for (int t = 0; t < TOKEN_TILES; t++) to[partial_vector(work.slot(cta, tile), strip, j, t, TOKEN_TILES, lane)] = pack(sums[j][t]);
  }

  // Publishes the shares that were left of the CTA's first and last tile; of each tile the CTA that comes last adds up all shares, by
  // rising column, and writes.
  SPECDEC_DEVICE void combine(int first, int last) const {
    int* flags = reinterpret_cast<int*>(shared + call.stages * STAGE);
    const int tile = thread == 0 ? first : last;
    const bool counts = thread == 0 || (thread == 1 && last != first);
    arrive(call.arrived + tile, counts ? work.owners(tile) : 0, flags, thread);
    if (flags[0] && first * STRIPS + strip < work.strips()) add_shares_apart(call, thread, work.ctas, first);
    if (flags[1] && last * STRIPS + strip < work.strips()) add_shares_apart(call, thread, work.ctas, last);
  }

  // A function of its own, so that its registers are not added to those of the loop over units.
  static SPECDEC_APART void add_shares_apart(const Call& call, int thread, int ctas, int tile) {
    Kernel(call, nullptr, thread, 0, ctas).add_shares(tile);
  }

  // The warps of both halves take half the token tiles each, TILES at a time. Several shares are on their way together: this is latency.
  SPECDEC_DEVICE void add_shares(int tile) const {
    const int first = work.first_owner(tile), last = work.last_owner(tile);
    const Factors factors(call, tile * STRIPS + strip, lane);  // on their way together with the shares
    constexpr int HALF = ceil_div(TOKEN_TILES, HALVES), TILES = HALF < 2 ? HALF : 2, AHEAD = 4 / TILES;
    const int stop = half == 0 ? HALF : TOKEN_TILES;
#pragma unroll 1
    for (int token_tile = half * HALF; token_tile < stop; token_tile += TILES) {
      Sums<TILES> sums;
#pragma unroll 1
      for (int begin = first; begin <= last; begin += AHEAD) {
        float4 shares[AHEAD][CHANNEL_TILES][TILES];
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
          if (begin + a <= last) load_share(shares[a], begin + a, tile, token_tile, stop);
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
          if (begin + a <= last) add_share(sums, shares[a], begin + a == first);
      }
      write<TILES>(sums, factors, tile * STRIPS + strip, token_tile, stop);
    }
  }

  // CTA c's sums of this strip, as many of the token tiles from `token_tile` on as come before `stop`.
  template <int TILES>
  SPECDEC_DEVICE void load_share(float4 (&share)[CHANNEL_TILES][TILES], int c, int tile, int token_tile, int stop) const {
    const float4* from = reinterpret_cast<const float4*>(call.partial);
#pragma unroll
    for (int j = 0; j < CHANNEL_TILES; j++)
#pragma unroll
      for (int t = 0; t < TILES; t++)
        if (token_tile + t < stop)
          share[j][t] = load_fresh(from + partial_vector(work.slot(c, tile), strip, j, token_tile + t, TOKEN_TILES, lane));
  }

  template <int TILES>
  static SPECDEC_DEVICE void add_share(Sums<TILES>& sums, const float4 (&share)[CHANNEL_TILES][TILES], bool first) {
#pragma unroll
    for (int j = 0; j < CHANNEL_TILES; j++)
#pragma unroll
      for (int t = 0; t < TILES; t++) first ? set(sums[j][t], share[j][t]) : add(sums[j][t], share[j][t]);
  }

  // Scales of the 8 neighbouring channels of strip `own` that a lane holds sums of.
  struct Factors {
    float at[2 * CHANNEL_TILES];
    SPECDEC_DEVICE Factors(const Call& call, int own, int lane) {
#pragma unroll
      for (int i = 0; i < 2 * CHANNEL_TILES; i++) at[i] = Weight::GROUPED ? 1.0f : call.channel_scale[first_channel(own, lane) + i];
    }
  };
  static SPECDEC_DEVICE int first_channel(int own, int lane) { return own * STRIP + channel_in_strip(0, lane / 4); }

  // Token tiles from `first` on, before `stop`, of strip `own` of the weight: sums times the channels' scales, rounded, 16 bytes a store.
  template <int TILES>
  SPECDEC_DEVICE void write(const Sums<TILES>& sums, const Factors& factors, int own, int first, int stop) const {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int token = 8 * (first + t) + sum_column(lane, e);
        if (first + t >= stop || token >= call.M) continue;
        uint32_t y[CHANNEL_TILES];
#pragma unroll
        for (int j = 0; j < CHANNEL_TILES; j++)
          y[j] = round_pair(times(sums[j][t][e], factors.at[2 * j]), times(sums[j][t][e + 2], factors.at[2 * j + 1]), Number());
        char* to = static_cast<char*>(call.y) + (int64_t(token) * call.N + first_channel(own, lane)) * 2;
        *reinterpret_cast<uint4*>(to) = make_uint4(y[0], y[1], y[2], y[3]);
      }
  }

  static SPECDEC_DEVICE void clear(Sums<TOKEN_TILES>& sums) {
    each(sums, [](float) { return 0.0f; });
  }
  static SPECDEC_DEVICE void scale(Sums<TOKEN_TILES>& sums, float factor) {
    each(sums, [factor](float sum) { return times(sum, factor); });
  }
  template <class Function>
  static SPECDEC_DEVICE void each(Sums<TOKEN_TILES>& sums, Function f) {
#pragma unroll
    for (int j = 0; j < CHANNEL_TILES; j++)
#pragma unroll
      for (int t = 0; t < TOKEN_TILES; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[j][t][i] = f(sums[j][t][i]);
  }

  static SPECDEC_DEVICE float4 pack(const float (&sum)[4]) { return make_float4(sum[0], sum[1], sum[2], sum[3]); }
  static SPECDEC_DEVICE void set(float (&sum)[4], const float4& v) { sum[0] = v.x, sum[1] = v.y, sum[2] = v.z, sum[3] = v.w; }
  static SPECDEC_DEVICE void add(float (&sum)[4], const float4& v) {
    sum[0] = plus(sum[0], v.x), sum[1] = plus(sum[1], v.y), sum[2] = plus(sum[2], v.z), sum[3] = plus(sum[3], v.w);
  }
};

}  // namespace specdec::fragment
