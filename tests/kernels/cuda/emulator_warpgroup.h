// csrc/cuda/ptx_warpgroup.h in plain C++. A product reads shared memory and writes its sums when it is waited for, not before.
#pragma once

#include "emulator_hopper.h"

namespace specdec {

struct Product {
  float* sums;
  int width, thread;
  const char *tokens, *weights;
  bool add;
};
inline std::vector<Product>& products_under_way() {
  static std::map<int, std::vector<Product>> all;
  return all[Machine::get().turn()];
}

inline void begin_products() { warp_barrier(); }  // instructions of whole warps
inline void commit_products() {
  for (Product& product : products_under_way())
    for (int i = 0; i < product.width / 2; i++)
      if (!product.add) product.sums[i] = NAN;
}

inline float code_at(const char* from, int row, int byte) {
  const uintptr_t plain = reinterpret_cast<uintptr_t>(from) + row * 128 + byte;
  static const std::vector<float> numbers = [] {
    std::vector<float> all;
    for (uint32_t code = 0; code < 256; code++) all.push_back(widen(widen_code(code), F16()));
    return all;
  }();
  return numbers[*reinterpret_cast<const unsigned char*>(plain ^ (plain >> 7 & 7) << 4)];
}
inline void multiply_now(const Product& product) {
  const int token = product.thread / 32 * 16 + product.thread % 32 / 4, row = product.thread % 4 * 2;
  for (int i = 0; i < product.width / 2; i++) {
    float sum = product.add ? product.sums[i] : 0.0f;
    for (int k = 0; k < 32; k++) sum += code_at(product.tokens, token + i / 2 % 2 * 8, k) * code_at(product.weights, i / 4 * 8 + row + i % 2, k);
    product.sums[i] = sum;
  }
}
inline void wait_products() {
  auto& products = products_under_way();
  for (const Product& product : products) multiply_now(product);
  products.clear();
  warp_barrier();
}
template <int COUNT>
void use_sums(float (&)[COUNT]) {}

template <int COUNT>
void multiply_e4m3(float (&sums)[COUNT], const void* tokens, const void* weights, bool add, int thread) {
  products_under_way().push_back({sums, 2 * COUNT, thread, static_cast<const char*>(tokens), static_cast<const char*>(weights), add});
}

}  // namespace specdec
