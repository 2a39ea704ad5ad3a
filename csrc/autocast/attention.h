// Attention that is composed of two products and a softmax in the dtype of the queries, instead of a fused kernel.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>

namespace tamp {

// Whether a call of scaled_dot_product_attention can be composed in half precision, with probabilities of at most so
// many bytes. What libtorch refuses cannot.
bool can_be_composed(c10::ArrayRef<c10::IValue> arguments, uint64_t most_bytes);

// Subtracts from each row of such a call's mask the largest number in it. That changes no probability, and keeps the
// scores, for which half precision has no digits left beside a large number. Call it before the mask is cast.
void lower_mask(c10::IValue *arguments);

// Composes such a call, whose arguments have been cast. Rows without any key are zero, as are their gradients.
at::Tensor composed_attention(c10::ArrayRef<c10::IValue> arguments);

}  // namespace tamp
