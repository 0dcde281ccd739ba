// The yardstick of kernels that are bound by reading a weight: a kernel that does nothing but read.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int THREADS = 512, DEPTH = 8;  // 16-byte loads that a thread has in flight

__global__ void __launch_bounds__(THREADS) read_all(const uint4* from, int64_t vectors, uint32_t* sink) {
  const int64_t step = int64_t(gridDim.x) * THREADS;
  uint32_t sum = 0;
  int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  for (; i + (DEPTH - 1) * step < vectors; i += DEPTH * step) {
    uint4 held[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; d++) held[d] = __ldcs(from + i + d * step);
#pragma unroll
    for (int d = 0; d < DEPTH; d++) sum ^= held[d].x ^ held[d].y ^ held[d].z ^ held[d].w;
  }
  for (; i < vectors; i += step) sum ^= __ldcs(from + i).x;
  if (sum == 0x5eed5eed) *sink = sum;  // so that the loads are not optimised away
}

}  // namespace

// Reads `bytes` (a multiple of 16) with `ctas` CTAs.
extern "C" int specdec_read(const void* from, int64_t bytes, uint32_t* sink, int ctas, int device, cudaStream_t stream) {
  if (cudaError_t error = cudaSetDevice(device)) return error;
  read_all<<<ctas, THREADS, 0, stream>>>(static_cast<const uint4*>(from), bytes / 16, sink);
  return cudaGetLastError();
}
