// Attention of a few rows over the paged cache: decode steps, chains and small trees, bf16. What it computes is in
// kernels/tree_attention/reference.py.
//
// A step's attention over a short context is no matter of bytes: 640 keys of eight heads are 2.6 MB, half a microsecond of reading. It is a chain
// of waits, one for lengths, one for block numbers, one for keys and values, and some for adding up what several programs found. So every
// link is as short as it can be. A cluster of up to 16 blocks owns the rows of a tile (up to 32 packed rows, m = row * group + head) of one
// KV head. Each warp takes chunks of 16 keys by itself, by turns, asks for the next ones ahead and keeps sums of its own: no warp waits for another
// before all are done. Then the block's warps add up through shared memory and the cluster's blocks read each other's: no workspace, no
// counter, no second launch.
//
// Products: scores = q kᵀ and out = p v, both with the packed rows as the left operand's 16 rows; the exponentials that leave the first
// are the left operand of the second as they lie. Rows are read by ldmatrix, whose eight lanes find their 16 bytes in banks of their own because part p of
// key k lies at p ^ k % 8.
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
constexpr int STAGES = 3;     // chunks of a warp under way
constexpr int CLUSTER = 16;   // blocks at most
constexpr int PACKED = 16;    // rows of a left operand
constexpr int NOBODY = -1;    // position of a packed row that is not there
constexpr int LAST = 0x7fffffff;

// Shapes and meanings as in specdec.ops.tree_attention; strides in numbers. first, sinks: may be null. window 0 = none.
struct Call {
  const void *q, *keys, *values, *sinks;
  const int *table, *cu_query, *context, *nodes, *first;
  const int64_t *words, *positions;
  void* out;
  int64_t q_row, q_head, kv_block, kv_slot, kv_head, table_row;
  int rows, sequences, heads, kv_heads, block, window, tiles;
  float scale, v_scale;  // of scores, log2 e included; of what comes out
};

// Bytes of shared memory of a block.
constexpr int shared_bytes(int size, int tiles) { return WARPS * STAGES * 2 * KEYS * size * 2 + 4 * 2 * (WARPS + 1) * PACKED * tiles; }

// SIZE: numbers of a head. TILES: of PACKED rows.
template <int SIZE, int TILES>
struct Kernel {
  static constexpr int M = PACKED * TILES, ROW = 2 * SIZE, PARTS = ROW / 16, HALF_STAGE = KEYS * ROW, STAGE = 2 * HALF_STAGE;
  static constexpr int STEPS = SIZE / 16;  // of the first product; pairs of column tiles of the second

  const Call& call;
  char* const shared;
  const int thread, lane, warp, rank, blocks, own, tile;
  // of the tile: its sequence, first row, rows, packed rows; of the sequence: committed keys, nodes of its tree, first key that counts
  int sequence, row, count, used, context, nodes, lowest;
  int position, low_word, high_word;     // of row `row + lane`
  int smallest, largest, any_low, any_high;  // over the tile's rows
  int lower, begin, stop, whole_from, whole_to;  // keys somebody sees, in whole chunks from `begin`; keys everybody sees
  int positions[2 * TILES], words[2 * TILES][2];  // of the packed rows that this lane's sums belong to
  uint32_t query[TILES][STEPS][4];
  float sums[TILES][2 * STEPS][4], top[2 * TILES], norm[2 * TILES];

  // cluster: number of the cluster; rank: of the block in it; blocks: of the cluster.
  SPECDEC_DEVICE Kernel(const Call& call, char* shared, int thread, int cluster, int rank, int blocks)
      : call(call), shared(shared), thread(thread), lane(thread % 32), warp(thread / 32), rank(rank), blocks(blocks),
        own(cluster % call.kv_heads), tile(cluster / call.kv_heads) {}

  SPECDEC_DEVICE void run() {
    wait_for_launches();
    release_launches();
    const bool there = find_rows();
    pad();
    if (!there) return;  // all blocks of the cluster
    find_keys();
    attend();
    gather_block();
    if (blocks > 1) cluster_barrier();
    gather_cluster();
    if (blocks > 1) cluster_barrier();  // others read this block's memory until here
  }

  SPECDEC_DEVICE int group() const { return call.heads / call.kv_heads; }
  SPECDEC_DEVICE int tile_rows() const { return M / group(); }

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
        used = count * group();
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
      uint32_t* out = static_cast<uint32_t*>(call.out) + (int64_t(padding) * call.heads + own * group()) * SIZE / 2;
      for (int i = thread; i < group() * SIZE / 2; i += THREADS) out[i] = 0;
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
    for (int half = 0; half < 2 * TILES; half++) {
      const int of = (PACKED / 2 * half + lane / 4) / group();
      positions[half] = warp_from(position, of % 32), words[half][0] = warp_from(low_word, of % 32), words[half][1] = warp_from(high_word, of % 32);
      if (of >= count) positions[half] = NOBODY, words[half][0] = words[half][1] = 0;
    }
  }

  // ---- Chunks: number i of this warp

  SPECDEC_DEVICE int chunk_start(int i) const { return begin + KEYS * (warp * blocks + rank + i * blocks * WARPS); }

  SPECDEC_DEVICE static bool has(int low, int high, int node) { return ((node < 32 ? low : high) >> (node & 31)) & 1; }

  // Where the key of slot position start + lane % 16 lies, in numbers of the cache; -1 where nobody sees it, who may hold anything.
  SPECDEC_DEVICE int64_t place_of(int start) const {
    const int slot = start + lane % KEYS;
    const bool wanted = slot >= lower && slot < stop && (nodes == 0 || slot < context || has(any_low, any_high, slot - context));
    if (!wanted) return -1;
    return call.table[sequence * call.table_row + slot / call.block] * call.kv_block + slot % call.block * call.kv_slot;
  }

  SPECDEC_DEVICE char* stage(int i) const { return shared + (warp * STAGES + i % STAGES) * STAGE; }

  SPECDEC_DEVICE void ask_for(int i, int64_t place) {
    char* const to = stage(i);
    const char* const keys = static_cast<const char*>(call.keys) + 2 * own * call.kv_head;
    const char* const values = static_cast<const char*>(call.values) + 2 * own * call.kv_head;
#pragma unroll
    for (int j = 0; j < KEYS * PARTS / 32; j++) {
      const int key = (32 * j + lane) / PARTS, part = lane % PARTS;
      const int64_t from = warp_from(place, key);
      const int at = key * ROW + 16 * (part ^ key % 8);
      const int64_t bytes = from < 0 ? 0 : 2 * from + 16 * part;
      copy_async_or_zero(to + at, keys + bytes, from >= 0);
      copy_async_or_zero(to + HALF_STAGE + at, values + bytes, from >= 0);
    }
    commit_copies();
  }

  SPECDEC_DEVICE void attend() {
    int64_t places[STAGES];
#pragma unroll
    for (int i = 0; i < STAGES; i++) places[i] = place_of(chunk_start(i));
#pragma unroll
    for (int i = 0; i < STAGES; i++) ask_for(i, places[i]);
    load_query();
#pragma unroll
    for (int half = 0; half < 2 * TILES; half++) top[half] = -INFINITY, norm[half] = 0.0f;
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int column = 0; column < 2 * STEPS; column++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[t][column][e] = 0.0f;
    int64_t next = place_of(chunk_start(STAGES));
    for (int i = 0; chunk_start(i) < stop; i++) {
      wait_copies<STAGES - 1>();
      warp_barrier();
      multiply(stage(i), chunk_start(i));
      warp_barrier();  // nobody reads the chunk any more
      ask_for(i + STAGES, next);
      next = place_of(chunk_start(i + STAGES + 1));
    }
    wait_copies<0>();
    warp_barrier();
  }

  SPECDEC_DEVICE void load_query() {
#pragma unroll
    for (int half = 0; half < 2 * TILES; half++) {
      const int packed = PACKED / 2 * half + lane / 4;
      const int64_t from = int64_t(row + packed / group()) * call.q_row + (own * group() + packed % group()) * call.q_head + lane % 4 * 2;
      const uint32_t* words_of = reinterpret_cast<const uint32_t*>(static_cast<const char*>(call.q) + 2 * from);
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        query[half / 2][step][half % 2] = packed < used ? words_of[8 * step] : 0;
        query[half / 2][step][half % 2 + 2] = packed < used ? words_of[8 * step + 4] : 0;
      }
    }
  }

  // One chunk into the warp's sums.
  SPECDEC_DEVICE void multiply(const char* keys, int start) {
    float scores[TILES][2][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      uint32_t right[4];
      const int key = lane / 16 * 8 + lane % 8, part = 2 * step + lane / 8 % 2;
      load_matrices(right, keys + key * ROW + 16 * (part ^ key % 8));
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        multiply_add(scores[t][0], query[t][step], right[0], right[1], Bf16());
        multiply_add(scores[t][1], query[t][step], right[2], right[3], Bf16());
      }
    }
    if (start < whole_from || start + KEYS > whole_to) hide(scores, start);
    uint32_t left[TILES][4];
#pragma unroll
    for (int half = 0; half < 2 * TILES; half++) soften(scores[half / 2], half, left[half / 2]);
    const char* const values = keys + HALF_STAGE;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      uint32_t right[4];
      const int key = lane / 8 % 2 * 8 + lane % 8, part = 2 * step + lane / 16;
      load_matrices_turned(right, values + key * ROW + 16 * (part ^ key % 8));
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        multiply_add(sums[t][2 * step], left[t], right[0], right[1], Bf16());
        multiply_add(sums[t][2 * step + 1], left[t], right[2], right[3], Bf16());
      }
    }
  }

  SPECDEC_DEVICE void hide(float (&scores)[TILES][2][4], int start) const {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int column = 0; column < 2; column++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int half = 2 * t + e / 2;
          if (!sees(positions[half], words[half][0], words[half][1], start + 8 * column + lane % 4 * 2 + e % 2)) scores[t][column][e] = -INFINITY;
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
    const int e = half % 2 * 2;
    float most = larger(larger(scores[0][e], scores[0][e + 1]), larger(scores[1][e], scores[1][e + 1]));
    most = larger(top[half], quad_most(most) * call.scale);
    const float base = most == -INFINITY ? 0.0f : most;
    const float shrink = power_of_two(top[half] - base);
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; i++) p[i] = power_of_two(scores[i / 2][e + i % 2] * call.scale - base);
    norm[half] = norm[half] * shrink + (p[0] + p[1] + p[2] + p[3]);
    top[half] = most;
    left[half % 2] = round_pair(p[0], p[1], Bf16()), left[half % 2 + 2] = round_pair(p[2], p[3], Bf16());
#pragma unroll
    for (int column = 0; column < 2 * STEPS; column++) sums[half / 2][column][e] *= shrink, sums[half / 2][column][e + 1] *= shrink;
  }

  // ---- What was found, added up

  SPECDEC_DEVICE float* warp_sums(int of) const { return reinterpret_cast<float*>(shared + of * STAGES * STAGE); }  // [M, SIZE]
  SPECDEC_DEVICE float* tops() const { return reinterpret_cast<float*>(shared + WARPS * STAGES * STAGE); }          // [WARPS + 1, M]
  SPECDEC_DEVICE float* norms() const { return tops() + (WARPS + 1) * M; }

  // The block's sums into those of its first warp, its tops and norms behind those of the warps.
  SPECDEC_DEVICE void gather_block() {
#pragma unroll
    for (int half = 0; half < 2 * TILES; half++) {
      const int packed = PACKED / 2 * half + lane / 4;
      const float whole = quad_sum(norm[half]);
      if (lane % 4 == 0) tops()[warp * M + packed] = top[half], norms()[warp * M + packed] = whole;
      float* const to = warp_sums(warp) + packed * SIZE + lane % 4 * 2;
#pragma unroll
      for (int column = 0; column < 2 * STEPS; column++) {
        to[8 * column] = sums[half / 2][column][half % 2 * 2];
        to[8 * column + 1] = sums[half / 2][column][half % 2 * 2 + 1];
      }
    }
    named_barrier(rank, 1, THREADS);
    for (int i = thread; i < used * SIZE / 4; i += THREADS) {
      const int packed = i * 4 / SIZE;
      float4 parts[WARPS];
      float found[WARPS], counted[WARPS], most = -INFINITY;
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        found[w] = tops()[w * M + packed], counted[w] = norms()[w * M + packed];
        parts[w] = reinterpret_cast<const float4*>(warp_sums(w))[i];
        most = larger(most, found[w]);
      }
      float whole = 0.0f;
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < WARPS; w++) add(sum, whole, parts[w], counted[w], found[w], most);
      reinterpret_cast<float4*>(warp_sums(0))[i] = sum;
      if (i * 4 % SIZE == 0) tops()[WARPS * M + packed] = most, norms()[WARPS * M + packed] = whole;
    }
    named_barrier(rank, 1, THREADS);
  }

  // Weighs what had `found` as its top against `most`. Who counted nothing found nothing, whatever lies there; NaN counts.
  SPECDEC_DEVICE static void add(float4& sum, float& whole, const float4& part, float counted, float found, float most) {
    if (counted == 0.0f) return;
    const float weight = power_of_two(found - most);
    whole += counted * weight;
    sum.x += part.x * weight, sum.y += part.y * weight, sum.z += part.z * weight, sum.w += part.w * weight;
  }

  // This block's share of the rows, from all blocks of the cluster.
  SPECDEC_DEVICE void gather_cluster() {
    for (int i = rank * THREADS + thread; i < used * SIZE / 4; i += blocks * THREADS) {
      const int packed = i * 4 / SIZE, head = own * group() + packed % group();
      float4 parts[CLUSTER];
      float found[CLUSTER], counted[CLUSTER], most = -INFINITY, sink = -INFINITY;
#pragma unroll
      for (int c = 0; c < CLUSTER; c++) {
        found[c] = -INFINITY;
        if (c < blocks) {
          found[c] = peer_float(tops() + WARPS * M + packed, c), counted[c] = peer_float(norms() + WARPS * M + packed, c);
          parts[c] = peer_float4(reinterpret_cast<const float4*>(warp_sums(0)) + i, c);
          most = larger(most, found[c]);
        }
      }
      if (call.sinks != nullptr) {
        sink = bits_float(uint32_t(static_cast<const uint16_t*>(call.sinks)[head]) << 16) * 1.4426950408889634f;
        most = larger(most, sink);
      }
      float whole = sink == -INFINITY ? 0.0f : power_of_two(sink - most);
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int c = 0; c < CLUSTER; c++)
        if (c < blocks) add(sum, whole, parts[c], counted[c], found[c], most);
      const float scale = call.v_scale / whole;
      uint32_t* const to = static_cast<uint32_t*>(call.out) + ((int64_t(row + packed / group()) * call.heads + head) * SIZE + i * 4 % SIZE) / 2;
      to[0] = round_pair(sum.x * scale, sum.y * scale, Bf16()), to[1] = round_pair(sum.z * scale, sum.w * scale, Bf16());
    }
  }
};

}  // namespace specdec::few
