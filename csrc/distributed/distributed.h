// What the sources of the feature `distributed` share.
#pragma once

#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "guarded.h"
#include "shim_distributed.h"

struct tamp_store {
  c10::intrusive_ptr<c10d::Store> store;
};

namespace tamp::distributed {

// Bytes that the ranks are gathering.
struct Gathering {
  at::Tensor part;  // those of this rank
  at::Tensor all;
  // Not the work, which would keep the connections of a group open that has been closed.
  c10::intrusive_ptr<c10::ivalue::Future> done;

  // Whether all ranks have given the same bytes; to be asked once `done` is complete.
  bool is_unanimous() const {
    const auto size = static_cast<size_t>(part.numel());
    const auto *bytes = all.const_data_ptr<uint8_t>();
    for (int64_t start = 0; start < all.numel(); start += part.numel()) {
      if (std::memcmp(bytes + start, part.const_data_ptr(), size) != 0) return false;
    }
    return true;
  }
};

struct Waiting;

// A process group whose all-reduces can depend on the agreement of the ranks.
class Group final : public c10d::ProcessGroup {
 public:
  using c10d::ProcessGroup::ProcessGroup;

  // Makes the all-reduces that follow wait until the ranks have gathered these bytes. If the bytes differ, their
  // tensors stay as they are. An all-reduce of CPU tensors waits without blocking its caller. Null ends the dependence.
  void depend_on(const std::shared_ptr<Gathering> &agreement);

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor> &tensors,
                                           const c10d::AllreduceOptions &options) override;

  // Begins an operation, which another thread cannot close meanwhile.
  template <typename F>
  c10::intrusive_ptr<c10d::Work> begin(const F &operation) {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!closed_, "the group has failed");
    return operation();
  }

  // Closes the connections, whoever still owns the group, so that the operations of the other ranks fail.
  void close();

 private:
  std::mutex mutex_;  // held by `close`, and while an operation begins
  bool closed_ = false;
  std::shared_ptr<Waiting> waiting_;
};

}  // namespace tamp::distributed

struct tamp_group {
  c10::intrusive_ptr<tamp::distributed::Group> group;
};

struct tamp_gathering {
  std::shared_ptr<tamp::distributed::Gathering> gathering;
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
