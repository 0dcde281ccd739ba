// y = x wᵀ with both operands e4m3, for up to 128 rows of x: the weight is read once, at the speed of memory (sm_90a).
//
// Every block has rows of the weight of its own, as many as make the blocks' work equal (64 for 8192 rows on 132 multiprocessors, where 128 blocks
// run), and all columns. So there are no partial sums of different blocks, and nothing to do at the end but to write. What it costs: every
// block reads all of x out of the second level cache, rows / WIDTH bytes for each byte of weight. Hence blocks come in clusters that fetch x
// together, each a share of the rows for all of them.
//
// One warp fetches, WARPS of a warpgroup for each 64 rows of x multiply. A unit, a stage of the ring, is PIECES pieces of 128 columns, of
// the block's rows of w and of all rows of x. The tensor cores add up 128 columns, with fewer bits than float32 has; those sums are carried on
// in float32, columns in order. Bits of a row depend on the row and the weight alone, whatever WIDTH, PIECES, the cluster and the other rows.
//
// Weights do not wait for the launch before: the ring is filled with them while it drains.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#include "ptx_warpgroup.h"
#else
#include "emulator_warpgroup.h"
#endif

namespace specdec::e4m3 {

constexpr int MAX_STAGES = 32;
constexpr int MAX_CLUSTER = 8;
constexpr int HEADER = 1024;  // bytes of shared memory for barriers
constexpr int GROUP = 64;     // rows of x that a warpgroup multiplies

// x [M, K], w [N, K] e4m3, y [M, N] bf16, dense; x_scale [M] f32, w_scale f32 [N], or [1] where `channels` is 0. K a multiple of 128, N of 8.
// share: rows of x that a block fetches for its cluster, a multiple of 8; those of all its blocks are M or more and at most the kernel's.
// Blocks of a launch: a multiple of the cluster's.
struct Call {
  const void *x, *w;
  const float *x_scale, *w_scale;
  void* y;
  Map x_map, w_map;  // set at the launch
  int M, N, K, channels, share, stages;
};

// A place in a ring and how often it has been round.
struct Cursor {
  int stage = 0, parity = 0;
  SPECDEC_DEVICE void advance(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

template <int ROWS, int WIDTH, int PIECES>
class Kernel {
 public:
  static constexpr int GROUPS = ROWS / GROUP, WARPS = 4 * GROUPS, THREADS = 32 * (WARPS + 1);
  static constexpr int TOKENS = PIECES * ROWS * PIECE, WEIGHTS = PIECES * WIDTH * PIECE, STAGE = TOKENS + WEIGHTS;  // bytes
  static constexpr int DEPTH = PIECES * PIECE;

  SPECDEC_DEVICE Kernel(const Call& call, char* shared, int thread, int block, int blocks, int rank, int cluster)
      : call(call), shared(shared), thread(thread), block(block), blocks(blocks), rank(rank), cluster(cluster),
        units((call.K + DEPTH - 1) / DEPTH), tiles((call.N + WIDTH - 1) / WIDTH), rounds((tiles + blocks - 1) / blocks) {}

  SPECDEC_DEVICE void run() {
    if (thread == 0) {
      for (int i = 0; i < call.stages; i++) {
        init_barrier(full(i), 1);
        init_barrier(empty(i), cluster * WARPS);
      }
      publish_barriers();
    }
    block_barrier();
    cluster_barrier();
    release_launches();
    if (thread / 32 < WARPS) {
      wait_for_launches();
      multiply();
    } else if (thread % 32 == 0) {
      fetch();
    }
    warp_barrier();
    cluster_barrier();  // no block leaves while another one still writes to it
  }

 private:
  // ---- One thread fetches

  SPECDEC_DEVICE void fetch() {
    const int all = rounds * units, ahead = call.stages < all ? call.stages : all;
    const uint64_t policy = evict_first();
    for (int unit = 0; unit < ahead; unit++) fetch_weights(unit, unit, policy);
    wait_for_launches();
    for (int unit = 0; unit < ahead; unit++) fetch_tokens(unit, unit);
    Cursor cursor;
    for (int unit = ahead; unit < all; unit++) {
      wait_barrier(empty(cursor.stage), cursor.parity);
      fetch_weights(unit, cursor.stage, policy);
      fetch_tokens(unit, cursor.stage);
      cursor.advance(call.stages);
    }
  }

  SPECDEC_DEVICE void fetch_weights(int unit, int stage, uint64_t policy) {
    expect_bytes(full(stage), WEIGHTS + PIECES * PIECE * call.share * cluster);
    const int row = (block + unit / units * blocks) * WIDTH, start = unit % units * DEPTH;
    copy_box(weights(stage), call.w_map.words, Box{call.w, call.K, call.N, start, row, DEPTH, WIDTH}, full(stage), policy);
  }

  // This block's share of the rows, for all of the cluster.
  SPECDEC_DEVICE void fetch_tokens(int unit, int stage) {
    const int row = rank * call.share, start = unit % units * DEPTH;
    for (int piece = 0; piece < PIECES; piece++) {
      const Box box{call.x, call.K, call.M, start + piece * PIECE, row, PIECE, call.share};
      copy_box_to_all(tokens(stage) + (piece * ROWS + row) * PIECE, call.x_map.words, box, full(stage), cluster);
    }
  }

  // ---- The others multiply

  SPECDEC_DEVICE void multiply() {
    const int first = thread / 128 * GROUP * PIECE;  // byte of the group's rows in a piece
    Cursor cursor;
    for (int round = 0; round < rounds; round++) {
      float sums[WIDTH / 2] = {};
      for (int unit = 0; unit < units; unit++) {
        float products[PIECES][WIDTH / 2];
        wait_barrier(full(cursor.stage), cursor.parity);
        begin_products();
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++)
#pragma unroll
          for (int start = 0; start < PIECE; start += 32)
            multiply_e4m3(products[piece], tokens(cursor.stage) + piece * ROWS * PIECE + first + start,
                          weights(cursor.stage) + piece * WIDTH * PIECE + start, start > 0, thread % 128);
        commit_products();
        wait_products();
        if (thread % 32 < cluster) arrive_barrier(empty(cursor.stage), thread % 32);  // this warp, at the fetcher of each block
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
          use_sums(products[piece]);
#pragma unroll
          for (int i = 0; i < WIDTH / 2; i++) sums[i] = plus(sums[i], products[piece][i]);
        }
        cursor.advance(call.stages);
      }
      write(sums, (block + round * blocks) * WIDTH);
    }
  }

  SPECDEC_DEVICE void write(const float (&sums)[WIDTH / 2], int first) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int m = thread / 32 * 16 + thread % 32 / 4 + 8 * half;
      if (m >= call.M) continue;
      const float x_scale = call.x_scale[m];
      uint32_t* const y = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(call.y) + int64_t(m) * call.N);
#pragma unroll
      for (int j = 0; j < WIDTH / 8; j++) {
        const int n = first + 8 * j + thread % 4 * 2;
        if (n >= call.N) continue;
        const float* const w_scale = call.w_scale + (call.channels ? n : 0);
        const float low = times(times(sums[4 * j + 2 * half], x_scale), w_scale[0]);
        const float high = times(times(sums[4 * j + 2 * half + 1], x_scale), w_scale[call.channels]);
        y[n / 2] = round_pair(low, high, Bf16());
      }
    }
  }

  // ---- Where things are

  SPECDEC_DEVICE uint64_t* full(int stage) { return reinterpret_cast<uint64_t*>(shared) + stage; }
  SPECDEC_DEVICE uint64_t* empty(int stage) { return reinterpret_cast<uint64_t*>(shared) + MAX_STAGES + stage; }
  SPECDEC_DEVICE char* tokens(int stage) { return shared + HEADER + stage * STAGE; }
  SPECDEC_DEVICE char* weights(int stage) { return tokens(stage) + TOKENS; }

  const Call& call;
  char* const shared;
  const int thread, block, blocks, rank, cluster;
  const int units;   // of a tile
  const int tiles, rounds;
};

}  // namespace specdec::e4m3
