// What a step has to know of gradients: how to treat each, and which of them share memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "border/shim.h"

namespace tamp {

// Describes a parameter and its gradient; see tamp_gradient.
tamp_gradient inspect(const at::Tensor &parameter);

// Copies gradients of `count` parameters that share memory, so that changing one in place changes no other; the same as
// tamp_gradients_separate if `from_all`. Otherwise only the gradients of these parameters are told apart from each
// other.
void separate(tamp_tensor *const *parameters, size_t count, bool from_all);

// Calls `f` with each leaf of the graph of `loss`, which may be a leaf itself.
void for_each_leaf(const at::Tensor &loss, const std::function<void(const at::Tensor &)> &f);

}  // namespace tamp
