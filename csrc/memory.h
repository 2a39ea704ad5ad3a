// The memory of tensors: whether a loop may walk it, and what tells it from all other memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "shim.h"

namespace tamp {

// Whether the numbers of `t` are those that its memory says, one by one. A negative or conjugate view has others, a zero
// tensor has none, and a nested tensor has no sizes.
inline bool has_own_numbers(const at::Tensor &t) {
  return t.layout() == at::kStrided && t.has_storage() && !t.is_nested() && !t.is_neg() && !t.is_conj() &&
         !t._is_zerotensor();
}

// Whether a loop can run over the memory of `t` from its first element to its last.
inline bool is_plain_memory(const at::Tensor &t) {
  if (!t.is_cpu() || !has_own_numbers(t)) return false;
  if (!t.is_contiguous() && !t.is_non_overlapping_and_dense()) return false;
  const auto end = static_cast<size_t>(t.storage_offset() + t.numel()) * t.element_size();
  return t.numel() == 0 || end <= t.unsafeGetTensorImpl()->unsafe_storage().nbytes();
}

// Whether two elements of a strided tensor can share memory. Exact for the layouts that libtorch makes; a tensor whose
// dimensions interleave counts as overlapping, since changing an element twice is worse than refusing it.
bool overlaps(const at::Tensor &t);

// A tensor with the numbers of `t`, which may be a negative view or a zero without memory: `t` itself where it is
// neither. Fails for a nested tensor.
at::Tensor with_own_numbers(const at::Tensor &t);

// Tells autograd that a tensor was changed in place. libtorch's AMP and fused kernels do not.
void bump_version(const at::Tensor &t);

// What holds the numbers of a tensor: its storage or, where it has none, the tensor itself. Null for an undefined one.
uintptr_t memory_of(const at::Tensor &t);

// Takes a weak reference to that and returns it: the numbers are freed when they are no longer needed elsewhere, but
// their address is not given to other memory until the reference is released.
uintptr_t hold(const at::Tensor &t);

// Releases what `hold` returned. Nothing happens for null.
void release(uintptr_t memory);

// Whether a parameter is as its stamp says.
bool is_as_stamped(const at::Tensor &t, const tamp_stamp &stamp);

// Has a stamp say how a parameter is now.
void take_stamp(const at::Tensor &t, tamp_stamp &stamp);

}  // namespace tamp
