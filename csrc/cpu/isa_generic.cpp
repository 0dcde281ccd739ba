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
  return kind == F32 ? 0 : M * (K / 32) * (int64_t)sizeof(generic::Digits);
}

int64_t tile_bytes(int64_t K, WeightKind kind) {
  static const int64_t block[] = {0, 288, 320, 544};
  return kind == F32 ? K * 16 * (int64_t)sizeof(float) : K / 32 * block[kind];
}
}  // namespace specdec
