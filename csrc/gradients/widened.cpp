// Multiplication of half-precision tensors in f32.

#include <ATen/ATen.h>

#include <algorithm>

#include "gradients/foreach.h"
#include "gradients/foreach_copy.h"
#include "gradients/storage.h"

namespace tamp {
namespace {

using at::Tensor;

// The number of elements that are converted at a time. As f32 they take 64 MiB, which is enough to make launches
// efficient.
constexpr int64_t kElements = int64_t{1} << 24;

}  // namespace

Widened::Widened(const std::vector<Tensor> &tensors) {
  if (tensors.empty()) return;
  end_lazy_copies(tensors);
  int64_t all = 0, largest = 0;
  for (const auto &t : tensors) {
    all += t.numel();
    largest = std::max(largest, t.numel());
  }
  const int64_t room = std::min(all, std::max(largest, kElements));
  const Tensor memory = at::empty({room}, tensors.front().options().dtype(at::kFloat));
  int64_t used = room;
  for (const auto &alike : by_dtype(tensors)) {
    used = room;  // another dtype begins another part
    for (const auto &t : alike) {
      if (used + t.numel() > room) {
        parts_.push_back({{}, {}, {}});
        used = 0;
      }
      Part &part = parts_.back();
      part.tensors.push_back(t);
      part.wide.push_back(place_in(memory, used, t));
      used += t.numel();
      part.memory = memory.narrow(0, 0, used);
    }
  }
}

void Widened::multiply(const Tensor &factor) const {
  for (const auto &part : parts_) {
    at::_foreach_copy_(part.wide, part.tensors);
    part.memory.mul_(factor);
    at::_foreach_copy_(part.tensors, part.wide);
  }
}

}  // namespace tamp
