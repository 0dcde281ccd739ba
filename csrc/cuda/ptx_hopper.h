// Instructions since sm_90: barriers that count bytes, copies of whole rows, launches that overlap; and a barrier of the whole grid.
// tests/kernels/cuda/emulator_hopper.h has the same functions in plain C++.
#pragma once

#include "box.h"
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

// The box into shared memory, by a map that was made for boxes of this size (tensor_map.h): piece of 128 bytes behind piece, in it row behind
// row, the 16 byte parts of row r exchanged by r % 8; zeros where the matrix has ended. `barrier` counts the bytes when they are there.
SPECDEC_DEVICE void copy_box(void* to, const void* map, const Box& box, uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(
          shared_address(to)),
      "l"(map), "r"(0), "r"(box.row), "r"(box.start / 128), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// The same into all `blocks` blocks of the cluster, where each has the place and a barrier that this one has here.
SPECDEC_DEVICE void copy_box_to_all(void* to, const void* map, const Box& box, uint64_t* barrier, int blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(
          shared_address(to)),
      "l"(map), "r"(0), "r"(box.row), "r"(box.start / 128), "r"(shared_address(barrier)), "h"(uint16_t((1 << blocks) - 1))
      : "memory");
}

// `bytes` bytes, a multiple of 16 as both addresses are.
SPECDEC_DEVICE void copy_bytes(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

SPECDEC_DEVICE void warp_barrier() { __syncwarp(); }

// Of `count` threads of the block, who share the number. `cta` is for the emulator.
SPECDEC_DEVICE void named_barrier(int, int number, int count) { asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(count) : "memory"); }

// Counts up and says what was there before.
SPECDEC_DEVICE unsigned long long count_up(unsigned long long* counter) { return atomicAdd(counter, 1ull); }

// Blocks that have come to the counter.
SPECDEC_DEVICE unsigned long long came_to_grid(unsigned long long* counter) {
  unsigned long long seen;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(counter) : "memory");
  return seen;
}

// Counts this block in, and waits until `all` have come. What they wrote before is there then, past the first level cache; of a block's other
// threads too, who came to a barrier with this one before and come to one after.
SPECDEC_DEVICE void grid_arrive_and_wait(unsigned long long* counter, unsigned long long all) {
  asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(counter) : "memory");
  while (came_to_grid(counter) < all) {
  }
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// Launched early, a kernel waits here for all launches before it; and lets the one behind it begin.
SPECDEC_DEVICE void wait_for_launches() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
SPECDEC_DEVICE void release_launches() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Four codes of e4m3 as two words of f16, in their order.
SPECDEC_DEVICE void widen_codes(uint32_t& first, uint32_t& second, uint32_t codes) {
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}\n"
      : "=r"(first), "=r"(second)
      : "r"(codes));
}

SPECDEC_DEVICE uint16_t load_fresh(const uint16_t* p) { return __ldcg(p); }

SPECDEC_DEVICE float warp_sum(float value) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) value += __shfl_xor_sync(0xffffffffu, value, apart);
  return value;
}

SPECDEC_DEVICE float warp_max(float value) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, apart));
  return value;
}

// Of all lanes: the largest; all bits that some lane has; the sum of those up to this one; whose condition holds; what one lane has.
SPECDEC_DEVICE int warp_most(int value) { return __reduce_max_sync(0xffffffffu, value); }
SPECDEC_DEVICE int warp_or(int value) { return int(__reduce_or_sync(0xffffffffu, uint32_t(value))); }
SPECDEC_DEVICE int warp_prefix(int value, int lane) {
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, value, apart);
    if (lane >= apart) value += before;
  }
  return value;
}
SPECDEC_DEVICE uint32_t warp_ballot(bool holds) { return __ballot_sync(0xffffffffu, holds); }
template <class Value>
SPECDEC_DEVICE Value warp_from(Value value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}

// Of four neighbouring lanes.
SPECDEC_DEVICE float quad_most(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}
SPECDEC_DEVICE float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// As load_matrices, every matrix turned on its diagonal.
SPECDEC_DEVICE void load_matrices_turned(uint32_t (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}

// All threads of all blocks of the cluster come, and wait for each other later. Says nothing of what they wrote but barriers published before.
SPECDEC_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
SPECDEC_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// All threads of all blocks of the cluster, and what each has done to another's shared memory before.
SPECDEC_DEVICE void cluster_barrier() { asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory"); }

// Where another block of the cluster has what this one has here.
SPECDEC_DEVICE uint32_t peer_address(const void* own, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(own)), "r"(rank));
  return there;
}

// With .release.cluster it would be a fence of the whole card, 400 ns: those who arrive here have only read.
SPECDEC_DEVICE void arrive_barrier(uint64_t* barrier, int rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(peer_address(barrier, rank)) : "memory");
}

// Into the shared memory of another block of the cluster, or of this one; its barrier counts the bytes when they are there.
SPECDEC_DEVICE void send(float4* to, int rank, const float4& value, uint64_t* barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(peer_address(to, rank)),
               "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(peer_address(barrier, rank))
               : "memory");
}
template <class Two>
SPECDEC_DEVICE void send(Two* to, int rank, const Two& value, uint64_t* barrier) {
  static_assert(sizeof(Two) == 8, "two numbers");
  const float2 both = reinterpret_cast<const float2&>(value);
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(peer_address(to, rank)),
               "f"(both.x), "f"(both.y), "r"(peer_address(barrier, rank))
               : "memory");
}

SPECDEC_DEVICE int bits_set(uint32_t word) { return __popc(word); }
SPECDEC_DEVICE int first_bit(uint32_t word) { return __ffs(word) - 1; }
SPECDEC_DEVICE int larger_of(int a, int b) { return a > b ? a : b; }
SPECDEC_DEVICE float power_of_two(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

SPECDEC_DEVICE float larger(float a, float b) { return fmaxf(a, b); }
SPECDEC_DEVICE uint32_t float_bits(float value) { return __float_as_uint(value); }
SPECDEC_DEVICE float bits_float(uint32_t bits) { return __uint_as_float(bits); }
SPECDEC_DEVICE float inverse_root(float x) { return rsqrtf(x); }
SPECDEC_DEVICE float exponential(float x) { return __expf(x); }

}  // namespace specdec
