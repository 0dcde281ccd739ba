// A draft head's network in few calls: features from taps, one pass over pairs, logits. Bits of the single ops.
#pragma once
#include "decoder_stack.h"

namespace specdec {

// A linear layer outside a stack.
class HeadLinear {
 public:
  explicit HeadLinear(const Linear& linear) : linear_(linear) {
    const auto& [parts, columns, bias] = linear_;
    for (const auto& [tiles, kind, rows] : parts) check_tiles(tiles, kind, rows, columns), rows_ += rows;
    if (!bias) return;
    check(*bias, "bias", at::kFloat, 1);
    TORCH_CHECK(bias->size(0) == rows_, "bias has ", bias->size(0), " elements for ", rows_, " rows");
  }

  int64_t rows() const { return rows_; }
  int64_t columns() const { return std::get<1>(linear_); }

  // x [M, K] -> [M, N].
  Tensor operator()(const Tensor& x) const {
    const auto& [parts, K, bias] = linear_;
    int64_t M = x.size(0), column = 0;
    Tensor out = at::empty({M, rows_}, x.options());
    for (const auto& [tiles, kind, rows] : parts) {
      Tensor scratch = at::empty({linear_scratch_bytes(M, K, (WeightKind)kind)}, x.options().dtype(at::kByte));
      current_kernels()->linear({floats(x), read<uint8_t>(tiles), writable(out) + column, M, rows, K, rows_, (WeightKind)kind,
                                 scratch.mutable_data_ptr(), bias ? floats(*bias) + column : nullptr, at::get_num_threads()});
      column += rows;
    }
    return out;
  }

 private:
  Linear linear_;
  int64_t rows_ = 0;
};

struct HeadWeights {
  std::vector<Layer> layers;  // the first of 2 H columns
  Tensor norm, cos, sin, feature_norm;
  std::vector<Tensor> tap_norms;  // one over all taps, one per tap, or none
  Linear fc, lm_head;
  Part embedding;
  double eps, scale;
  bool normed_stream, norm_output;  // see HeadConfig: norm_before_residual, norm_output
};

class DraftHead {
 public:
  explicit DraftHead(const HeadWeights& w)
      : stack_(w.layers, w.norm, w.cos, w.sin, w.eps, w.scale, Pairing{w.feature_norm, w.normed_stream}), fc_(w.fc), lm_head_(w.lm_head),
        embedding_(w.embedding), tap_norms_(w.tap_norms), norm_output_(w.norm_output) {
    const auto& [tiles, kind, rows] = embedding_;
    int64_t H = stack_.hidden_size(), n = (int64_t)tap_norms_.size();
    check_tiles(tiles, kind, rows, H);
    TORCH_CHECK(fc_.rows() == H && lm_head_.columns() == H, "fc and lm_head do not fit a head of size ", H);
    for (const Tensor& norm : tap_norms_) {
      check(norm, "tap norm", at::kFloat, 1);
      TORCH_CHECK(norm.size(0) * n == fc_.columns(), "tap norms do not fit fc");
    }
  }

  int64_t hidden_size() const { return stack_.hidden_size(); }
  int64_t layers() const { return stack_.count(); }

  // taps [T, n * Ht] -> features [T, H].
  Tensor fuse(const Tensor& taps) const {
    check(taps, "taps", at::kFloat, 2);
    int64_t T = taps.size(0), n = (int64_t)tap_norms_.size();
    TORCH_CHECK(taps.size(1) == fc_.columns(), "taps have ", taps.size(1), " columns, fc takes ", fc_.columns());
    if (n == 0) return fc_(taps);
    Tensor normed = at::empty(taps.sizes(), taps.options());
    int64_t size = taps.size(1) / n;
    for (int64_t i = 0; i < T * n; i++)
      current_kernels()->rms_norm({floats(taps) + i * size, nullptr, floats(tap_norms_[i % n]), writable(normed) + i * size, nullptr, 1, size, stack_.eps()});
    return fc_(normed);
  }

  // ids [T] of the target, features [T, H] -> (hidden, feedback), each [T, H]; writes the caches.
  std::tuple<Tensor, Tensor> pass(const Tensor& ids, const Tensor& features, const Rows& rows, const std::vector<Cache>& caches,
                                  const std::vector<int64_t>& groups) const {
    check(ids, "ids", at::kLong, 1);
    const auto& [tiles, kind, count] = embedding_;
    int64_t T = ids.size(0), H = hidden_size();
    for (int64_t t = 0; t < T; t++) {
      int64_t id = read<int64_t>(ids)[t];
      TORCH_CHECK_INDEX(id >= 0 && id < count, "token id ", id, " is outside the vocabulary of ", count);
    }
    Tensor x = at::empty({T, H}, features.options());
    current_kernels()->embedding({read<int64_t>(ids), read<uint8_t>(tiles), writable(x), T, count, H, (WeightKind)kind});
    if (norm_output_) {
      Tensor hidden = std::get<0>(stack_.run(x, rows, caches, groups, {}, features));
      return {hidden, hidden};
    }
    return stack_.run(x, rows, caches, groups, {layers()}, features);
  }

  // [R, H] -> [R, Vd].
  Tensor logits(const Tensor& hidden) const { return lm_head_(hidden); }

 private:
  DecoderStack stack_;
  HeadLinear fc_, lm_head_;
  Part embedding_;
  std::vector<Tensor> tap_norms_;
  bool norm_output_;
};

}  // namespace specdec
