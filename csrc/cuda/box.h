// Boxes of a matrix, as the copy engine brings them into shared memory (`copy_box`).
#pragma once

#include <cstdint>

namespace specdec {

constexpr int PIECE = 128;  // bytes of a row that lie together in shared memory

// `rows` rows from `row` on, `bytes` of each from byte `start` on, of a matrix at `from` with `all` rows of `pitch` bytes, without gaps.
struct Box {
  const void* from;
  int pitch, all, start, row, bytes, rows;
};

// What the copy engine knows of a matrix and the size of its boxes (tensor_map.h makes it).
struct alignas(64) Map {
  uint64_t words[16];
};

}  // namespace specdec
