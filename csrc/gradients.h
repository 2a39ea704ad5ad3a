// What is known of a gradient before anything is done to it.
#pragma once

#include <ATen/core/Tensor.h>

#include "shim.h"

namespace tamp {

// Describes the gradient of a parameter; see tamp_gradient.
tamp_gradient inspect(const at::Tensor &parameter);

}  // namespace tamp
