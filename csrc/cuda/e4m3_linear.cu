// Launches of the product of e4m3 matrices behind a C interface (kernels/cuda_library.py). Functions return a cudaError_t.
#include <cstring>

#include "e4m3_linear.h"
#include "tensor_map.h"

namespace specdec::e4m3 {

template <int ROWS, int WIDTH, int PIECES>
__global__ void __launch_bounds__(Kernel<ROWS, WIDTH, PIECES>::THREADS, 1) e4m3_linear(const __grid_constant__ Call call, int cluster) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char shared[];
  Kernel<ROWS, WIDTH, PIECES>(call, shared, threadIdx.x, blockIdx.x, gridDim.x, blockIdx.x % cluster, cluster).run();
#endif
}

// How a launch is divided: blocks, of a cluster and in all; bytes of shared memory that a block may have.
struct Cut {
  int cluster, blocks, limit;
  bool early;
};

template <int ROWS, int WIDTH, int PIECES>
cudaError_t launch(Call& call, const Cut& cut, cudaStream_t stream) {
  using Kernel = Kernel<ROWS, WIDTH, PIECES>;
  const int fitting = (cut.limit - HEADER) / Kernel::STAGE;
  call.stages = fitting < MAX_STAGES ? fitting : MAX_STAGES;
  if (call.stages < 2 || call.share * cut.cluster > ROWS) return cudaErrorInvalidConfiguration;
  if (cudaError_t error = describe(Box{call.x, call.K, call.M, 0, 0, PIECE, call.share}, &call.x_map)) return error;
  if (cudaError_t error = describe(Box{call.w, call.K, call.N, 0, 0, Kernel::DEPTH, WIDTH}, &call.w_map)) return error;
  const auto kernel = e4m3_linear<ROWS, WIDTH, PIECES>;
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, cut.limit)) return error;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = cut.cluster, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(cut.blocks), config.blockDim = dim3(Kernel::THREADS), config.stream = stream;
  config.dynamicSmemBytes = HEADER + call.stages * Kernel::STAGE, config.attrs = attributes, config.numAttrs = cut.early ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, call, cut.cluster);
}

template <int ROWS, int PIECES>
cudaError_t launch_width(Call& call, int width, const Cut& cut, cudaStream_t stream) {
  switch (width) {
    case 32: return launch<ROWS, 32, PIECES>(call, cut, stream);
    case 48: return launch<ROWS, 48, PIECES>(call, cut, stream);
    case 64: return launch<ROWS, 64, PIECES>(call, cut, stream);
    case 80: return launch<ROWS, 80, PIECES>(call, cut, stream);
    case 96: return launch<ROWS, 96, PIECES>(call, cut, stream);
    case 112: return launch<ROWS, 112, PIECES>(call, cut, stream);
    case 128: return launch<ROWS, 128, PIECES>(call, cut, stream);
  }
  return cudaErrorInvalidValue;
}

template <int ROWS>
cudaError_t launch_rows(Call& call, int width, int pieces, const Cut& cut, cudaStream_t stream) {
  return pieces == 1 ? launch_width<ROWS, 1>(call, width, cut, stream) : launch_width<ROWS, 2>(call, width, cut, stream);
}

}  // namespace specdec::e4m3

extern "C" {

// width: rows of the weight that a block multiplies at a time; pieces: of 128 columns in a unit, 1 or 2. Maps and stages of `arguments` are not
// read. limit: bytes of shared memory that a block may have.
int specdec_e4m3_linear(const void* arguments, int width, int pieces, int cluster, int blocks, int limit, int early, int device, cudaStream_t stream) {
  using namespace specdec::e4m3;
  Call call;  // aligned as maps must be
  std::memcpy(static_cast<void*>(&call), arguments, sizeof call);
  if (cluster < 1 || cluster > MAX_CLUSTER || blocks % cluster || call.share % 8 || call.share * cluster < call.M || pieces < 1 || pieces > 2)
    return cudaErrorInvalidValue;
  if (cudaError_t error = cudaSetDevice(device)) return error;  // this library's runtime need not be the one torch uses
  const Cut cut{cluster, blocks, limit, early != 0};
  return call.share * cluster <= 64 ? launch_rows<64>(call, width, pieces, cut, stream) : launch_rows<128>(call, width, pieces, cut, stream);
}

}  // extern "C"
