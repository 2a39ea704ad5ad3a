// The description of a gradient, by which a step decides how to treat it.
#pragma once

#include <ATen/core/Tensor.h>

#include "shim.h"

namespace tamp {

// Describes a parameter and its gradient; see tamp_gradient.
tamp_gradient inspect(const at::Tensor &parameter);

}  // namespace tamp
