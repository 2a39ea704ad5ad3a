// The memory of tensors: whether a loop can run over it, and what identifies it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "border/shim.h"

namespace tamp {

// Whether the numbers of `t` are exactly those in its memory. A negative or conjugate view has other numbers, a zero
// tensor has no memory, and a nested tensor has no sizes.
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

// Whether two elements of a strided tensor can share memory. The answer is exact for the layouts that libtorch makes. A
// tensor whose dimensions interleave counts as overlapping, since it is worse to change an element twice than to refuse
// a tensor.
bool overlaps(const at::Tensor &t);

// What `is_shared` asks of a tensor that does not alone fill a storage of its own.
bool may_be_shared(const at::Tensor &t);

// Whether something else may use the memory of a strided tensor, since its storage has other owners, or whether two of
// its own elements can share memory. Each step asks for every gradient, and nearly all are alone and dense.
inline bool is_shared(const at::Tensor &t) {
  const c10::TensorImpl *impl = t.unsafeGetTensorImpl();
  if (!impl->has_storage() || impl->is_nested()) return false;
  const bool is_alone = impl->unsafe_storage().use_count() == 1 && impl->is_non_overlapping_and_dense();
  return !is_alone && may_be_shared(t);
}

// Decides which of several strided tensors keep their memory so that those that keep it have no byte in common. Returns
// for each tensor its own index if it keeps its memory, and otherwise that of one that keeps a part of it. Only
// addresses are compared, and no memory is read.
std::vector<size_t> keepers(const std::vector<at::Tensor> &tensors);

// Returns the places of those of several distinct tensors that have a byte in common: for each that would not keep its
// memory, one that keeps a part of it, and the tensor itself. Costs next to nothing if no storage has several owners.
std::vector<std::pair<size_t, size_t>> overlapping(const std::vector<const at::Tensor *> &tensors);

// Gives a tensor that is a lazy copy, and will be written, memory of its own. CUDA's kernels for lists of tensors do not
// do that: they write to memory that they have asked for to read. May allocate.
void end_lazy_copy(const at::Tensor &written);

inline void end_lazy_copies(const std::vector<at::Tensor> &written) {
  for (const auto &t : written) end_lazy_copy(t);
}

// Returns a tensor whose memory holds the numbers of `t`: a copy of a negative view or of a zero tensor, and otherwise
// `t` itself. Fails for a nested tensor.
at::Tensor with_own_numbers(const at::Tensor &t);

// Increases the version of a tensor, which tells autograd that it was changed in place. libtorch's AMP and fused
// kernels do not do that. Does nothing for an undefined tensor.
void bump_version(const at::Tensor &t);

// Returns the identity of what holds the numbers of a tensor: its storage or, if it has none, the tensor itself. It is
// zero for an undefined tensor.
uintptr_t memory_of(const at::Tensor &t);

// Takes a weak reference to the same and returns its identity. The numbers are freed when nothing else holds them, but
// no other memory gets their identity until the reference is released.
uintptr_t hold(const at::Tensor &t);

// Releases a reference that `hold` took. Does nothing for zero.
void release(uintptr_t memory);

// Whether a parameter still fits its stamp.
bool is_as_stamped(const at::Tensor &t, const tamp_stamp &stamp);

// Whether a parameter has the memory that its stamp names, whatever was written to it since.
bool is_where_stamped(const at::Tensor &t, const tamp_stamp &stamp);

// Sets a stamp to the present contents of a parameter.
void take_stamp(const at::Tensor &t, tamp_stamp &stamp);

// While the calling thread captures a graph, keeps pinned memory that the graph copies from, or that must not be freed
// meanwhile, as long as the graph.
void keep_if_captured(const at::Tensor &source);

// Whether the calling thread captures a graph.
bool is_capturing();

// Where `keep_if_captured` puts such memory from now on, on the calling thread; null for nowhere.
void keep_for_replays(std::vector<at::Tensor> *kept);

}  // namespace tamp
