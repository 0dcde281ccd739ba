// Runs a CTA of a CUDA kernel on the CPU: the functions of csrc/cuda/ptx.h in plain C++, and a fiber per thread.
//
// The machine is as unkind as the real one may be. Threads take turns at random, and change only where they must wait: at barriers and in
// warp-wide instructions. An asynchronous copy destroys its destination when it is issued and delivers when its own thread waits for it.
// Shared memory starts as NaN. A warp-wide instruction that not all 32 lanes reach, and a barrier that not all threads reach, is an error.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#include "widen.h"

#define SPECDEC_DEVICE inline
#define SPECDEC_APART inline

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(8) float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace specdec {

// ---- 16-bit numbers

inline float as_float(uint32_t bits) {
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline uint32_t as_bits(float value) {
  uint32_t out;
  std::memcpy(&out, &value, 4);
  return out;
}

inline float widen(uint32_t half, Bf16) { return as_float((half & 0xffff) << 16); }
inline float widen(uint32_t half, F16) {
  const int sign = half >> 15 & 1, exponent = half >> 10 & 31, mantissa = half & 0x3ff;
  const float magnitude = exponent == 31  ? (mantissa ? NAN : INFINITY)
                          : exponent == 0 ? std::ldexp(float(mantissa), -24)
                                          : std::ldexp(float(mantissa + 1024), exponent - 25);
  return sign ? -magnitude : magnitude;
}

inline uint32_t narrow(float value, Bf16) {
  const uint32_t bits = as_bits(value);
  if (std::isnan(value)) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t narrow(float value, F16) {
  const uint32_t sign = std::signbit(value) ? 0x8000 : 0;
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return 0x7fff;
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  if (magnitude == 0.0f) return sign;
  int exponent = 0;
  std::frexp(magnitude, &exponent);  // magnitude = f 2^exponent, f in [1/2, 1)
  const int ulp = (exponent > -13 ? exponent : -13) - 11;
  const uint32_t units = uint32_t(std::nearbyint(std::ldexp(magnitude, -ulp)));  // at most 2^11; ties to even
  return sign | (uint32_t(ulp + 24) * 1024 + units);
}

template <class Number>
uint32_t round_pair(float low, float high, Number number) {
  return narrow(low, number) | narrow(high, number) << 16;
}
template <class Number>
uint32_t fused_pair(uint32_t a, uint32_t b, uint32_t c, Number number) {
  auto fused = [number](uint32_t a, uint32_t b, uint32_t c) {  // the product is exact in float32, the sum in all but far-fetched cases
    return widen(a, number) * widen(b, number) + widen(c, number);
  };
  return round_pair(fused(a, b, c), fused(a >> 16, b >> 16, c >> 16), number);
}
template <class Number>
uint32_t times_pair(uint32_t a, uint32_t b, Number number) {
  return fused_pair(a, b, 0x80008000u, number);
}
inline uint32_t lower_twice(uint32_t word) { return (word & 0xffff) * 0x10001u; }
inline uint32_t upper_twice(uint32_t word) { return (word >> 16) * 0x10001u; }

inline float times(float a, float b) { return a * b; }
inline float plus(float a, float b) { return a + b; }

// ---- Threads

class Machine {
 public:
  static Machine& get() {
    static Machine machine;
    return machine;
  }

  // body(thread) on `threads` threads, in an order drawn from `seed`.
  void run(int threads, uint64_t seed, std::function<void(int)> body) {
    this->body = std::move(body);
    random = seed * 2654435761u + 1;
    fibers.assign(threads, Fiber());
    groups.assign(threads / 32, Group());
    arrived = 0;
    for (int i = 0; i < threads; i++) {
      Fiber& fiber = fibers[i];
      fiber.stack.resize(1 << 16);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      fiber.context.uc_link = &scheduler;
      makecontext(&fiber.context, reinterpret_cast<void (*)()>(&Machine::enter), 0);
    }
    ready.resize(threads);
    for (int i = 0; i < threads; i++) ready[i] = i;
    while (!ready.empty()) {
      const size_t pick = draw() % ready.size();
      current = ready[pick];
      ready[pick] = ready.back();
      ready.pop_back();
      swapcontext(&scheduler, &fibers[current].context);
    }
    for (const Fiber& fiber : fibers)
      if (!fiber.done) fail("a thread waits for others that have gone elsewhere");
  }

  void block_barrier() {
    if (++arrived < int(fibers.size())) return park(blocked);
    arrived = 0;
    release(blocked);
    yield();
  }

  // Of `count` threads that come with this key.
  void named_barrier(int key, int count) {
    std::vector<int>& waiting = named[key];
    if (int(waiting.size()) + 1 < count) return park(waiting);
    release(waiting);
    yield();
  }

  // The thread whose turn it is; and where it is in its warp.
  int turn() const { return current; }
  int lane() const { return current % 32; }

  // Somebody else's turn.
  void yield() { park(ready); }

  // All lanes of the warp hand in `argument`; the last one runs op(arguments) for them all. `name` must be the same for all.
  template <class Op>
  void warp_wide(const char* name, void* argument, Op op) {
    const int self = current;
    Group& group = groups[self / 32];
    if (group.count > 0 && group.name != name) fail("lanes of one warp are at different instructions");
    group.name = name;
    group.arguments[self % 32] = argument;
    if (++group.count < 32) return park(group.waiting);
    group.count = 0;
    op(group.arguments);
    release(group.waiting);
  }

  struct Copy {
    void* to;
    const void* from;  // null: zeros
  };
  void issue(Copy copy) {
    std::memset(copy.to, 0xff, 16);
    fibers[current].open.push_back(copy);
  }
  void commit() {
    fibers[current].committed.push_back(std::move(fibers[current].open));
    fibers[current].open.clear();
  }
  void wait(int pending) {
    auto& groups = fibers[current].committed;
    while (int(groups.size()) > pending) {
      for (const Copy& copy : groups.front()) {
        if (copy.from) std::memcpy(copy.to, copy.from, 16);
        else std::memset(copy.to, 0, 16);
      }
      groups.erase(groups.begin());
    }
  }

  [[noreturn]] static void fail(const char* what) {
    std::fprintf(stderr, "emulator: %s\n", what);
    std::abort();
  }

 private:
  struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool done = false;
    std::vector<Copy> open;
    std::vector<std::vector<Copy>> committed;
  };
  struct Group {
    int count = 0;
    const char* name = nullptr;
    void* arguments[32];
    std::vector<int> waiting;
  };

  static void enter() {
    Machine& machine = get();
    const int self = machine.current;
    machine.body(self);
    machine.fibers[self].done = true;
  }
  void park(std::vector<int>& where) {
    const int self = current;
    where.push_back(self);
    swapcontext(&fibers[self].context, &scheduler);
  }
  void release(std::vector<int>& who) {
    ready.insert(ready.end(), who.begin(), who.end());
    who.clear();
  }
  uint64_t draw() {
    random ^= random << 13, random ^= random >> 7, random ^= random << 17;
    return random >> 11;
  }

  std::function<void(int)> body;
  std::vector<Fiber> fibers;
  std::vector<Group> groups;
  std::vector<int> ready, blocked;
  std::map<int, std::vector<int>> named;
  ucontext_t scheduler;
  int current = 0, arrived = 0;
  uint64_t random = 1;
};

inline void block_barrier() { Machine::get().block_barrier(); }

// ---- Copies and matrices

inline int in_a_register(int value) { return value; }
inline uint64_t evict_first() { return 0; }
inline void copy_async(void* to, const void* from, uint64_t) { Machine::get().issue({to, from}); }
inline void copy_async_or_zero(void* to, const void* from, bool real) { Machine::get().issue({to, real ? from : nullptr}); }
inline void commit_copies() { Machine::get().commit(); }
template <int PENDING>
void wait_copies() {
  Machine::get().wait(PENDING);
}

inline void load_matrices(uint32_t (&out)[4], const void* row) {
  struct Lane {
    uint32_t* out;
    const void* row;
  } lane{out, row};
  Machine::get().warp_wide("ldmatrix", &lane, [](void** lanes) {
    for (int reader = 0; reader < 32; reader++)
      for (int matrix = 0; matrix < 4; matrix++) {
        const char* row = static_cast<const char*>(static_cast<Lane*>(lanes[8 * matrix + reader / 4])->row);
        std::memcpy(&static_cast<Lane*>(lanes[reader])->out[matrix], row + 4 * (reader % 4), 4);
      }
  });
}

// mma.m16n8k16, by the fragment tables of the PTX manual. The 16 products are added in float64.
template <class Number>
void multiply_add(float (&sum)[4], const uint32_t (&left)[4], uint32_t right0, uint32_t right1, Number number) {
  struct Lane {
    float* sum;
    const uint32_t* left;
    uint32_t right[2];
  } lane{sum, left, {right0, right1}};
  Machine::get().warp_wide("mma", &lane, [number](void** pointers) {
    float a[16][16], b[16][8];
    auto at = [&](int i) { return static_cast<Lane*>(pointers[i]); };
    for (int i = 0; i < 32; i++)
      for (int e = 0; e < 2; e++) {
        const int group = i / 4, quad = 2 * (i % 4) + e;
        for (int r = 0; r < 4; r++) a[group + (r & 1) * 8][quad + (r >> 1) * 8] = widen(at(i)->left[r] >> 16 * e, number);
        for (int r = 0; r < 2; r++) b[quad + r * 8][group] = widen(at(i)->right[r] >> 16 * e, number);
      }
    for (int i = 0; i < 32; i++)
      for (int c = 0; c < 4; c++) {
        const int row = i / 4 + (c >> 1) * 8, column = 2 * (i % 4) + (c & 1);
        double total = at(i)->sum[c];
        for (int k = 0; k < 16; k++) total += double(a[row][k]) * b[k][column];
        at(i)->sum[c] = float(total);
      }
  });
}

// ---- Between CTAs, which run one after another here

inline float4 load_fresh(const float4* p) { return *p; }
inline void arrive(int* counter, int expected, int* flags, int thread) {
  block_barrier();
  if (thread < 2) {
    bool last = false;
    if (expected > 1) {
      last = (*counter)++ == expected - 1;
      if (last) *counter = 0;
    }
    flags[thread] = last;
  }
  block_barrier();
}

}  // namespace specdec
