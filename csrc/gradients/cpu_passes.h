// Passes of the kernels over the memory of lists of CPU tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gradients/parallel_chunks.h"
#include "gradients/storage.h"

namespace tamp {

// Whether the loops of kernels/kernels.h can run over the memory of `t`.
inline bool has_loop(const at::Tensor &t) {
  return is_plain_memory(t) && with_floating(t.scalar_type(), [](auto *) {});
}

inline std::vector<Chunk> chunks_of(const std::vector<at::Tensor> &tensors) {
  std::vector<int64_t> sizes;
  sizes.reserve(tensors.size());
  for (const auto &t : tensors) sizes.push_back(t.numel());
  return chunks(sizes);
}

enum class Access { kRead, kWrite };

// Returns where the memory of each tensor begins. For kWrite it copies copy-on-write memory, which must not happen
// inside a parallel loop.
inline std::vector<void *> beginnings(const std::vector<at::Tensor> &tensors, Access access) {
  std::vector<void *> out;
  out.reserve(tensors.size());
  for (const auto &t : tensors) {
    out.push_back(access == Access::kWrite ? t.mutable_data_ptr() : const_cast<void *>(t.const_data_ptr()));
  }
  return out;
}

// Calls `f(pointer, n, i)` for each chunk `i` of tensors that have a loop.
template <typename F>
void over(const std::vector<at::Tensor> &tensors, const std::vector<Chunk> &chunks, Access access, const F &f) {
  const auto memory = beginnings(tensors, access);
  for_each(chunks, From::kStart, [&](int64_t i) {
    const Chunk &chunk = chunks[static_cast<size_t>(i)];
    with_floating(tensors[chunk.tensor].scalar_type(), [&](auto *type) {
      auto *begin = static_cast<decltype(type)>(memory[chunk.tensor]) + chunk.begin;
      f(begin, chunk.end - chunk.begin, static_cast<size_t>(i));
    });
  });
}

// Calls `f` with lists of the tensors that have a loop: with one of those that have one, and one for each of the others,
// which are copied to contiguous memory, one at a time.
template <typename F>
void with_loops(const std::vector<at::Tensor> &tensors, const F &f) {
  if (std::all_of(tensors.begin(), tensors.end(), has_loop)) return f(tensors);
  std::vector<at::Tensor> plain, other;
  for (const auto &t : tensors) (has_loop(t) ? plain : other).push_back(t);
  f(plain);
  for (const auto &t : other) f({with_own_numbers(t).contiguous()});
}

}  // namespace tamp
