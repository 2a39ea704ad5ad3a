// Arithmetic on lists of tensors that unscaling, clipping and the loss scales share.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "border/shim.h"

namespace tamp {

// Returns a sparse fp16 gradient coalesced, because the values of duplicate indices can add up to infinity, and any other
// gradient as it is.
at::Tensor coalesced(const at::Tensor &gradient);

// Returns the dense real tensor that holds the numbers of a gradient, or of a copy if that has to be coalesced.
at::Tensor numbers(const at::Tensor &gradient);

// Groups tensors by dtype and keeps their order within a group. libtorch processes a list in one launch only if all
// dtypes are the same.
std::vector<std::vector<at::Tensor>> by_dtype(const std::vector<at::Tensor> &tensors);

// Returns the largest absolute value in tensors of one device and dtype, none of which is empty, as a 0-dim tensor on
// that device. It is non-finite if an element is.
at::Tensor largest(const std::vector<at::Tensor> &tensors);

// Multiplies tensors that have a loop by `factor`, unless it is 1. Returns whether an element was non-finite before or,
// with `recheck`, after the multiplication.
bool unscale_in_loops(const std::vector<at::Tensor> &tensors, float factor, bool recheck);

// Returns 1/scale as an f32 on the scale's device, rounded as on the host.
at::Tensor inverse_of(const at::Tensor &scale);

// The multiplication of tensors of one device by one number.
class Product {
 public:
  // `factor` is a 0-dim tensor on any device. The constructor allocates everything that `run` needs.
  Product(const std::vector<at::Tensor> &tensors, const at::Tensor &factor);

  void run() const;

 private:
  std::vector<at::Tensor> looped_;
  double value_ = 1;
  std::vector<std::pair<std::vector<at::Tensor>, at::Tensor>> lists_;  // tensors of one dtype, and the factor
};

// The multiplication of half-precision tensors of one device in f32, with one rounding. Its f32 buffer has room for all
// of them but is at most 64 MiB large, unless the largest tensor needs more.
class Widened {
 public:
  Widened() = default;
  explicit Widened(const std::vector<at::Tensor> &tensors);

  // Multiplies the tensors in place. Allocates nothing on the device.
  void multiply(const at::Tensor &factor) const;

 private:
  // Tensors that are converted at the same time, their f32 counterparts, and the part of the buffer that these fill.
  struct Part {
    std::vector<at::Tensor> tensors, wide;
    at::Tensor memory;
  };
  std::vector<Part> parts_;
};

}  // namespace tamp
