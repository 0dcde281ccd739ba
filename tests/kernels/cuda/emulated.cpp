// The fragment linear layer on the emulator, behind a C interface for tests/kernels/test_fragment_linear.py.
#include <algorithm>
#include <numeric>
#include <random>

#include "fragment_linear.h"

using namespace specdec;
using namespace specdec::fragment;

namespace {

template <class Weight, int TOKEN_TILES>
void run_tiles(const Call& call, int ctas, uint64_t seed) {
  std::vector<int> order(ctas);
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 random(seed);
  std::shuffle(order.begin(), order.end(), random);
  const int bytes = shared_bytes(call.stages, Weight::VECTORS, TOKEN_TILES);
  std::vector<uint4> shared(bytes / 16 + 8);
  char* base = reinterpret_cast<char*>(shared.data() + 4);
  for (int cta : order) {
    std::memset(shared.data(), 0xff, shared.size() * 16);
    Machine::get().run(THREADS, seed + cta, [&](int thread) { Kernel<Weight, TOKEN_TILES>(call, base, thread, cta, ctas).run(); });
    for (int i = 0; i < 64; i++)
      if (reinterpret_cast<unsigned char*>(shared.data())[i] != 0xff || reinterpret_cast<unsigned char*>(base)[bytes + i] != 0xff)
        Machine::fail("a write outside shared memory");
  }
}

template <class Weight>
void run(const Call& call, int ctas, uint64_t seed) {
  switch (token_tiles(call.M)) {
    case 1: return run_tiles<Weight, 1>(call, ctas, seed);
    case 2: return run_tiles<Weight, 2>(call, ctas, seed);
    case 3: return run_tiles<Weight, 3>(call, ctas, seed);
    case 4: return run_tiles<Weight, 4>(call, ctas, seed);
    case 6: return run_tiles<Weight, 6>(call, ctas, seed);
    default: return run_tiles<Weight, 8>(call, ctas, seed);
  }
}

}  // namespace

extern "C" {

void emulate_fragment_linear(const Call* call, int format, int number, int ctas, uint64_t seed) {
  if (format == 0) number == 0 ? run<Fp8<Bf16>>(*call, ctas, seed) : run<Fp8<F16>>(*call, ctas, seed);
  else number == 0 ? run<Int4<Bf16>>(*call, ctas, seed) : run<Int4<F16>>(*call, ctas, seed);
}

int64_t partial_bytes(int ctas, int rows) { return partial_floats(ctas, token_tiles(rows)) * 4; }

// The repacked words of codes [N,K], by fp8_place.
void pack_fp8(const uint8_t* codes, uint32_t* words, int N, int K) {
  for (int n = 0; n < N; n++)
    for (int k = 0; k < K; k++) {
      const Place place = fp8_place(n, k, K);
      const uint32_t code = codes[int64_t(n) * K + k];
      words[place.vector * 4 + place.word] |= (place.index ? e4m3_half(0, code) : e4m3_half(code, 0)) << 16 * place.half;
    }
}

// The repacked words of 4-bit codes [N,K], a byte each, by int4_place.
void pack_int4(const uint8_t* codes, uint32_t* words, int N, int K) {
  for (int n = 0; n < N; n++)
    for (int k = 0; k < K; k++) {
      const Place place = int4_place(n, k, K);
      words[place.vector * 4 + place.word] |= uint32_t(codes[int64_t(n) * K + k]) << (16 * place.half + 4 * place.index);
    }
}

// What the tensor cores get for the first (second = 0) or second code of every word, as float32 pairs.
void widen_fp8(const uint32_t* words, float* out, int count, int number, int second) {
  for (int i = 0; i < count; i++) {
    const uint32_t fields = number == 0 ? (second ? E4m3<Bf16>::b(words[i]) : E4m3<Bf16>::a(words[i]))
                                        : (second ? E4m3<F16>::b(words[i]) : E4m3<F16>::a(words[i]));
    const uint32_t pair = number == 0 ? times_pair(fields, E4m3<Bf16>::FACTORS, Bf16()) : times_pair(fields, E4m3<F16>::FACTORS, F16());
    for (int e = 0; e < 2; e++) out[2 * i + e] = number == 0 ? widen(pair >> 16 * e, Bf16()) : widen(pair >> 16 * e, F16());
  }
}

// out [ctas + 1]: first units. owners [units]. slots [ctas, tiles] (of tiles the CTA has no unit of: -1).
void partition(int N, int K, int ctas, int* first, int* owners, int* slots) {
  const Work work{N, K, ctas};
  for (int c = 0; c <= ctas; c++) first[c] = work.first_unit(c);
  for (int u = 0; u < work.units(); u++) owners[u] = work.owner(u);
  for (int c = 0; c < ctas; c++)
    for (int t = 0; t < work.tiles(); t++)
      slots[c * work.tiles() + t] = work.first_owner(t) <= c && c <= work.last_owner(t) ? work.slot(c, t) : -1;
}

int stages(int limit, int token_tiles) { return stages_that_fit(limit, FP8_VECTORS, token_tiles); }
int tokens(int limit) { return tokens_that_fit(limit, FP8_VECTORS); }
int shared_memory(int stages, int token_tiles) { return shared_bytes(stages, FP8_VECTORS, token_tiles); }

// Banks: the most lanes of 8 consecutive ones (one phase of a 16-byte access) whose granules share a group of four banks.
int bank_conflicts(int token_tiles) {
  int worst = 0;
  for (int t = 0; t < token_tiles; t++)
    for (int half = 0; half < HALVES; half++)
      for (int pair = 0; pair < 2; pair++)
        for (int phase = 0; phase < 4; phase++) {
          int count[8] = {};
          for (int lane = 8 * phase; lane < 8 * phase + 8; lane++)
            worst = std::max(worst, ++count[x_granule_of_lane(lane, t, half, pair) % 8]);
        }
  return worst;
}

}  // extern "C"
