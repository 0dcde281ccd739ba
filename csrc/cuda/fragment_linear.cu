// Launches of the fragment linear layer behind a C interface: no torch here, so any nvcc builds it and ctypes can call it
// (kernels/cuda_library.py). Functions return a cudaError_t.
#include <atomic>

#include "fragment_linear.h"

namespace specdec::fragment {

template <class Weight, int TOKEN_TILES>
__global__ void __launch_bounds__(THREADS, 1) fragment_linear(const __grid_constant__ Call call) {
  extern __shared__ __align__(128) char shared[];
  Kernel<Weight, TOKEN_TILES>(call, shared, threadIdx.x, blockIdx.x, gridDim.x).run();
}

constexpr int MAX_DEVICES = 64;

// The stages that fit on the current device; the kernel's limit on shared memory is raised at its first launch there.
template <class Weight, int TOKEN_TILES>
cudaError_t prepare(int* stages) {
  static std::atomic<int> known[MAX_DEVICES];
  int device = 0, limit = 0;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  if (device >= MAX_DEVICES) return cudaErrorInvalidDevice;
  if ((*stages = known[device].load())) return cudaSuccess;
  if (cudaError_t error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) return error;
  const int fit = stages_that_fit(limit, Weight::VECTORS, TOKEN_TILES);
  if (fit < 2) return cudaErrorInvalidConfiguration;
  const int bytes = shared_bytes(fit, Weight::VECTORS, TOKEN_TILES);
  if (cudaError_t error = cudaFuncSetAttribute(fragment_linear<Weight, TOKEN_TILES>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
    return error;
  known[device] = *stages = fit;
  return cudaSuccess;
}

template <class Weight, int TOKEN_TILES>
cudaError_t launch_tiles(Call call, int ctas, cudaStream_t stream) {
  if (cudaError_t error = prepare<Weight, TOKEN_TILES>(&call.stages)) return error;
  const int bytes = shared_bytes(call.stages, Weight::VECTORS, TOKEN_TILES);
  fragment_linear<Weight, TOKEN_TILES><<<ctas, THREADS, bytes, stream>>>(call);
  return cudaGetLastError();
}

template <class Weight>
cudaError_t launch_rows(const Call& call, int ctas, cudaStream_t stream) {
  switch (token_tiles(call.M)) {
    case 1: return launch_tiles<Weight, 1>(call, ctas, stream);
    case 2: return launch_tiles<Weight, 2>(call, ctas, stream);
    case 3: return launch_tiles<Weight, 3>(call, ctas, stream);
    case 4: return launch_tiles<Weight, 4>(call, ctas, stream);
    case 6: return launch_tiles<Weight, 6>(call, ctas, stream);
    default: return launch_tiles<Weight, 8>(call, ctas, stream);
  }
}

// Rows in launches of at most MAX_TOKENS.
template <class Weight>
cudaError_t launch(Call call, int ctas, cudaStream_t stream) {
  const int rows = call.M;
  const char* x = static_cast<const char*>(call.x);
  char* y = static_cast<char*>(call.y);
  for (int row = 0; row < rows; row += MAX_TOKENS) {
    call.M = rows - row < MAX_TOKENS ? rows - row : MAX_TOKENS;
    call.x = x + row * call.x_stride;
    call.y = y + int64_t(row) * call.N * 2;
    if (cudaError_t error = launch_rows<Weight>(call, ctas, stream)) return error;
  }
  return cudaSuccess;
}

}  // namespace specdec::fragment

extern "C" {

// Bytes of partial sums that `rows` rows need with `ctas` CTAs.
int64_t specdec_partial_bytes(int ctas, int rows) {
  using namespace specdec::fragment;
  return partial_floats(ctas, token_tiles(rows)) * 4;
}

// number: 0 bf16, 1 f16. The call's `stages` is ignored. At most ctas CTAs run, one per unit at least.
int specdec_fp8_linear(const specdec::fragment::Call* call, int number, int ctas, cudaStream_t stream) {
  using namespace specdec::fragment;
  if (call->N % STRIP || call->K % DEPTH || call->x_stride % 16 || ctas < 1) return cudaErrorInvalidValue;
  const int units = Work{call->N, call->K, 1}.units(), grid = ctas < units ? ctas : units;
  return number == 0 ? launch<Fp8<specdec::Bf16>>(*call, grid, stream) : launch<Fp8<specdec::F16>>(*call, grid, stream);
}

const char* specdec_error(int error) { return cudaGetErrorString(cudaError_t(error)); }

}  // extern "C"
