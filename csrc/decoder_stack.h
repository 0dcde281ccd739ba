// The decoder stack of one call: weights are checked once and kept, a run checks the batch and goes.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <deque>
#include <optional>
#include <tuple>
#include <vector>

#include "bindings.h"

namespace specdec {

using at::Tensor;
using Part = std::tuple<Tensor, int64_t, int64_t>;                             // tiles, kind, rows
using Linear = std::tuple<std::vector<Part>, int64_t, std::optional<Tensor>>;  // parts stacked along rows, columns, bias
using Layer = std::tuple<Tensor, Linear, Linear, Tensor, Linear, Linear, std::optional<int64_t>>;
using Cache = std::tuple<Tensor, Tensor>;  // K and V of a layer, each [NB, bs, nkv, hd]

struct Pairing {  // what a draft head's first layer has besides; see StackArgs
  Tensor norm;
  bool normed_stream;
};

struct Rows {  // the batch, as in specdec/types.py
  Tensor positions, cu_query, ctx_lens, tree_len, tree_mask, tables, slots;
  std::optional<Tensor> first;
};

class DecoderStack {
 public:
  // Layer: input norm, qkv, out, post norm, gate_up, down, window.
  DecoderStack(const std::vector<Layer>& layers, Tensor norm, Tensor cos, Tensor sin, double eps, double scale,
               std::optional<Pairing> pairing = std::nullopt)
      : norm_(norm), cos_(cos), sin_(sin), pairing_(pairing), eps_((float)eps), scale_((float)scale) {
    check(norm, "norm", at::kFloat, 1);
    check(cos, "cos", at::kFloat, 2);
    check(sin, "sin", at::kFloat, 2);
    if (pairing) keep(pairing->norm);
    TORCH_CHECK(!layers.empty() && cos.sizes() == sin.sizes(), "a stack needs layers, and cos and sin of one size");
    for (const auto& [input_norm, qkv, out, post_norm, gate_up, down, window] : layers) {
      TORCH_CHECK(!window || *window > 0, "window must be positive");
      layers_.push_back({keep(input_norm), keep(post_norm), keep(qkv), keep(out), keep(gate_up), keep(down), window.value_or(0)});
      const StackLayer &l = layers_.back(), &first = layers_.front();
      int64_t H = norm.size(0), wide = pairing && layers_.size() == 1 ? 2 * H : H;
      TORCH_CHECK(l.qkv.K == wide && l.out.N == H && l.gate_up.K == H && l.down.N == H && l.gate_up.N == 2 * l.down.K &&
                      l.down.K == first.down.K && l.out.K == first.out.K && l.qkv.N == first.qkv.N,
                  "the layers of a stack disagree on their sizes");
    }
  }

  // x [T, H] -> (after the final norm [T, H], residual stream on entry to the layers `taps` [T, n * H]); writes the caches.
  // features [T, H]: of a stack with pairing, and of no other.
  std::tuple<Tensor, Tensor> run(const Tensor& x, const Rows& rows, const std::vector<Cache>& caches, const std::vector<int64_t>& groups,
                                 const std::vector<int64_t>& taps, const std::optional<Tensor>& features = std::nullopt) const {
    StackArgs a = weights();
    describe(x, rows, &a);
    TORCH_CHECK(features.has_value() == pairing_.has_value(), "features go with a stack that pairs them");
    if (features) {
      check(*features, "features", at::kFloat, 2);
      TORCH_CHECK(features->sizes() == x.sizes(), "x and features differ in size");
      a.features = floats(*features), a.feature_norm = floats(pairing_->norm), a.normed_stream = pairing_->normed_stream;
    }
    std::vector<StackCache> opened = open(caches, groups, rows, &a);
    a.caches = opened.data();
    check_attention(rows.cu_query, rows.ctx_lens, rows.tree_len, rows.tree_mask, rows.positions, a.B, a.T, a.table_width * a.block_size);
    if (rows.first) check_first(*rows.first, rows.cu_query, rows.positions), a.first = read<int32_t>(*rows.first);
    for (int64_t layer : taps) TORCH_CHECK(layer >= 0 && layer <= a.count, "tap ", layer, " of ", a.count, " layers");
    Tensor hidden = at::empty({a.T, a.H}, x.options()), tapped = at::empty({a.T, (int64_t)taps.size() * a.H}, x.options());
    a.hidden = writable(hidden), a.taps = writable(tapped);
    a.tap_layers = taps.data(), a.tap_count = (int64_t)taps.size();
    const CpuKernels* kernels = current_kernels();
    Tensor scratch = at::empty({kernels->stack_bytes(a) + 64}, x.options().dtype(at::kByte));
    a.scratch = (void*)(((uintptr_t)scratch.mutable_data_ptr() + 63) / 64 * 64);
    if (a.T > 0) kernels->decoder_stack(a);
    return {hidden, tapped};
  }

  int64_t hidden_size() const { return norm_.size(0); }
  int64_t count() const { return (int64_t)layers_.size(); }
  float eps() const { return eps_; }

 private:
  const float* keep(const Tensor& weight) {
    check(weight, "norm weight", at::kFloat, 1);
    TORCH_CHECK(weight.size(0) == norm_.size(0), "norm weights differ in size");
    held_.push_back(weight);
    return floats(weight);
  }

  StackLinear keep(const Linear& linear) {
    const auto& [parts, columns, bias] = linear;
    std::vector<LinearPart>& out = parts_.emplace_back();
    int64_t rows = 0;
    for (const auto& [tiles, kind, count] : parts) {
      check_tiles(tiles, kind, count, columns);
      held_.push_back(tiles);
      out.push_back({read<uint8_t>(tiles), count, (WeightKind)kind});
      rows += count;
    }
    if (bias) {
      check(*bias, "bias", at::kFloat, 1);
      TORCH_CHECK(bias->size(0) == rows, "bias has ", bias->size(0), " elements for ", rows, " rows");
      held_.push_back(*bias);
    }
    return {out.data(), (int)out.size(), bias ? floats(*bias) : nullptr, rows, columns};
  }

  StackArgs weights() const {
    StackArgs a{};
    a.layers = layers_.data(), a.count = (int64_t)layers_.size();
    a.norm = floats(norm_), a.cos = floats(cos_), a.sin = floats(sin_);
    a.eps = eps_, a.scale = scale_;
    a.H = norm_.size(0), a.I = layers_[0].down.K;
    return a;
  }

  void describe(const Tensor& x, const Rows& r, StackArgs* a) const {
    check(x, "x", at::kFloat, 2);
    check(r.positions, "positions", at::kLong, 1);
    check(r.cu_query, "cu_query", at::kInt, 1);
    check(r.ctx_lens, "ctx_lens", at::kInt, 1);
    check(r.tree_len, "tree_len", at::kInt, 1);
    check(r.tree_mask, "tree_mask", at::kLong, 1);
    check(r.tables, "block_tables", at::kInt, 3);
    check(r.slots, "slot_mapping", at::kLong, 2);
    a->T = x.size(0), a->B = r.ctx_lens.size(0), a->table_width = r.tables.size(2);
    TORCH_CHECK(x.size(1) == a->H && r.positions.size(0) == a->T && r.tree_mask.size(0) == a->T && r.slots.size(1) == a->T &&
                    r.cu_query.size(0) == a->B + 1 && r.tree_len.size(0) == a->B && r.tables.size(1) == a->B &&
                    r.tables.size(0) == r.slots.size(0), "decoder_stack: sizes disagree");
    a->x = floats(x);
    a->positions = read<int64_t>(r.positions), a->words = read<int64_t>(r.tree_mask), a->slots = read<int64_t>(r.slots);
    a->cu_query = read<int32_t>(r.cu_query), a->ctx = read<int32_t>(r.ctx_lens), a->tree = read<int32_t>(r.tree_len);
    a->tables = read<int32_t>(r.tables);
    int64_t layer = layers_[0].qkv.N * a->H + layers_[0].out.K * a->H + 3 * a->H * a->I;
    a->threads = a->T * layer < 131072 ? 1 : at::get_num_threads();
  }

  // Caches may differ in the number of blocks only.
  std::vector<StackCache> open(const std::vector<Cache>& caches, const std::vector<int64_t>& groups, const Rows& r, StackArgs* a) const {
    TORCH_CHECK((int64_t)caches.size() == a->count && (int64_t)groups.size() == a->count, "one cache and one group per layer");
    std::vector<StackCache> out;
    std::vector<int64_t> blocks(r.tables.size(0), INT64_MAX);
    for (int64_t i = 0; i < a->count; i++) {
      const auto& [k, v] = caches[i];
      check(k, "k_cache", at::kFloat, 4);
      check(v, "v_cache", at::kFloat, 4);
      if (i == 0) a->block_size = k.size(1), a->nkv = k.size(2), a->hd = k.size(3);
      TORCH_CHECK(k.sizes() == v.sizes() && k.size(1) == a->block_size && k.size(2) == a->nkv && k.size(3) == a->hd, "caches disagree on their sizes");
      TORCH_CHECK(groups[i] >= 0 && groups[i] < (int64_t)blocks.size(), "layer ", i, " is in no KV group of the batch");
      blocks[groups[i]] = std::min(blocks[groups[i]], k.size(0));
      out.push_back({writable(k), writable(v), groups[i]});
    }
    a->nh = layers_[0].out.K / a->hd;
    TORCH_CHECK(a->nkv > 0 && a->nh % a->nkv == 0 && a->nh * a->hd == layers_[0].out.K && layers_[0].qkv.N == (a->nh + 2 * a->nkv) * a->hd &&
                    cos_.size(1) * 2 == a->hd, "the caches do not have the layers' heads");
    for (size_t g = 0; g < blocks.size(); g++)
      if (blocks[g] != INT64_MAX) check_rope(r.positions, a->slots + g * a->T, cos_.size(0), blocks[g] * a->block_size);
    return out;
  }

  Tensor norm_, cos_, sin_;
  std::optional<Pairing> pairing_;
  float eps_, scale_;
  std::vector<StackLayer> layers_;
  std::deque<std::vector<LinearPart>> parts_;  // what the layers point into
  std::vector<Tensor> held_;                   // keeps the weights alive
};

}  // namespace specdec
