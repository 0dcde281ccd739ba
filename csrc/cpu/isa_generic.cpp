// The CPU ops in plain C++, for any processor, and the sizes all variants share.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>
#include <omp.h>

#include "../include/cpu_kernels.h"

#define SPECDEC_TABLE "generic"
namespace specdec {
namespace generic {
#include "kernels.h"
}
const CpuKernels* generic_kernels() { return &generic::table; }

int64_t linear_scratch_bytes(int64_t M, int64_t K, WeightKind kind) {
  return in_blocks(kind) ? M * (K / 32) * (int64_t)sizeof(generic::Digits) : 0;
}

int64_t tile_bytes(int64_t K, WeightKind kind) {
  switch (kind) {
    case F32: return K * 64;
    case F16:
    case BF16: return K * 32;
    case F8: return K * 16 + 64;
    case Q4_0: return K / 32 * 288;
    case Q4_1: return K / 32 * 320;
    case Q8_0: return K / 32 * 544;
  }
  return 0;
}
}  // namespace specdec
