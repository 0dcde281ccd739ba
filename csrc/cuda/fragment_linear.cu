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

struct Card {
  int device, limit, ctas;
  cudaStream_t stream;
};

// Bytes of shared memory that a CTA on `device` may have.
cudaError_t shared_limit(int device, int* limit) {
  static std::atomic<int> known[MAX_DEVICES];
  if (device < 0 || device >= MAX_DEVICES) return cudaErrorInvalidDevice;
  if ((*limit = known[device].load())) return cudaSuccess;
  const cudaError_t error = cudaDeviceGetAttribute(limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (!error) known[device] = *limit;
  return error;
}

template <class Weight, int TOKEN_TILES>
cudaError_t launch_tiles(Call call, const Card& card) {
  static std::atomic<bool> raised[MAX_DEVICES];  // the kernel's own limit, at its first launch on each device
  call.stages = stages_that_fit(card.limit, Weight::VECTORS, TOKEN_TILES);
  const int bytes = shared_bytes(call.stages, Weight::VECTORS, TOKEN_TILES);
  const auto kernel = fragment_linear<Weight, TOKEN_TILES>;
  if (!raised[card.device]) {
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return error;
    raised[card.device] = true;
  }
  kernel<<<card.ctas, THREADS, bytes, card.stream>>>(call);
  return cudaGetLastError();
}

template <class Weight>
cudaError_t launch_rows(const Call& call, const Card& card) {
  switch (token_tiles(call.M)) {
    case 1: return launch_tiles<Weight, 1>(call, card);
    case 2: return launch_tiles<Weight, 2>(call, card);
    case 3: return launch_tiles<Weight, 3>(call, card);
    case 4: return launch_tiles<Weight, 4>(call, card);
    case 6: return launch_tiles<Weight, 6>(call, card);
    default: return launch_tiles<Weight, 8>(call, card);
  }
}

// Rows in as many launches as shared memory makes necessary.
template <class Weight>
cudaError_t launch(Call call, const Card& card) {
  const int rows = call.M, most = tokens_that_fit(card.limit, Weight::VECTORS);
  if (most == 0) return cudaErrorInvalidConfiguration;
  const char* x = static_cast<const char*>(call.x);
  char* y = static_cast<char*>(call.y);
  for (int row = 0; row < rows; row += most) {
    call.M = rows - row < most ? rows - row : most;
    call.x = x + row * call.x_stride;
    call.y = y + int64_t(row) * call.N * 2;
    if (cudaError_t error = launch_rows<Weight>(call, card)) return error;
  }
  return cudaSuccess;
}

}  // namespace specdec::fragment

extern "C" {

// format: 0 fp8, 1 int4. number: 0 bf16, 1 f16. The call's `stages` is ignored. At most `ctas` CTAs run on `device`; the partial sums have
// room for that many.
int specdec_fragment_linear(const specdec::fragment::Call* call, int format, int number, int ctas, int device, cudaStream_t stream) {
  using namespace specdec;
  using namespace specdec::fragment;
  if (call->N % STRIP || call->K % DEPTH || call->x_stride % 16 || ctas < 1) return cudaErrorInvalidValue;
  const int group = call->group;
  if (format == 1 && (group < 32 || call->K % group || (group % DEPTH && DEPTH % group))) return cudaErrorInvalidValue;
  int limit = 0;
  if (cudaError_t error = cudaSetDevice(device)) return error;  // this library's runtime need not be the one torch uses
  if (cudaError_t error = shared_limit(device, &limit)) return error;
  const int units = Work{call->N, call->K, 1}.units();
  const Card card{device, limit, ctas < units ? ctas : units, stream};
  if (format == 0) return number == 0 ? launch<Fp8<Bf16>>(*call, card) : launch<Fp8<F16>>(*call, card);
  return number == 0 ? launch<Int4<Bf16>>(*call, card) : launch<Int4<F16>>(*call, card);
}

const char* specdec_error(int error) { return cudaGetErrorString(cudaError_t(error)); }

}  // extern "C"
