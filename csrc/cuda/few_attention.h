// Attention of a few rows over the paged cache: decode steps, chains and small trees, bf16. What it computes is in
// kernels/tree_attention/reference.py.
//
// A step's attention over a short context is no matter of bytes: 640 keys of eight heads are 2.6 MB, half a microsecond of reading. It is a chain
// of waits: for lengths, for block numbers, for keys and values, for what other programs found. So every link is short, and where the launch
// before may only have written the call's own rows (`ahead`), those up to the keys of committed tokens come before the wait for it.
//
// A cluster of up to 16 blocks owns the rows of a tile (16 packed rows, m = row * group + head) of one KV head. Each warp takes chunks of
// 16 keys by itself, by turns, asks for the next ones ahead and keeps sums of its own: no warp waits for another before all are done.
// Then the block's warps add up through shared memory, and send the result into the memory of the blocks that write it, whose barriers
// count the bytes: no workspace, no fence, no second launch.
//
// Products: scores = q kᵀ and out = p v, both with the packed rows as the left operand's rows; the exponentials that leave the first are the
// left operand of the second as they lie. Rows are read by ldmatrix, whose eight lanes find their 16 bytes in banks of their own because
// part p of key k lies at p ^ k % 8.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#include "ptx.h"
#include "ptx_hopper.h"
#else
#include "emulator.h"
#include "emulator_hopper.h"
#endif

namespace specdec::few {

constexpr int KEYS = 16;      // a chunk, for one warp
constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int CLUSTER = 16;   // blocks at most
constexpr int PACKED = 16;    // rows of a left operand
constexpr int NOBODY = -1;    // position of a packed row that is not there
constexpr int LAST = 0x7fffffff;

// Shapes and meanings as in specdec.ops.tree_attention; strides in numbers. first, sinks: may be null. window 0 = none. Blocks have a power
// of two of slots, 16 at least. ahead: the launch before has written nothing but q and the keys and values of the call's own rows, and all
// launches before that have ended.
struct Call {
  const void *q, *keys, *values, *sinks;
  const int *table, *cu_query, *context, *nodes, *first;
  const int64_t *words, *positions;
  void* out;
  int64_t q_row, q_head, kv_block, kv_slot, kv_head, table_row;
  int rows, sequences, heads, kv_heads, group, block, block_bits, window, tiles, ahead;
  float scale, v_scale;  // of scores, log2 e included; of what comes out
};

// Of 16 bytes of results: what a block sends beside them.
struct alignas(8) Weight {
  float top, norm;
};

// A block's shared memory: chunks, later sums; tops and norms of its warps; what others send; a barrier.
template <int SIZE>
struct Room {
  static constexpr int ROW = 2 * SIZE, HALF_STAGE = KEYS * ROW, STAGE = 2 * HALF_STAGE;
  static constexpr int STAGES = 3;                       // chunks of a warp under way: two such blocks share a multiprocessor
  static constexpr int PIECES = PACKED * SIZE / 4 + CLUSTER;  // of results, however they are shared out
  static constexpr int TOPS = WARPS * STAGES * STAGE, NORMS = TOPS + 4 * WARPS * PACKED, RECEIVED = NORMS + 4 * WARPS * PACKED;
  static constexpr int WEIGHTS = RECEIVED + 16 * PIECES, BARRIER = WEIGHTS + 8 * PIECES, BYTES = BARRIER + 16;
  static_assert(PACKED * SIZE * 4 <= STAGES * STAGE, "a warp's sums lie where its chunks were");
};

// SIZE: numbers of a head.
template <int SIZE>
struct Kernel {
  using In = Room<SIZE>;
  static constexpr int ROW = In::ROW, PARTS = ROW / 16, HALF_STAGE = In::HALF_STAGE, STAGE = In::STAGE, STAGES = In::STAGES;
  static constexpr int STEPS = SIZE / 16;  // of the first product; pairs of column tiles of the second

  const Call& call;
  char* const shared;
  const int thread, lane, warp, rank, blocks, own, tile;
  // of the tile: its sequence, first row, rows, packed rows; of the sequence: committed keys, nodes of its tree, first key that counts
  int sequence, row, count, used, context, nodes, lowest;
  int position, low_word, high_word;         // of row `row + lane`
  int smallest, largest, any_low, any_high;  // over the tile's rows
  int lower, begin, stop, whole_from, whole_to;   // keys somebody sees, in whole chunks from `begin`; keys everybody sees
  int positions[2], words[2][2];                   // of the packed rows that this lane's sums belong to
  uint32_t query[STEPS][4];
  float sums[2 * STEPS][4], top[2], norm[2];

  // rank: of the block in its cluster; blocks: of the cluster; own: the KV head.
  SPECDEC_DEVICE Kernel(const Call& call, char* shared, int thread, int rank, int blocks, int own, int tile)
      : call(call), shared(shared), thread(thread), lane(thread % 32), warp(thread / 32), rank(rank), blocks(blocks), own(own), tile(tile) {}

  SPECDEC_DEVICE void run() {
    if (!call.ahead) begin_launch();
    if (!find_rows()) {  // all blocks of the cluster
      if (call.ahead) begin_launch();
      return pad();
    }
    if (blocks > 1) {
      if (thread == THREADS - 32) init_barrier(sent(), 1), publish_barriers();  // slow, so by the warp that has the fewest chunks
      warp_barrier();
      cluster_arrive();
    }
    find_keys();
    attend();
    leave_sums();
    named_barrier(rank, 1, THREADS);
    if (blocks > 1) {
      cluster_wait();  // the others' barriers are there
      if (thread == 0) expect_bytes(sent(), 24 * blocks * mine());
    }
    gather_block();
    if (blocks > 1) gather_cluster();
    pad();
  }

  SPECDEC_DEVICE static void begin_launch() {
    wait_for_launches();
    release_launches();
  }

  SPECDEC_DEVICE int tile_rows() const { return PACKED / call.group; }
  SPECDEC_DEVICE int row_of(int packed) const { return (packed * (65536 / call.group + 1)) >> 16; }  // packed / group, exact for all there are

  // Whose rows the tile holds: tiles are numbered without gaps through the sequences. Every warp looks by itself.
  SPECDEC_DEVICE bool find_rows() {
    int before = 0;
    for (int base = 0; base < call.sequences; base += 32) {
      const int b = base + lane;
      const int from = b < call.sequences ? call.cu_query[b] : 0, to = b < call.sequences ? call.cu_query[b + 1] : 0;
      const int tiles = (to - from + tile_rows() - 1) / tile_rows();
      const int past = before + warp_prefix(tiles, lane);
      const uint32_t hits = warp_ballot(tile >= past - tiles && tile < past);
      if (hits != 0) {
        const int found = first_bit(hits);
        sequence = base + found;
        row = warp_from(from + (tile - past + tiles) * tile_rows(), found);
        count = warp_from(to, found) - row;
        count = count < tile_rows() ? count : tile_rows();
        used = count * call.group;
        return true;
      }
      before = warp_from(past, 31);
    }
    return false;
  }

  // Rows of no sequence become zeros, all clusters helping.
  SPECDEC_DEVICE void pad() {
    if (rank != 0) return;
    for (int padding = call.cu_query[call.sequences] + tile; padding < call.rows; padding += call.tiles) {
      uint32_t* out = static_cast<uint32_t*>(call.out) + (int64_t(padding) * call.heads + own * call.group) * SIZE / 2;
      for (int i = thread; i < call.group * SIZE / 2; i += THREADS) out[i] = 0;
    }
  }

  SPECDEC_DEVICE void find_keys() {
    context = call.context[sequence], nodes = call.nodes[sequence];
    lowest = call.first == nullptr ? 0 : call.first[sequence];
    const bool mine = lane < count;
    position = mine ? int(call.positions[row + lane]) : NOBODY;
    const int64_t word = mine ? call.words[row + lane] : 0;
    low_word = int(word), high_word = int(word >> 32);
    smallest = -warp_most(mine ? -position : -LAST), largest = warp_most(position);
    any_low = warp_or(low_word), any_high = warp_or(high_word);
    stop = nodes > 0 ? context + nodes : largest + 1;
    lower = lowest > 0 ? lowest : 0, whole_from = lower;
    if (call.window > 0) {
      lower = larger_of(lower, smallest - call.window + 1);
      whole_from = larger_of(whole_from, largest - call.window + 1);
    }
    whole_to = nodes > 0 ? context : smallest + 1;
    begin = lower / KEYS * KEYS;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int of = row_of(PACKED / 2 * half + lane / 4);
      positions[half] = warp_from(position, of % 32), words[half][0] = warp_from(low_word, of % 32), words[half][1] = warp_from(high_word, of % 32);
      if (of >= count) positions[half] = NOBODY, words[half][0] = words[half][1] = 0;
    }
  }

  // ---- Chunks: number i of this warp

  SPECDEC_DEVICE int chunk_start(int i) const { return begin + KEYS * (warp * blocks + rank + i * blocks * WARPS); }

  SPECDEC_DEVICE static bool has(int low, int high, int node) { return ((node < 32 ? low : high) >> (node & 31)) & 1; }

  // The block that a chunk lies in, if it is a chunk of ours.
  SPECDEC_DEVICE int block_of(int start) const { return start < stop ? call.table[sequence * call.table_row + (start >> call.block_bits)] : 0; }

  SPECDEC_DEVICE char* stage(int i) const { return shared + (warp * STAGES + i % STAGES) * STAGE; }

  // The keys and values of a chunk in this block. What nobody sees may hold anything, and comes as zeros.
  SPECDEC_DEVICE void ask_for(int i, int start, int block) {
    constexpr int AT_ONCE = 32 / PARTS;
    const int slot = start + lane % KEYS, first = lane / PARTS, part = lane % PARTS;
    const bool wanted = slot >= lower && slot < stop && (nodes == 0 || slot < context || has(any_low, any_high, slot - context));
    const uint32_t wants = warp_ballot(wanted) >> first;
    const int64_t base = block * call.kv_block + own * call.kv_head + ((start & (call.block - 1)) + first) * call.kv_slot + 8 * part;
    const char* key = static_cast<const char*>(call.keys) + 2 * base;
    const char* value = static_cast<const char*>(call.values) + 2 * base;
    const int64_t step = 2 * AT_ONCE * call.kv_slot;
    char* const to = stage(i) + first * ROW;
#pragma unroll
    for (int j = 0; j < KEYS; j += AT_ONCE) {
      const int at = j * ROW + 16 * (part ^ (j + first) % 8);
      const bool real = wants >> j & 1;
      copy_async_or_zero(to + at, key, real);
      copy_async_or_zero(to + HALF_STAGE + at, value, real);
      key += step, value += step;
    }
    commit_copies();
  }

  SPECDEC_DEVICE void attend() {
    const int block = block_of(chunk_start(lane % STAGES));  // lane i's is that of chunk i
    int asked = 0;
    if (call.ahead) {
#pragma unroll 1
      for (; asked < STAGES && chunk_start(asked) + KEYS <= context; asked++) ask_for(asked, chunk_start(asked), warp_from(block, asked));
      begin_launch();
    }
#pragma unroll 1
    for (; asked < STAGES; asked++) ask_for(asked, chunk_start(asked), warp_from(block, asked));
    int next = block_of(chunk_start(STAGES));
    load_query();
#pragma unroll
    for (int half = 0; half < 2; half++) top[half] = -INFINITY, norm[half] = 0.0f;
#pragma unroll
    for (int column = 0; column < 2 * STEPS; column++)
#pragma unroll
      for (int e = 0; e < 4; e++) sums[column][e] = 0.0f;
#pragma unroll 1
    for (int i = 0; chunk_start(i) < stop; i++) {
      wait_copies<STAGES - 1>();
      warp_barrier();
      multiply(stage(i), chunk_start(i));
      warp_barrier();  // nobody reads the chunk any more
      ask_for(i + STAGES, chunk_start(i + STAGES), next);
      next = block_of(chunk_start(i + STAGES + 1));
    }
    wait_copies<0>();
    warp_barrier();
  }

  SPECDEC_DEVICE void load_query() {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int packed = PACKED / 2 * half + lane / 4;
      const int of = row_of(packed), head = own * call.group + packed - of * call.group;
      const int64_t from = (row + of) * call.q_row + head * call.q_head + lane % 4 * 2;
      const uint32_t* words_of = reinterpret_cast<const uint32_t*>(static_cast<const char*>(call.q) + 2 * from);
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        query[step][half] = packed < used ? words_of[8 * step] : 0;
        query[step][half + 2] = packed < used ? words_of[8 * step + 4] : 0;
      }
    }
  }

  // One chunk into the warp's sums.
  SPECDEC_DEVICE void multiply(const char* keys, int start) {
    float scores[2][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      uint32_t right[4];
      const int key = lane / 16 * 8 + lane % 8, part = 2 * step + lane / 8 % 2;
      load_matrices(right, keys + key * ROW + 16 * (part ^ key % 8));
      multiply_add(scores[0], query[step], right[0], right[1], Bf16());
      multiply_add(scores[1], query[step], right[2], right[3], Bf16());
    }
    if (start < whole_from || start + KEYS > whole_to) hide(scores, start);
    uint32_t left[4];
#pragma unroll
    for (int half = 0; half < 2; half++) soften(scores, half, left);
    const char* const values = keys + HALF_STAGE;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      uint32_t right[4];
      const int key = lane / 8 % 2 * 8 + lane % 8, part = 2 * step + lane / 16;
      load_matrices_turned(right, values + key * ROW + 16 * (part ^ key % 8));
      multiply_add(sums[2 * step], left, right[0], right[1], Bf16());
      multiply_add(sums[2 * step + 1], left, right[2], right[3], Bf16());
    }
  }

  SPECDEC_DEVICE void hide(float (&scores)[2][4], int start) const {
#pragma unroll
    for (int column = 0; column < 2; column++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int half = e / 2, slot = start + 8 * column + lane % 4 * 2 + e % 2;
        if (!sees(positions[half], words[half][0], words[half][1], slot)) scores[column][e] = -INFINITY;
      }
  }

  // Whether a row at this position, with this word, sees the key in this slot.
  SPECDEC_DEVICE bool sees(int at, int low, int high, int slot) const {
    const int node = slot - context;
    int logical = slot;
    bool seen = slot < stop && slot <= at;
    if (node >= 0 && node < nodes) {
      seen = has(low, high, node);
      logical = context + (node < 32 ? bits_set(low & ((1u << node) - 1)) : bits_set(low) + bits_set(high & ((1u << (node - 32)) - 1)));
    }
    return seen && logical >= lowest && (call.window == 0 || at - logical < call.window);
  }

  // Scores of the packed rows 8 half + lane / 4 become exponentials, in the left operand's order, and count.
  SPECDEC_DEVICE void soften(const float (&scores)[2][4], int half, uint32_t (&left)[4]) {
    const int e = 2 * half;
    float most = larger(larger(scores[0][e], scores[0][e + 1]), larger(scores[1][e], scores[1][e + 1]));
    most = larger(top[half], quad_most(most) * call.scale);
    const float base = most == -INFINITY ? 0.0f : most;
    const float shrink = power_of_two(top[half] - base);
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; i++) p[i] = power_of_two(scores[i / 2][e + i % 2] * call.scale - base);
    norm[half] = norm[half] * shrink + (p[0] + p[1] + p[2] + p[3]);
    top[half] = most;
    left[half] = round_pair(p[0], p[1], Bf16()), left[half + 2] = round_pair(p[2], p[3], Bf16());
#pragma unroll
    for (int column = 0; column < 2 * STEPS; column++) sums[column][e] *= shrink, sums[column][e + 1] *= shrink;
  }

  // ---- What was found, added up. Results of a tile are taken in pieces of 16 bytes; block r of the cluster writes pieces r, r + blocks, …

  SPECDEC_DEVICE float* warp_sums(int of) const { return reinterpret_cast<float*>(shared + of * STAGES * STAGE); }  // [PACKED, SIZE]
  SPECDEC_DEVICE float* tops() const { return reinterpret_cast<float*>(shared + In::TOPS); }                    // [WARPS, PACKED]
  SPECDEC_DEVICE float* norms() const { return reinterpret_cast<float*>(shared + In::NORMS); }
  SPECDEC_DEVICE float4* received() const { return reinterpret_cast<float4*>(shared + In::RECEIVED); }  // [pieces of this block, blocks]
  SPECDEC_DEVICE Weight* received_weights() const { return reinterpret_cast<Weight*>(shared + In::WEIGHTS); }
  SPECDEC_DEVICE uint64_t* sent() const { return reinterpret_cast<uint64_t*>(shared + In::BARRIER); }
  SPECDEC_DEVICE int pieces() const { return used * (SIZE / 4); }
  SPECDEC_DEVICE int mine() const { return pieces() > rank ? (pieces() - rank + blocks - 1) / blocks : 0; }

  // The warp's sums where its chunks were.
  SPECDEC_DEVICE void leave_sums() {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int packed = PACKED / 2 * half + lane / 4;
      const float whole = quad_sum(norm[half]);
      if (lane % 4 == 0) tops()[warp * PACKED + packed] = top[half], norms()[warp * PACKED + packed] = whole;
      float2* const to = reinterpret_cast<float2*>(warp_sums(warp) + packed * SIZE + lane % 4 * 2);
#pragma unroll
      for (int column = 0; column < 2 * STEPS; column++)
        to[4 * column] = make_float2(sums[column][2 * half], sums[column][2 * half + 1]);
    }
  }

  // The block's warps together, piece by piece to whoever writes it.
  SPECDEC_DEVICE void gather_block() {
    for (int piece = thread; piece < pieces(); piece += THREADS) {
      const int packed = piece / (SIZE / 4);
      Sum sum;
#pragma unroll
      for (int w = 0; w < WARPS; w++) sum.see(tops()[w * PACKED + packed]);
#pragma unroll
      for (int w = 0; w < WARPS; w++)
        sum.add(reinterpret_cast<const float4*>(warp_sums(w))[piece], {tops()[w * PACKED + packed], norms()[w * PACKED + packed]});
      if (blocks == 1) {
        finish(piece, sum);
      } else {
        const int to = piece % blocks, at = piece / blocks * blocks + rank;
        send(received() + at, to, sum.values, sent());
        send(received_weights() + at, to, Weight{sum.top, sum.norm}, sent());
      }
    }
  }

  // What the cluster's blocks found of this block's pieces; four lanes take a piece, each every fourth block.
  SPECDEC_DEVICE void gather_cluster() {
    wait_barrier(sent(), 0);
    const int count = mine(), quad = lane % 4;
    for (int base = 0; base < count; base += THREADS / 4) {  // all lanes of a warp stay together
      const int i = base + thread / 4;
      Sum sum;
      if (i < count) {
        for (int c = quad; c < blocks; c += 4) sum.see(received_weights()[i * blocks + c].top);
        for (int c = quad; c < blocks; c += 4) sum.add(received()[i * blocks + c], received_weights()[i * blocks + c]);
      }
      const float most = quad_most(sum.top);
      const float weight = sum.norm == 0.0f ? 0.0f : power_of_two(sum.top - most);
      sum.norm = quad_sum(sum.norm * weight), sum.top = most;
      sum.values = make_float4(quad_sum(sum.values.x * weight), quad_sum(sum.values.y * weight), quad_sum(sum.values.z * weight),
                               quad_sum(sum.values.w * weight));
      if (i < count && quad == 0) finish(i * blocks + rank, sum);
    }
  }

  // Sums under a common top, which must be known first. Who counted nothing found nothing, whatever lies there; NaN counts.
  struct Sum {
    float top = -INFINITY, norm = 0.0f;
    float4 values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

    SPECDEC_DEVICE void see(float other) { top = larger(top, other); }
    SPECDEC_DEVICE void add(const float4& part, Weight of) {
      if (of.norm == 0.0f) return;
      const float weight = power_of_two(of.top - top);
      norm += of.norm * weight;
      values.x += part.x * weight, values.y += part.y * weight, values.z += part.z * weight, values.w += part.w * weight;
    }
  };

  SPECDEC_DEVICE void finish(int piece, Sum& sum) const {
    const int packed = piece / (SIZE / 4), of = row_of(packed), head = own * call.group + packed - of * call.group;
    float scale = call.v_scale, norm = sum.norm;
    if (call.sinks != nullptr) {
      const float sink = bits_float(uint32_t(static_cast<const uint16_t*>(call.sinks)[head]) << 16) * 1.4426950408889634f;
      const float most = larger(sum.top, sink), weight = power_of_two(sum.top - most);
      norm = norm * weight + power_of_two(sink - most), scale *= weight;
    }
    scale /= norm;
    uint2* const to = static_cast<uint2*>(call.out) + (int64_t(row + of) * call.heads + head) * (SIZE / 4) + piece % (SIZE / 4);
    *to = make_uint2(round_pair(sum.values.x * scale, sum.values.y * scale, Bf16()), round_pair(sum.values.z * scale, sum.values.w * scale, Bf16()));
  }
};

}  // namespace specdec::few
