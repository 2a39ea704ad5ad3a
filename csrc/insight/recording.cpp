// The memory of recorded tensors, and the numbers in them.

#include <ATen/ATen.h>
#include <ATen/SparseCsrTensorUtils.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "insight/recording.h"

namespace tamp {
namespace {

// Counts numbers by their bits, of which `infinity` are those of +inf. One pass, where libtorch's operators need ten.
template <typename T, typename Bits>
void count_bits(const at::Tensor &t, Bits infinity, Numbers &found) {
  constexpr int64_t kBlock = 1 << 14;  // whose counts fit into Bits
  const Bits sign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  const at::Tensor whole = t.contiguous();
  const auto *bits = static_cast<const Bits *>(whole.const_data_ptr());
  Bits largest = 0;
  for (int64_t begin = 0; begin < whole.numel(); begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, whole.numel());
    Bits positive = 0, negative = 0, nan = 0;
    for (int64_t i = begin; i < end; ++i) {
      const Bits size = static_cast<Bits>(bits[i] & ~sign);
      positive += bits[i] == infinity;
      negative += bits[i] == static_cast<Bits>(infinity | sign);
      nan += size > infinity;
      largest = std::max(largest, size < infinity ? size : Bits{0});
    }
    found.positive_infinite += positive;
    found.negative_infinite += negative;
    found.nan += nan;
  }
  T number;
  std::memcpy(&number, &largest, sizeof number);
  found.largest = static_cast<double>(number);
}

void count_on_device(const at::Tensor &t, Numbers &found) {
  const auto count = [](const at::Tensor &which) { return which.sum().item<int64_t>(); };
  found.nan = count(t.isnan());
  found.positive_infinite = count(t.isposinf());
  found.negative_infinite = count(t.isneginf());
  found.largest = at::where(t.isfinite(), t.abs(), 0).max().item<double>();
}

void count(const at::Tensor &t, Numbers &found) {
  if (!t.is_cpu() || t.is_neg()) return count_on_device(t, found);
  switch (t.scalar_type()) {
    case at::kFloat:
      return count_bits<float, uint32_t>(t, 0x7F800000, found);
    case at::kDouble:
      return count_bits<double, uint64_t>(t, 0x7FF0000000000000, found);
    case at::kHalf:
      return count_bits<at::Half, uint16_t>(t, 0x7C00, found);
    case at::kBFloat16:
      return count_bits<at::BFloat16, uint16_t>(t, 0x7F80, found);
    default:
      return count_on_device(t, found);
  }
}

}  // namespace

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
  count(values, found);
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
