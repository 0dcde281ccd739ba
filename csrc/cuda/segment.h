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
// block a multiprocessor stays for all phases. Its warps have three trades:
//
//   one thread fetches   asks for weights in the order in which they are needed, as far ahead as shared memory reaches (some 160 KB, 5 us of
//                        memory's time). Weights depend on nothing, so it never waits for a phase to end. It also takes the tiles: the
//                        first by the block's number, others by ticket, since memory does not serve all multiprocessors alike.
//   WARPS multiply       a tile of 16 rows after the other, each warp a part of the columns.
//   FINISHERS            add up the warps' sums of a tile while the next one is multiplied, scale, add, activate, rotate, write; and stand
//                        at the barrier between phases.
//
// So memory idles between phases only if barrier and loading of tokens take longer than what is under way, and only if multiplying is much
// faster than memory is what was missed caught up with.
//
// A unit is a tile by one chunk of its columns, as they lie in the checkpoint. Warps divide its columns between them, 128 bytes each; a lane's
// 16 bytes of a row are its share of the tensor core's left operand. Which columns a product takes is free as long as both
// operands agree, so nothing is repacked. Tokens are the right operand, in shared memory. Where two rows of a weight are needed together
// (gate and up, two numbers that rotate), a tile has 8 of the ones and 8 of the others.
//
// Order of reduction. Per row and feature: pieces of a warp by rising column, then warps by number. Hence bits depend on the weight's shape
// and the number of warps alone, neither on who took a tile nor, but for the squares of a norm, on how many rows there are.
//
// Needs all its thread blocks on the card at once: at most one a multiprocessor, and nobody else's that wait for these.
#pragma once

#include "segment_call.h"

namespace specdec::segment {

// One CTA's work. 8 * TOKEN_TILES >= call.M.
template <class Weight, int TOKEN_TILES, int WARPS>
struct Kernel {
  static constexpr int CONSUMERS = 32 * WARPS, THREADS = CONSUMERS + 32 * FINISHERS + 32;
  static constexpr int RESULTS = TOKEN_TILES * 128;  // sums of a tile
  using Number = typename Weight::Number;

  // Tokens of DOWN that do not fit all at once: two windows by turns, one multiplied, the other on its way.
  struct Window {
    int coming, turn;  // column at which the one on its way begins; room of the one that is multiplied
  };

  // A warp's sums of a tile, as the tensor core lays them out: of both halves of its pieces, by eight tokens.
  struct Sum {
    float of[2][TOKEN_TILES][4];
    SPECDEC_DEVICE float both(int n, int i) const { return of[0][n][i] + of[1][n][i]; }
  };

  // What goes with the sums of an item's tiles.
  struct Beside {
    float scale[TILES], residual[TILES];
  };

  const Call& call;
  const Room& room;
  char* const shared;
  const int thread, cta, ctas;
  const int lane = thread % 32, warp = thread / 32, group = lane / 4, quad = lane % 4;

  SPECDEC_DEVICE Kernel(const Call& call, const Room& room, char* shared, int thread, int cta, int ctas)
      : call(call), room(room), shared(shared), thread(thread), cta(cta), ctas(ctas) {}

  SPECDEC_DEVICE void run() const {
    if (thread == 0) {
      for (int s = 0; s < call.stages; s++) init_barrier(full(s), 1), init_barrier(empty(s), WARPS);
      for (int s = 0; s < SUMS; s++) init_barrier(summed(s), WARPS), init_barrier(finished(s), FINISHERS);
      init_barrier(next_phase(), 1);
      publish_barriers();
    }
    block_barrier();
    if (warp < WARPS) multiply_all();
    else if (warp < WARPS + FINISHERS) finish_all();
    else if (lane == 0) fetch_all();
  }

  // ---- Places

  SPECDEC_DEVICE uint64_t* barrier(int i) const { return reinterpret_cast<uint64_t*>(shared) + i; }
  SPECDEC_DEVICE uint64_t* full(int stage) const { return barrier(stage); }
  SPECDEC_DEVICE uint64_t* empty(int stage) const { return barrier(MAX_STAGES + stage); }
  SPECDEC_DEVICE uint64_t* summed(int turn) const { return barrier(2 * MAX_STAGES + turn); }
  SPECDEC_DEVICE uint64_t* finished(int turn) const { return barrier(2 * MAX_STAGES + SUMS + turn); }
  SPECDEC_DEVICE uint64_t* next_phase() const { return barrier(2 * MAX_STAGES + 2 * SUMS); }
  SPECDEC_DEVICE int& item_of(int stage) const { return reinterpret_cast<int*>(shared + 320)[stage]; }  // a unit's, -1 = phase ends
  SPECDEC_DEVICE int& tile_summed(int turn) const { return reinterpret_cast<int*>(shared + 384)[turn]; }
  SPECDEC_DEVICE float& shrunk(int token) const { return reinterpret_cast<float*>(shared + 448)[token]; }  // undoes its power of two
  SPECDEC_DEVICE float* sums(int turn) const { return reinterpret_cast<float*>(shared + room.sums + turn * room.sum); }  // [token tile][warp][128]
  SPECDEC_DEVICE float* residuals(int turn) const { return sums(turn) + WARPS * RESULTS; }  // [RESULTS]
  SPECDEC_DEVICE float* scales(int turn) const { return residuals(turn) + RESULTS; }  // [TILE]
  SPECDEC_DEVICE float* scales_of(int stage) const { return reinterpret_cast<float*>(shared + HEADER) + stage * TILE; }
  SPECDEC_DEVICE char* tokens() const { return shared + room.tokens; }
  SPECDEC_DEVICE char* unit(int stage) const { return shared + room.ring + stage * room.stage; }

  // ---- Division of work: tiles of a phase, one at a time, or where tokens come window by window two, so that a window serves both

  SPECDEC_DEVICE bool rotates(int phase) const { return phase == QKV && call.rotary.cos != nullptr; }
  SPECDEC_DEVICE bool pairs(int phase) const { return phase == GATE_UP || rotates(phase); }
  SPECDEC_DEVICE int tiles(int phase) const { return call.matrix[phase].rows / TILE; }
  SPECDEC_DEVICE bool in_windows(int phase) const { return call.matrix[phase].window < call.matrix[phase].columns; }
  SPECDEC_DEVICE int at_once(int phase) const { return in_windows(phase) ? TILES : 1; }
  SPECDEC_DEVICE int items(int phase) const { return (tiles(phase) + at_once(phase) - 1) / at_once(phase); }
  SPECDEC_DEVICE int tiles_of(int phase, int item) const {
    const int left = tiles(phase) - item * at_once(phase);
    return left < at_once(phase) ? left : at_once(phase);
  }
  // Where the upper or the lower half of a tile begins.
  SPECDEC_DEVICE int row(int phase, int tile, int half) const {
    if (phase == GATE_UP) return tile * HALF + half * (call.matrix[phase].rows / 2);
    if (!rotates(phase)) return tile * TILE + half * HALF;
    const int size = call.rotary.size, of_head = size / TILE;  // tiles of a head
    return tile / of_head * size + tile % of_head * HALF + half * (size / 2);
  }

  // ---- The thread that fetches

  SPECDEC_DEVICE void fetch_all() const {
    const uint64_t policy = evict_first();
    Cursor cursor;
#pragma unroll 1
    for (int phase = 0; phase < PHASES; phase++) {
      if (call.matrix[phase].rows == 0) return;
      const int count = items(phase);
      int item = cta;
      unsigned long long ticket = take(phase, count);
#pragma unroll 1
      while (item < count) {
        fetch(phase, item, cursor, policy);
        item = count <= ctas ? count : ctas + int(ticket % count);  // asked for an item ago, since it takes its time to come
        if (item < count) ticket = take(phase, count);
      }
      wait_barrier(empty(cursor.stage), cursor.parity ^ 1);
      item_of(cursor.stage) = -1;
      arrive_barrier(full(cursor.stage));
      cursor.advance(call.stages);
    }
  }

  // Leads to the next item behind those that blocks have by their number. Every launch takes `count` tickets: one for each such item, and one
  // of each block that finds none left. So a ticket says how many of this launch were taken before, once no other launch takes any: the one
  // before is through with OUT when this one begins, with the other phases when it has ended.
  SPECDEC_DEVICE unsigned long long take(int phase, int count) const {
    if (count <= ctas) return 0;
    if (phase != OUT) wait_for_launches();
    return count_up(&call.counters->tickets[phase]);
  }

  SPECDEC_DEVICE void fetch(int phase, int item, Cursor& cursor, uint64_t policy) const {
    const Matrix& matrix = call.matrix[phase];
    const int row_bytes = matrix.columns * Weight::BYTES, count = tiles_of(phase, item);
#pragma unroll 1
    for (int start = 0; start < row_bytes; start += matrix.chunk)
#pragma unroll 1
      for (int t = 0; t < count; t++) {
        const bool scales = start == 0 && matrix.scale != nullptr;  // by those whom they are for they would be asked for too late
        wait_barrier(empty(cursor.stage), cursor.parity ^ 1);
        item_of(cursor.stage) = item;
        expect_bytes(full(cursor.stage), TILE * (matrix.chunk + (scales ? 4 : 0)));
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
          const int first = row(phase, item * at_once(phase) + t, half);
          if (scales) copy_bytes(scales_of(cursor.stage) + half * HALF, matrix.scale + first, 4 * HALF, full(cursor.stage));
          const Box box{matrix.data, row_bytes, matrix.rows, start, first, matrix.chunk, HALF};
          copy_box(unit(cursor.stage) + half * HALF * matrix.chunk, call.map[phase].words, box, full(cursor.stage), policy);
        }
        cursor.advance(call.stages);
      }
  }

  // ---- The warps that multiply

  SPECDEC_DEVICE void multiply_all() const {
    Cursor unit, turn;
#pragma unroll 1
    for (int phase = OUT; phase < PHASES && call.matrix[phase].rows != 0; phase++) multiply_phase(phase, unit, turn);
  }

  // One code for all phases: with one for each, whose instructions come from memory once a launch, phases took 2 us longer.
  SPECDEC_DEVICE void multiply_phase(int phase, Cursor& unit, Cursor& turn) const {
    const bool works = cta < items(phase);
    const char* input = static_cast<const char*>(phase == OUT ? call.mixed : phase == GATE_UP ? call.mid : phase == DOWN ? call.inner : call.last);
    Near near{};
    if (works) near = send_for_norm(phase);
    if (phase == OUT) wait_for_launches();
    else wait_barrier(next_phase(), (phase - 1) % 2);
    if (phase == QKV) release_launches();
    Window window{};
    Beside beside{};
    if (works) {
      look_beside(phase, cta, beside);
      if (in_windows(phase)) first_window(window, input);
      else load_tokens(phase, input, near);
    }
#pragma unroll 1
    for (;;) {
      wait_barrier(full(unit.stage), unit.parity);
      const int item = item_of(unit.stage);
      if (item < 0) break;
      if (item != cta) look_beside(phase, item, beside);
      Sum sum[TILES] = {};
      multiply_item(phase, item, sum, beside, unit, window, input);
#pragma unroll
      for (int t = 0; t < TILES; t++)
        if (t < tiles_of(phase, item)) hand_over(sum[t], beside.residual[t], beside.scale[t], item * at_once(phase) + t, turn);
    }
    leave(unit);
    wait_copies<0>();  // of a window that nobody needed, whose room is the next phase's
    hand_over({}, 0.0f, 0.0f, -1, turn);
  }

  SPECDEC_DEVICE void leave(Cursor& cursor) const {
    warp_barrier();
    if (lane == 0) arrive_barrier(empty(cursor.stage));
    cursor.advance(call.stages);
  }

  // The first unit is there.
  SPECDEC_DEVICE void multiply_item(
      int phase, int item, Sum (&sum)[TILES], Beside& beside, Cursor& cursor, Window& window, const char* input) const {
    const Matrix& matrix = call.matrix[phase];
    const int row_bytes = matrix.columns * Weight::BYTES, pitch = Weight::token_pitch(matrix.window), count = tiles_of(phase, item);
    int column = 0;  // in the window
#pragma unroll 1
    for (int start = 0; start < row_bytes; start += matrix.chunk) {
      const char* from = tokens() + (in_windows(phase) ? window.turn * call.M * pitch : 0) + 2 * column;
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        if (t == count) break;
        wait_barrier(full(cursor.stage), cursor.parity);
        if (start == 0 && thread < TILE) beside.scale[t] = matrix.scale == nullptr ? 1.0f : scales_of(cursor.stage)[thread];
        multiply(sum[t], unit(cursor.stage), matrix.chunk, from, pitch);
        leave(cursor);
      }
      column += matrix.chunk / Weight::BYTES;
      if (in_windows(phase) && (column == matrix.window || start + matrix.chunk == row_bytes)) turn_window(window, input), column = 0;
    }
  }

  static constexpr int SIDES = TOKEN_TILES == 1 ? 2 : 1;  // halves of a piece that registers hold at once

  // Adds this warp's pieces of a unit; the halves of a piece have sums of their own, so that products wait for each other half as often.
  // Lanes whose token is none read nothing, which saves shared memory its time, and nobody reads their sums.
  SPECDEC_DEVICE void multiply(Sum& sum, const char* codes, int chunk, const char* tokens, int pitch) const {
    const int row = row_in_half(group);
#pragma unroll 1
    for (int piece = warp; piece < chunk / PIECE; piece += WARPS) {
      const char* own = codes + piece * HALF * PIECE + row * PIECE;
      const char* x = tokens + group * pitch + piece * 8 * Weight::X + quad * Weight::X;
#pragma unroll
      for (int first = 0; first < 2; first += SIDES) {
        uint4 low[SIDES], high[SIDES], right[SIDES][TOKEN_TILES][Weight::X / 16] = {};
#pragma unroll
        for (int side = 0; side < SIDES; side++) {
          const int part = ((4 * (first + side) + quad) ^ row) * 16;
          low[side] = *reinterpret_cast<const uint4*>(own + part), high[side] = *reinterpret_cast<const uint4*>(own + HALF * chunk + part);
#pragma unroll
          for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
            for (int i = 0; i < Weight::X / 16; i++)
              if (8 * n + group < call.M)
                right[side][n][i] = *reinterpret_cast<const uint4*>(x + 8 * n * pitch + (first + side) * 4 * Weight::X + 16 * i);
        }
#pragma unroll
        for (int p = 0; p < Weight::PRODUCTS; p++)
#pragma unroll
          for (int side = 0; side < SIDES; side++) {
            uint32_t left[4];
            Weight::left(left, low[side], high[side], p);
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; n++) {
              const uint4& r = right[side][n][p / 2];
              multiply_add(sum.of[first + side][n], left, p % 2 ? r.z : r.x, p % 2 ? r.w : r.y, Number());
            }
          }
      }
    }
  }

  // The row of eight that a lane multiplies: neighbours' differ by four, so that what they read together lies in banks of its own.
  static SPECDEC_DEVICE int row_in_half(int group) { return group / 2 + group % 2 * 4; }

  // ---- Sums: the first RESULTS threads look up the residual that is added to one of them each, before its tile is multiplied

  // Of sum `sum` of a tile, as the tensor core lays them out: the row in the tile and the token.
  static SPECDEC_DEVICE int feature_of(int sum) { return row_in_half(sum % 128 / 16) + sum / 2 % 2 * 8; }
  static SPECDEC_DEVICE int token_of(int sum) { return sum / 128 * 8 + sum / 4 % 4 * 2 + sum % 2; }
  static_assert(RESULTS <= CONSUMERS, "a thread looks up what is added to one sum");

  SPECDEC_DEVICE void look_beside(int phase, int item, Beside& beside) const {
    if ((phase != OUT && phase != DOWN) || thread >= RESULTS || token_of(thread) >= call.M) return;
    const uint16_t* stream = static_cast<const uint16_t*>(phase == OUT ? call.residual : call.mid);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      if (t == tiles_of(phase, item)) break;
      const int64_t place = int64_t(token_of(thread)) * call.matrix[phase].rows + (item * at_once(phase) + t) * TILE + feature_of(thread);
      beside.residual[t] = bits_float(uint32_t(load_fresh(stream + place)) << 16);
    }
  }

  SPECDEC_DEVICE void hand_over(const Sum& sum, float residual, float scale, int tile, Cursor& turn) const {
    wait_barrier(finished(turn.stage), turn.parity ^ 1);
    float* to = sums(turn.stage);
    if (thread == 0) tile_summed(turn.stage) = tile;
    if (tile >= 0) {
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; n++)
        *reinterpret_cast<float4*>(to + (n * WARPS + warp) * 128 + 4 * lane) =
            make_float4(sum.both(n, 0), sum.both(n, 1), sum.both(n, 2), sum.both(n, 3));
      if (thread < RESULTS) residuals(turn.stage)[thread] = residual;
      if (thread < TILE) scales(turn.stage)[thread] = scale;
    }
    warp_barrier();
    if (lane == 0) arrive_barrier(summed(turn.stage));
    turn.advance(SUMS);
  }

  // ---- Tokens into shared memory: a warp has part of one row, as many warps a row as there are, in vectors of 8 numbers. Copies go past the
  // registers, all of a row's at once, because they come from the second level cache, which answers late.

  static_assert(WARPS >= MAX_ROWS, "a warp has one row");
  struct Share {
    int row, begin, apart;
    SPECDEC_DEVICE Share(int rows, int warp, int lane) {
      int together = 1;
      while (2 * together * rows <= WARPS) together *= 2;
      row = warp / together, begin = warp % together * 32 + lane, apart = 32 * together;
    }
  };

  SPECDEC_DEVICE bool has_norm(int phase) const { return phase == GATE_UP || phase == QKV; }
  SPECDEC_DEVICE const Norm& norm(int phase) const { return phase == QKV ? call.next_norm : call.post_norm; }

  // The first of a norm's weights that a thread needs, asked for before the phase begins.
  static constexpr int NEAR = 4;
  struct Near {
    uint4 weight[NEAR];
  };
  SPECDEC_DEVICE Near send_for_norm(int phase) const {
    Near near{};
    const Share share(call.M, warp, lane);
    const uint4* weight = static_cast<const uint4*>(norm(phase).weight);
    if (!has_norm(phase)) return near;
#pragma unroll
    for (int i = 0; i < NEAR; i++) {
      const int v = share.begin + i * share.apart;
      if (v < call.matrix[phase].columns / 8) near.weight[i] = weight[v];
    }
    return near;
  }

  // Asks for `columns` columns of tokens from `input` on, of rows of `from_columns`, to lie in rows of `pitch` bytes.
  SPECDEC_DEVICE void send_for_tokens(char* to, const char* input, int columns, int from_columns, int pitch) const {
    const Share share(call.M, warp, lane);
    if (share.row < call.M) {
      const char* from = input + int64_t(share.row) * from_columns * 2;
#pragma unroll 2
      for (int v = share.begin; v < columns / 8; v += share.apart) copy_async_or_zero(to + share.row * pitch + 16 * v, from + 16 * v, true);
    }
    commit_copies();
  }

  // Before: all warps have come here from the phase before, whose tokens and sums nobody reads any more.
  SPECDEC_DEVICE void load_tokens(int phase, const char* input, const Near& near) const {
    const int columns = call.matrix[phase].columns, pitch = Weight::token_pitch(columns);
    send_for_tokens(tokens(), input, columns, columns, pitch);
    wait_copies<0>();
    if (has_norm(phase) || (phase == OUT && Weight::SCALES_TOKENS)) make_operands(phase, columns / 8, pitch, near);
    named_barrier(cta, 1, CONSUMERS);
  }

  // Normed and scaled, in place.
  SPECDEC_DEVICE void make_operands(int phase, int vectors, int pitch, const Near& near) const {
    const Share share(call.M, warp, lane);
    float* partial = sums(0) + share.row * WARPS * 2;  // of a row, by warp: squares, and the largest magnitude
    uint4* const row = reinterpret_cast<uint4*>(tokens() + share.row * pitch);
    if (share.row < call.M) {
      float squares = 0.0f, most = 0.0f;
#pragma unroll 2
      for (int v = share.begin; v < vectors; v += share.apart) {
        const uint4 value = row[v];
        squares += squared(value), most = larger(most, magnitude(value));
      }
      squares = warp_sum(squares), most = warp_max(most);
      if (lane == 0) partial[share.begin / 16] = squares, partial[share.begin / 16 + 1] = most;
    }
    named_barrier(cta, 1, CONSUMERS);
    if (share.row >= call.M) return;
    const bool counts = 32 * lane < share.apart;
    const float squares = warp_sum(counts ? partial[2 * lane] : 0.0f), most = warp_max(counts ? partial[2 * lane + 1] : 0.0f);
    const float factor = has_norm(phase) ? inverse_root(squares / float(8 * vectors) + norm(phase).eps) : 1.0f;
    const float grow = growth(has_norm(phase) ? most * factor * norm(phase).peak : most);
    if (share.begin == 0) shrunk(share.row) = 1.0f / grow;
#pragma unroll
    for (int i = 0; i < NEAR; i++) {
      const int v = share.begin + i * share.apart;
      if (v < vectors) make_operand(phase, row[v], near.weight[i], factor, grow);
    }
#pragma unroll 4
    for (int v = share.begin + NEAR * share.apart; v < vectors; v += share.apart)
      make_operand(phase, row[v], static_cast<const uint4*>(norm(phase).weight)[v], factor, grow);
  }

  SPECDEC_DEVICE void make_operand(int phase, uint4& value, const uint4& weight, float factor, float grow) const {
    const uint4 own = has_norm(phase) ? normed(value, weight, factor) : value;
    value = Weight::SCALES_TOKENS ? uint4{operand(own.x, grow), operand(own.y, grow), operand(own.z, grow), operand(own.w, grow)} : own;
  }

  // The power of two that a token whose largest magnitude is `most` is multiplied by.
  static SPECDEC_DEVICE float growth(float most) {
    const uint32_t exponent = float_bits(most) >> 23;
    const bool usual = Weight::SCALES_TOKENS && exponent < 255 && most != 0.0f;
    return bits_float((!usual ? 127 : exponent < 41 ? 227 : 127 + 14 + 127 - exponent) << 23);
  }
  static SPECDEC_DEVICE uint32_t operand(uint32_t pair, float grow) { return round_pair(low(pair) * grow, high(pair) * grow, Number()); }

  static SPECDEC_DEVICE float low(uint32_t pair) { return bits_float(pair << 16); }
  static SPECDEC_DEVICE float high(uint32_t pair) { return bits_float(pair & 0xffff0000u); }
  static SPECDEC_DEVICE float squared(const uint4& v) { return squared(v.x) + squared(v.y) + squared(v.z) + squared(v.w); }
  static SPECDEC_DEVICE float squared(uint32_t pair) { return low(pair) * low(pair) + high(pair) * high(pair); }
  static SPECDEC_DEVICE float magnitude(const uint4& v) {
    return larger(larger(magnitude(v.x), magnitude(v.y)), larger(magnitude(v.z), magnitude(v.w)));
  }
  static SPECDEC_DEVICE float magnitude(uint32_t pair) { return larger(low(pair & 0x7fffu), high(pair & 0x7fffffffu)); }
  // weight · x / √(mean(x²) + eps), rounded after the quotient and after the product.
  static SPECDEC_DEVICE uint4 normed(const uint4& x, const uint4& weight, float factor) {
    return {normed(x.x, weight.x, factor), normed(x.y, weight.y, factor), normed(x.z, weight.z, factor), normed(x.w, weight.w, factor)};
  }
  static SPECDEC_DEVICE uint32_t normed(uint32_t x, uint32_t weight, float factor) {
    const uint32_t scaled = round_pair(low(x) * factor, high(x) * factor, Bf16());
    return round_pair(low(scaled) * low(weight), high(scaled) * high(weight), Bf16());
  }

  // ---- `inner` window by window, which GATE_UP has made operands already

  SPECDEC_DEVICE void first_window(Window& window, const char* input) const {
    window.coming = 0, window.turn = 1;
    send_for_window(window, input);
    turn_window(window, input);
  }

  // What is on its way has come, into the room that was multiplied before last; asks for what follows. The tokens' begin follows their end.
  SPECDEC_DEVICE void turn_window(Window& window, const char* input) const {
    const Matrix& matrix = call.matrix[DOWN];
    wait_copies<0>();
    named_barrier(cta, 1, CONSUMERS);
    window.turn ^= 1;
    window.coming += matrix.window;
    if (window.coming >= matrix.columns) window.coming = 0;
    send_for_window(window, input);
  }

  SPECDEC_DEVICE void send_for_window(const Window& window, const char* input) const {
    const Matrix& matrix = call.matrix[DOWN];
    const int left = matrix.columns - window.coming, pitch = Weight::token_pitch(matrix.window);
    char* const to = tokens() + (window.turn ^ 1) * call.M * pitch;
    send_for_tokens(to, input + 2 * window.coming, left < matrix.window ? left : matrix.window, matrix.columns, pitch);
  }

  // ---- The warps that finish

  static constexpr int FINISHING = 32 * FINISHERS;
  SPECDEC_DEVICE int finisher() const { return thread - CONSUMERS; }

  SPECDEC_DEVICE void finish_all() const {
    Cursor turn;
    wait_for_launches();
    unsigned long long come = came_to_grid(&call.counters->barrier) / ctas * ctas;  // by the launches before
#pragma unroll 1
    for (int phase = OUT; phase < PHASES && call.matrix[phase].rows != 0; phase++) finish(phase, turn, come += ctas);
  }

  SPECDEC_DEVICE void finish(int phase, Cursor& turn, unsigned long long come) const {
#pragma unroll 1
    for (;;) {
      wait_barrier(summed(turn.stage), turn.parity);
      const int tile = tile_summed(turn.stage);
      if (tile >= 0) finish_tile(phase, tile, turn.stage);
      warp_barrier();
      if (lane == 0) arrive_barrier(finished(turn.stage));
      turn.advance(SUMS);
      if (tile < 0) break;
    }
    named_barrier(cta, 2, FINISHING);
    if (phase == QKV || (phase == DOWN && call.matrix[QKV].rows == 0)) return;
    if (finisher() == 0) {
      grid_arrive_and_wait(&call.counters->barrier, come);
      arrive_barrier(next_phase());
    }
  }

  SPECDEC_DEVICE void finish_tile(int phase, int tile, int turn) const {
    if (pairs(phase)) {
#pragma unroll 1
      for (int i = finisher(); i < RESULTS / 2; i += FINISHING) {
        const int one = i / 64 * 128 + i % 64 / 2 * 4 + i % 2, token = token_of(one);  // and one + 2 is the other half's
        if (token >= call.M) continue;
        const float a = result(phase, turn, one, token), b = result(phase, turn, one + 2, token);
        if (phase == GATE_UP) write_activation(token, tile * HALF + feature_of(one), a, b);
        else write_rotated(token, tile, feature_of(one), a, b);
      }
    } else {
#pragma unroll 1
      for (int one = finisher(); one < RESULTS; one += FINISHING) {
        const int token = token_of(one);
        if (token >= call.M) continue;
        const int64_t place = int64_t(token) * call.matrix[phase].rows + tile * TILE + feature_of(one);
        const float value = result(phase, turn, one, token);
        if (phase == QKV) store(call.next, place, value);
        else store(phase == OUT ? call.mid : call.last, place, value + residuals(turn)[one]);
      }
    }
  }

  // A sum over all warps, scaled and rounded.
  SPECDEC_DEVICE float result(int phase, int turn, int i, int token) const {
    const float* from = sums(turn) + i / 128 * WARPS * 128 + i % 128;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += from[w * 128];
    const float shrink = !Weight::SCALES_TOKENS ? 1.0f : phase == DOWN ? call.inner_shrunk : shrunk(token);
    return rounded(sum * scales(turn)[feature_of(i)] * shrink);
  }

  static SPECDEC_DEVICE float rounded(float value) { return low(round_pair(value, 0.0f, Bf16())); }
  static SPECDEC_DEVICE void store(void* to, int64_t place, float value) {
    static_cast<uint16_t*>(to)[place] = uint16_t(round_pair(value, 0.0f, Bf16()));
  }

  SPECDEC_DEVICE void write_activation(int token, int feature, float gate, float up) const {
    const float value = rounded(gate / (1.0f + exponential(-gate)) * up) * (Weight::SCALES_TOKENS ? call.inner_grown : 1.0f);
    const int64_t place = int64_t(token) * (call.matrix[GATE_UP].rows / 2) + feature;
    static_cast<uint16_t*>(call.inner)[place] = uint16_t(round_pair(value, 0.0f, Number()));
  }

  // A number of the first half of a head, and the one that turns with it in the second.
  SPECDEC_DEVICE void write_rotated(int token, int tile, int feature, float a, float b) const {
    const Rotary& rotary = call.rotary;
    const int half = rotary.size / 2, of_head = half / HALF, head = tile / of_head, place = tile % of_head * HALF + feature;
    const int keys = head - rotary.heads, values = keys - rotary.kv_heads;
    const int64_t slot = keys < 0 ? 0 : rotary.slots[token];
    if (slot < 0) return;
    void* const to = keys < 0 ? call.next : values < 0 ? rotary.keys : rotary.values;
    const int64_t first = keys < 0 ? int64_t(token) * rotary.heads + head : slot * rotary.kv_heads + (values < 0 ? keys : values);
    float c = 1.0f, s = 0.0f;
    if (values < 0) c = rotary.cos[rotary.positions[token] * half + place], s = rotary.sin[rotary.positions[token] * half + place];
    store(to, first * rotary.size + place, a * c - b * s);
    store(to, first * rotary.size + place + half, b * c + a * s);
  }
};

}  // namespace specdec::segment
