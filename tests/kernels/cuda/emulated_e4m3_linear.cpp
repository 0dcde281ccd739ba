// The product of e4m3 matrices on the emulator, behind a C interface for tests/kernels/test_e4m3_linear.py.
#include "e4m3_linear.h"

using namespace specdec;
using namespace specdec::e4m3;

namespace {

template <int ROWS, int WIDTH, int PIECES>
void run(const Call& call, int cluster, int blocks, uint64_t seed) {
  using Kernel = Kernel<ROWS, WIDTH, PIECES>;
  const int bytes = HEADER + call.stages * Kernel::STAGE;
  std::vector<uint4> shared(cluster * bytes / 16 + 128);
  char* const base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(shared.data()) + 1023) / 1024 * 1024);
  Cluster::get() = {base, bytes};
  for (int first = 0; first < blocks; first += cluster) {
    std::memset(shared.data(), 0xff, shared.size() * 16);
    Machine::get().run(cluster * Kernel::THREADS, seed + first, [&](int thread) {
      const int rank = thread / Kernel::THREADS;
      Kernel(call, base + rank * bytes, thread % Kernel::THREADS, first + rank, blocks, rank, cluster).run();
    });
    for (int i = 0; i < 128; i++)
      if (reinterpret_cast<unsigned char*>(base)[cluster * bytes + i] != 0xff) Machine::fail("a write outside shared memory");
  }
}

template <int ROWS>
void run_rows(const Call& call, int width, int pieces, int cluster, int blocks, uint64_t seed) {
  if (width == 32) pieces == 1 ? run<ROWS, 32, 1>(call, cluster, blocks, seed) : run<ROWS, 32, 2>(call, cluster, blocks, seed);
  else if (width == 48) pieces == 1 ? run<ROWS, 48, 1>(call, cluster, blocks, seed) : run<ROWS, 48, 2>(call, cluster, blocks, seed);
  else run<ROWS, 112, 1>(call, cluster, blocks, seed);
}

}  // namespace

extern "C" {

void emulate_e4m3_linear(const Call* call, int width, int pieces, int cluster, int blocks, uint64_t seed) {
  call->share * cluster <= 64 ? run_rows<64>(*call, width, pieces, cluster, blocks, seed)
                              : run_rows<128>(*call, width, pieces, cluster, blocks, seed);
}

}  // extern "C"
