// A whole decoder stack in one parallel region. Included once per instruction set.
//
// Every row goes through the same inner routines, in the same order, as through the single ops, so the bits are theirs.
// Threads split tiles in the linears, heads in attention and rows elsewhere, and meet at a barrier where one reads what
// another wrote. With few rows each thread repeats norms, SiLU and digits for itself: that is cheaper than a barrier.

constexpr int64_t kAlone = 4096;  // elements of a row-wise step up to which every thread does all of it

struct Own {  // of one thread, or of all when rows are split
  float *residual, *x, *act;  // [T, H], [T, H] or [T, 2 H] (`pair`), [T, I]
  char* digits;
};

struct Shared {
  float *qkv, *q, *mixed, *branch, *gate_up;  // [T, …] as the linears have it
  Own first;
  int64_t own_bytes;  // distance from one thread's Own to the next; 0 when rows are split
};

// The linears' digits, one area per part.
static int64_t digit_bytes(const StackLinear& l, int64_t T) {
  int64_t bytes = 0;
  for (int p = 0; p < l.count; p++) bytes += linear_scratch_bytes(T, l.K, l.parts[p].kind);
  return bytes;
}

// Lays the buffers out from `base` on; returns their size in bytes.
static int64_t lay_out(const StackArgs& a, char* base, Shared* s) {
  int64_t used = 0, digits = 0;
  auto take = [&](int64_t bytes) {
    char* start = base + used;
    used += (bytes + 63) / 64 * 64;
    return start;
  };
  auto floats = [&](int64_t columns) { return (float*)take(a.T * columns * (int64_t)sizeof(float)); };
  for (int64_t i = 0; i < a.count; i++)
    for (const StackLinear* l : {&a.layers[i].qkv, &a.layers[i].out, &a.layers[i].gate_up, &a.layers[i].down})
      if (int64_t bytes = digit_bytes(*l, a.T); bytes > digits) digits = bytes;
  s->qkv = floats((a.nh + 2 * a.nkv) * a.hd);
  s->q = floats(a.nh * a.hd);
  s->mixed = floats(a.nh * a.hd);
  s->branch = floats(a.H);
  s->gate_up = floats(2 * a.I);
  int64_t start = used;
  s->first = {floats(a.H), floats(a.features ? 2 * a.H : a.H), floats(a.I), take(digits)};
  s->own_bytes = a.T * (a.H > a.I ? a.H : a.I) <= kAlone ? used - start : 0;
  return used + s->own_bytes * (a.threads - 1);
}

static int64_t stack_bytes(const StackArgs& a) {
  Shared s;
  return lay_out(a, nullptr, &s);
}

// Threads that wait spin for about the time of a phase, then give way: on a busy machine the one they wait for may not be running.
class Barrier {
 public:
  void meet(int count) {
    int turn = turn_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; turn_.load(std::memory_order_acquire) == turn; spins++)
      if (spins < kSpins) pause();
      else std::this_thread::yield();
  }

 private:
  static constexpr int kSpins = 2000;
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> turn_{0};
};

struct Member {  // one thread of the team
  const StackArgs& a;
  const Shared& s;
  const std::vector<Task>& tasks;
  Barrier& barrier;
  Own own;
  int id, count;
  bool split;                   // rows of row-wise steps are split
  int64_t lo, hi;               // rows of row-wise steps this thread does
  int64_t share_lo, share_hi;   // rows that no other thread does
  Scratch scratch;

  Member(const StackArgs& args, const Shared& shared, const std::vector<Task>& t, Barrier& b, int i, int n)
      : a(args), s(shared), tasks(t), barrier(b), own(shared.first), id(i), count(n), split(shared.own_bytes == 0) {
    int64_t skip = shared.own_bytes * id;
    own = {own.residual + skip / 4, own.x + skip / 4, own.act + skip / 4, own.digits + skip};
    share_lo = a.T * id / count, share_hi = a.T * (id + 1) / count;
    lo = split ? share_lo : 0, hi = split ? share_hi : a.T;
    scratch.state.reset(new Softmax[kTaskRows * (a.nh / a.nkv)]);
  }

  void meet() const {
    if (count > 1) barrier.meet(count);
  }

  // residual += branch, x = its norm; for rows [from, to).
  void norm(const float* branch, const float* weight, float* out, int64_t from, int64_t to) const {
    float* residual = own.residual + from * a.H;
    const float* in = branch ? branch + from * a.H : residual;
    rms_norm({in, branch ? residual : nullptr, weight, out + from * a.H, branch ? residual : nullptr, to - from, a.H, a.eps});
  }

  // The first input of a draft head: the norms of token and feature side by side.
  void pair(const float* token_norm) const {
    for (int64_t t = lo; t < hi; t++) {
      const float *token = a.x + t * a.H, *feature = a.features + t * a.H;
      float* out = own.x + t * 2 * a.H;
      rms_norm({token, nullptr, token_norm, out, nullptr, 1, a.H, a.eps});
      rms_norm({feature, nullptr, a.feature_norm, out + a.H, nullptr, 1, a.H, a.eps});
      __builtin_memcpy(own.residual + t * a.H, a.normed_stream ? out + a.H : feature, sizeof(float) * a.H);
    }
  }

  void linear(const StackLinear& l, const float* x, float* out) const {
    int64_t area = 0, column = 0;
    for (int p = 0; p < l.count; p++) {
      LinearArgs args = part(l, p, x, out, area, column);
      with_kind(args.kind, [&]<int kind>() { digit_rows<kind>(args, lo, hi); });
    }
    if (split) meet();
    area = column = 0;
    for (int p = 0; p < l.count; p++) {
      LinearArgs args = part(l, p, x, out, area, column);
      with_kind(args.kind, [&]<int kind>() { tile_share<kind>(args, id, count); });
    }
    meet();
  }

  LinearArgs part(const StackLinear& l, int p, const float* x, float* out, int64_t& area, int64_t& column) const {
    const LinearPart& w = l.parts[p];
    LinearArgs args = {x, w.tiles, out + column, a.T, w.rows, l.K, l.N, w.kind, own.digits + area, l.bias ? l.bias + column : nullptr, count};
    area += linear_scratch_bytes(a.T, l.K, w.kind);
    column += w.rows;
    return args;
  }

  void attend(const StackLayer& layer, const StackCache& cache) {
    int64_t first = share_lo, width = (a.nh + 2 * a.nkv) * a.hd;
    const int64_t* slots = a.slots + cache.group * a.T;
    rope_write_kv({s.qkv + first * width, a.positions + first, slots + first, a.cos, a.sin, cache.k, cache.v, s.q + first * a.nh * a.hd,
                   share_hi - first, a.nh, a.nkv, a.hd});
    meet();
    attend_share({s.q, cache.k, cache.v, a.tables + cache.group * a.B * a.table_width, a.cu_query, a.ctx, a.tree, a.words, a.positions,
                  nullptr, s.mixed, a.B, a.T, a.nh, a.nkv, a.hd, a.block_size, a.table_width, a.scale, layer.window, count, a.first},
                 tasks, &scratch, id, count);
    meet();
  }

  void tap(int64_t index) const {
    for (int64_t j = 0; j < a.tap_count; j++)
      for (int64_t t = share_lo; t < share_hi && a.tap_layers[j] == index; t++)
        __builtin_memcpy(a.taps + (t * a.tap_count + j) * a.H, own.residual + t * a.H, sizeof(float) * a.H);
  }

  void run() {
    if (!a.features && hi > lo) __builtin_memcpy(own.residual + lo * a.H, a.x + lo * a.H, sizeof(float) * (hi - lo) * a.H);
    for (int64_t i = 0; i < a.count; i++) {
      const StackLayer& layer = a.layers[i];
      if (i == 0 && a.features) pair(layer.input_norm);
      else norm(i ? s.branch : nullptr, layer.input_norm, own.x, lo, hi);
      tap(i);
      linear(layer.qkv, own.x, s.qkv);
      attend(layer, a.caches[i]);
      linear(layer.out, s.mixed, s.branch);
      norm(s.branch, layer.post_norm, own.x, lo, hi);
      linear(layer.gate_up, own.x, s.gate_up);
      silu_mul(s.gate_up + lo * 2 * a.I, own.act + lo * a.I, hi - lo, a.I);
      linear(layer.down, own.act, s.branch);
    }
    norm(s.branch, a.norm, a.hidden, share_lo, share_hi);
    tap(a.count);
  }
};

static void decoder_stack(const StackArgs& a) {
  Shared shared;
  lay_out(a, (char*)a.scratch, &shared);
  const std::vector<Task> tasks = attention_tasks(a.B, a.cu_query, a.positions);
  Barrier barrier;
  int64_t used = a.B ? a.cu_query[a.B] : 0;
  __builtin_memset(shared.mixed + used * a.nh * a.hd, 0, sizeof(float) * (a.T - used) * a.nh * a.hd);
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
  {
    Member member(a, shared, tasks, barrier, a.threads > 1 ? omp_get_thread_num() : 0, a.threads > 1 ? omp_get_num_threads() : 1);
    member.run();
  }
}
