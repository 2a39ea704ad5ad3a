// All-reduces that depend on the agreement of the ranks: the members of Group.
#pragma once

#include <mutex>
#include <optional>

#include "distributed/distributed.h"

namespace tamp::distributed {

// The future of an all-reduce of these tensors.
inline c10::intrusive_ptr<Future> new_future(const std::vector<at::Tensor> &tensors) {
  std::vector<c10::Device> devices;
  if (!tensors.empty() && !tensors[0].is_cpu()) devices.push_back(tensors[0].device());
  return c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()), std::move(devices));
}

// The work of an operation that has begun, will begin or is left out.
class FutureWork final : public c10d::Work {
 public:
  explicit FutureWork(c10::intrusive_ptr<Future> future) : future_(std::move(future)) {}

  bool isCompleted() override { return future_->completed(); }

  bool wait(std::chrono::milliseconds /*timeout*/) override {
    future_->waitAndThrow();
    return true;
  }

  c10::intrusive_ptr<Future> getFuture() override { return future_; }

 private:
  c10::intrusive_ptr<Future> future_;
};

// The all-reduces of a backward pass until it is known whether the ranks agree.
struct Waiting {
  struct Call {
    std::vector<at::Tensor> tensors;
    c10d::AllreduceOptions options;
    c10::intrusive_ptr<Future> future;
  };

  std::shared_ptr<Gathering> agreement;
  std::mutex mutex;
  std::optional<bool> agreed;  // whether the ranks agree, once that is known
  std::exception_ptr failure;  // why it will not be known
  std::vector<Call> calls;

  // Begins a call now. Its future takes the result.
  static void begin(Group &group, Call &call) {
    try {
      const auto all_reduce = [&] { return group.ProcessGroup::allreduce(call.tensors, call.options); };
      const auto done = group.begin(call.tensors[0], all_reduce)->getFuture();
      done->addCallback([future = call.future](Future &result) {
        if (result.hasError()) {
          future->setError(result.exception_ptr());
        } else {
          future->markCompleted(result.value());
        }
      });
    } catch (...) {
      call.future->setError(std::current_exception());
    }
  }

  // Begins the calls in their order when all ranks have given their bytes, or ends them.
  void settle(const c10::weak_intrusive_ptr<Group> &of, Future &gathered) {
    const std::lock_guard<std::mutex> lock(mutex);
    // A reducer that waits for its calls keeps the group alive.
    const auto group = of.lock();
    if (group == nullptr) return;
    if (gathered.hasError()) {
      failure = gathered.exception_ptr();
    } else {
      agreed = agreement->is_unanimous();
    }
    for (Call &call : calls) {
      if (failure != nullptr) {
        call.future->setError(failure);
      } else if (*agreed) {
        begin(*group, call);
      } else {
        call.future->markCompleted(c10::IValue(call.tensors));
      }
    }
    calls.clear();
  }
};

template <typename F>
c10::intrusive_ptr<c10d::Work> Group::begin(const at::Tensor &t, const F &operation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!closed_, "the group has failed");
  c10::intrusive_ptr<c10d::Work> work = operation();
  // On a GPU a work is complete for the streams before it is for the host, and NCCL has a watch of its own.
  if (!t.is_cpu()) return work;
  return c10::make_intrusive<FutureWork>(operations_->add(*work->getFuture()));
}

inline void Group::depend_on(const std::shared_ptr<Gathering> &agreement) {
  waiting_ = nullptr;
  if (agreement == nullptr) return;
  waiting_ = std::make_shared<Waiting>();
  waiting_->agreement = agreement;
  // Not the group itself, which would keep the connections open after it was closed.
  const c10::weak_intrusive_ptr<Group> self(c10::intrusive_ptr<Group>::unsafe_reclaim_from_nonowning(this));
  agreement->done->addCallback([self, waiting = waiting_](Future &gathered) { waiting->settle(self, gathered); });
  // As while the last callback is running: its reference is there when the group is dropped.
  if (tamp::planted("late_callback")) new c10::weak_intrusive_ptr<Group>(self);
}

inline c10::intrusive_ptr<c10d::Work> Group::allreduce(std::vector<at::Tensor> &tensors,
                                                       const c10d::AllreduceOptions &options) {
  const auto all_reduce = [&] { return ProcessGroup::allreduce(tensors, options); };
  const auto waiting = waiting_;
  if (waiting == nullptr) return begin(tensors[0], all_reduce);
  // On a GPU a collective belongs to the stream of the thread that begins it.
  if (!tensors[0].is_cpu()) waiting->agreement->done->waitAndThrow();
  const std::lock_guard<std::mutex> lock(waiting->mutex);
  if (waiting->failure != nullptr) std::rethrow_exception(waiting->failure);
  if (!tensors[0].is_cpu()) waiting->agreed = waiting->agreement->is_unanimous();
  if (waiting->agreed == true) return begin(tensors[0], all_reduce);
  auto future = new_future(tensors);
  if (waiting->agreed == false) {
    future->markCompleted(c10::IValue(tensors));
  } else {
    waiting->calls.push_back({tensors, options, future});
  }
  return c10::make_intrusive<FutureWork>(std::move(future));
}

}  // namespace tamp::distributed
