// What the scaler, clipping and the optimizers share about gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "shim.h"

namespace tamp {

// The dense real tensor that holds the numbers of a gradient. An fp16 sparse gradient is coalesced first: duplicate
// indices can add up to infinity.
at::Tensor numbers(const at::Tensor &parameter);

// Whether a multiplication or a look at `tensors` takes a loop of kernels.h rather than libtorch.
bool has_loop(const at::Tensor &t);

// Whether any element of tensors that have a loop is infinite or NaN; multiplies them by `factor` unless it is 1.
bool unscale_in_loops(const std::vector<at::Tensor> &tensors, float factor, bool recheck);

// The 2-norm of tensors of one device, each element times `factor`, a 0-dim tensor there: f64 if all of them are, else
// f32. It is not finite where an element is not.
at::Tensor norm(const std::vector<at::Tensor> &tensors, const at::Tensor &factor);

// The factor that brings a norm down to `max_norm`, at most one, on the norm's device.
at::Tensor clip_factor(const at::Tensor &norm, double max_norm);

// Multiplies tensors of one device by a 0-dim tensor there.
void multiply(const std::vector<at::Tensor> &tensors, const at::Tensor &factor);

}  // namespace tamp
