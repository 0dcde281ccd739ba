// The decoder segment on the emulator, behind a C interface for tests/kernels/test_segment.py.
#include "segment.h"

using namespace specdec;
using namespace specdec::segment;

namespace {

constexpr int WARPS = 16;

template <class Weight, int TOKEN_TILES>
void run(const Call& call, int ctas, uint64_t seed) {
  using Block = Kernel<Weight, TOKEN_TILES, WARPS>;
  const Room room{call, Weight(), TOKEN_TILES, WARPS};
  const int bytes = room.bytes;
  std::vector<std::vector<uint4>> shared(ctas, std::vector<uint4>(bytes / 16 + 192));
  std::vector<char*> base(ctas);
  for (int c = 0; c < ctas; c++) {
    std::memset(shared[c].data(), 0xff, shared[c].size() * 16);
    const uintptr_t start = reinterpret_cast<uintptr_t>(shared[c].data() + 8);
    base[c] = reinterpret_cast<char*>((start + 1023) / 1024 * 1024);
  }
  Machine::get().run(ctas * Block::THREADS, seed, [&](int thread) {
    const int cta = thread / Block::THREADS;
    Block(call, room, base[cta], thread % Block::THREADS, cta, ctas).run();
  });
  for (int c = 0; c < ctas; c++)
    for (int i = 0; i < 128; i++)
      if (reinterpret_cast<unsigned char*>(shared[c].data())[i] != 0xff || reinterpret_cast<unsigned char*>(base[c])[bytes + i] != 0xff)
        Machine::fail("a write outside shared memory");
}

}  // namespace

extern "C" {

void emulate_segment(const Call* call, int format, int ctas, uint64_t seed) {
  if (format == 0) call->M <= 8 ? run<Plain, 1>(*call, ctas, seed) : run<Plain, 2>(*call, ctas, seed);
  else call->M <= 8 ? run<E4m3Rows, 1>(*call, ctas, seed) : run<E4m3Rows, 2>(*call, ctas, seed);
}

}  // extern "C"
