// Launches of the decoder segment behind a C interface (kernels/cuda_library.py). Functions return a cudaError_t.
#include <cstring>

#include "segment.h"
#include "tensor_map.h"

namespace specdec::segment {

constexpr int WARPS = 16;

template <class Weight, int TOKEN_TILES>
__global__ void __launch_bounds__(Kernel<Weight, TOKEN_TILES, WARPS>::THREADS, 1)
    decoder_segment(const __grid_constant__ Call call, const __grid_constant__ Room room) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(1024) char shared[];
  Kernel<Weight, TOKEN_TILES, WARPS>(call, room, shared, threadIdx.x, blockIdx.x, gridDim.x).run();
#endif
}

template <class Weight, int TOKEN_TILES>
cudaError_t launch(const Call& call, int ctas, int limit, bool early, cudaStream_t stream) {
  const Room room{call, Weight(), TOKEN_TILES, WARPS};
  if (room.bytes > limit) return cudaErrorInvalidConfiguration;
  const auto kernel = decoder_segment<Weight, TOKEN_TILES>;
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit)) return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(ctas), config.blockDim = dim3(Kernel<Weight, TOKEN_TILES, WARPS>::THREADS), config.dynamicSmemBytes = room.bytes, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, call, room);
}

template <class Weight>
cudaError_t launch_rows(const Call& call, int ctas, int limit, bool early, cudaStream_t stream) {
  if (call.M <= 8) return launch<Weight, 1>(call, ctas, limit, early, stream);
  return launch<Weight, 2>(call, ctas, limit, early, stream);
}

}  // namespace specdec::segment

extern "C" {

// format: 0 bf16, 1 e4m3. limit: bytes of shared memory that a block may have. At most `ctas` blocks, all at once.
int specdec_segment(
    const void* arguments, int format, int ctas, int limit, int early, int device, cudaStream_t stream) {
  using namespace specdec;
  using namespace specdec::segment;
  Call own;  // aligned as maps must be
  std::memcpy(static_cast<void*>(&own), arguments, sizeof own);
  const Call* call = &own;
  for (int p = 0; p < PHASES; p++) {
    const Matrix& matrix = own.matrix[p];
    const Box box{matrix.data, matrix.columns * (format == 0 ? 2 : 1), matrix.rows, 0, 0, matrix.chunk, HALF};
    if (matrix.rows != 0)
      if (cudaError_t error = describe(box, &own.map[p])) return error;
  }
  if (call->M < 1 || call->M > MAX_ROWS || call->stages < 2 || call->stages > MAX_STAGES || ctas < 1) return cudaErrorInvalidValue;
  if (cudaError_t error = cudaSetDevice(device)) return error;  // this library's runtime need not be the one torch uses
  return format == 0 ? launch_rows<Plain>(*call, ctas, limit, early, stream) : launch_rows<E4m3Rows>(*call, ctas, limit, early, stream);
}

}  // extern "C"
