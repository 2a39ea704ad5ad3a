// Copies between many tensors in few launches.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_fused_sgd.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "border/groups.h"
#include "gradients/storage.h"

namespace tamp {

// Returns a part of `memory` for the elements of `t`, with the strides of `t` if that is dense, so that libtorch copies a
// list in one launch.
inline at::Tensor place_in(const at::Tensor &memory, int64_t begin, const at::Tensor &t) {
  const at::Tensor part = memory.narrow(0, begin, t.numel());
  return t.is_non_overlapping_and_dense() ? part.as_strided(t.sizes(), t.strides()) : part.view(t.sizes());
}

// Copies like `_foreach_copy_`, between tensors of one device and dtype, unless `found_inf` is one on the device.
// libtorch has no such copy, but the first step of its fused SGD sets a momentum buffer to its gradient. The same step
// subtracts zero times the gradient from a parameter, for which `from` stands as well: its numbers are undefined then.
inline void copy_unless(const at::Tensor &found_inf, const std::vector<at::Tensor> &to,
                        const std::vector<at::Tensor> &from) {
  at::_fused_sgd_(from, from, to, /*weight_decay=*/0, /*momentum=*/1, /*lr=*/0, /*dampening=*/0, /*nesterov=*/false,
                  /*maximize=*/false, /*is_first_step=*/true, /*grad_scale=*/std::nullopt, found_inf);
}

// Copies between pairs of tensors that have the same device and memory layout. One launch copies all pairs of a device
// that have the same two dtypes.
class Copies {
 public:
  void add(at::Tensor to, at::Tensor from) {
    end_lazy_copy(to);
    const auto takes = [&](const Group &group) {
      const at::Tensor &first = group.to.front();
      return first.device() == to.device() && first.scalar_type() == to.scalar_type() &&
             group.from.front().scalar_type() == from.scalar_type();
    };
    Group &group = group_for(groups_, takes);
    group.to.push_back(std::move(to));
    group.from.push_back(std::move(from));
  }

  void run() const {
    for (const auto &group : groups_) at::_foreach_copy_(group.to, group.from);
  }

  // Copies tensors of the same dtypes unless `found_inf`, which may be undefined, is one on the device.
  void run_unless(const at::Tensor &found_inf) const {
    if (!found_inf.defined()) return run();
    for (const auto &group : groups_) copy_unless(found_inf, group.to, group.from);
  }

 private:
  struct Group {
    std::vector<at::Tensor> to, from;
  };

  std::vector<Group> groups_;
};

}  // namespace tamp
