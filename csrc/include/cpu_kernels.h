// The compiled CPU ops, free of torch: plain pointers in, plain pointers out. One table of functions per instruction set.
//
// Promise of every op: the bits of an output row depend on that row's inputs only, never on the number of rows, on other
// rows, or on the number of threads. Sizes are elements unless named bytes. `threads` is an upper bound.
#pragma once
#include <cstdint>

namespace specdec {

enum WeightKind { F32, Q4_0, Q4_1, Q8_0, F16, BF16, F8 };  // order of KINDS in kernels/linear/tiles.py

constexpr bool in_blocks(int kind) { return kind == Q4_0 || kind == Q4_1 || kind == Q8_0; }  // of 32 columns; the others are numbers

struct LinearArgs {
  const float* x;        // [M, K]
  const uint8_t* tiles;  // layout in kernels/linear/tiles.py
  float* out;            // [M, N], rows `stride` apart
  int64_t M, N, K, stride;
  WeightKind kind;
  void* scratch;      // `linear_scratch_bytes` bytes, 64-byte aligned
  const float* bias;  // [N] or null
  int threads;
};

struct EmbeddingArgs {
  const int64_t* ids;  // [T], in [0, N)
  const uint8_t* tiles;
  float* out;  // [T, K]
  int64_t T, N, K;
  WeightKind kind;
};

struct AttentionArgs {
  const float* q;                           // [T, nh, hd]
  const float *k_cache, *v_cache;           // [NB, bs, nkv, hd]
  const int32_t* block_table;               // [B, M]
  const int32_t *cu_query, *ctx, *tree;     // [B + 1], [B], [B]
  const int64_t *words, *positions;         // [T]
  const float* sinks;                       // [nh] or null
  float* out;                               // [T, nh * hd], zeroed by the caller past cu_query[B]
  int64_t B, T, nh, nkv, hd, block_size, table_width;
  float scale;
  int64_t window;  // <= 0: none
  int threads;
  const int32_t* first = nullptr;  // [B] first visible key, or null: 0
};

struct RopeArgs {
  const float* qkv;  // [T, (nh + 2 nkv) * hd]
  const int64_t *positions, *slots;
  const float *cos, *sin;     // [P, hd / 2]
  float *k_cache, *v_cache;   // [slots, nkv, hd]
  float* q;                   // [T, nh, hd]
  int64_t T, nh, nkv, hd;
};

struct NormArgs {
  const float *x, *residual, *weight;  // [T, H], [T, H] or null, [H]
  float *out, *total;                  // [T, H]; total = x + residual, null without residual
  int64_t T, H;
  float eps;
};

struct NoiseKey {
  const int64_t *seeds, *positions, *choices;  // [R]
  uint32_t purpose;
};

struct ArgmaxArgs {
  const float* scores;  // [R, V]
  NoiseKey key;
  const bool* noisy;  // [R]
  int64_t* out;       // [R]
  int64_t R, V;
  int threads;
};

struct NoiseArgs {
  NoiseKey key;
  const int64_t* ids;  // [R, W]
  float* out;          // [R, W]
  int64_t R, W;
  bool uniform;  // uniforms instead of Gumbel noise
  int threads;
};

struct MassCutArgs {
  const float *log_p, *rank;  // [R, V]
  const float* p;             // [R]
  bool* kept;                 // [R, V]
  int64_t R, V;
  int threads;
};

struct LinearPart {
  const uint8_t* tiles;
  int64_t rows;
  WeightKind kind;
};

struct StackLinear {  // parts stacked along rows
  const LinearPart* parts;
  int count;
  const float* bias;  // [N] or null
  int64_t N, K;
};

struct StackLayer {
  const float *input_norm, *post_norm;  // [H]
  StackLinear qkv, out, gate_up, down;
  int64_t window;  // <= 0: none
};

struct StackCache {  // of one layer
  float *k, *v;   // [NB, bs, nkv, hd]
  int64_t group;  // which table and slots
};

struct StackArgs {
  const StackLayer* layers;  // [count]
  const StackCache* caches;  // [count]
  int64_t count;
  const float *norm, *cos, *sin;  // [H], [P, hd / 2] twice
  float eps, scale;
  int64_t H, I, nh, nkv, hd;
  const float* x;                        // [T, H]
  const int64_t *positions, *words;      // [T]
  const int32_t *cu_query, *ctx, *tree;  // [B + 1], [B], [B]
  const int32_t* tables;                 // [G, B, table_width]
  const int64_t* slots;                  // [G, T]
  int64_t T, B, block_size, table_width;
  const int64_t* tap_layers;  // [tap_count], each in 0…count
  int64_t tap_count;
  float *hidden, *taps;  // [T, H], [T, tap_count * H]
  int threads;
  void* scratch;  // `stack_bytes` bytes, 64-byte aligned
  const int32_t* first = nullptr;  // [B] first visible key, or null: 0
  // Of a draft head: the first layer reads 2 H columns, norm of x | norm of features, and the stream starts as the features.
  const float *features = nullptr, *feature_norm = nullptr;  // [T, H] or null: a plain first layer; [H]
  bool normed_stream = false;                                // the stream starts as the features' norm
};

constexpr int64_t kField = 256;  // FIELD of specdec/spec/candidates.py

struct CandidateArgs {
  const float* logits;        // [R, V]
  const int64_t* target_ids;  // [V] or null: the ids are the target's
  int64_t* ids;               // [R, width] of the target, best first, ties to the lowest; distinct where the chance is not 0
  float* chances;             // [R, width] softmax of the row, or share of the race
  int64_t R, V, width;        // width <= kField
  bool noisy;                 // logits / temperature + share * noise of the kField best race
  NoiseKey key;
  float temperature, share;
};

struct CpuKernels {
  const char* name;
  void (*linear)(const LinearArgs&);
  void (*embedding)(const EmbeddingArgs&);
  void (*attention)(const AttentionArgs&);
  void (*rope_write_kv)(const RopeArgs&);
  void (*rms_norm)(const NormArgs&);
  void (*silu_mul)(const float* gate_up, float* out, int64_t T, int64_t I);
  void (*gumbel_argmax)(const ArgmaxArgs&);
  void (*noise)(const NoiseArgs&);
  void (*mass_cut)(const MassCutArgs&);
  int64_t (*stack_bytes)(const StackArgs&);
  void (*decoder_stack)(const StackArgs&);
  void (*candidates)(const CandidateArgs&);
};

int64_t linear_scratch_bytes(int64_t M, int64_t K, WeightKind kind);
int64_t tile_bytes(int64_t K, WeightKind kind);  // bytes of one 16-row tile

const CpuKernels* avx512_kernels();   // null where not compiled in
const CpuKernels* avx2_kernels();
const CpuKernels* generic_kernels();  // always there

}  // namespace specdec
