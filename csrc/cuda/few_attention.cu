// Launches of attention of a few rows behind a C interface (kernels/cuda_library.py). Functions return a cudaError_t.
#include "few_attention.h"

namespace specdec::few {

template <int SIZE>
__global__ void __launch_bounds__(THREADS, 2) few_attention(const __grid_constant__ Call call) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char shared[];
  Kernel<SIZE>(call, shared, threadIdx.x, blockIdx.x, gridDim.x, blockIdx.y, blockIdx.z).run();
#endif
}

template <int SIZE>
cudaError_t launch(const Call& call, int blocks, bool early, cudaStream_t stream) {
  const auto kernel = few_attention<SIZE>;
  constexpr int bytes = Room<SIZE>::BYTES;
  static const cudaError_t prepared = [kernel] {
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return error;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }();
  if (prepared) return prepared;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = blocks, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks, call.kv_heads, call.tiles), config.blockDim = dim3(THREADS), config.dynamicSmemBytes = bytes;
  config.stream = stream, config.attrs = attributes, config.numAttrs = early ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, call);
}

}  // namespace specdec::few

extern "C" {

// size: numbers of a head, 64 or 128. blocks: of a cluster.
int specdec_few_attention(const void* arguments, int size, int blocks, int early, int device, cudaStream_t stream) {
  using namespace specdec::few;
  const Call& call = *static_cast<const Call*>(arguments);
  if (call.tiles < 1 || call.tiles > 65535 || blocks < 1 || blocks > CLUSTER) return cudaErrorInvalidValue;
  if (cudaError_t error = cudaSetDevice(device)) return error;  // this library's runtime need not be the one torch uses
  if (size == 64) return launch<64>(call, blocks, early, stream);
  if (size == 128) return launch<128>(call, blocks, early, stream);
  return cudaErrorInvalidValue;
}

}  // extern "C"
