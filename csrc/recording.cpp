// The memory of recorded tensors, and the numbers in them.

#include <ATen/ATen.h>
#include <ATen/SparseCsrTensorUtils.h>

#include <algorithm>
#include <cmath>

#include "recording.h"

namespace tamp {

at::Tensor dense_part(const at::Tensor &t) {
  if (t.layout() == at::kSparse) return t._values();
  return at::sparse_csr::is_sparse_compressed(t) ? t.values() : t;
}

std::optional<Numbers> count_numbers(const at::Tensor &tensor) {
  if (!tensor.defined()) return std::nullopt;
  const at::Tensor t = dense_part(tensor);
  if (t.layout() != at::kStrided || t.is_nested() || t.is_quantized() || t.is_meta()) {
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

const c10::StorageImpl *storage(const at::Tensor &t) {
  return t.unsafeGetTensorImpl()->has_storage() ? t.storage().unsafeGetStorageImpl() : nullptr;
}

tamp_recording::Memory *memory_of(tamp_recording &recording, const at::Tensor &t) {
  const auto *impl = storage(t);
  if (impl == nullptr) return nullptr;
  const auto found = recording.memory.find(impl);
  if (found != recording.memory.end()) return &found->second;
  auto strong = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(t.storage().unsafeGetStorageImpl());
  tamp_recording::Memory entry{
      c10::weak_intrusive_ptr<c10::StorageImpl>(strong), static_cast<int64_t>(recording.memory.size()), {}};
  return &recording.memory.emplace(impl, std::move(entry)).first->second;
}

void add_parameter(tamp_recording &recording, const at::Tensor &t, size_t index) {
  auto *memory = memory_of(recording, t);
  if (memory == nullptr || t.numel() == 0) return;
  // From the first number to the last, whatever the strides.
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  const int64_t begin = t.storage_offset() * static_cast<int64_t>(t.element_size());
  const int64_t end = begin + (last + 1) * static_cast<int64_t>(t.element_size());
  memory->parameters.push_back({begin, end, static_cast<int64_t>(index)});
}

}  // namespace tamp

int64_t tamp_recording::Memory::parameter_at(const at::Tensor &t) const {
  if (parameters.empty() || t.layout() != at::kStrided) return -1;
  const int64_t first = t.storage_offset() * static_cast<int64_t>(t.element_size());
  for (const auto &parameter : parameters) {
    if (parameter.begin <= first && first < parameter.end) return parameter.index;
  }
  return -1;
}
