// Python bindings of the CPU ops: check every tensor, allocate the result, call the table of this processor.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <bit>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"

namespace {

using at::Tensor;
using specdec::check, specdec::check_attention, specdec::check_first, specdec::check_rope, specdec::check_tiles, specdec::CpuKernels;
using specdec::floats, specdec::read, specdec::writable;

std::vector<const CpuKernels*> usable_tables() {
  std::vector<const CpuKernels*> out;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (specdec::avx512_kernels() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
    out.push_back(specdec::avx512_kernels());
  if (specdec::avx2_kernels() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    out.push_back(specdec::avx2_kernels());
#endif
  out.push_back(specdec::generic_kernels());
  return out;
}

thread_local const CpuKernels* current = usable_tables().front();

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  check(x, "x", at::kFloat, 2);
  check(weight, "weight", at::kFloat, 1);
  TORCH_CHECK(weight.size(0) == x.size(1), "weight has ", weight.size(0), " elements for rows of ", x.size(1));
  Tensor out = at::empty_like(x);
  current->rms_norm({floats(x), nullptr, floats(weight), writable(out), nullptr, x.size(0), x.size(1), (float)eps});
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  check(x, "x", at::kFloat, 2);
  check(residual, "residual", at::kFloat, 2);
  check(weight, "weight", at::kFloat, 1);
  TORCH_CHECK(residual.sizes() == x.sizes() && weight.size(0) == x.size(1), "x, residual and weight disagree on their sizes");
  Tensor out = at::empty_like(x), total = at::empty_like(x);
  current->rms_norm({floats(x), floats(residual), floats(weight), writable(out), writable(total), x.size(0), x.size(1), (float)eps});
  return {out, total};
}

Tensor silu_mul(const Tensor& gate_up) {
  check(gate_up, "gate_up", at::kFloat, 2);
  TORCH_CHECK(gate_up.size(1) % 2 == 0, "gate_up needs an even number of columns");
  int64_t T = gate_up.size(0), I = gate_up.size(1) / 2;
  Tensor out = at::empty({T, I}, gate_up.options());
  current->silu_mul(floats(gate_up), writable(out), T, I);
  return out;
}

Tensor rope_write_kv(const Tensor& qkv, const Tensor& positions, const Tensor& cos, const Tensor& sin, const Tensor& k_cache,
                     const Tensor& v_cache, const Tensor& slots) {
  check(qkv, "qkv", at::kFloat, 2);
  check(positions, "positions", at::kLong, 1);
  check(slots, "slots", at::kLong, 1);
  check(cos, "cos", at::kFloat, 2);
  check(sin, "sin", at::kFloat, 2);
  check(k_cache, "k_cache", at::kFloat, 4);
  check(v_cache, "v_cache", at::kFloat, 4);
  int64_t T = qkv.size(0), nkv = k_cache.size(2), hd = k_cache.size(3), nh = qkv.size(1) / hd - 2 * nkv;
  TORCH_CHECK(nh > 0 && qkv.size(1) == (nh + 2 * nkv) * hd && k_cache.sizes() == v_cache.sizes() && cos.sizes() == sin.sizes() &&
                  cos.size(1) * 2 == hd && positions.size(0) == T && slots.size(0) == T, "rope_write_kv: sizes disagree");
  check_rope(positions, read<int64_t>(slots), cos.size(0), k_cache.size(0) * k_cache.size(1));
  Tensor q = at::empty({T, nh, hd}, qkv.options());
  current->rope_write_kv({floats(qkv), read<int64_t>(positions), read<int64_t>(slots), floats(cos), floats(sin), writable(k_cache),
                          writable(v_cache), writable(q), T, nh, nkv, hd});
  return q;
}

Tensor tree_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_table, const Tensor& cu_query,
                      const Tensor& ctx_lens, const Tensor& tree_len, const Tensor& tree_mask, const Tensor& positions, double scale,
                      std::optional<int64_t> window, const std::optional<Tensor>& sinks, const std::optional<Tensor>& first) {
  check(q, "q", at::kFloat, 3);
  check(k_cache, "k_cache", at::kFloat, 4);
  check(v_cache, "v_cache", at::kFloat, 4);
  check(block_table, "block_table", at::kInt, 2);
  check(cu_query, "cu_query", at::kInt, 1);
  check(ctx_lens, "ctx_lens", at::kInt, 1);
  check(tree_len, "tree_len", at::kInt, 1);
  check(tree_mask, "tree_mask", at::kLong, 1);
  check(positions, "positions", at::kLong, 1);
  int64_t T = q.size(0), nh = q.size(1), hd = q.size(2), B = ctx_lens.size(0), bs = k_cache.size(1), nkv = k_cache.size(2);
  TORCH_CHECK(k_cache.sizes() == v_cache.sizes() && k_cache.size(3) == hd && nh % nkv == 0 && cu_query.size(0) == B + 1 &&
                  tree_len.size(0) == B && block_table.size(0) == B && tree_mask.size(0) == T && positions.size(0) == T,
              "tree_attention: sizes disagree");
  if (sinks) check(*sinks, "sinks", at::kFloat, 1);
  TORCH_CHECK(!sinks || sinks->size(0) == nh, "sinks must have one element per head");
  TORCH_CHECK(!window || *window > 0, "window must be positive");
  check_attention(cu_query, ctx_lens, tree_len, tree_mask, positions, B, T, block_table.size(1) * bs);
  if (first) check_first(*first, cu_query, positions);
  Tensor out = at::empty({T, nh * hd}, q.options());
  int64_t used = B ? read<int32_t>(cu_query)[B] : 0;
  if (used < T) out.narrow(0, used, T - used).zero_();
  current->attention({floats(q), floats(k_cache), floats(v_cache), read<int32_t>(block_table), read<int32_t>(cu_query),
                      read<int32_t>(ctx_lens), read<int32_t>(tree_len), read<int64_t>(tree_mask), read<int64_t>(positions),
                      sinks ? floats(*sinks) : nullptr, writable(out), B, T, nh, nkv, hd, bs, block_table.size(1), (float)scale,
                      window.value_or(0), at::get_num_threads(), first ? read<int32_t>(*first) : nullptr});
  return out;
}

void move_kv(const std::vector<Tensor>& k_caches, const std::vector<Tensor>& v_caches, const Tensor& src, const Tensor& dst) {
  check(src, "src", at::kLong, 1);
  check(dst, "dst", at::kLong, 1);
  TORCH_CHECK(src.size(0) == dst.size(0), "src and dst differ in length");
  int64_t n = src.size(0);
  std::vector<char> held;
  for (const auto* caches : {&k_caches, &v_caches})
    for (const Tensor& cache : *caches) {
      TORCH_CHECK(cache.is_cpu() && cache.is_contiguous() && cache.dim() == 4, "caches must be contiguous CPU tensors of 4 dimensions");
      int64_t slots = cache.size(0) * cache.size(1), bytes = cache.size(2) * cache.size(3) * cache.element_size();
      char* base = static_cast<char*>(cache.mutable_data_ptr());
      held.resize(n * bytes);
      for (int64_t i = 0; i < n; i++) {
        int64_t from = read<int64_t>(src)[i], to = read<int64_t>(dst)[i];
        TORCH_CHECK_INDEX(from >= 0 && from < slots && to >= 0 && to < slots, "slot outside the cache of ", slots);
        std::memcpy(held.data() + i * bytes, base + from * bytes, bytes);
      }
      for (int64_t i = 0; i < n; i++) std::memcpy(base + read<int64_t>(dst)[i] * bytes, held.data() + i * bytes, bytes);
    }
}

Tensor tiled_linear(const Tensor& x, const Tensor& tiles, int64_t kind, int64_t rows) {
  check(x, "x", at::kFloat, 2);
  int64_t M = x.size(0), K = x.size(1);
  check_tiles(tiles, kind, rows, K);
  auto k = (specdec::WeightKind)kind;
  Tensor out = at::empty({M, rows}, x.options());
  Tensor scratch = at::empty({specdec::linear_scratch_bytes(M, K, k)}, x.options().dtype(at::kByte));
  current->linear({floats(x), read<uint8_t>(tiles), writable(out), M, rows, K, rows, k, scratch.mutable_data_ptr(), nullptr, at::get_num_threads()});
  return out;
}

Tensor tiled_embedding(const Tensor& ids, const Tensor& tiles, int64_t kind, int64_t rows, int64_t cols) {
  check(ids, "ids", at::kLong, 1);
  check_tiles(tiles, kind, rows, cols);
  for (int64_t t = 0; t < ids.size(0); t++) {
    int64_t id = read<int64_t>(ids)[t];
    TORCH_CHECK_INDEX(id >= 0 && id < rows, "token id ", id, " is outside the vocabulary of ", rows);
  }
  Tensor out = at::empty({ids.size(0), cols}, ids.options().dtype(at::kFloat));
  current->embedding({read<int64_t>(ids), read<uint8_t>(tiles), writable(out), ids.size(0), rows, cols, (specdec::WeightKind)kind});
  return out;
}

specdec::NoiseKey noise_key(const Tensor& seeds, const Tensor& positions, const Tensor& choices, int64_t purpose, int64_t R) {
  check(seeds, "seeds", at::kLong, 1);
  check(positions, "positions", at::kLong, 1);
  check(choices, "choices", at::kLong, 1);
  TORCH_CHECK(seeds.size(0) == R && positions.size(0) == R && choices.size(0) == R, "noise keys must have one entry per row");
  return {read<int64_t>(seeds), read<int64_t>(positions), read<int64_t>(choices), (uint32_t)purpose};
}

Tensor gumbel_argmax(const Tensor& scores, const Tensor& seeds, const Tensor& positions, const Tensor& choices, const Tensor& noisy,
                     int64_t purpose) {
  check(scores, "scores", at::kFloat, 2);
  check(noisy, "noisy", at::kBool, 1);
  int64_t R = scores.size(0), V = scores.size(1);
  TORCH_CHECK(V > 0 && noisy.size(0) == R, "gumbel_argmax: empty vocabulary, or `noisy` is not one per row");
  auto key = noise_key(seeds, positions, choices, purpose, R);
  Tensor out = at::empty({R}, scores.options().dtype(at::kLong));
  current->gumbel_argmax({floats(scores), key, read<bool>(noisy), static_cast<int64_t*>(out.mutable_data_ptr()), R, V, at::get_num_threads()});
  return out;
}

template <bool uniform> Tensor noise(const Tensor& seeds, const Tensor& positions, const Tensor& choices, const Tensor& ids, int64_t purpose) {
  check(ids, "ids", at::kLong, 2);
  auto key = noise_key(seeds, positions, choices, purpose, ids.size(0));
  Tensor out = at::empty(ids.sizes(), ids.options().dtype(at::kFloat));
  current->noise({key, read<int64_t>(ids), writable(out), ids.size(0), ids.size(1), uniform, at::get_num_threads()});
  return out;
}

Tensor mass_cut(const Tensor& log_p, const Tensor& rank, const Tensor& p) {
  check(log_p, "log_p", at::kFloat, 2);
  check(rank, "rank", at::kFloat, 2);
  check(p, "p", at::kFloat, 1);
  int64_t R = rank.size(0), V = rank.size(1);
  TORCH_CHECK(log_p.sizes() == rank.sizes() && p.size(0) == R && V < INT32_MAX, "mass_cut: sizes disagree");
  Tensor kept = at::empty({R, V}, rank.options().dtype(at::kBool));
  current->mass_cut({floats(log_p), floats(rank), floats(p), static_cast<bool*>(kept.mutable_data_ptr()), R, V, at::get_num_threads()});
  return kept;
}

std::vector<std::string> variants() {
  std::vector<std::string> names;
  for (const CpuKernels* table : usable_tables()) names.emplace_back(table->name);
  return names;
}

std::string use_variant(const std::string& name) {
  std::string before = current->name;
  for (const CpuKernels* table : usable_tables())
    if (name == table->name) {
      current = table;
      return before;
    }
  TORCH_CHECK(false, "no variant '", name, "' of the CPU kernels on this processor");
}

}  // namespace

namespace specdec {

const CpuKernels* current_kernels() { return current; }

void check(const at::Tensor& t, const char* name, at::ScalarType dtype, int64_t dims) {
  TORCH_CHECK(t.is_cpu() && t.scalar_type() == dtype && t.is_contiguous() && t.dim() == dims, name, " must be a contiguous CPU tensor of ",
              dims, " dimensions and dtype ", dtype, ", got ", t.dim(), " dimensions, ", t.scalar_type(), t.is_contiguous() ? "" : ", strided");
}

void check_tiles(const at::Tensor& tiles, int64_t kind, int64_t rows, int64_t cols) {
  TORCH_CHECK(kind >= 0 && kind <= F8 && (!in_blocks((int)kind) || cols % 32 == 0), "unknown weight kind or odd width");
  int64_t bytes = (rows + 15) / 16 * tile_bytes(cols, (WeightKind)kind);
  TORCH_CHECK(tiles.is_cpu() && tiles.is_contiguous() && (int64_t)tiles.nbytes() == bytes, "tiles must be contiguous, of ", bytes, " bytes");
}

void check_rope(const at::Tensor& positions, const int64_t* slots, int64_t rotary_rows, int64_t slot_count) {
  for (int64_t t = 0; t < positions.size(0); t++) {
    int64_t p = read<int64_t>(positions)[t], s = slots[t];
    TORCH_CHECK_INDEX(p >= 0 && p < rotary_rows, "position ", p, " is outside the rotary table of ", rotary_rows);
    TORCH_CHECK_INDEX(s >= -1 && s < slot_count, "slot ", s, " is outside the cache of ", slot_count);
  }
}

void check_attention(const at::Tensor& cu_query, const at::Tensor& ctx_lens, const at::Tensor& tree_len, const at::Tensor& tree_mask,
                     const at::Tensor& positions, int64_t B, int64_t T, int64_t reach) {
  const int32_t *cu = read<int32_t>(cu_query), *ctx = read<int32_t>(ctx_lens), *tree = read<int32_t>(tree_len);
  TORCH_CHECK(cu[0] == 0 && cu[B] <= T, "cu_query must start at 0 and stay within ", T, " rows");
  for (int64_t b = 0; b < B; b++) {
    TORCH_CHECK(cu[b] <= cu[b + 1], "cu_query must not decrease");
    TORCH_CHECK(tree[b] >= 0 && tree[b] <= 64, "a tree has at most 64 nodes");
    TORCH_CHECK_INDEX(ctx[b] >= 0 && (tree[b] == 0 || ctx[b] + tree[b] <= reach), "sequence ", b, " reaches past its block table");
    for (int64_t row = cu[b]; row < cu[b + 1]; row++) {
      int64_t p = read<int64_t>(positions)[row];
      uint64_t word = (uint64_t)read<int64_t>(tree_mask)[row];
      TORCH_CHECK_INDEX(p >= 0 && p < reach, "position ", p, " of row ", row, " is outside its block table");
      TORCH_CHECK(tree[b] == 0 || ((tree[b] == 64 || word >> tree[b] == 0) && ctx[b] + std::popcount(word) == p + 1), "row ", row,
                  " of a tree must have one ancestor per depth, all of them nodes of the tree");
    }
  }
}

void check_first(const at::Tensor& first, const at::Tensor& cu_query, const at::Tensor& positions) {
  check(first, "first", at::kInt, 1);
  TORCH_CHECK(first.size(0) + 1 == cu_query.size(0), "first must have one element per sequence");
  for (int64_t b = 0; b < first.size(0); b++)
    for (int64_t row = read<int32_t>(cu_query)[b]; row < read<int32_t>(cu_query)[b + 1]; row++)
      TORCH_CHECK(read<int32_t>(first)[b] <= read<int64_t>(positions)[row], "row ", row, " would not see its own key");
}

}  // namespace specdec

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  m.doc() = "Compiled CPU ops of specdec; signatures and meaning in specdec/ops.py.";
  m.def("rms_norm", &rms_norm);
  m.def("add_rms_norm", &add_rms_norm);
  m.def("silu_mul", &silu_mul);
  m.def("rope_write_kv", &rope_write_kv);
  m.def("tree_attention", &tree_attention, py::arg("q"), py::arg("k_cache"), py::arg("v_cache"), py::arg("block_table"), py::arg("cu_query"),
        py::arg("ctx_lens"), py::arg("tree_len"), py::arg("tree_mask"), py::arg("positions"), py::kw_only(), py::arg("scale"),
        py::arg("window") = std::nullopt, py::arg("sinks") = std::nullopt,
        py::arg("first") = std::nullopt);
  m.def("move_kv", &move_kv);
  m.def("tiled_linear", &tiled_linear);
  m.def("tiled_embedding", &tiled_embedding);
  specdec::bind_decoder_stack(m);
  specdec::bind_draft_head(m);
  specdec::bind_lookup(m);
  specdec::bind_tree_walk(m);
  specdec::bind_memory(m);
  m.def("gumbel_argmax", &gumbel_argmax);
  m.def("gumbel_noise", &noise<false>);
  m.def("mass_cut", &mass_cut);
  m.def("philox_uniform", &noise<true>);
  m.def("variants", &variants, "Names of the usable instruction-set variants, best first.");
  m.def("use_variant", &use_variant, "Use this variant on the calling thread (tests); returns the one used before.");
}
