// Shapes and identities of tensors, and stamps of their contents.

#include "memory.h"

#include <ATen/ATen.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "guarded.h"

namespace tamp {
namespace {

using at::Tensor;

c10::intrusive_ptr_target *target_of(const Tensor &t) {
  if (!t.defined()) return nullptr;
  c10::TensorImpl *impl = t.unsafeGetTensorImpl();
  if (!impl->has_storage()) return impl;
  return impl->unsafe_storage().unsafeGetStorageImpl();
}

uintptr_t address(c10::intrusive_ptr_target *target) { return reinterpret_cast<uintptr_t>(target); }

void mix(uint64_t &hash, uint64_t value) { hash = (hash ^ value) * 0x9e3779b97f4a7c15U; }

// Returns a hash that says which elements of its memory a tensor has, and in which order.
uint64_t view_of(const Tensor &t) {
  uint64_t hash = 0;
  if (t.layout() != at::kStrided || !t.has_storage() || t.is_nested()) return hash;
  const auto *storage = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  mix(hash, reinterpret_cast<uintptr_t>(storage->data()));
  mix(hash, static_cast<uint64_t>(t.storage_offset()));
  mix(hash, static_cast<uint64_t>(t.scalar_type()));
  for (int64_t i = 0; i < t.dim(); ++i) {
    mix(hash, static_cast<uint64_t>(t.size(i)));
    mix(hash, static_cast<uint64_t>(t.stride(i)));
  }
  return hash;
}

uint64_t version_of(const Tensor &t) { return t.is_inference() ? 0 : static_cast<uint64_t>(t._version()); }

}  // namespace

bool overlaps(const Tensor &t) {
  if (t.is_non_overlapping_and_dense() || t.numel() <= 1) return false;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t i = 0; i < t.dim(); ++i) {
    if (t.size(i) > 1) dims.emplace_back(t.stride(i), t.size(i));
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 1;  // elements covered by the dimensions so far
  for (const auto &[stride, size] : dims) {
    if (stride < reach) return true;
    reach = stride * (size - 1) + reach;
  }
  return false;
}

Tensor with_own_numbers(const Tensor &t) {
  TORCH_CHECK(!t.is_nested(), "a nested tensor is not supported; take its parts with unbind");
  if (t._is_zerotensor()) return at::zeros(t.sizes(), t.options().requires_grad(false));
  return t.is_neg() ? t.resolve_neg() : t;
}

void bump_version(const Tensor &t) {
  if (t.defined() && !t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

uintptr_t memory_of(const Tensor &t) { return address(target_of(t)); }

uintptr_t hold(const Tensor &t) {
  if (!t.defined()) return 0;
  if (t.unsafeGetTensorImpl()->has_storage()) {
    return address(t.unsafeGetTensorImpl()->unsafe_storage().getWeakStorageImpl().release());
  }
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  return address(Weak(t.getIntrusivePtr()).release());
}

void release(uintptr_t memory) {
  if (memory != 0) c10::raw::weak_intrusive_ptr::decref(reinterpret_cast<c10::intrusive_ptr_target *>(memory));
}

bool is_as_stamped(const Tensor &t, const tamp_stamp &stamp) {
  return stamp.memory != 0 && stamp.memory == memory_of(t) && stamp.version == version_of(t) &&
         stamp.view == view_of(t);
}

void take_stamp(const Tensor &t, tamp_stamp &stamp) {
  if (stamp.memory != memory_of(t)) release(std::exchange(stamp.memory, hold(t)));
  stamp.view = view_of(t);
  stamp.version = version_of(t);
}

}  // namespace tamp

extern "C" {

size_t tamp_sizes(const tamp_tensor *tensor, int64_t *sizes, size_t room, char **err) noexcept {
  return tamp::guarded(err, [&]() -> size_t {
    const at::Tensor &t = tamp::tensor(tensor);
    TORCH_CHECK(t.defined(), "an undefined tensor has no sizes");
    TORCH_CHECK(!t.is_nested(), "a nested tensor is not supported; take its parts with unbind");
    const auto known = t.sizes();
    if (known.size() <= room) std::copy(known.begin(), known.end(), sizes);
    return known.size();
  });
}

void tamp_stamps_compare(tamp_tensor *const *parameters, size_t count, const tamp_stamp *stamps, uint8_t *changed,
                         char **err) noexcept {
  tamp::guarded(err, [&] {
    for (size_t i = 0; i < count; ++i) changed[i] = !tamp::is_as_stamped(tamp::tensor(parameters[i]), stamps[i]);
  });
}

void tamp_stamps_take(tamp_tensor *const *parameters, size_t count, tamp_stamp *stamps, char **err) noexcept {
  tamp::guarded(err, [&] {
    for (size_t i = 0; i < count; ++i) tamp::take_stamp(tamp::tensor(parameters[i]), stamps[i]);
  });
}

void tamp_memory_release(uintptr_t memory) noexcept { tamp::release(memory); }

}  // extern "C"
