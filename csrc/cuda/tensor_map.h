// Makes the map by which the copy engine finds boxes of a matrix (box.h). Host code.
#pragma once

#include <cuda_runtime.h>

#include "box.h"

namespace specdec {

// cuTensorMapEncodeTiled of the driver, whose header not every compiler comes with: map, type of numbers, dimensions, address, sizes, bytes from
// row to row, box, steps in it, interleaving, swizzle, promotion in the second level cache, filling.
using Encode = int (*)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int, int, int, int);

// For boxes of box.rows rows and box.bytes bytes, both at most 256 steps, wherever they begin. Dimensions: units of 8 bytes of a piece, rows,
// pieces.
inline cudaError_t describe(const Box& box, Map* map) {
  constexpr int FLOAT64 = 8, PLAIN = 0, EXCHANGED_IN_128 = 3, LINES_OF_256 = 3, ZEROS = 0;
  static Encode encode = nullptr;
  if (encode == nullptr) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result)) return error;
    if (found == nullptr) return cudaErrorNotSupported;
    encode = reinterpret_cast<Encode>(found);
  }
  const uint64_t sizes[3] = {PIECE / 8, uint64_t(box.all), uint64_t(box.pitch) / PIECE}, pitch[2] = {uint64_t(box.pitch), PIECE};
  const uint32_t steps[3] = {1, 1, 1}, size[3] = {PIECE / 8, uint32_t(box.rows), uint32_t(box.bytes / PIECE)};
  const int error = encode(map, FLOAT64, 3, const_cast<void*>(box.from), sizes, pitch, size, steps, PLAIN, EXCHANGED_IN_128, LINES_OF_256, ZEROS);
  return error ? cudaErrorInvalidValue : cudaSuccess;
}

}  // namespace specdec
