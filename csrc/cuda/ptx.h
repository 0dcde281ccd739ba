// The PTX instructions that CUDA C++ has no words for, each with its reason. Everything here exists since sm_80.
// tests/kernels/cuda/emulator.h has the same functions in plain C++.
#pragma once

#include "widen.h"

#define SPECDEC_DEVICE __device__ __forceinline__
#define SPECDEC_APART __device__ __noinline__

namespace specdec {

SPECDEC_DEVICE uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// `value`, of which the compiler no longer knows that all lanes hold the same. ptxas 13.0 writes addresses that are uniform but for the lane
// with uniform registers that it never sets ([R15+UR0], desc[UR1]), and the card stops with an illegal instruction.
SPECDEC_DEVICE int in_a_register(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Weights pass once: they should not push activations and partial sums out of L2.
SPECDEC_DEVICE uint64_t evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// 16 bytes from global to shared memory, past the registers and past L1.
SPECDEC_DEVICE void copy_async(void* to, const void* from, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "l"(policy) : "memory");
}

// The same where `real`, else 16 zero bytes; `from` is then not read.
SPECDEC_DEVICE void copy_async_or_zero(void* to, const void* from, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(real ? 16 : 0) : "memory");
}

SPECDEC_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
SPECDEC_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8 × 8 matrices of 16-bit numbers: the lane's address is row lane % 8 of matrix lane / 8; out[i] is matrix i in the layout of the
// right operand.
SPECDEC_DEVICE void load_matrices(uint32_t (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}

SPECDEC_DEVICE void multiply_add(float (&sum)[4], const uint32_t (&left)[4], uint32_t right0, uint32_t right1, Bf16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}

SPECDEC_DEVICE void multiply_add(float (&sum)[4], const uint32_t (&left)[4], uint32_t right0, uint32_t right1, F16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}

// Two numbers at a time, a b + c rounded once, subnormals kept. A fused multiply-add serves for products and sums too: bf16 has them since
// sm_90 only, and adding -0 or multiplying by 1 changes nothing.
SPECDEC_DEVICE uint32_t fused_pair(uint32_t a, uint32_t b, uint32_t c, Bf16) {
  uint32_t out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

SPECDEC_DEVICE uint32_t fused_pair(uint32_t a, uint32_t b, uint32_t c, F16) {
  uint32_t out;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

template <class Number>
SPECDEC_DEVICE uint32_t times_pair(uint32_t a, uint32_t b, Number number) {
  return fused_pair(a, b, 0x80008000u, number);
}

// One half of a word, twice.
SPECDEC_DEVICE uint32_t lower_twice(uint32_t word) { return __byte_perm(word, 0, 0x1010); }
SPECDEC_DEVICE uint32_t upper_twice(uint32_t word) { return __byte_perm(word, 0, 0x3232); }

// Two sums rounded to nearest; `low` goes to the lower address.
SPECDEC_DEVICE uint32_t round_pair(float low, float high, Bf16) {
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

SPECDEC_DEVICE uint32_t round_pair(float low, float high, F16) {
  uint32_t out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// Products and sums that the compiler may not contract: every instantiation rounds alike, so bits do not depend on the token tiles.
SPECDEC_DEVICE float times(float a, float b) { return __fmul_rn(a, b); }
SPECDEC_DEVICE float plus(float a, float b) { return __fadd_rn(a, b); }


SPECDEC_DEVICE void block_barrier() { __syncthreads(); }

// What another CTA has written during this launch: from the second level cache, never from this SM's first.
SPECDEC_DEVICE float4 load_fresh(const float4* p) { return __ldcg(p); }

// Threads 0 and 1 count this CTA at a counter each, of those `expected` there (1 or fewer: not counted). flags[thread] says whether the
// CTA was the last one; then all that the others wrote before they came is visible to all its threads, and the counter is zero again.
// The barrier before it and the fence of one thread make the writes of all threads visible: fences are cumulative. `flags`: two shared
// ints that nobody else uses until the next barrier.
SPECDEC_DEVICE void arrive(int* counter, int expected, int* flags, int thread) {
  __syncthreads();
  if (thread < 2) {
    bool last = false;
    if (expected > 1) {
      __threadfence();
      last = atomicAdd(counter, 1) == expected - 1;
      if (last) *counter = 0;
      __threadfence();
    }
    flags[thread] = last;
  }
  __syncthreads();
}

}  // namespace specdec
