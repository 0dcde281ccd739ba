// Launches of the decoder segment behind a C interface (kernels/cuda_library.py). Functions return a cudaError_t.
#include "segment.h"

namespace specdec::segment {

template <class Weight, int TOKEN_TILES, int WARPS>
__global__ void __launch_bounds__(32 * WARPS + 32, 1) decoder_segment(const __grid_constant__ Call call) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char shared[];
  Kernel<Weight, TOKEN_TILES, WARPS>(call, shared, threadIdx.x, blockIdx.x, gridDim.x).run();
#endif
}

template <class Weight, int TOKEN_TILES, int WARPS>
cudaError_t launch(const Call& call, int ctas, int limit, bool early, cudaStream_t stream) {
  const Room room{call, Weight::token_pitch(call.window), TOKEN_TILES, WARPS};
  if (room.bytes > limit) return cudaErrorInvalidConfiguration;
  const auto kernel = decoder_segment<Weight, TOKEN_TILES, WARPS>;
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit)) return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(ctas), config.blockDim = dim3(32 * WARPS + 32), config.dynamicSmemBytes = room.bytes, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, call);
}

template <class Weight, int WARPS>
cudaError_t launch_rows(const Call& call, int ctas, int limit, bool early, cudaStream_t stream) {
  if (call.M <= 8) return launch<Weight, 1, WARPS>(call, ctas, limit, early, stream);
  return launch<Weight, 2, WARPS>(call, ctas, limit, early, stream);
}

}  // namespace specdec::segment

extern "C" {

// format: 0 bf16, 1 e4m3. warps: 8 or 16. limit: bytes of shared memory that a block may have. At most `ctas` blocks, all at once.
int specdec_segment(
    const specdec::segment::Call* call, int format, int warps, int ctas, int limit, int early, int device, cudaStream_t stream) {
  using namespace specdec::segment;
  if (call->M < 1 || call->M > 16 || call->stages < 2 || call->stages > MAX_STAGES || ctas < 1) return cudaErrorInvalidValue;
  if (cudaError_t error = cudaSetDevice(device)) return error;  // this library's runtime need not be the one torch uses
  if (format == 0)
    return warps == 8 ? launch_rows<Plain, 8>(*call, ctas, limit, early, stream) : launch_rows<Plain, 16>(*call, ctas, limit, early, stream);
  return warps == 8 ? launch_rows<E4m3Rows, 8>(*call, ctas, limit, early, stream)
                    : launch_rows<E4m3Rows, 16>(*call, ctas, limit, early, stream);
}

}  // extern "C"
