// Memory that streams of reads go through: in huge pages where the system has them, because a step touches every page of the
// weights and with 4 KiB pages misses the TLB on each.
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <sys/mman.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings.h"

namespace specdec {
namespace {

constexpr int64_t kHuge = 2 << 20;  // bytes; the size on x86-64, and a harmless alignment elsewhere

// uint8 [bytes], zero. Pages are committed when first touched, as with calloc.
at::Tensor huge_zeros(int64_t bytes) {
  TORCH_CHECK(bytes >= 0, "a tensor cannot have ", bytes, " bytes");
#ifdef MADV_HUGEPAGE
  size_t size = bytes + kHuge;
  void* base = bytes >= kHuge ? mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) : MAP_FAILED;
  if (base != MAP_FAILED) {
    void* data = (void*)(((uintptr_t)base + kHuge - 1) / kHuge * kHuge);
    madvise(data, bytes, MADV_HUGEPAGE);  // where it is refused the pages are small, and right all the same
    return at::from_blob(data, {bytes}, [base, size](void*) { munmap(base, size); }, at::TensorOptions().dtype(at::kByte));
  }
#endif
  return at::zeros({bytes}, at::TensorOptions().dtype(at::kByte));
}

}  // namespace

void bind_memory(pybind11::module_& m) { m.def("huge_zeros", &huge_zeros); }

}  // namespace specdec
