// The CPU ops compiled for AVX2 with FMA and F16C.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>
#include <omp.h>

#include "../include/cpu_kernels.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
// After the standard headers, so that no shared inline function is compiled for this instruction set.
#pragma GCC target("avx2,fma,f16c,bmi")
#define SPECDEC_AVX2
#define SPECDEC_TABLE "avx2"
namespace specdec {
namespace avx2 {
#include "kernels.h"
}
const CpuKernels* avx2_kernels() { return &avx2::table; }
}  // namespace specdec
#else
namespace specdec {
const CpuKernels* avx2_kernels() { return nullptr; }
}  // namespace specdec
#endif
