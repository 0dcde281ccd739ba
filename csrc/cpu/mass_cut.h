// Where a law is cut; the definition is kernels/mass_cut/reference.py. Included once per instruction set.
//
// No sort of the row: mass is added up in bins of equal width in rank, the tokens of the bin in which it reaches p are
// collected and binned again, and only the few that are left are sorted. Masses are integers in units of 2^-52, so sums are exact.

constexpr int kBins = 1024, kFewTokens = 48, kChunk = 256;

struct RankedToken {
  float rank;
  int32_t id;
  int64_t mass;
};

template <class To, class From> SPECDEC_INLINE To same_bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  __builtin_memcpy(&out, &x, sizeof x);
  return out;
}

// Choices are arithmetic on bits: the compiler vectorises that, and leaves alone comparisons of floats, for they could trap.
SPECDEC_INLINE int32_t choose(int32_t mask, int32_t a, int32_t b) { return b ^ ((a ^ b) & mask); }  // a where mask is -1, b where 0
SPECDEC_INLINE int32_t magnitude_bits(float x) { return same_bits<int32_t>(x) & 0x7fffffff; }
constexpr int32_t kNoMass = 0x42140000, kInfinity = 0x7f800000;  // 37: e^-37 < 2^-53 rounds to nothing

SPECDEC_INLINE int64_t fixed_point(double x) { return same_bits<int64_t>(1.0 + x) - same_bits<int64_t>(1.0); }

// e^x in units of 2^-52 for x <= 0, 0 for NaN. Multiplications and additions only: the same bits on every instruction set.
SPECDEC_INLINE int64_t mass_of(float log_p) {
  int32_t bits = magnitude_bits(log_p);
  double x = -(double)same_bits<float>(choose((bits - kNoMass) >> 31, bits, kNoMass));
  double shifted = x * 1.4426950408889634 + 6755399441055744.0;  // 1.5 * 2^52: rounds to an integer, in the low bits
  double n = shifted - 6755399441055744.0;
  double r = (x - n * 0.69314718036912382) - n * 1.9082149292705877e-10;  // ln 2 in two parts, |r| <= 0.35
  double sum = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;               // Taylor to the 13th power: below the last bit
  sum = sum * r + 1.0 / 39916800.0;
  sum = sum * r + 1.0 / 3628800.0;
  sum = sum * r + 1.0 / 362880.0;
  sum = sum * r + 1.0 / 40320.0;
  sum = sum * r + 1.0 / 5040.0;
  sum = sum * r + 1.0 / 720.0;
  sum = sum * r + 1.0 / 120.0;
  sum = sum * r + 1.0 / 24.0;
  sum = sum * r + 1.0 / 6.0;
  sum = sum * r + 0.5;
  sum = sum * r + 1.0;
  sum = sum * r + 1.0;
  return fixed_point(sum * same_bits<double>((same_bits<uint64_t>(shifted) + 1023) << 52));
}

// -1 where a token of finite rank has mass, else 0.
SPECDEC_INLINE int32_t counts(float log_p, float rank) {
  return ((magnitude_bits(log_p) - kNoMass) & (magnitude_bits(rank) - kInfinity)) >> 31;
}

// The ranks of the tokens that count lie in [low, high].
struct Bins {
  double high, scale;
  Bins(float low, float top) : high(top), scale(top > low ? (kBins - 1) / ((double)top - low) : 0.0) {}
  int32_t of(float rank) const { return (int32_t)((high - rank) * scale); }  // never falls as the rank falls
};

// Integers in the order of the ranks, and back.
SPECDEC_INLINE int32_t ordered(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

struct Row {
  const float *log_p, *rank;
  int64_t V;

  // False where no token counts.
  bool range(float* low, float* high) const {
    int32_t least = INT32_MAX, most = INT32_MIN;
    for (int64_t v = 0; v < V; v++) {
      int32_t key = ordered(same_bits<int32_t>(rank[v]));
      int32_t in = counts(log_p[v], rank[v]);
      least = std::min(least, choose(in, key, INT32_MAX));
      most = std::max(most, choose(in, key, INT32_MIN));
    }
    if (least > most) return false;
    *low = same_bits<float>(ordered(least));
    *high = same_bits<float>(ordered(most));
    return true;
  }

  // Bins of tokens [start, start + n), -1 where a token does not count.
  void bins_of(const Bins& bins, int64_t start, int64_t n, int32_t* out) const {
    int32_t top = same_bits<int32_t>((float)bins.high);
    for (int64_t i = 0; i < n; i++) {
      int32_t in = counts(log_p[start + i], rank[start + i]);
      out[i] = bins.of(same_bits<float>(choose(in, same_bits<int32_t>(rank[start + i]), top))) | ~in;
    }
  }

  // The mass in every bin: bin b is sums[b + 1].
  void sum(const Bins& bins, int64_t* sums) const {
    int64_t mass[kChunk];
    int32_t bin[kChunk];
    for (int64_t start = 0; start < V; start += kChunk) {
      int64_t n = V - start < kChunk ? V - start : kChunk;
      bins_of(bins, start, n, bin);
      for (int64_t i = 0; i < n; i++) mass[i] = mass_of(log_p[start + i]);
      for (int64_t i = 0; i < n; i++) sums[bin[i] + 1] += mass[i];
    }
  }

  // The tokens of a bin by rising id; returns their number.
  int64_t collect(const Bins& bins, int32_t wanted, RankedToken* out) const {
    int64_t count = 0;
    int32_t bin[kChunk];
    for (int64_t start = 0; start < V; start += kChunk) {
      int64_t n = V - start < kChunk ? V - start : kChunk, found[kChunk], hits = 0;
      bins_of(bins, start, n, bin);
      for (int64_t i = 0; i < n; i++) {
        found[hits] = start + i;
        hits += bin[i] == wanted;
      }
      for (int64_t i = 0; i < hits; i++) out[count++] = {rank[found[i]], (int32_t)found[i], mass_of(log_p[found[i]])};
    }
    return count;
  }
};

// Moves past the bins ahead of the one in which the mass reaches the target; returns that one.
static int32_t reach(const int64_t* sums, int64_t target, int64_t* ahead) {
  int32_t bin = 0;
  while (*ahead + sums[bin] < target) *ahead += sums[bin++];
  return bin;
}

// The last token wanted of those in `t`, by rising id, which the tokens of mass `ahead` precede and whose mass reaches the target.
static RankedToken last_of(RankedToken* t, int64_t count, int64_t ahead, int64_t target) {
  while (true) {
    auto [low, high] = std::minmax_element(t, t + count, [](const RankedToken& a, const RankedToken& b) { return a.rank < b.rank; });
    if (low->rank == high->rank) break;
    if (count <= kFewTokens) {
      std::stable_sort(t, t + count, [](const RankedToken& a, const RankedToken& b) { return a.rank > b.rank; });
      break;
    }
    int64_t sums[kBins] = {0};
    Bins bins(low->rank, high->rank);
    for (int64_t i = 0; i < count; i++) sums[bins.of(t[i].rank)] += t[i].mass;
    int32_t bin = reach(sums, target, &ahead);
    count = std::stable_partition(t, t + count, [&](const RankedToken& token) { return bins.of(token.rank) == bin; }) - t;
  }
  for (; ahead + t->mass < target; t++) ahead += t->mass;
  return *t;
}

static void mass_cut_row(const Row& row, float p, RankedToken* tokens, bool* kept) {
  float low, high;
  int64_t sums[kBins + 1] = {0}, total = 0, ahead = 0, target = fixed_point(p);
  target = target < 1 ? 1 : target;
  bool any = row.range(&low, &high);
  if (any) {
    row.sum(Bins(low, high), sums);
    for (int b = 1; b <= kBins; b++) total += sums[b];
  }
  if (total < target) {
    for (int64_t v = 0; v < row.V; v++) kept[v] = true;
    return;
  }
  int64_t count = row.collect(Bins(low, high), reach(sums + 1, target, &ahead), tokens);
  RankedToken last = last_of(tokens, count, ahead, target);
  for (int64_t v = 0; v <= last.id; v++) kept[v] = row.rank[v] >= last.rank;
  for (int64_t v = last.id + 1; v < row.V; v++) kept[v] = row.rank[v] > last.rank;
}

static void mass_cut(const MassCutArgs& a) {
  int threads = a.R * a.V < 65536 ? 1 : a.threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::unique_ptr<RankedToken[]> tokens(new RankedToken[a.V]);  // pages that no tie needs are never touched
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < a.R; r++)
      mass_cut_row({a.log_p + r * a.V, a.rank + r * a.V, a.V}, a.p[r], tokens.get(), a.kept + r * a.V);
  }
}
