// c10d's backend for CUDA tensors: gloo on the memory of the devices. Its class has the name and the constructors of
// libtorch_cuda's, which is all that a program of this crate takes of it.

// libtorch is built with gloo, whose headers it does not bring: see csrc/gloo_headers.
#define USE_C10D_GLOO

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "counters.h"
#include "mirror.h"

namespace c10d {

class ProcessGroupNCCL : public Backend {
 public:
  struct Options : Backend::Options {
    explicit Options(bool);
    ~Options() override;
  };

  ProcessGroupNCCL(c10::intrusive_ptr<Store> store, int rank, int size, c10::intrusive_ptr<Options> options);
  ~ProcessGroupNCCL() override;

  const std::string getBackendName() const override { return "nccl"; }

  c10::intrusive_ptr<Work> broadcast(std::vector<at::Tensor> &tensors, const BroadcastOptions &opts) override;
  c10::intrusive_ptr<Work> allreduce(std::vector<at::Tensor> &tensors, const AllreduceOptions &opts) override;
  c10::intrusive_ptr<Work> _allgather_base(at::Tensor &out, at::Tensor &in, const AllgatherOptions &opts) override;
  c10::intrusive_ptr<Work> _reduce_scatter_base(at::Tensor &out, at::Tensor &in,
                                                const ReduceScatterOptions &opts) override;

 private:
  c10::intrusive_ptr<Backend> gloo_;
};

}  // namespace c10d

namespace {

using c10d::ProcessGroupNCCL;
using Works = c10::intrusive_ptr<c10d::Work>;

// Work that is complete, as that of kernels is when their launch returns.
class Done : public c10d::Work {
 public:
  explicit Done(std::vector<at::Tensor> tensors) : result_(std::move(tensors)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{result_.at(0).device()});
    future_->markCompleted(c10::IValue(result_));
  }

  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  std::vector<at::Tensor> result() override { return result_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  std::vector<at::Tensor> result_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// The times of an iteration, for the log of DistributedDataParallel. The simulated devices have none.
class Timer : public c10d::Timer {
 public:
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

// Runs a collective of gloo on the memory of these tensors.
template <typename Collective>
Works run(std::vector<at::Tensor> tensors, const char *name, Collective collective) {
  simulated::Mirror mirror;
  std::vector<at::Tensor> hosts;
  for (const at::Tensor &t : tensors) {
    TORCH_CHECK(t.is_cuda(), "NCCL communicates CUDA tensors only");
    hosts.push_back(mirror.host(t));
  }
  simulated::note_launches(tensors.at(0).device().index(), name);
  collective(hosts)->wait();
  return c10::make_intrusive<Done>(std::move(tensors));
}

}  // namespace

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, ::Timer);
}  // namespace c10d

ProcessGroupNCCL::Options::Options(bool) : Backend::Options("nccl") {}
ProcessGroupNCCL::Options::~Options() = default;

ProcessGroupNCCL::ProcessGroupNCCL(c10::intrusive_ptr<Store> store, int rank, int size,
                                   c10::intrusive_ptr<Options> options)
    : Backend(rank, size) {
  auto gloo = c10::make_intrusive<ProcessGroupGloo::Options>(options->timeout);
  gloo->devices.push_back(ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  gloo_ = c10::make_intrusive<ProcessGroupGloo>(store, rank, size, gloo);
}

ProcessGroupNCCL::~ProcessGroupNCCL() = default;

Works ProcessGroupNCCL::broadcast(std::vector<at::Tensor> &tensors, const BroadcastOptions &opts) {
  return run(tensors, "nccl broadcast", [&](auto &hosts) { return gloo_->broadcast(hosts, opts); });
}

Works ProcessGroupNCCL::allreduce(std::vector<at::Tensor> &tensors, const AllreduceOptions &opts) {
  return run(tensors, "nccl allreduce", [&](auto &hosts) { return gloo_->allreduce(hosts, opts); });
}

Works ProcessGroupNCCL::_allgather_base(at::Tensor &out, at::Tensor &in, const AllgatherOptions &opts) {
  return run({out, in}, "nccl allgather",
             [&](auto &hosts) { return gloo_->_allgather_base(hosts[0], hosts[1], opts); });
}

Works ProcessGroupNCCL::_reduce_scatter_base(at::Tensor &out, at::Tensor &in, const ReduceScatterOptions &opts) {
  return run({out, in}, "nccl reduce_scatter",
             [&](auto &hosts) { return gloo_->_reduce_scatter_base(hosts[0], hosts[1], opts); });
}
