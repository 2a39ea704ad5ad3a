// Norms of lists of gradients. The type of a norm is its order: more than 0, or infinity, which stands for the largest
// absolute value.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tamp {

// Returns the dense real tensor whose norm is that of a dense gradient. For the 2-norm it has the real and imaginary
// parts of complex numbers, and for all others their absolute values.
at::Tensor for_norm(const at::Tensor &gradient, double norm_type);

// Returns the norm of tensors of one device, multiplied by `factor`, as a 0-dim tensor there. It is f64 if all of them
// are or if, on the CPU, it is finite and too large for f32; otherwise it is f32. It is non-finite if an element is.
at::Tensor norm(const std::vector<at::Tensor> &tensors, double norm_type, const at::Tensor &factor);

// Returns the norm of norms of one type, at least one, which may be on several devices: a 0-dim tensor on the first
// one's, f64 or f32 like that of `norm`.
at::Tensor norm_of_norms(const std::vector<at::Tensor> &norms, double norm_type);

// Returns the factor, at most one, that reduces a norm to `max_norm`, on the norm's device.
at::Tensor clip_factor(const at::Tensor &norm, double max_norm);

}  // namespace tamp
