// Philox4x32-10, Gumbel noise and the noisy argmax; the definition is kernels/noise/reference.py. Included once per
// instruction set. Logs are float64 (libm), rounded once to float32.
//
// The argmax evaluates few logs: noise never exceeds 22.88, so blocks of ids that cannot catch up with the best so far are
// skipped, and a cheap upper bound of the noise, read from the exponent bits of u, rules out most other ids. Both are
// upper bounds, so the result is that of the full evaluation.

constexpr float kLargestNoise = 22.88f;  // -log(-log1p(-2^-33)) = 22.874

struct Words4 { uint32_t w[4][16]; };  // word i of 16 counters

static void philox16(const uint32_t c0[16], uint32_t position, uint32_t choice, uint32_t purpose, uint64_t seed, Words4* out) {
  Int16 c[4] = {load_int(c0), all_int((int32_t)position), all_int((int32_t)choice), all_int((int32_t)purpose)};
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    Int16 high0, low0, high1, low1;
    wide_product(c[0], all_int((int32_t)0xD2511F53u), &high0, &low0);
    wide_product(c[2], all_int((int32_t)0xCD9E8D57u), &high1, &low1);
    c[0] = bit_xor(bit_xor(high1, c[1]), all_int((int32_t)k0));
    c[2] = bit_xor(bit_xor(high0, c[3]), all_int((int32_t)k1));
    c[1] = low1;
    c[3] = low0;
  }
  for (int w = 0; w < 4; w++) store_int(out->w[w], c[w]);
}

SPECDEC_INLINE float gumbel(uint32_t word) {
  double u = ((double)word + 0.5) * 2.3283064365386963e-10;  // 2^-32
  return (float)-std::log(-std::log1p(-u));
}

SPECDEC_INLINE float uniform(uint32_t word) {
  float u = (float)(((double)word + 0.5) * 2.3283064365386963e-10);
  return u < 0.99999994f ? u : 0.99999994f;  // 1 - 2^-24
}

// At least the Gumbel noise of 16 words: -log E <= -log u, log2(1 + f) >= f; dropping a word's last bit only raises it.
SPECDEC_INLINE Float16 noise_bound(const uint32_t words[16]) {
  Float16 u = fma(to_float(bit_and(right<1>(load_int(words)), all_int(0x7fffffff))), all(2.0f), all(0.5f));
  Float16 log2 = fma(to_float(bits_of(u)), all(1.1920929e-7f), all(-159.0f));  // exponent and mantissa read as a number
  return fma(log2, all(-0.69314718f), all(1e-3f));
}

static uint32_t word_of(const NoiseKey& key, int64_t row, int64_t id) {
  uint32_t c0[16] = {(uint32_t)(id >> 2)};
  Words4 words;
  philox16(c0, (uint32_t)key.positions[row], (uint32_t)key.choices[row], key.purpose, (uint64_t)key.seeds[row], &words);
  return words.w[id & 3][0];
}

// The first of the highest scores: which stretch holds it, then where in the stretch.
static int64_t plain_argmax(const float* score, int64_t V) {
  constexpr int64_t kStretch = 1024;
  float best = -__builtin_inff();
  int64_t stretch = -1;
  for (int64_t start = 0; start < V; start += kStretch) {
    int64_t end = start + kStretch < V ? start + kStretch : V, v = start;
    Float16 top[4] = {all(-__builtin_inff()), all(-__builtin_inff()), all(-__builtin_inff()), all(-__builtin_inff())};
    for (; v + 64 <= end; v += 64)
      for (int i = 0; i < 4; i++) top[i] = max(load(score + v + 16 * i), top[i]);
    float here = largest(max(max(top[0], top[1]), max(top[2], top[3])));
    for (; v < end; v++) here = score[v] > here ? score[v] : here;
    if (stretch < 0 || here > best) best = here, stretch = start;
  }
  for (int64_t v = stretch; v < V; v++) if (score[v] == best) return v;
  return 0;  // nothing but NaN
}

// Ids [start, start + 64), whose highest score is `top`, against the best so far.
static void noisy_block(const ArgmaxArgs& a, int64_t row, int64_t start, const float* score, float top, float* best, int64_t* best_id) {
  uint32_t c0[16];
  for (int i = 0; i < 16; i++) c0[i] = (uint32_t)(start / 4 + i);
  Words4 words;
  philox16(c0, (uint32_t)a.key.positions[row], (uint32_t)a.key.choices[row], a.key.purpose, (uint64_t)a.key.seeds[row], &words);
  int64_t count = a.V - start < 64 ? a.V - start : 64;
  float limit[4][16];
  for (int w = 0; w < 4; w++) store(limit[w], noise_bound(words.w[w]));
  float room = largest(max(max(load(limit[0]), load(limit[1])), max(load(limit[2]), load(limit[3]))));
  if (!(top + room >= *best)) return;
  for (int64_t j = 0; j < count; j++) {
    if (!(score[start + j] + limit[j & 3][j >> 2] >= *best)) continue;
    float total = score[start + j] + gumbel(words.w[j & 3][j >> 2]);
    if (total > *best || (total == *best && start + j < *best_id)) { *best = total; *best_id = start + j; }
  }
}

static int64_t noisy_argmax(const ArgmaxArgs& a, int64_t row) {
  const float* score = a.scores + row * a.V;
  int64_t best_id = plain_argmax(score, a.V);
  if (!(score[best_id] > -__builtin_inff()) || score[best_id] == __builtin_inff()) return best_id;
  float best = score[best_id] + gumbel(word_of(a.key, row, best_id));
  for (int64_t start = 0; start < a.V; start += 64) {
    float top = -__builtin_inff();
    if (start + 64 <= a.V) {
      Float16 t = all(top);
      for (int i = 0; i < 64; i += 16) t = max(load(score + start + i), t);
      top = largest(t);
    } else {
      for (int64_t v = start; v < a.V; v++) top = score[v] > top ? score[v] : top;
    }
    if (top + kLargestNoise >= best) noisy_block(a, row, start, score, top, &best, &best_id);
  }
  return best_id;
}

static void gumbel_argmax(const ArgmaxArgs& a) {
  int threads = a.R * a.V < 65536 ? 1 : a.threads;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
  for (int64_t r = 0; r < a.R; r++) a.out[r] = a.noisy[r] ? noisy_argmax(a, r) : plain_argmax(a.scores + r * a.V, a.V);
}

static void noise(const NoiseArgs& a) {
  int threads = a.R * a.W < 4096 ? 1 : a.threads;
  int64_t chunks = (a.W + 15) / 16;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t i = 0; i < a.R * chunks; i++) {
    int64_t r = i / chunks, start = i % chunks * 16, count = a.W - start < 16 ? a.W - start : 16;
    const int64_t* id = a.ids + r * a.W + start;
    uint32_t c0[16] = {0};
    for (int64_t j = 0; j < count; j++) c0[j] = (uint32_t)(id[j] >> 2);
    Words4 words;
    philox16(c0, (uint32_t)a.key.positions[r], (uint32_t)a.key.choices[r], a.key.purpose, (uint64_t)a.key.seeds[r], &words);
    for (int64_t j = 0; j < count; j++) {
      uint32_t word = words.w[id[j] & 3][j];
      a.out[r * a.W + start + j] = a.uniform ? uniform(word) : gumbel(word);
    }
  }
}
