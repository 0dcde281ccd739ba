// Python bindings of the token index and of the trees that the n-gram and suffix drafters grow from it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "include/draft_trie.h"
#include "include/token_index.h"

namespace specdec {
namespace {

namespace py = pybind11;

// A TokenIndex over a list of its own, or over one that its caller lets grow.
class BoundIndex {
 public:
  BoundIndex(std::vector<int32_t> levels, std::optional<py::list> tokens) : index(std::move(levels)), list_(std::move(tokens)) {}

  TokenIndex index;

  bool follows() const { return list_.has_value(); }

  void extend(const py::sequence& tokens, bool separate) {
    if (separate && !index.tokens.empty()) index.tokens.push_back(kSeparator);
    append(tokens, 0);
    index.update((int64_t)index.tokens.size());
  }

  void update(int64_t end) {
    if (list_) append(*list_, index.tokens.size());
    if (end > (int64_t)index.tokens.size()) throw std::out_of_range("the index cannot reach beyond its tokens");
    index.update(end);
  }

 private:
  void append(const py::sequence& tokens, size_t from) {
    py::object items = py::reinterpret_steal<py::object>(PySequence_Fast(tokens.ptr(), "tokens must be a sequence"));
    if (!items) throw py::error_already_set();
    for (Py_ssize_t i = from, count = PySequence_Fast_GET_SIZE(items.ptr()); i < count; i++) {
      long token = PyLong_AsLong(PySequence_Fast_GET_ITEM(items.ptr(), i));
      if (token == -1 && PyErr_Occurred()) throw py::error_already_set();
      index.tokens.push_back((int32_t)token);
    }
  }

  std::optional<py::list> list_;
};

using Query = std::tuple<int32_t, size_t, size_t, std::vector<int32_t>, std::vector<int32_t>>;  // as in specdec/spec/lookup.py
using Draft = std::tuple<std::vector<int32_t>, std::vector<int32_t>, std::vector<double>, std::vector<int32_t>>;

struct Search {  // what a drafter looks for in each source
  int32_t vocab, candidates, longest;
  bool oldest_first;
};

template <class Rule> Draft draft(const Rule& rule, const std::vector<const BoundIndex*>& sources, const Query& query, const py::buffer& rates,
                                  const Search& search) {
  const auto& [depth, nodes, width, end_ids, guess] = query;
  py::buffer_info info = rates.request();
  if (info.ndim != 1 || info.itemsize != sizeof(double) || info.format != py::format_descriptor<double>::format() || info.size != Rule::kCells)
    throw std::invalid_argument("rates must be the float64 rates of all cells");
  const BoundIndex* text = nullptr;
  for (const BoundIndex* source : sources)
    if (source->follows()) text = source;
  if (!text || text->index.tokens.empty()) throw std::invalid_argument("one of the sources must be the text of the sequence, not empty");
  std::vector<int32_t> pool;
  std::vector<std::pair<int32_t, size_t>> found;  // length, where the continuation starts in the pool
  if (!guess.empty()) {
    found.push_back({search.longest, 0});
    pool.assign(guess.begin(), guess.begin() + std::min<size_t>(guess.size(), depth));
  }
  std::vector<Hit> hits;
  for (const BoundIndex* source : sources) {
    hits.clear();
    source->index.matches(text->index.tokens, search.candidates, search.longest, source == text && search.oldest_first, &hits);
    for (const Hit& hit : hits) {
      found.push_back({hit.length, pool.size()});
      source->index.continuation(hit.position, depth, source == text, &pool);
    }
  }
  std::vector<Match> matches;
  for (size_t i = 0; i < found.size(); i++) {
    size_t end = i + 1 < found.size() ? found[i + 1].second : pool.size();
    matches.push_back({found[i].first, pool.data() + found[i].second, (int32_t)(end - found[i].second)});
  }
  DraftTrie trie(text->index.tokens.back(), 4 * nodes, width);
  rule(&trie, std::move(matches), {depth, search.vocab, end_ids, static_cast<const double*>(info.ptr), info.size});
  if (width > 1) trie = trie.select(nodes);
  return {std::move(trie.tokens), std::move(trie.parents), std::move(trie.scores), std::move(trie.cells)};
}

}  // namespace

void bind_lookup(py::module_& m) {
  py::class_<BoundIndex>(m, "TokenIndex", "specdec.spec.index.TokenIndex, compiled.")
      .def(py::init<std::vector<int32_t>, std::optional<py::list>>(), py::arg("levels"), py::arg("tokens") = py::none())
      .def("extend", &BoundIndex::extend, py::arg("tokens"), py::kw_only(), py::arg("separate") = false)
      .def("update", &BoundIndex::update, py::arg("end"))
      .def("__len__", [](const BoundIndex& self) { return self.index.tokens.size(); })
      .def_property_readonly("tokens", [](const BoundIndex& self) { return self.index.tokens; })
      .def("matches", [](const BoundIndex& self, const std::vector<int32_t>& context, int limit, int longest, bool oldest_first) {
        std::vector<Hit> hits;
        self.index.matches(context, limit, longest, oldest_first, &hits);
        std::vector<std::tuple<int32_t, int32_t>> out;
        for (const Hit& hit : hits) out.emplace_back(hit.length, hit.position);
        return out;
      }, py::arg("context"), py::arg("limit"), py::arg("longest"), py::kw_only(), py::arg("oldest_first") = false)
      .def("continuation", [](const BoundIndex& self, int64_t position, int64_t length, bool cyclic) {
        std::vector<int32_t> out;
        self.index.continuation(position, length, cyclic, &out);
        return out;
      }, py::arg("position"), py::arg("length"), py::kw_only(), py::arg("cyclic"));
  m.def("draft_ngram", [](const std::vector<const BoundIndex*>& sources, const Query& query, const py::buffer& rates, int32_t vocab,
                          int32_t candidates, int32_t longest, bool oldest_first, int32_t ngram_max) {
    return draft(NgramRule{ngram_max}, sources, query, rates, {vocab, candidates, longest, oldest_first});
  }, py::arg("sources"), py::arg("query"), py::arg("rates"), py::kw_only(), py::arg("vocab"), py::arg("candidates"), py::arg("longest"),
        py::arg("oldest_first"), py::arg("ngram_max"));
  m.def("draft_suffix", [](const std::vector<const BoundIndex*>& sources, const Query& query, const py::buffer& rates, int32_t vocab,
                           int32_t candidates, int32_t longest, int32_t factor, int32_t bonus, double floor) {
    return draft(SuffixRule{factor, bonus, floor}, sources, query, rates, {vocab, candidates, longest, false});
  }, py::arg("sources"), py::arg("query"), py::arg("rates"), py::kw_only(), py::arg("vocab"), py::arg("candidates"), py::arg("longest"),
        py::arg("factor"), py::arg("bonus"), py::arg("floor"));
}

}  // namespace specdec
