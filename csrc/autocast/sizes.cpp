// The sizes of the calls of operators.

#include "autocast/sizes.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

namespace tamp {
namespace {

using c10::IValue;

// The products of two factors, which are these arguments.
struct ProductOperator {
  const char *name;
  uint8_t first, second;
};

constexpr ProductOperator kProducts[] = {
    {"aten::mm", 0, 1},    {"aten::matmul", 0, 1}, {"aten::mv", 0, 1},      {"aten::bmm", 0, 1},    {"aten::dot", 0, 1},
    {"aten::addmm", 1, 2}, {"aten::addmv", 1, 2},  {"aten::baddbmm", 1, 2}, {"aten::addbmm", 1, 2},
};

// Nothing if the argument is no tensor with sizes.
const at::Tensor *dense(const IValue &value) {
  if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().is_nested()) return nullptr;
  return &value.toTensor();
}

// The size of a dimension that counts from the last; 1 if there are fewer.
uint64_t extent(const at::Tensor &t, int64_t from_last) {
  return t.dim() < from_last ? 1 : static_cast<uint64_t>(t.size(-from_last));
}

uint64_t elements(const IValue &value) {
  if (const auto *t = dense(value)) return static_cast<uint64_t>(t->numel());
  uint64_t sum = 0;
  if (value.isList()) {
    for (const IValue &element : value.toListRef()) sum += elements(element);
  }
  return sum;
}

// The batches of the two factors are broadcast to each other.
uint64_t multiplications(const at::Tensor &a, const at::Tensor &b) {
  if (a.numel() == 0 || b.numel() == 0) return 0;
  uint64_t all = (a.dim() < 2 ? 1 : extent(a, 2)) * (b.dim() < 2 ? 1 : extent(b, 1)) * extent(a, 1);
  for (int64_t place = 3; place <= std::max(a.dim(), b.dim()); ++place) {
    all *= std::max(a.dim() < place ? 1 : extent(a, place), b.dim() < place ? 1 : extent(b, place));
  }
  return all;
}

// The weight has the channels of one side, and of the other those of one group.
uint64_t channels(const at::Tensor &weight, int64_t groups) {
  if (weight.dim() < 2) return 0;
  return static_cast<uint64_t>(std::min(weight.size(0), weight.size(1) * groups));
}

}  // namespace

Measure measure_of(const std::string &name, const c10::FunctionSchema &schema) {
  for (const auto &product : kProducts) {
    if (name == product.name) return {Measure::kProduct, product.first, product.second};
  }
  if (name == "aten::linear") return {Measure::kLinear, 0, 1};
  if (name == "aten::scaled_dot_product_attention") return {Measure::kAttention, 0, 1};
  const auto weight = schema.argumentIndexWithName("weight"), groups = schema.argumentIndexWithName("groups");
  if (weight && groups) return {Measure::kConvolution, static_cast<uint8_t>(*weight), static_cast<uint8_t>(*groups)};
  return {};
}

uint64_t size_of(const Measure &measure, c10::ArrayRef<IValue> arguments) {
  if (measure.kind == Measure::kElements) {
    for (const IValue &argument : arguments) {
      if (const uint64_t found = elements(argument)) return found;
    }
    return 0;
  }
  const auto *first = dense(arguments[measure.first]), *second = dense(arguments[measure.second]);
  if (first == nullptr) return 0;
  if (measure.kind == Measure::kConvolution) {
    const IValue &groups = arguments[measure.second];
    return groups.isInt() ? channels(*first, groups.toInt()) : 0;
  }
  if (second == nullptr) return 0;
  switch (measure.kind) {
    case Measure::kLinear:
      return static_cast<uint64_t>(first->numel()) * extent(*second, 2);
    case Measure::kAttention:
      return first->dim() < 2 ? 0 : std::max(extent(*first, 2), extent(*second, 2));
    default:
      return multiplications(*first, *second);
  }
}

}  // namespace tamp
