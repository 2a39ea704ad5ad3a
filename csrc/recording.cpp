// The numbers in a recorded tensor.

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "recording.h"

namespace tamp {

std::optional<Numbers> count_numbers(const at::Tensor &t) {
  if (!t.defined() || t.layout() != at::kStrided || t.is_nested() || t.is_quantized() || t.is_meta()) {
    return std::nullopt;
  }
  // Float8 has no kernels for it.
  if (!at::isFloatingType(t.scalar_type()) || t.element_size() < 2 || t.numel() == 0 ||
      !t.unsafeGetTensorImpl()->has_storage() || t._is_zerotensor()) {
    return std::nullopt;
  }
  const at::Tensor values = t.detach();
  Numbers found;
  // Both are NaN if any number is.
  const auto ends = at::aminmax(values);
  const double least = std::get<0>(ends).item<double>(), most = std::get<1>(ends).item<double>();
  if (std::isfinite(least) && std::isfinite(most)) {
    found.largest = std::max(std::abs(least), std::abs(most));
    return found;
  }
  const auto count = [](const at::Tensor &which) { return which.sum().item<int64_t>(); };
  found.nan = count(values.isnan());
  found.positive_infinite = count(values.isposinf());
  found.negative_infinite = count(values.isneginf());
  found.largest = at::where(values.isfinite(), values.abs(), 0).max().item<double>();
  return found;
}

}  // namespace tamp
