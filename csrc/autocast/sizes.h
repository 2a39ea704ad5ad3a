// The sizes by which rules tell the calls of an operator apart.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string>

namespace tamp {

// What the size of an operator is, and which of its arguments have it.
struct Measure {
  enum Kind : uint8_t {
    kElements,     // of the tensors in the first argument that has any
    kProduct,      // the multiplications of two factors
    kLinear,       // the same, where the second factor is transposed
    kConvolution,  // the channels of input or output, whichever are fewer
    kAttention,    // the length of the queries or of the keys, whichever is longer
  };
  Kind kind = kElements;
  // The factors; the weight and the groups; the queries and the keys.
  uint8_t first = 0, second = 0;
};

Measure measure_of(const std::string &name, const c10::FunctionSchema &schema);

// The size of a call with these arguments; 0 if it has none.
uint64_t size_of(const Measure &measure, c10::ArrayRef<c10::IValue> arguments);

}  // namespace tamp
