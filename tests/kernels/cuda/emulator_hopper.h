// csrc/cuda/ptx_hopper.h in plain C++, for the machine of emulator.h; here the threads of several CTAs take turns.
//
// A copy destroys its destination when it is issued, and what it brings arrives when a barrier that counts it is next waited for.
#pragma once

#include "emulator.h"

namespace specdec {

// In the eight bytes of a barrier: arrivals still missing, arrivals a phase takes, bytes still missing, the phase.
struct Counted {
  int16_t missing, count;
  int32_t bytes_and_phase;  // bytes << 1 | phase
};

inline Counted& counted(uint64_t* barrier) { return *reinterpret_cast<Counted*>(barrier); }

struct BulkCopy {
  void* to;
  const void* from;
  int bytes;
  uint64_t* barrier;
};
inline std::vector<BulkCopy>& bulk_copies() {
  static std::vector<BulkCopy> copies;
  return copies;
}

inline void settle(Counted& barrier) {
  if (barrier.missing == 0 && barrier.bytes_and_phase >> 1 == 0) {
    barrier.missing = barrier.count;
    barrier.bytes_and_phase ^= 1;
  }
}

inline void init_barrier(uint64_t* barrier, int count) { counted(barrier) = {int16_t(count), int16_t(count), 0}; }
inline void publish_barriers() {}
inline void arrive_barrier(uint64_t* barrier) {
  if (--counted(barrier).missing < 0) Machine::fail("more arrivals than a barrier waits for");
  settle(counted(barrier));
}
inline void expect_bytes(uint64_t* barrier, int bytes) {
  counted(barrier).bytes_and_phase += bytes << 1;
  arrive_barrier(barrier);
}
inline void deliver(uint64_t* barrier) {
  auto& copies = bulk_copies();
  for (size_t i = 0; i < copies.size();) {
    if (copies[i].barrier != barrier) {
      i++;
      continue;
    }
    std::memcpy(copies[i].to, copies[i].from, copies[i].bytes);
    counted(barrier).bytes_and_phase -= copies[i].bytes << 1;
    copies.erase(copies.begin() + i);
    settle(counted(barrier));
  }
}
inline void wait_barrier(uint64_t* barrier, int parity) {
  while ((counted(barrier).bytes_and_phase & 1) == parity) {
    deliver(barrier);
    if ((counted(barrier).bytes_and_phase & 1) == parity) Machine::get().yield();
  }
}
struct Box {
  const void* from;
  int pitch, start, row, bytes, rows;
};
inline void copy_box(void* to, const void*, const Box& box, uint64_t* barrier, uint64_t) {
  if (reinterpret_cast<uintptr_t>(to) % 128 || box.bytes % 16 || box.bytes > 2048) Machine::fail("a crooked copy");
  std::memset(to, 0xff, box.bytes * box.rows);
  for (int r = 0; r < box.rows; r++) {
    const char* from = static_cast<const char*>(box.from) + int64_t(box.row + r) * box.pitch + box.start;
    bulk_copies().push_back({static_cast<char*>(to) + r * box.bytes, from, box.bytes, barrier});
  }
}

inline void warp_barrier() {
  Machine::get().warp_wide("syncwarp", nullptr, [](void**) {});
}
inline void named_barrier(int cta, int count) { Machine::get().named_barrier(cta, count); }
inline void grid_arrive_and_wait(unsigned long long* counter, int ctas) {
  const unsigned long long target = ((*counter)++ / ctas + 1) * ctas;
  while (*counter < target) Machine::get().yield();
}
inline void wait_for_launches() {}
inline void release_launches() {}

inline void send_for(const void*) {}

inline uint4 load_fresh(const uint4* p) { return *p; }
inline uint16_t load_fresh(const uint16_t* p) { return *p; }
inline float warp_sum(float value) {
  Machine::get().warp_wide("sum", &value, [](void** lanes) {
    float sums[32];
    for (int i = 0; i < 32; i++) sums[i] = *static_cast<float*>(lanes[i]);
    for (int apart = 16; apart > 0; apart /= 2) {
      float next[32];
      for (int i = 0; i < 32; i++) next[i] = sums[i] + sums[i ^ apart];
      std::memcpy(sums, next, sizeof sums);
    }
    for (int i = 0; i < 32; i++) *static_cast<float*>(lanes[i]) = sums[i];
  });
  return value;
}

inline uint32_t lower_halves(uint32_t a, uint32_t b) { return (a & 0xffff) | b << 16; }
inline uint32_t upper_halves(uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000u); }
inline float bits_float(uint32_t bits) { return as_float(bits); }
inline float inverse_root(float x) { return 1.0f / std::sqrt(x); }
inline float exponential(float x) { return std::exp(x); }

}  // namespace specdec
