// Attention that is composed of two products and a softmax in the dtype of the queries, instead of a fused kernel.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>

namespace tamp {

// Whether a call of scaled_dot_product_attention can be composed in half precision, with probabilities of at most so
// many bytes. What libtorch refuses cannot.
bool can_be_composed(c10::ArrayRef<c10::IValue> arguments, uint64_t most_bytes);

// Composes such a call, whose arguments have been cast. Rows without any key are zero, as are their gradients.
at::Tensor composed_attention(c10::ArrayRef<c10::IValue> arguments);

}  // namespace tamp
