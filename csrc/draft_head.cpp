// Python binding of a draft head.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "draft_head.h"

namespace specdec {

void bind_draft_head(pybind11::module_& m) {
  namespace py = pybind11;
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
      }, py::call_guard<py::gil_scoped_release>());
}

}  // namespace specdec
