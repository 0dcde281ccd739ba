// Where the n-grams of a growing token list occurred before: specdec/spec/index.py, compiled. No Python, no torch.
//
// Per level (n-gram length) a hash map holds the newest and the oldest position at which each n-gram ends, and every position
// links to the one before with the same n-gram. The hash is the reference's, so even its collisions are the same.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

namespace specdec {

constexpr int32_t kSeparator = -1;  // between texts of one index: never part of a match, ends every continuation

// Open addressing with linear probing; at most 7/8 full.
class GramMap {
 public:
  struct Entry {
    uint64_t key;
    int32_t newest, oldest;  // newest < 0: free
  };

  void reserve(size_t count) {
    if (8 * (used_ + count) > 7 * entries_.size()) grow(std::bit_ceil((used_ + count) * 8 / 7 + 1));
  }
  void prefetch(uint64_t key) const { __builtin_prefetch(&entries_[home(key)], 1); }

  const Entry* find(uint64_t key) const {
    if (entries_.empty()) return nullptr;
    const Entry* e = &entries_[probe(key)];
    return e->newest < 0 ? nullptr : e;
  }

  // The position this key had before, or -1. Room must have been reserved.
  int32_t put(uint64_t key, int32_t position) {
    Entry& e = entries_[probe(key)];
    int32_t before = e.newest;
    if (before < 0) e = {key, position, position}, used_++;
    e.newest = position;
    return before;
  }

 private:
  size_t home(uint64_t key) const { return (key * 0x9E3779B97F4A7C15u) >> shift_; }
  size_t probe(uint64_t key) const {
    size_t at = home(key), mask = entries_.size() - 1;
    while (entries_[at].newest >= 0 && entries_[at].key != key) at = (at + 1) & mask;
    return at;
  }
  void grow(size_t capacity) {
    std::vector<Entry> old = std::exchange(entries_, std::vector<Entry>(std::max<size_t>(capacity, 64), Entry{0, -1, -1}));
    shift_ = 64 - std::countr_zero(entries_.size());
    for (const Entry& e : old)
      if (e.newest >= 0) entries_[probe(e.key)] = e;
  }

  std::vector<Entry> entries_;
  size_t used_ = 0;
  int shift_ = 0;
};

struct Hit {
  int32_t length, position;  // tokens that agree, and where they end
};

class TokenIndex {
 public:
  explicit TokenIndex(std::vector<int32_t> levels) : levels_(std::move(levels)), maps_(levels_.size()), previous_(levels_.size()) {}

  std::vector<int32_t> tokens;

  // Index the n-grams that end before `end` (<= tokens.size()): level by level, so that one map at a time is in the cache.
  void update(int64_t end) {
    constexpr int64_t kAhead = 16;  // insertions between fetching a map entry and using it
    int64_t count = end - size_, done = 0;
    if (count <= 0) return;
    keys_.assign(count, 0);
    for (size_t l = 0; l < levels_.size(); l++) {
      for (; done < levels_[l]; done++)
        for (int64_t i = std::max<int64_t>(0, done - size_); i < count; i++) keys_[i] = horner(keys_[i], tokens[size_ + i - done]);
      maps_[l].reserve(count);
      previous_[l].resize(end, -1);
      for (int64_t i = std::max<int64_t>(0, levels_[l] - 1 - size_); i < count; i++) {
        if (i + kAhead < count) maps_[l].prefetch(keys_[i + kAhead]);
        previous_[l][size_ + i] = maps_[l].put(keys_[i], (int32_t)(size_ + i));
      }
    }
    size_ = end;
  }

  // Earlier ends of the last tokens of `context`, longest level first; at most `limit`. Appends to `out`.
  void matches(const std::vector<int32_t>& context, int limit, int longest, bool oldest_first, std::vector<Hit>* out) const {
    if (context.empty() || limit <= 0) return;
    std::vector<uint64_t> keys(levels_.size());
    size_t known = keys_at(context.data(), (int64_t)context.size() - 1, keys.data()), stop = out->size() + limit;
    Seen seen(std::min<size_t>(known * (2 * (size_t)limit + 1), size_));
    for (size_t l = known; l-- > 0;) {
      const GramMap::Entry* e = maps_[l].find(keys[l]);
      if (!e) continue;
      int32_t position = oldest_first ? e->oldest : e->newest, next = e->newest;
      for (int links = oldest_first ? -1 : 0; position >= 0 && links < 2 * limit; links++, position = next) {
        next = links < 0 ? e->newest : previous_[l][position];
        if (!seen.add(position)) continue;
        int32_t length = common(context, position, longest);
        if (length < levels_[l]) continue;
        out->push_back({length, position});
        if (out->size() == stop) return;
      }
    }
  }

  // Up to `length` tokens that followed `position`; `cyclic`: past the end it repeats what it has just read. Appends to `out`.
  void continuation(int64_t position, int64_t length, bool cyclic, std::vector<int32_t>* out) const {
    size_t first = out->size();
    int64_t at = position + 1, end = std::min<int64_t>(at + length, tokens.size()), period = (int64_t)tokens.size() - at;
    for (; at < end; at++) {
      if (tokens[at] == kSeparator) return;
      out->push_back(tokens[at]);
    }
    if (cyclic && period > 0)
      while ((int64_t)(out->size() - first) < length) out->push_back((*out)[out->size() - period]);
  }

 private:
  class Seen {  // set of positions
   public:
    explicit Seen(size_t most) : slots_(std::bit_ceil(2 * most + 2), -1) {}
    bool add(int32_t position) {  // false if it was there
      size_t mask = slots_.size() - 1, at = (uint32_t)position * 2654435769u & mask;
      while (slots_[at] >= 0 && slots_[at] != position) at = (at + 1) & mask;
      return std::exchange(slots_[at], position) != position;
    }

   private:
    std::vector<int32_t> slots_;
  };

  static uint64_t horner(uint64_t key, int32_t token) {
    return (key * 0x9E3779B97F4A7C5u + (uint64_t)(int64_t)token + 1) & ((1ull << 60) - 1);
  }

  // Hashes of the n-grams that end at `position`, Horner from the end backwards; returns how many levels fit.
  size_t keys_at(const int32_t* text, int64_t position, uint64_t* keys) const {
    uint64_t key = 0;
    int64_t done = 0;
    for (size_t l = 0; l < levels_.size(); l++) {
      if (levels_[l] > position + 1) return l;
      for (; done < levels_[l]; done++) key = horner(key, text[position - done]);
      keys[l] = key;
    }
    return levels_.size();
  }

  int32_t common(const std::vector<int32_t>& context, int64_t position, int64_t longest) const {
    int64_t bound = std::min({longest, position + 1, (int64_t)context.size()}), length = 0;
    const int32_t *here = tokens.data() + position, *there = context.data() + context.size() - 1;
    while (length < bound && here[-length] == there[-length]) length++;
    return (int32_t)length;
  }

  std::vector<int32_t> levels_;
  std::vector<GramMap> maps_;
  std::vector<std::vector<int32_t>> previous_;  // [level][position] -> earlier position or -1
  std::vector<uint64_t> keys_;  // of the positions being indexed
  int64_t size_ = 0;
};

}  // namespace specdec
