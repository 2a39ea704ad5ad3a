// The arithmetic of gradients: what unscaling, clipping and the optimizers share.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "shim.h"

namespace tamp {

// The dense real tensor that holds the numbers of a gradient. An fp16 sparse gradient is coalesced first: duplicate
// indices can add up to infinity.
at::Tensor numbers(const at::Tensor &parameter);

// The tensors by dtype, in their order: libtorch takes a list in one launch where all are alike.
std::vector<std::vector<at::Tensor>> by_dtype(const std::vector<at::Tensor> &tensors);

// The largest absolute value in tensors of one device and dtype, none of which is empty: a tensor of no dimensions
// there. It is not finite where an element is not.
at::Tensor largest(const std::vector<at::Tensor> &tensors);

// Whether a multiplication or a look at `tensors` takes a loop of kernels.h rather than libtorch.
bool has_loop(const at::Tensor &t);

// Whether any element of tensors that have a loop is infinite or NaN; multiplies them by `factor` unless it is 1.
bool unscale_in_loops(const std::vector<at::Tensor> &tensors, float factor, bool recheck);

// The 2-norm of tensors of one device, each element times `factor`, a 0-dim tensor there: f64 if all of them are, else
// narrowed. It is not finite where an element is not.
at::Tensor norm(const std::vector<at::Tensor> &tensors, const at::Tensor &factor);

// A norm in f32, or in f64 where it is there and too large for f32.
at::Tensor narrowed(const at::Tensor &norm);

// The factor that brings a norm down to `max_norm`, at most one, on the norm's device.
at::Tensor clip_factor(const at::Tensor &norm, double max_norm);

// Tensors of one device that are multiplied by one number.
class Product {
 public:
  // `factor` has no dimensions and lies on any device. All that the product takes is made here.
  Product(const std::vector<at::Tensor> &tensors, const at::Tensor &factor);

  void run() const;

 private:
  std::vector<at::Tensor> looped_;
  double value_ = 1;
  std::vector<std::pair<std::vector<at::Tensor>, at::Tensor>> lists_;  // of one dtype each, and the number
};

// bf16 and fp16 tensors of one device that are multiplied in f32 and rounded once. The f32 numbers have memory for all
// of them, or 64 MiB if that is less, or what the largest takes.
class Widened {
 public:
  Widened() = default;
  explicit Widened(const std::vector<at::Tensor> &tensors);

  // Allocates nothing on the device.
  void multiply(const at::Tensor &factor) const;

 private:
  // Tensors that are f32 at the same time, and the memory of their numbers.
  struct Part {
    std::vector<at::Tensor> tensors, wide;
    at::Tensor memory;
  };
  std::vector<Part> parts_;
};

}  // namespace tamp
