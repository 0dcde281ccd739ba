// Python binding of the decoder stack.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "decoder_stack.h"

namespace specdec {

void bind_decoder_stack(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<DecoderStack>(m, "DecoderStack", "Weights of all decoder layers, ready to run; see specdec/kernels/decoder_stack.")
      .def(py::init<const std::vector<Layer>&, Tensor, Tensor, Tensor, double, double>(), py::arg("layers"), py::arg("norm"), py::arg("cos"),
           py::arg("sin"), py::arg("eps"), py::arg("scale"))
      .def("run", [](const DecoderStack& self, const Tensor& x, const Tensor& positions, const Tensor& cu_query, const Tensor& ctx_lens,
                     const Tensor& tree_len, const Tensor& tree_mask, const Tensor& block_tables, const Tensor& slot_mapping,
                     const std::vector<Cache>& caches, const std::vector<int64_t>& groups, const std::vector<int64_t>& taps,
                     const std::optional<Tensor>& first) {
        return self.run(x, {positions, cu_query, ctx_lens, tree_len, tree_mask, block_tables, slot_mapping, first}, caches, groups, taps);
      }, py::call_guard<py::gil_scoped_release>());
}

}  // namespace specdec
