// Paged attention for causal and tree rows. Included once per instruction set.
//
// Every row reduces over its logical keys 0, 1, 2, … (committed positions, then its ancestors by depth) in tiles of 64,
// merged in order by online softmax. A tile without visible keys changes nothing and is skipped, so windows cost what
// they show. Which rows share a task, and where a task runs, cannot change a bit.

constexpr int kKeys = 64;      // keys per tile
constexpr int kTaskRows = 16;  // rows of one sequence that walk a tile while it is in cache
constexpr int kMaxHead = 256;

struct Softmax {  // running state of one (row, head)
  float top, norm;
  float acc[kMaxHead];
};

struct AttentionRow {
  int64_t row, position, first;  // batch row, logical position, first visible key
  int32_t ancestor[64];          // node by depth, for a tree row
};

struct Scratch {  // of one thread
  AttentionRow rows[kTaskRows];
  int64_t node[64];      // element offset of each tree node's key, whether its row is here or not
  int64_t shared[kKeys]; // of the current tile's positions, for keys all rows share
  int64_t own[kKeys];    // the same for one row, ancestors included
  std::unique_ptr<Softmax[]> state;  // [kTaskRows, group]
};

SPECDEC_INLINE void plan_row(const AttentionArgs& a, int64_t b, int64_t row, bool tree, AttentionRow* out) {
  out->row = row;
  out->position = a.positions[row];
  out->first = a.window > 0 && out->position >= a.window ? out->position - a.window + 1 : 0;
  if (a.first && a.first[b] > out->first) out->first = a.first[b];
  uint64_t word = tree ? (uint64_t)a.words[row] : 0;
  for (int depth = 0; word; depth++, word &= word - 1) out->ancestor[depth] = __builtin_ctzll(word);
}

// Element offsets (of kv head 0) of slot positions [lo, hi).
SPECDEC_INLINE void locate(const AttentionArgs& a, int64_t b, int64_t lo, int64_t hi, int64_t* offset) {
  const int32_t* table = a.block_table + b * a.table_width;
  int64_t width = a.nkv * a.hd, block = lo / a.block_size, within = lo % a.block_size;
  for (int64_t p = lo; p < hi; within = 0, block++) {
    int64_t base = (int64_t)table[block] * a.block_size;
    for (; within < a.block_size && p < hi; within++, p++) *offset++ = (base + within) * width;
  }
}

// One tile of `count` keys for one head.
template <int vectors>
static void attend_tile(const float* q, const float* keys, const float* values, const int64_t* offset, int count, float scale, Softmax* s) {
  alignas(64) float score[kKeys];
  Float16 qv[vectors], top = all(-__builtin_inff()), odd = all(0.0f);  // odd: NaN where a score is none of the numbers
#pragma GCC unroll 8
  for (int v = 0; v < vectors; v++) qv[v] = load(q + 16 * v);
  for (int start = 0; start < count; start += 16) {
    Float16 dots[16];
    for (int i = 0; i < 16; i++) {
      const float* key = keys + offset[start + i < count ? start + i : count - 1];
      dots[i] = mul(qv[0], load(key));
#pragma GCC unroll 8
      for (int v = 1; v < vectors; v++) dots[i] = fma(qv[v], load(key + 16 * v), dots[i]);
    }
    Float16 part = mul(sums(dots), all(scale));
    store(score + start, part);
    odd = fma(part, all(0.0f), odd);
    for (int i = count - start; i < 16; i++) score[start + i] = -__builtin_inff();
    top = max(load(score + start), top);
  }
  float new_top = largest(top) > s->top ? largest(top) : s->top;
  alignas(16) float old[16] = {s->top - new_top};
  store(old, exponential(load(old)));
  Float16 total = all(0.0f);
  for (int start = 0; start < count; start += 16) {
    Float16 p = exponential(sub(load(score + start), all(new_top)));
    store(score + start, p);
    total = add(total, p);
  }
  float shrink = s->top == -__builtin_inff() ? 0.0f : old[0];
  s->top = new_top;
  s->norm = __builtin_fmaf(s->norm, shrink, sum(total)) + sum(odd);  // the exponential would make NaN a weight of 0
  Float16 acc[vectors];
#pragma GCC unroll 8
  for (int v = 0; v < vectors; v++) acc[v] = mul(load(s->acc + 16 * v), all(shrink));
  for (int i = 0; i < count; i++) {
    const float* value = values + offset[i];
    Float16 p = all(score[i]);
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) acc[v] = fma(p, load(value + 16 * v), acc[v]);
  }
#pragma GCC unroll 8
  for (int v = 0; v < vectors; v++) store(s->acc + 16 * v, acc[v]);
}

// Offsets of keys [lo, hi) of the tile from `tile` on, for one row.
SPECDEC_INLINE const int64_t* row_offsets(const AttentionRow& r, bool tree, int64_t ctx, int64_t tile, int64_t lo, int64_t hi, Scratch* s) {
  if (!tree || hi <= ctx) return s->shared + (lo - tile);
  for (int64_t p = lo; p < hi; p++) s->own[p - lo] = p < ctx ? s->shared[p - tile] : s->node[r.ancestor[p - ctx]];
  return s->own;
}

struct Task {  // `count` rows of sequence b from `row` on
  int64_t b, row;
  int count;
  int64_t keys;  // visible to all of them together, without a window: the measure of work
};

// Heads [from, to) of KV head kv's group.
template <int vectors> static void attend_rows(const AttentionArgs& a, const Task& t, int64_t kv, int64_t from, int64_t to, Scratch* s) {
  int64_t group = a.nh / a.nkv, last = 0, begin = INT64_MAX, ctx = a.ctx[t.b];
  bool tree = a.tree[t.b] > 0;
  if (tree) locate(a, t.b, ctx, ctx + a.tree[t.b], s->node);
  for (int i = 0; i < t.count; i++) {
    plan_row(a, t.b, t.row + i, tree, s->rows + i);
    if (s->rows[i].position > last) last = s->rows[i].position;
    if (s->rows[i].first < begin) begin = s->rows[i].first;
    for (int64_t g = from; g < to; g++) {
      Softmax& state = s->state[i * group + g];
      state.top = a.sinks ? a.sinks[kv * group + g] : -__builtin_inff();
      state.norm = a.sinks ? 1.0f : 0.0f;
      for (int v = 0; v < vectors; v++) store(state.acc + 16 * v, all(0.0f));
    }
  }
  int64_t end = tree ? (ctx < last + 1 ? ctx : last + 1) : last + 1;  // keys that all rows find at the same place
  for (int64_t tile = begin / kKeys * kKeys; tile <= last; tile += kKeys) {
    if (tile < end) locate(a, t.b, tile, end < tile + kKeys ? end : tile + kKeys, s->shared);
    for (int i = 0; i < t.count; i++) {
      const AttentionRow& r = s->rows[i];
      int64_t lo = r.first > tile ? r.first : tile;
      int64_t hi = r.position + 1 < tile + kKeys ? r.position + 1 : tile + kKeys;
      if (lo >= hi) continue;
      const int64_t* offset = row_offsets(r, tree, ctx, tile, lo, hi, s);
      for (int64_t g = from; g < to; g++)
        attend_tile<vectors>(a.q + (r.row * a.nh + kv * group + g) * a.hd, a.k_cache + kv * a.hd, a.v_cache + kv * a.hd, offset,
                             (int)(hi - lo), a.scale, &s->state[i * group + g]);
    }
  }
  for (int i = 0; i < t.count; i++)
    for (int64_t g = from; g < to; g++) {
      const Softmax& state = s->state[i * group + g];
      float* out = a.out + (s->rows[i].row * a.nh + kv * group + g) * a.hd;
      for (int v = 0; v < vectors; v++) store(out + 16 * v, div(load(state.acc + 16 * v), all(state.norm)));
    }
}

static void attend_task(const AttentionArgs& a, const Task& t, int64_t kv, int64_t from, int64_t to, Scratch* s) {
  switch (a.hd / 16) {
    case 1: return attend_rows<1>(a, t, kv, from, to, s);
    case 2: return attend_rows<2>(a, t, kv, from, to, s);
    case 3: return attend_rows<3>(a, t, kv, from, to, s);
    case 4: return attend_rows<4>(a, t, kv, from, to, s);
    case 5: return attend_rows<5>(a, t, kv, from, to, s);
    case 6: return attend_rows<6>(a, t, kv, from, to, s);
    case 8: return attend_rows<8>(a, t, kv, from, to, s);
    case 16: return attend_rows<16>(a, t, kv, from, to, s);
  }
}

static std::vector<Task> attention_tasks(int64_t B, const int32_t* cu_query, const int64_t* positions) {
  std::vector<Task> tasks;
  for (int64_t b = 0; b < B; b++)
    for (int64_t row = cu_query[b]; row < cu_query[b + 1]; row += kTaskRows) {
      int64_t left = cu_query[b + 1] - row, keys = 0;
      int count = (int)(left < kTaskRows ? left : kTaskRows);
      for (int i = 0; i < count; i++) keys += positions[row + i] + 1;
      tasks.push_back({b, row, count, keys});
    }
  return tasks;
}

SPECDEC_INLINE int64_t cost(const AttentionArgs& a, const Task& t) {
  return a.window > 0 && t.keys > t.count * a.window ? t.count * a.window : t.keys;
}

// Thread `id` of `count`: a run of (task, head) pairs of about equal work, neighbouring heads of a group together.
static void attend_share(const AttentionArgs& a, const std::vector<Task>& tasks, Scratch* s, int id, int count) {
  int64_t group = a.nh / a.nkv, total = 0, before = 0;
  for (const Task& t : tasks) total += cost(a, t) * a.nh;
  for (const Task& t : tasks) {
    int64_t work = cost(a, t);
    for (int64_t kv = 0; kv < a.nkv; kv++) {
      int64_t from = group, to = 0;
      for (int64_t g = 0; g < group; g++, before += work) {
        if ((2 * before + work) * count / (2 * total) != id) continue;  // the thread that the middle of this work falls to
        if (from > g) from = g;
        to = g + 1;
      }
      if (from < to) attend_task(a, t, kv, from, to, s);
    }
  }
}

static void attention(const AttentionArgs& a) {
  const std::vector<Task> tasks = attention_tasks(a.B, a.cu_query, a.positions);
  int64_t work = 0;
  for (const Task& t : tasks) work += cost(a, t) * a.nh * a.hd;
  int threads = work < 32768 ? 1 : a.threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Scratch scratch;  // not zeroed: every field is written before it is read
    scratch.state.reset(new Softmax[kTaskRows * (a.nh / a.nkv)]);
    attend_share(a, tasks, &scratch, threads > 1 ? omp_get_thread_num() : 0, threads > 1 ? omp_get_num_threads() : 1);
  }
}
