// Copies between many tensors in few launches.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>

#include <utility>
#include <vector>

namespace tamp {

// Copies between pairs of tensors that have the same device and memory layout. One launch copies all pairs of a device
// that have the same two dtypes.
class Copies {
 public:
  void add(at::Tensor to, at::Tensor from) {
    size_t i = 0;
    while (i < groups_.size() && !groups_[i].takes(to, from)) ++i;
    if (i == groups_.size()) groups_.emplace_back();
    groups_[i].to.push_back(std::move(to));
    groups_[i].from.push_back(std::move(from));
  }

  void run() const {
    for (const auto &group : groups_) at::_foreach_copy_(group.to, group.from);
  }

 private:
  struct Group {
    std::vector<at::Tensor> to, from;

    bool takes(const at::Tensor &t, const at::Tensor &f) const {
      return t.device() == to.front().device() && t.scalar_type() == to.front().scalar_type() &&
             f.scalar_type() == from.front().scalar_type();
    }
  };

  std::vector<Group> groups_;
};

}  // namespace tamp
