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

// softmax of a row whose largest value is `top`, at `width` values of it, in place.
static void shares(const float* row, int64_t V, float top, float* values, int64_t width) {
  Float16 shift = all(top), total = all(0.0f);
  int64_t v = 0;
  for (; v + 16 <= V; v += 16) total = add(total, exponential(sub(load(row + v), shift)));
  float rest[16], mass = sum(total);
  store(rest, exponential(sub(load_n(row + v, (int)(V - v)), shift)));
  for (int64_t i = 0; i < V - v; i++) mass += rest[i];
  for (int64_t i = 0; i < width; i += 16) {
    int n = width - i < 16 ? (int)(width - i) : 16;
    store(rest, exponential(sub(load_n(values + i, n), shift)));
    for (int j = 0; j < n; j++) values[i + j] = mass > 0.0f && values[i + j] > -__builtin_inff() ? rest[j] / mass : 0.0f;
  }
}

static void candidates(const CandidateArgs& a) {
  int64_t field[kField];
  float race[kField];
  for (int64_t r = 0; r < a.R; r++) {
    const float* row = a.logits + r * a.V;
    float* chances = a.chances + r * a.width;
    int64_t *ids = a.ids + r * a.width, V = a.V;
    if (a.noisy) {
      V = V < kField ? V : kField;
      best_columns(row, a.V, V, field, race);
      row = race;
      for (int64_t i = 0; i < V; i++) {
        if (a.target_ids) field[i] = a.target_ids[field[i]];
        race[i] = race[i] / a.temperature + a.share * gumbel(word_of(a.key, r, field[i]));
      }
    }
    best_columns(row, V, a.width, ids, chances);
    shares(row, V, chances[0], chances, a.width);
    for (int64_t i = 0; i < a.width; i++)
      if (a.noisy) ids[i] = field[ids[i]];
      else if (a.target_ids) ids[i] = a.target_ids[ids[i]];
  }
}
