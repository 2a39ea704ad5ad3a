// Shapes and identities of tensors, and stamps of their contents.

#include "gradients/storage.h"

#include <ATen/ATen.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/COW.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "border/guarded.h"

namespace tamp {
namespace {

using at::Tensor;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

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

// The bytes of memory from the first to the last that a tensor uses.
struct Extent {
  size_t index;  // of the tensor
  uintptr_t begin, end;
};

bool has_memory(const Tensor &t) {
  return t.defined() && t.layout() == at::kStrided && t.has_storage() && !t.is_nested() && !t.is_meta() &&
         !t._is_zerotensor() && t.numel() > 0;
}

Extent extent(const Tensor &t, size_t index) {
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  const auto begin = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  return {index, begin, begin + static_cast<uintptr_t>(last + 1) * t.element_size()};
}

// Calls `f` with the offset from the first byte of each byte that a tensor uses.
template <typename F>
void for_each_byte(const Tensor &t, const F &f) {
  const auto size = static_cast<size_t>(t.element_size());
  std::vector<int64_t> place(static_cast<size_t>(t.dim()));
  int64_t offset = 0;
  for (int64_t left = t.numel(); left > 0; --left) {
    for (size_t i = 0; i < size; ++i) f(static_cast<size_t>(offset) * size + i);
    for (int64_t i = t.dim() - 1; i >= 0; --i) {
      auto &at = place[static_cast<size_t>(i)];
      offset += t.stride(i);
      if (++at < t.size(i)) break;
      offset -= at * t.stride(i);
      at = 0;
    }
  }
}

bool is_lazy_copy(const Tensor &t) { return c10::impl::cow::is_cow_data_ptr(t.storage().data_ptr()); }

// Whether two tensors have a byte in common, of which the first does not begin after the second.
bool meet(const Tensor &first, const Extent &one, const Tensor &second, const Extent &other) {
  if (one.end <= other.begin || first.device() != second.device()) return false;
  if (!first.is_alias_of(second) && (is_lazy_copy(first) || is_lazy_copy(second))) return false;
  if (first.is_non_overlapping_and_dense() && second.is_non_overlapping_and_dense()) return true;
  // Views such as the columns of a matrix can interleave, so each element counts.
  std::vector<bool> used(one.end - one.begin);
  for_each_byte(first, [&](size_t byte) { used[byte] = true; });
  const size_t distance = other.begin - one.begin;
  bool found = false;
  for_each_byte(second,
                [&](size_t byte) { found = found || (distance + byte < used.size() && used[distance + byte]); });
  return found;
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

void end_lazy_copy(const Tensor &written) {
  if (written.defined() && has_memory(written) && is_lazy_copy(written)) (void)written.mutable_data_ptr();
}

bool may_be_shared(const Tensor &t) { return has_memory(t) && (t.storage().use_count() > 1 || overlaps(t)); }

std::vector<size_t> keepers(const std::vector<Tensor> &tensors) {
  std::vector<size_t> out(tensors.size());
  std::iota(out.begin(), out.end(), 0);
  std::vector<Extent> extents;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (has_memory(tensors[i])) extents.push_back(extent(tensors[i], i));
  }
  const auto key = [](const Extent &e) { return std::make_pair(e.begin, e.index); };
  std::sort(extents.begin(), extents.end(), [&](const Extent &a, const Extent &b) { return key(a) < key(b); });
  std::vector<Extent> open;  // those that keep memory beyond the present beginning
  for (const auto &e : extents) {
    open.erase(std::remove_if(open.begin(), open.end(), [&](const Extent &o) { return o.end <= e.begin; }), open.end());
    const auto met = std::find_if(open.begin(), open.end(),
                                  [&](const Extent &o) { return meet(tensors[o.index], o, tensors[e.index], e); });
    if (met == open.end()) {
      open.push_back(e);
    } else {
      out[e.index] = met->index;
    }
  }
  return out;
}

std::vector<std::pair<size_t, size_t>> overlapping(const std::vector<const Tensor *> &tensors) {
  std::vector<Tensor> shared;
  std::vector<size_t> places;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!is_shared(*tensors[i])) continue;
    shared.push_back(*tensors[i]);
    places.push_back(i);
  }
  std::vector<std::pair<size_t, size_t>> out;
  const auto kept = keepers(shared);
  for (size_t i = 0; i < kept.size(); ++i) {
    if (kept[i] != i) out.emplace_back(places[kept[i]], places[i]);
  }
  return out;
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
  return address(WeakTensor(t.getIntrusivePtr()).release());
}

void release(uintptr_t memory) {
  if (memory != 0) c10::raw::weak_intrusive_ptr::decref(reinterpret_cast<c10::intrusive_ptr_target *>(memory));
}

bool is_as_stamped(const Tensor &t, const tamp_stamp &stamp) {
  return is_where_stamped(t, stamp) && stamp.version == version_of(t);
}

bool is_where_stamped(const Tensor &t, const tamp_stamp &stamp) {
  return stamp.memory != 0 && stamp.memory == memory_of(t) && stamp.view == view_of(t);
}

void take_stamp(const Tensor &t, tamp_stamp &stamp) {
  if (stamp.memory != memory_of(t)) release(std::exchange(stamp.memory, hold(t)));
  stamp.view = view_of(t);
  stamp.version = version_of(t);
}

namespace {
thread_local std::vector<Tensor> *replay_memory = nullptr;
}

void keep_if_captured(const Tensor &source) {
  if (replay_memory != nullptr) replay_memory->push_back(source);
}

bool is_capturing() { return replay_memory != nullptr; }

void keep_for_replays(std::vector<Tensor> *kept) { replay_memory = kept; }

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

uint8_t tamp_is_dense(const tamp_tensor *tensor, char **err) noexcept {
  return tamp::guarded(err, [&]() -> uint8_t {
    const at::Tensor &t = tamp::tensor(tensor);
    return t.defined() && !t.is_nested() && t.layout() == at::kStrided && t.has_storage() ? 1 : 0;
  });
}

uint8_t tamp_overlapping(tamp_tensor *const *tensors, size_t count, size_t *one, size_t *other, char **err) noexcept {
  return tamp::guarded(err, [&]() -> uint8_t {
    std::vector<const at::Tensor *> all;
    for (size_t i = 0; i < count; ++i) all.push_back(&tamp::tensor(tensors[i]));
    const auto found = tamp::overlapping(all);
    if (found.empty()) return 0;
    std::tie(*one, *other) = found.front();
    return 1;
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

uint8_t tamp_stamps_have_moved(tamp_tensor *const *parameters, size_t count, const tamp_stamp *stamps,
                               char **err) noexcept {
  return tamp::guarded(err, [&]() -> uint8_t {
    for (size_t i = 0; i < count; ++i) {
      if (!tamp::is_where_stamped(tamp::tensor(parameters[i]), stamps[i])) return 1;
    }
    return 0;
  });
}

void tamp_memory_release(uintptr_t memory) noexcept { tamp::release(memory); }

uintptr_t tamp_tensor_watch(const tamp_tensor *watched) noexcept {
  return reinterpret_cast<uintptr_t>(tamp::WeakTensor(tamp::tensor(watched).getIntrusivePtr()).release());
}

tamp_tensor *tamp_tensor_watched(uintptr_t watch, char **err) noexcept {
  return tamp::guarded(err, [&]() -> tamp_tensor * {
    auto strong = tamp::WeakTensor::reclaim_copy(reinterpret_cast<c10::TensorImpl *>(watch)).lock();
    return strong.defined() ? tamp::give(at::Tensor(std::move(strong))) : nullptr;
  });
}

}  // extern "C"
