// csrc/cuda/ptx_hopper.h in plain C++, for the machine of emulator.h; here the threads of several CTAs take turns.
//
// A copy destroys its destination when it is issued, and what it brings arrives when a barrier that counts it is next waited for.
#pragma once

#include "box.h"
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
inline void copy_box(void* to, const void*, const Box& box, uint64_t* barrier, uint64_t) {
  static const char zeros[16] = {};
  if (reinterpret_cast<uintptr_t>(to) % 1024 || box.bytes % 128 || box.rows % 8) Machine::fail("a crooked copy");
  std::memset(to, 0xff, box.bytes * box.rows);
  for (int r = 0; r < box.rows; r++)
    for (int part = 0; part < box.bytes / 16; part++) {
      const bool real = box.row + r < box.all && box.start + 16 * part < box.pitch;
      const char* from = static_cast<const char*>(box.from) + int64_t(box.row + r) * box.pitch + box.start + 16 * part;
      char* const piece = static_cast<char*>(to) + part / 8 * 128 * box.rows;
      bulk_copies().push_back({piece + r * 128 + (part % 8 ^ r % 8) * 16, real ? from : zeros, 16, barrier});
    }
}

inline void copy_bytes(void* to, const void* from, int bytes, uint64_t* barrier) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) Machine::fail("a crooked copy");
  std::memset(to, 0xff, bytes);
  bulk_copies().push_back({to, from, bytes, barrier});
}

inline void warp_barrier() {
  Machine::get().warp_wide("syncwarp", nullptr, [](void**) {});
}
inline void named_barrier(int cta, int number, int count) { Machine::get().named_barrier(16 * cta + number, count); }
inline unsigned long long count_up(unsigned long long* counter) { return (*counter)++; }
inline unsigned long long came_to_grid(unsigned long long* counter) { return *counter; }
inline void grid_arrive_and_wait(unsigned long long* counter, unsigned long long all) {
  ++*counter;
  while (*counter < all) Machine::get().yield();
}
inline void wait_for_launches() {}
inline void release_launches() {}


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

inline float warp_max(float value) {
  Machine::get().warp_wide("max", &value, [](void** lanes) {
    float most = 0.0f;
    for (int i = 0; i < 32; i++) most = std::fmax(most, *static_cast<float*>(lanes[i]));
    for (int i = 0; i < 32; i++) *static_cast<float*>(lanes[i]) = most;
  });
  return value;
}

// ---- Across a warp

template <class Value>
Value warp_from(Value value, int lane) {
  struct Lane {
    Value value, out;
    int from;
  } own{value, value, lane};
  Machine::get().warp_wide("shuffle", &own, [](void** lanes) {
    for (int i = 0; i < 32; i++) {
      Lane* const reader = static_cast<Lane*>(lanes[i]);
      if (reader->from < 0 || reader->from > 31) Machine::fail("a lane that is not there");
      reader->out = static_cast<Lane*>(lanes[reader->from])->value;
    }
  });
  return own.out;
}
template <class Value, class Join>
Value warp_joined(Value value, Join join) {
  Value total = warp_from(value, 0);
  for (int i = 1; i < 32; i++) total = join(total, warp_from(value, i));
  return total;
}
inline int warp_most(int value) {
  return warp_joined(value, [](int a, int b) { return a > b ? a : b; });
}
inline int warp_or(int value) {
  return warp_joined(value, [](int a, int b) { return a | b; });
}
inline int warp_prefix(int value, int lane) {
  int total = 0;
  for (int i = 0; i < 32; i++) {
    const int other = warp_from(value, i);
    if (i <= lane) total += other;
  }
  return total;
}
inline uint32_t warp_ballot(bool holds) {
  uint32_t found = 0;
  for (int i = 0; i < 32; i++) found |= uint32_t(warp_from(int(holds), i)) << i;
  return found;
}
template <class Join>
float quad_joined(float value, Join join) {
  float all[32];
  for (int i = 0; i < 32; i++) all[i] = warp_from(value, i);
  const int first = Machine::get().lane() / 4 * 4;
  return join(join(all[first], all[first + 1]), join(all[first + 2], all[first + 3]));
}
inline float quad_most(float value) {
  return quad_joined(value, [](float a, float b) { return std::fmax(a, b); });
}
inline float quad_sum(float value) {
  return quad_joined(value, [](float a, float b) { return a + b; });
}

inline void load_matrices_turned(uint32_t (&out)[4], const void* row) {
  struct Lane {
    uint32_t* out;
    const void* row;
  } lane{out, row};
  Machine::get().warp_wide("ldmatrix.trans", &lane, [](void** lanes) {
    for (int reader = 0; reader < 32; reader++)
      for (int matrix = 0; matrix < 4; matrix++) {
        uint16_t pair[2];
        for (int e = 0; e < 2; e++) {
          const char* row = static_cast<const char*>(static_cast<Lane*>(lanes[8 * matrix + reader % 4 * 2 + e])->row);
          std::memcpy(&pair[e], row + 2 * (reader / 4), 2);
        }
        std::memcpy(&static_cast<Lane*>(lanes[reader])->out[matrix], pair, 4);
      }
  });
}

// ---- A cluster: all that runs at a time, its blocks' shared memory side by side

struct Cluster {
  char* shared;
  int bytes;  // of a block
  static Cluster& get() {
    static Cluster cluster;
    return cluster;
  }
};
inline void cluster_arrive() {}
inline void cluster_wait() { Machine::get().block_barrier(); }
template <class Own>
Own* peer(Own* own, int rank) {
  const Cluster& cluster = Cluster::get();
  return reinterpret_cast<Own*>(cluster.shared + int64_t(rank) * cluster.bytes + (reinterpret_cast<char*>(own) - cluster.shared) % cluster.bytes);
}
inline void cluster_barrier() { Machine::get().block_barrier(); }
inline void arrive_barrier(uint64_t* barrier, int rank) { arrive_barrier(peer(barrier, rank)); }
inline void copy_box_to_all(void* to, const void* map, const Box& box, uint64_t* barrier, int blocks) {
  for (int rank = 0; rank < blocks; rank++) copy_box(peer(static_cast<char*>(to), rank), map, box, peer(barrier, rank), 0);
}
template <class Value>
void send(Value* to, int rank, const Value& value, uint64_t* barrier) {
  *peer(to, rank) = value;
  Counted& counts = counted(peer(barrier, rank));
  counts.bytes_and_phase -= int(sizeof value) << 1;
  settle(counts);
}

inline int bits_set(uint32_t word) { return __builtin_popcount(word); }
inline int first_bit(uint32_t word) { return __builtin_ctz(word); }
inline int larger_of(int a, int b) { return a > b ? a : b; }
inline float power_of_two(float x) { return std::exp2(x); }

inline float larger(float a, float b) { return std::fmax(a, b); }
inline uint32_t float_bits(float value) { return as_bits(value); }

inline uint32_t widen_code(uint32_t code) {
  if ((code & 0x7f) == 0x7f) return 0x7fff;
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude = exponent == 0 ? std::ldexp(float(mantissa), -9) : std::ldexp(float(mantissa + 8), exponent - 10);
  return narrow(code & 0x80 ? -magnitude : magnitude, F16());
}
inline void widen_codes(uint32_t& first, uint32_t& second, uint32_t codes) {
  first = widen_code(codes & 0xff) | widen_code(codes >> 8 & 0xff) << 16;
  second = widen_code(codes >> 16 & 0xff) | widen_code(codes >> 24) << 16;
}
inline float bits_float(uint32_t bits) { return as_float(bits); }
inline float inverse_root(float x) { return 1.0f / std::sqrt(x); }
inline float exponential(float x) { return std::exp(x); }

}  // namespace specdec
