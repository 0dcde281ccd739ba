// The best tokens of a row of logits and their share of the softmax. Included once per instruction set.

// Rises while a sorted list of `width` values is filled: what does not beat its last one is passed over 16 at a time.
static void best_columns(const float* row, int64_t V, int64_t width, int64_t* ids, float* values) {
  int64_t held = 0;
  for (int64_t start = 0; start < V; start += 16) {
    int n = V - start < 16 ? (int)(V - start) : 16;
    if (held == width && n == 16 && !(largest(load(row + start)) > values[width - 1])) continue;
    for (int i = 0; i < n; i++) {
      float value = row[start + i];
      if (!(value > -__builtin_inff()) || (held == width && !(value > values[width - 1]))) continue;
      int64_t place = held < width ? held++ : width - 1;
      for (; place > 0 && values[place - 1] < value; place--) values[place] = values[place - 1], ids[place] = ids[place - 1];
      values[place] = value, ids[place] = start + i;
    }
  }
  for (; held < width; held++) values[held] = -__builtin_inff(), ids[held] = 0;
}

static void candidates(const CandidateArgs& a) {
  for (int64_t r = 0; r < a.R; r++) {
    const float* row = a.logits + r * a.V;
    float* chances = a.chances + r * a.width;
    best_columns(row, a.V, a.width, a.ids + r * a.width, chances);
    float top = chances[0], mass = 0.0f;
    Float16 shift = all(top), total = all(0.0f);
    int64_t v = 0;
    for (; v + 16 <= a.V; v += 16) total = add(total, exponential(sub(load(row + v), shift)));
    float rest[16];
    store(rest, exponential(sub(load_n(row + v, (int)(a.V - v)), shift)));
    mass = sum(total);
    for (int64_t i = 0; i < a.V - v; i++) mass += rest[i];
    float held[16];
    for (int64_t i = 0; i < a.width; i += 16) {
      int n = a.width - i < 16 ? (int)(a.width - i) : 16;
      store(held, exponential(sub(load_n(chances + i, n), shift)));
      for (int j = 0; j < n; j++) chances[i + j] = mass > 0.0f && chances[i + j] > -__builtin_inff() ? held[j] / mass : 0.0f;
    }
  }
}
