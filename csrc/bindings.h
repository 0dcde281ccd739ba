// What the binding files share: tensor checks, and the table of the calling thread.
#pragma once
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include "include/cpu_kernels.h"

namespace specdec {

const CpuKernels* current_kernels();
void bind_decoder_stack(pybind11::module_& m);
void bind_draft_head(pybind11::module_& m);
void bind_lookup(pybind11::module_& m);
void bind_tree_walk(pybind11::module_& m);
void bind_memory(pybind11::module_& m);

void check(const at::Tensor& t, const char* name, at::ScalarType dtype, int64_t dims);
void check_tiles(const at::Tensor& tiles, int64_t kind, int64_t rows, int64_t cols);

// Every index the kernels will follow, so that a wrong batch is an error and not a stray read.
void check_rope(const at::Tensor& positions, const int64_t* slots, int64_t rotary_rows, int64_t slot_count);
void check_attention(const at::Tensor& cu_query, const at::Tensor& ctx_lens, const at::Tensor& tree_len, const at::Tensor& tree_mask,
                     const at::Tensor& positions, int64_t B, int64_t T, int64_t reach);
void check_first(const at::Tensor& first, const at::Tensor& cu_query, const at::Tensor& positions);  // after check_attention

template <class T> const T* read(const at::Tensor& t) { return static_cast<const T*>(t.const_data_ptr()); }
inline const float* floats(const at::Tensor& t) { return read<float>(t); }
inline float* writable(const at::Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }

}  // namespace specdec
