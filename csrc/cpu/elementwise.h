// RMS norm, RoPE with KV write, SiLU·mul. Included once per instruction set. All run on the calling thread: at the sizes of
// a decode or verify step waking a second thread costs more than it saves.

static void rms_norm(const NormArgs& a) {
  for (int64_t t = 0; t < a.T; t++) {
    const float* x = a.x + t * a.H;
    float* out = a.out + t * a.H;
    const float* row = x;
    Float16 square[4] = {all(0.0f), all(0.0f), all(0.0f), all(0.0f)};
    if (a.residual) row = a.total + t * a.H;
    for (int64_t h = 0; h < a.H; h += 16) {
      int n = a.H - h < 16 ? (int)(a.H - h) : 16;
      Float16 value = n == 16 ? load(x + h) : load_n(x + h, n);
      if (a.residual) {
        const float* r = a.residual + t * a.H + h;
        value = add(value, n == 16 ? load(r) : load_n(r, n));
        store_n(a.total + t * a.H + h, value, n);
      }
      square[h / 16 % 4] = fma(value, value, square[h / 16 % 4]);
    }
    float mean = sum(add(add(square[0], square[1]), add(square[2], square[3]))) / (float)a.H;
    Float16 scale = all(1.0f / __builtin_sqrtf(mean + a.eps));
    for (int64_t h = 0; h < a.H; h += 16) {
      int n = a.H - h < 16 ? (int)(a.H - h) : 16;
      if (n == 16) store(out + h, mul(mul(load(row + h), scale), load(a.weight + h)));
      else store_n(out + h, mul(mul(load_n(row + h, n), scale), load_n(a.weight + h, n)), n);
    }
  }
}

static void silu_mul(const float* gate_up, float* out, int64_t T, int64_t I) {
  for (int64_t t = 0; t < T; t++, gate_up += 2 * I, out += I)
    for (int64_t i = 0; i < I; i += 16) {
      int n = I - i < 16 ? (int)(I - i) : 16;
      Float16 gate = load_n(gate_up + i, n), up = load_n(gate_up + I + i, n);
      Float16 silu = div(gate, add(all(1.0f), exponential(sub(all(0.0f), gate))));
      store_n(out + i, mul(silu, up), n);
    }
}

SPECDEC_INLINE void rotate(const float* in, const float* cos, const float* sin, float* out, int64_t half) {
  for (int64_t j = 0; j < half; j++) {
    float first = in[j], second = in[j + half];
    out[j] = first * cos[j] - second * sin[j];
    out[j + half] = second * cos[j] + first * sin[j];
  }
}

static void rope_write_kv(const RopeArgs& a) {
  int64_t half = a.hd / 2;
  for (int64_t t = 0; t < a.T; t++) {
    const float* row = a.qkv + t * (a.nh + 2 * a.nkv) * a.hd;
    const float *cos = a.cos + a.positions[t] * half, *sin = a.sin + a.positions[t] * half;
    for (int64_t h = 0; h < a.nh; h++) rotate(row + h * a.hd, cos, sin, a.q + (t * a.nh + h) * a.hd, half);
    if (a.slots[t] < 0) continue;
    const float* k = row + a.nh * a.hd;
    int64_t to = a.slots[t] * a.nkv * a.hd;
    for (int64_t h = 0; h < a.nkv; h++) rotate(k + h * a.hd, cos, sin, a.k_cache + to + h * a.hd, half);
    __builtin_memcpy(a.v_cache + to, k + a.nkv * a.hd, sizeof(float) * a.nkv * a.hd);
  }
}
