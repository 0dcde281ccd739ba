// The CPU ops compiled for AVX-512 with byte dot products (VNNI).
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
#pragma GCC target("avx2,fma,f16c,bmi,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#define SPECDEC_AVX512
#define SPECDEC_TABLE "avx512"
namespace specdec {
namespace avx512 {
#include "kernels.h"
}
const CpuKernels* avx512_kernels() { return &avx512::table; }
}  // namespace specdec
#else
namespace specdec {
const CpuKernels* avx512_kernels() { return nullptr; }
}  // namespace specdec
#endif
