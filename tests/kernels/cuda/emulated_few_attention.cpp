// Attention of a few rows on the emulator, behind a C interface for tests/kernels/test_few_attention.py.
#include "few_attention.h"

using namespace specdec;
using namespace specdec::few;

namespace {

template <int SIZE>
void run(const Call& call, int blocks, uint64_t seed) {
  constexpr int bytes = Room<SIZE>::BYTES;
  std::vector<uint4> shared(blocks * bytes / 16 + 32);
  char* const base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(shared.data()) + 127) / 128 * 128);
  Cluster::get() = {base, bytes};
  for (int cluster = 0; cluster < call.tiles * call.kv_heads; cluster++) {
    std::memset(shared.data(), 0xff, shared.size() * 16);
    Machine::get().run(blocks * THREADS, seed + cluster, [&](int thread) {
      const int rank = thread / THREADS;
      const int own = cluster % call.kv_heads, tile = cluster / call.kv_heads;
      Kernel<SIZE>(call, base + rank * bytes, thread % THREADS, rank, blocks, own, tile).run();
    });
    for (int i = 0; i < 128; i++)
      if (reinterpret_cast<unsigned char*>(base)[blocks * bytes + i] != 0xff) Machine::fail("a write outside shared memory");
  }
}

}  // namespace

extern "C" {

void emulate_few_attention(const Call* call, int size, int blocks, uint64_t seed) {
  size == 64 ? run<64>(*call, blocks, seed) : run<128>(*call, blocks, seed);
}

}  // extern "C"
