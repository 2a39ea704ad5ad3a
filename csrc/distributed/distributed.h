// What the sources of the feature `distributed` share.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "border/guarded.h"
#include "distributed/shim_distributed.h"

struct tamp_store {
  c10::intrusive_ptr<c10d::Store> store;
};

namespace tamp::distributed {

using Future = c10::ivalue::Future;

// The operations of a group that have begun. gloo does not end an operation whose connection is closed after the header
// of a message and before its end (Pair::signalException), so that whoever waits for it has to be told.
class Operations : public std::enable_shared_from_this<Operations> {
 public:
  // Returns a future that takes the result of an operation, or the failure of the group.
  c10::intrusive_ptr<Future> add(Future &done);

  // Ends all operations, also those that are added later.
  void fail(const char *why);

  // Waits for a while. Returns whether the operations have failed.
  bool have_failed_within(std::chrono::milliseconds time);

  // Returns the number of the operation that has begun first and has not ended, or 0.
  uint64_t oldest();

 private:
  // Returns the future of an operation, unless somebody else has ended it.
  c10::intrusive_ptr<Future> take(uint64_t number);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::exception_ptr failure_;
  uint64_t count_ = 0;
  std::map<uint64_t, c10::intrusive_ptr<Future>> begun_;
};

// Bytes that the ranks are gathering.
struct Gathering {
  at::Tensor part;  // those of this rank
  at::Tensor all;
  // Not the work, which would keep the connections of a group open that has been closed.
  c10::intrusive_ptr<Future> done;

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

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor> &tensors,
                                           const c10d::BroadcastOptions &options) override;

  // Begins an operation of tensors like `t`, which another thread cannot close meanwhile.
  template <typename F>
  c10::intrusive_ptr<c10d::Work> begin(const at::Tensor &t, const F &operation);

  // Ends the operations of this rank soon after a rank has set the key `failure` of the store.
  void watch(const c10::intrusive_ptr<c10d::Store> &store);

  // Closes the connections, whoever still owns the group, so that its operations and those of the other ranks fail.
  void close();

  ~Group() override;

  // Called in place of the destructor while a weak reference is left, such as that of an agreement of the ranks.
  void release_resources() override;

 private:
  // Ends the operations and the backends.
  void leave();

  std::mutex mutex_;  // held by `close`, and while an operation begins
  bool closed_ = false;
  std::shared_ptr<Operations> operations_ = std::make_shared<Operations>();
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
