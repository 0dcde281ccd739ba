// Instructions since sm_90: barriers that count bytes, copies of whole rows, launches that overlap; and a barrier of the whole grid.
// tests/kernels/cuda/emulator_hopper.h has the same functions in plain C++.
#pragma once

#include "ptx.h"

namespace specdec {

SPECDEC_DEVICE void init_barrier(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// Barriers that were set up are there for all threads and for copies, behind the next barrier of the block.
SPECDEC_DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory"); }

SPECDEC_DEVICE void arrive_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and asks the barrier to wait for so many bytes too.
SPECDEC_DEVICE void expect_bytes(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Until the barrier's phase of this parity has ended.
SPECDEC_DEVICE void wait_barrier(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni ended;\n"
      "bra.uni again;\n"
      "ended:\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// `rows` rows from `row` on, `bytes` of each from byte `start` on, of a matrix at `from` with rows of `pitch` bytes.
struct Box {
  const void* from;
  int pitch, start, row, bytes, rows;
};

// The box, row behind row, into shared memory, by a map (a CUtensorMap in units of 8 bytes, made for boxes of this size); `barrier` counts the
// bytes when they are there.
SPECDEC_DEVICE void copy_box(void* to, const void* map, const Box& box, uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
          shared_address(to)),
      "l"(map), "r"(box.start / 8), "r"(box.row), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

SPECDEC_DEVICE void warp_barrier() { __syncwarp(); }

// Of the first `count` threads of the block. `cta` is for the emulator.
SPECDEC_DEVICE void named_barrier(int, int count) { asm volatile("bar.sync 1, %0;" ::"r"(count) : "memory"); }

// Counts this block in, and waits until all `ctas` have come as often. What they wrote before is there then, past the first level cache.
SPECDEC_DEVICE void grid_arrive_and_wait(unsigned long long* counter, int ctas) {
  __threadfence();
  const unsigned long long ticket = atomicAdd(counter, 1ull), target = (ticket / ctas + 1) * ctas;
  unsigned long long seen;
  do {
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(counter) : "memory");
  } while (seen < target);
  __threadfence();
}

// Launched early, a kernel waits here for all launches before it; and lets the one behind it begin.
SPECDEC_DEVICE void wait_for_launches() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
SPECDEC_DEVICE void release_launches() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Asks for the line at `p`.
SPECDEC_DEVICE void send_for(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

SPECDEC_DEVICE uint4 load_fresh(const uint4* p) { return __ldcg(p); }
SPECDEC_DEVICE uint16_t load_fresh(const uint16_t* p) { return __ldcg(p); }

SPECDEC_DEVICE float warp_sum(float value) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) value += __shfl_xor_sync(0xffffffffu, value, apart);
  return value;
}

SPECDEC_DEVICE uint32_t lower_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
SPECDEC_DEVICE uint32_t upper_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }
SPECDEC_DEVICE float bits_float(uint32_t bits) { return __uint_as_float(bits); }
SPECDEC_DEVICE float inverse_root(float x) { return rsqrtf(x); }
SPECDEC_DEVICE float exponential(float x) { return __expf(x); }

}  // namespace specdec
