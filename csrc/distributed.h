// What the sources of the feature `distributed` share.
#pragma once

#include <chrono>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "guarded.h"
#include "shim_distributed.h"

struct tamp_store {
  c10::intrusive_ptr<c10d::Store> store;
};

struct tamp_group {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
};

namespace tamp::distributed {

template <typename T>
T &given(T *handle) {
  TORCH_CHECK(handle != nullptr, "null handle");
  return *handle;
}

// Makes the backend for CUDA tensors. Fails without a GPU.
c10::intrusive_ptr<c10d::Backend> nccl(const c10::intrusive_ptr<c10d::Store> &store, int rank, int size,
                                       std::chrono::milliseconds timeout);

}  // namespace tamp::distributed
