// Which path of each draft tree is taken, and where it is cut: kernels/tree_walk/reference.py, one pass over the nodes.
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "bindings.h"

namespace specdec {
namespace {

using at::Tensor;

enum Finish : int64_t { kRunning, kStopped, kLength };  // Verdict.finish

struct Trees {  // [B, N] each
  const int64_t *tokens, *parents, *depth;
  int64_t N;
};

struct Limits {  // by request slot
  const int64_t *length, *min_total, *max_total, *end_ids;
  int64_t S, E;
};

struct Verdict {  // [B, D + 1], path [B, D]
  int64_t *committed, *num_committed, *path, *num_accepted, *finish, *rows;
};

// Nodes of tree b on the path, by depth; returns how many are drafts. first: the root's row.
int64_t walk(const Trees& t, int64_t b, int64_t nodes, int64_t first, const int64_t* following, const bool* agrees, std::vector<int64_t>* path) {
  const int64_t *tokens = t.tokens + b * t.N, *parents = t.parents + b * t.N, *depth = t.depth + b * t.N;
  int64_t count = 0;
  std::vector<char> on(nodes, 0);
  on[0] = 1, (*path)[0] = 0;
  for (int64_t i = 1; i < nodes; i++) {
    int64_t p = parents[i];
    TORCH_CHECK(p >= 0 && p < i && depth[i] == depth[p] + 1 && depth[i] < (int64_t)path->size(), "node ", i, " of tree ", b, " does not follow its parent");
    if (!on[p] || !(agrees ? agrees[first + i] : following[first + p] == tokens[i])) continue;
    on[i] = 1, count++, (*path)[depth[i]] = i;
  }
  return count;
}

// Writes row b of the verdict for a path of `count` drafts. width = D + 1.
void settle(const Trees& t, const Limits& l, int64_t b, int64_t slot, int64_t first, const int64_t* following, const std::vector<int64_t>& path,
            int64_t count, int64_t width, const Verdict& v) {
  int64_t *committed = v.committed + b * width, last = count, finish = kRunning;
  const int64_t* ends = l.end_ids + slot * l.E;
  for (int64_t c = 0; c <= count; c++) {
    v.rows[b * width + c] = first + path[c];
    int64_t token = c < count ? t.tokens[b * t.N + path[c + 1]] : following[first + path[c]], position = l.length[slot] + c;
    if (finish != kRunning) continue;
    committed[c] = token;
    bool stop = position >= l.min_total[slot] && std::find(ends, ends + l.E, token) != ends + l.E;
    if (stop || position + 1 >= l.max_total[slot]) finish = stop ? kStopped : kLength, last = c;
  }
  v.num_committed[b] = last + 1;
  v.num_accepted[b] = std::min(count, last + 1);
  v.finish[b] = finish;
  for (int64_t c = 0; c < v.num_accepted[b]; c++) v.path[b * (width - 1) + c] = path[c + 1];
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> tree_walk(
    const Tensor& following, const std::optional<Tensor>& agrees, const Tensor& tokens, const Tensor& parents, const Tensor& depth,
    const Tensor& num_nodes, const std::vector<int64_t>& slots, const Tensor& length, const Tensor& min_total, const Tensor& max_total,
    const Tensor& end_ids) {
  check(following, "following", at::kLong, 1);
  check(tokens, "tokens", at::kLong, 2);
  check(parents, "parents", at::kLong, 2);
  check(depth, "depth", at::kLong, 2);
  check(num_nodes, "num_nodes", at::kLong, 1);
  for (const Tensor* t : {&length, &min_total, &max_total}) check(*t, "length, min_total and max_total", at::kLong, 1);
  check(end_ids, "end_ids", at::kLong, 2);
  if (agrees) check(*agrees, "agrees", at::kBool, 1);
  int64_t B = tokens.size(0), N = tokens.size(1), R = following.size(0), S = length.size(0), first = 0;
  TORCH_CHECK(parents.sizes() == tokens.sizes() && depth.sizes() == tokens.sizes() && num_nodes.size(0) == B && (int64_t)slots.size() == B &&
                  min_total.size(0) == S && max_total.size(0) == S && end_ids.size(0) == S && (!agrees || agrees->size(0) == R),
              "tree_walk: sizes disagree");
  Trees trees = {read<int64_t>(tokens), read<int64_t>(parents), read<int64_t>(depth), N};
  Limits limits = {read<int64_t>(length), read<int64_t>(min_total), read<int64_t>(max_total), read<int64_t>(end_ids), S, end_ids.size(1)};
  int64_t width = 1 + (tokens.numel() > 0 ? *std::max_element(trees.depth, trees.depth + B * N) : 0);
  TORCH_CHECK(width <= std::max<int64_t>(N, 1), "a tree of ", N, " nodes cannot be ", width - 1, " deep");
  std::vector<Tensor> made;  // empty and filled by hand: a step has little other use for the operators that would do it
  auto table = [&](at::IntArrayRef sizes) {
    made.push_back(at::empty(sizes, tokens.options()));
    int64_t* data = static_cast<int64_t*>(made.back().mutable_data_ptr());
    std::fill_n(data, made.back().numel(), 0);
    return data;
  };
  Verdict verdict{};
  verdict.committed = table({B, width}), verdict.num_committed = table({B}), verdict.path = table({B, width - 1});
  verdict.num_accepted = table({B}), verdict.finish = table({B}), verdict.rows = table({B, width});
  std::vector<int64_t> taken(width);
  for (int64_t b = 0; b < B; b++) {
    int64_t nodes = read<int64_t>(num_nodes)[b];
    TORCH_CHECK_INDEX(nodes >= 1 && nodes <= N && first + nodes <= R && slots[b] >= 0 && slots[b] < S, "tree ", b, " has ", nodes,
                      " nodes in request slot ", slots[b]);
    int64_t count = walk(trees, b, nodes, first, read<int64_t>(following), agrees ? read<bool>(*agrees) : nullptr, &taken);
    settle(trees, limits, b, slots[b], first, read<int64_t>(following), taken, count, width, verdict);
    first += nodes;
  }
  TORCH_CHECK(first == R, R, " rows for trees of ", first, " nodes");
  return {made[0], made[1], made[2], made[3], made[4], made[5]};
}

}  // namespace

void bind_tree_walk(pybind11::module_& m) { m.def("tree_walk", &tree_walk); }

}  // namespace specdec
