// Python binding of a draft head, and the growth of one sequence's tree (specdec/spec/growth.py) in one call.
#include <ATen/ops/cat.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <numeric>

#include "draft_head.h"

namespace specdec {
namespace {

namespace py = pybind11;

struct Pending {  // pairs to run before the tree grows: row i at position and slot start + i
  std::vector<Tensor> taps;
  std::vector<int64_t> tokens;
  int64_t start, first;  // first key that draft rows see
  Tensor table;          // [1, 1, M] i32, up to the last slot the tree writes
};

struct Shape {
  int64_t nodes, depth, width, beam;
  std::vector<int64_t> end_ids;  // nothing is run below them
  float hopeless;                // a beam whose best node scores less is not run
};

struct Law {  // the request's; without noise: temperature 0
  bool noisy;
  double temperature, share;  // share: of the noise that candidates listen to
  int64_t seed, choice, purpose;
};

struct Rating {  // as in specdec/spec/head_drafter.py: Scores
  py::buffer rates;
  std::vector<int64_t> depth_cells, rank_cells;  // first cell by depth - 1, by rank
  double buckets, tie;
};

using Picks = std::vector<std::tuple<int64_t, float, int64_t, int64_t, int64_t>>;  // place, score, token, place of the parent, cell

class Growth {
 public:
  Growth(const DraftHead& head, const std::vector<Cache>& caches, const Pending& pending, const Shape& shape, const Law& law, const Rating& rating,
         const double* rates, int64_t cells, const std::optional<Tensor>& target_ids)
      : head_(head), caches_(caches), pending_(pending), shape_(shape), law_(law), rating_(rating), rates_(rates), cells_(cells),
        target_ids_(target_ids ? read<int64_t>(*target_ids) : nullptr), vocab_(target_ids ? target_ids->size(0) : INT64_MAX),
        groups_(caches.size(), 0), block_(std::get<0>(caches.front()).size(1)) {}

  Picks run() {
    auto [hidden, feedback] = extend();
    words_ = {0};
    std::vector<int64_t> above{-1};  // places of the nodes that ran last
    std::vector<float> scores{1.0f};
    for (int64_t depth = 1;; depth++) {
      size_t before = pool_.size();
      candidates(hidden, above, scores, depth);
      if (depth == shape_.depth) break;
      std::vector<int64_t> next = beam(before), rows;
      scores.clear();
      for (int64_t place : next) {
        rows.push_back((place - (int64_t)before) / shape_.width);
        scores.push_back(ends(token(place)) ? 0.0f : score(place));
      }
      if (scores.front() < shape_.hopeless) break;
      std::tie(hidden, feedback) = advance(feedback, next, rows, depth - 1);
      above = std::move(next);
    }
    std::vector<int64_t> order(pool_.size());
    std::iota(order.begin(), order.end(), 0);
    size_t kept = std::min<size_t>(order.size(), shape_.nodes - 1);
    std::partial_sort(order.begin(), order.begin() + kept, order.end(), [&](int64_t a, int64_t b) { return before(a, b); });
    Picks picks;
    for (size_t i = 0; i < kept; i++) picks.push_back(pool_[order[i]]);
    return picks;
  }

 private:
  int64_t token(int64_t place) const { return std::get<2>(pool_[place]); }
  float score(int64_t place) const { return std::get<1>(pool_[place]); }
  bool before(int64_t a, int64_t b) const { return score(a) != score(b) ? score(a) > score(b) : a < b; }
  bool ends(int64_t token) const { return std::find(shape_.end_ids.begin(), shape_.end_ids.end(), token) != shape_.end_ids.end(); }

  int64_t context() const { return pending_.start + (int64_t)pending_.tokens.size(); }

  static Tensor ints(const std::vector<int64_t>& values, at::ScalarType dtype = at::kLong) {
    Tensor out = at::empty({(int64_t)values.size()}, at::TensorOptions().dtype(dtype));
    for (size_t i = 0; i < values.size(); i++)
      if (dtype == at::kLong) static_cast<int64_t*>(out.mutable_data_ptr())[i] = values[i];
      else static_cast<int32_t*>(out.mutable_data_ptr())[i] = (int32_t)values[i];
    return out;
  }

  int64_t slot(int64_t cell) const {
    int64_t column = cell / block_;
    TORCH_CHECK_INDEX(column < pending_.table.size(2), "cell ", cell, " is past the block table");
    return read<int32_t>(pending_.table)[column] * block_ + cell % block_;
  }

  Rows rows(const std::vector<int64_t>& positions, const std::vector<int64_t>& words, const std::vector<int64_t>& slots, int64_t context,
            int64_t tree) const {
    return {ints(positions), ints({0, (int64_t)positions.size()}, at::kInt), ints({context}, at::kInt), ints({tree}, at::kInt), ints(words),
            pending_.table, ints(slots).unsqueeze(0), ints({pending_.first}, at::kInt)};
  }

  std::tuple<Tensor, Tensor> extend() const {
    Tensor taps = pending_.taps.size() == 1 ? pending_.taps.front() : at::cat(pending_.taps);
    int64_t T = taps.size(0);
    TORCH_CHECK(T == (int64_t)pending_.tokens.size() && T > 0, "one token per pending pair");
    std::vector<int64_t> positions(T), slots(T);
    for (int64_t i = 0; i < T; i++) positions[i] = pending_.start + i, slots[i] = slot(pending_.start + i);
    auto [hidden, feedback] = head_.pass(ints(pending_.tokens), head_.fuse(taps), rows(positions, std::vector<int64_t>(T, 0), slots, pending_.start, 0),
                                         caches_, groups_);
    return {hidden.narrow(0, T - 1, 1), feedback.narrow(0, T - 1, 1)};
  }

  // Children of the nodes `above`, whose scores are `scores`: `width` per row of hidden.
  void candidates(const Tensor& hidden, const std::vector<int64_t>& above, const std::vector<float>& scores, int64_t depth) {
    Tensor logits = head_.logits(hidden);
    int64_t R = logits.size(0), width = shape_.width;
    TORCH_CHECK(width <= logits.size(1) && logits.size(1) <= vocab_, "width or draft vocabulary do not fit lm_head");
    std::vector<int64_t> ids(R * width);
    std::vector<float> chances(R * width);
    std::vector<int64_t> seeds(R, law_.seed), positions(R, context() + depth - 1), choices(R, law_.choice);
    current_kernels()->candidates({floats(logits), target_ids_, ids.data(), chances.data(), R, logits.size(1), width, law_.noisy,
                                   {seeds.data(), positions.data(), choices.data(), (uint32_t)law_.purpose}, (float)law_.temperature, (float)law_.share});
    for (int64_t i = 0; i < R * width; i++) {
      float chance = chances[i];
      int64_t cell = (int64_t)(chance * (float)rating_.buckets) + rating_.depth_cells[depth - 1] + rating_.rank_cells[i % width];
      TORCH_CHECK_INDEX(cell >= 0 && cell < cells_, "cell ", cell, " of ", cells_);
      float rate = (float)rates_[cell] * (chance * (float)rating_.tie + (float)(1.0 - rating_.tie));
      float total = chance > 0.0f ? scores[i / width] * rate : 0.0f;
      pool_.push_back({(int64_t)pool_.size(), total, ids[i], above[i / width], cell});
    }
  }

  // The likeliest of the candidates from `start` on, none of them an end token as long as there are others.
  std::vector<int64_t> beam(size_t start) const {
    std::vector<int64_t> order(pool_.size() - start);
    std::iota(order.begin(), order.end(), (int64_t)start);
    auto better = [&](int64_t a, int64_t b) {
      bool ended = ends(token(a));
      return ended != ends(token(b)) ? !ended : before(a, b);
    };
    std::partial_sort(order.begin(), order.begin() + shape_.beam, order.end(), better);
    order.resize(shape_.beam);
    return order;
  }

  // Runs the nodes `next`, children of the rows `from` of the pass before; their keys lie behind the newest token.
  std::tuple<Tensor, Tensor> advance(const Tensor& feedback, const std::vector<int64_t>& next, const std::vector<int64_t>& from, int64_t pass) {
    int64_t R = (int64_t)next.size(), H = head_.hidden_size();
    Tensor features = at::empty({R, H}, feedback.options());
    std::vector<int64_t> tokens(R), words(R), slots(R);
    for (int64_t i = 0; i < R; i++) {
      int64_t node = pass * shape_.beam + i;
      std::copy_n(floats(feedback) + from[i] * H, H, writable(features) + i * H);
      tokens[i] = token(next[i]);
      words[i] = (int64_t)((uint64_t)words_[from[i]] | (uint64_t)1 << node);
      slots[i] = slot(context() + node);
    }
    words_ = words;
    int64_t fed = shape_.beam * (shape_.depth - 1);
    return head_.pass(ints(tokens), features, rows(std::vector<int64_t>(R, context() + pass), words, slots, context(), fed), caches_, groups_);
  }

  const DraftHead& head_;
  const std::vector<Cache>& caches_;
  const Pending& pending_;
  const Shape& shape_;
  const Law& law_;
  const Rating& rating_;
  const double* rates_;
  int64_t cells_;
  const int64_t* target_ids_;
  int64_t vocab_;
  std::vector<int64_t> groups_;
  int64_t block_;
  Picks pool_;                  // all candidates, by place
  std::vector<int64_t> words_;  // ancestor words of the nodes that ran last
};

Picks grow(const DraftHead& head, const std::vector<Cache>& caches, const Pending& pending, const Shape& shape, const Law& law,
           const Rating& rating, const std::optional<Tensor>& target_ids) {
  py::buffer_info info = rating.rates.request();
  TORCH_CHECK(info.ndim == 1 && info.format == py::format_descriptor<double>::format(), "rates must be float64");
  TORCH_CHECK(shape.nodes > 1 && shape.depth >= 1 && shape.width >= 1 && shape.beam >= 1 && shape.beam <= shape.width && shape.width <= kField &&
                  shape.beam * (shape.depth - 1) < 64, "a tree of this shape cannot be grown");
  TORCH_CHECK((int64_t)rating.depth_cells.size() >= shape.depth && (int64_t)rating.rank_cells.size() >= shape.width, "cells by depth and rank");
  check(pending.table, "table", at::kInt, 3);
  TORCH_CHECK(pending.table.size(0) == 1 && pending.table.size(1) == 1 && !caches.empty(), "one table of one sequence");
  if (target_ids) check(*target_ids, "target_ids", at::kLong, 1);
  py::gil_scoped_release release;
  return Growth(head, caches, pending, shape, law, rating, static_cast<const double*>(info.ptr), info.size, target_ids).run();
}

}  // namespace

void bind_draft_head(py::module_& m) {
  py::class_<DraftHead>(m, "DraftHead", "Weights of a draft head, ready to run; see specdec/kernels/draft_pass.")
      .def(py::init([](const std::vector<Layer>& layers, Tensor norm, Tensor cos, Tensor sin, Tensor feature_norm, const std::vector<Tensor>& tap_norms,
                       const Linear& fc, const Linear& lm_head, const Part& embedding, double eps, double scale, bool normed_stream, bool norm_output) {
             return DraftHead({layers, norm, cos, sin, feature_norm, tap_norms, fc, lm_head, embedding, eps, scale, normed_stream, norm_output});
           }), py::kw_only(), py::arg("layers"), py::arg("norm"), py::arg("cos"), py::arg("sin"), py::arg("feature_norm"), py::arg("tap_norms"),
           py::arg("fc"), py::arg("lm_head"), py::arg("embedding"), py::arg("eps"), py::arg("scale"), py::arg("normed_stream"), py::arg("norm_output"))
      .def("fuse", &DraftHead::fuse, py::call_guard<py::gil_scoped_release>())
      .def("run", [](const DraftHead& self, const Tensor& ids, const Tensor& features, const Tensor& positions, const Tensor& cu_query,
                     const Tensor& ctx_lens, const Tensor& tree_len, const Tensor& tree_mask, const Tensor& block_tables,
                     const Tensor& slot_mapping, const std::vector<Cache>& caches, const std::vector<int64_t>& groups,
                     const std::optional<Tensor>& first) {
        return self.pass(ids, features, {positions, cu_query, ctx_lens, tree_len, tree_mask, block_tables, slot_mapping, first}, caches, groups);
      }, py::call_guard<py::gil_scoped_release>())
      .def("grow", [](const DraftHead& self, const std::vector<Cache>& caches, const std::vector<Tensor>& taps, const std::vector<int64_t>& tokens,
                      int64_t start, int64_t first, const Tensor& table, const std::array<int64_t, 4>& shape, const std::vector<int64_t>& end_ids,
                      float hopeless, const std::optional<std::tuple<double, double, int64_t, int64_t, int64_t>>& law, const py::buffer& rates, const std::vector<int64_t>& depth_cells, const std::vector<int64_t>& rank_cells,
                      double buckets, double tie, const std::optional<Tensor>& target_ids) {
        auto [temperature, share, seed, choice, purpose] = law.value_or(std::make_tuple(0.0, 0.0, 0, 0, 0));
        return grow(self, caches, {taps, tokens, start, first, table}, {shape[0], shape[1], shape[2], shape[3], end_ids, hopeless},
                    {law.has_value(), temperature, share, seed, choice, purpose}, {rates, depth_cells, rank_cells, buckets, tie}, target_ids);
      }, py::arg("caches"), py::kw_only(), py::arg("taps"), py::arg("tokens"), py::arg("start"), py::arg("first"), py::arg("table"), py::arg("shape"),
         py::arg("end_ids"), py::arg("hopeless"), py::arg("law"), py::arg("rates"), py::arg("depth_cells"), py::arg("rank_cells"), py::arg("buckets"), py::arg("tie"),
         py::arg("target_ids"));
}

}  // namespace specdec
