// Process groups and their collectives.

// libtorch is built with gloo, whose headers it does not bring: see gloo_headers.
#define USE_C10D_GLOO

#include <c10/core/InferenceMode.h>
#include <torch/headeronly/version.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include "agreement.h"
#include "memory.h"

namespace {

using c10d::ProcessGroup;
using c10d::ProcessGroupGloo;
using std::chrono::milliseconds;
using tamp::distributed::given;

// What the connections of a group use.
auto device(const char *interface, const char *host) {
  return interface != nullptr ? ProcessGroupGloo::createDeviceForInterface(interface)
         : host != nullptr    ? ProcessGroupGloo::createDeviceForHostname(host)
                              : ProcessGroupGloo::createDefaultDevice();
}

// The connections of a backend, which it does not make public.
struct Connections : ProcessGroupGloo {
  static auto &of(ProcessGroupGloo &backend) { return backend.*(&Connections::contexts_); }
};

c10::intrusive_ptr<ProcessGroupGloo::Options> gloo_options(const tamp_group_options &o) {
  auto options = c10::make_intrusive<ProcessGroupGloo::Options>(milliseconds(o.timeout_ms));
  options->devices.push_back(device(o.interface, o.host));
  return options;
}

// Turns off c10d's flight recorder, unless a variable asks for it. It lists the groups of the whole process in a map
// that it does not lock, and ranks that are threads change the map at the same time.
void turn_off_flight_recorder() {
  static std::once_flag once;
  std::call_once(once, [] {
    const bool is_set = getenv("TORCH_FR_BUFFER_SIZE") != nullptr || getenv("TORCH_NCCL_TRACE_BUFFER_SIZE") != nullptr;
    if (!is_set) setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0);
  });
}

// Blocks until a collective is complete; on a GPU, has the current stream wait for it.
void finish(const c10::intrusive_ptr<c10d::Work> &work) { work->wait(); }

c10d::ReduceOp reduction(uint8_t op) {
  switch (op) {
    case TAMP_REDUCE_SUM:
      return c10d::ReduceOp::SUM;
    case TAMP_REDUCE_MIN:
      return c10d::ReduceOp::MIN;
    case TAMP_REDUCE_MAX:
      return c10d::ReduceOp::MAX;
    default:
      TORCH_CHECK(false, "unknown reduction");
  }
}

// The tensor without its autograd history, which collectives do not record.
at::Tensor plain(const at::Tensor &t) { return t.detach(); }

c10::intrusive_ptr<c10d::Work> gather(const tamp_group *given_group, at::Tensor all, at::Tensor part) {
  auto &group = *given(given_group).group;
  return group.begin([&] {
#if TORCH_VERSION_MINOR >= 13
    return group.all_gather_single(all, part);
#else
    return group._allgather_base(all, part);
#endif
  });
}

void scatter_sum(const tamp_group *given_group, at::Tensor part, at::Tensor all) {
  auto &group = *given(given_group).group;
  finish(group.begin([&] {
#if TORCH_VERSION_MINOR >= 13
    return group.reduce_scatter_single(part, all);
#else
    return group._reduce_scatter_base(part, all);
#endif
  }));
}

}  // namespace

void tamp::distributed::Group::close() {
  decltype(deviceTypeToBackend_) devices;
  decltype(backendTypeToBackend_) backends;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    devices.swap(deviceTypeToBackend_);
    backends.swap(backendTypeToBackend_);
  }
  devices.clear();
  for (auto &[type, backend] : backends) {
    auto *gloo = dynamic_cast<ProcessGroupGloo *>(backend.get());
    if (gloo == nullptr) continue;
    for (const auto &context : Connections::of(*gloo)) context->closeConnections();
    // The end of a backend waits for the operations of this rank that have begun, which may take until their timeout.
    std::thread([last = std::move(backend)]() mutable { last.reset(); }).detach();
  }
}

extern "C" {

tamp_group *tamp_group_new(const tamp_store *store, const tamp_group_options *options, char **err) noexcept {
  return tamp::guarded(err, [&]() -> tamp_group * {
    turn_off_flight_recorder();
    const int rank = static_cast<int>(options->rank), size = static_cast<int>(options->size);
    auto prefixed = c10::make_intrusive<c10d::PrefixStore>(options->prefix, given(store).store);
    auto group = c10::make_intrusive<tamp::distributed::Group>(prefixed, rank, size);
    auto gloo = c10::make_intrusive<ProcessGroupGloo>(c10::make_intrusive<c10d::PrefixStore>("gloo", prefixed), rank,
                                                      size, gloo_options(*options));
    group->setBackend(c10::kCPU, ProcessGroup::GLOO, gloo);
    group->setDefaultBackend(ProcessGroup::GLOO);
    if (options->cuda != 0) {
      group->setBackend(c10::kCUDA, ProcessGroup::NCCL,
                        tamp::distributed::nccl(prefixed, rank, size, milliseconds(options->timeout_ms)));
    }
    group->setGroupName(options->prefix);
    return new tamp_group{std::move(group)};
  });
}

void tamp_group_check_interface(const char *interface, const char *host, char **err) noexcept {
  tamp::guarded(err, [&] { device(interface, host); });
}

void tamp_group_close(const tamp_group *group) noexcept {
  char *err = nullptr;
  tamp::contained(&err, [&] { given(group).group->close(); });
  tamp_string_free(err);
}

int64_t tamp_group_unwritable(tamp_tensor *const *tensors, size_t count, char **err) noexcept {
  return tamp::guarded(err, [&]() -> int64_t {
    for (size_t i = 0; i < count; ++i) {
      const at::Tensor &t = tamp::tensor(tensors[i]);
      const bool is_sealed = t.is_inference() && !c10::InferenceMode::is_enabled();
      if (t._is_zerotensor() || is_sealed || tamp::overlaps(t)) return static_cast<int64_t>(i);
    }
    return -1;
  });
}

void tamp_group_free(tamp_group *group) noexcept {
  char *err = nullptr;
  tamp::contained(&err, [&] { delete group; });
  tamp_string_free(err);
}

tamp_gathering *tamp_gathering_begin(const tamp_group *group, const uint8_t *bytes, size_t len, char **err) noexcept {
  return tamp::guarded(err, [&]() -> tamp_gathering * {
    const auto count = static_cast<int64_t>(len);
    auto gathering = std::make_shared<tamp::distributed::Gathering>();
    gathering->part = at::empty({count}, at::kByte);
    gathering->all = at::empty({count * given(group).group->getSize()}, at::kByte);
    auto out = std::make_unique<tamp_gathering>(tamp_gathering{gathering});
    std::memcpy(gathering->part.mutable_data_ptr(), bytes, len);
    gathering->done = gather(group, gathering->all, gathering->part)->getFuture();
    return out.release();
  });
}

void tamp_gathering_finish(const tamp_gathering *gathering, uint8_t *all, char **err) noexcept {
  tamp::guarded(err, [&] {
    const auto &gathered = *given(gathering).gathering;
    gathered.done->waitAndThrow();
    std::memcpy(all, gathered.all.const_data_ptr(), static_cast<size_t>(gathered.all.numel()));
  });
}

void tamp_gathering_free(tamp_gathering *gathering) noexcept { delete gathering; }

void tamp_group_all_reduce(const tamp_group *group, tamp_tensor *t, uint8_t op, char **err) noexcept {
  tamp::guarded(err, [&] {
    std::vector<at::Tensor> tensors{plain(tamp::tensor(t))};
    c10d::AllreduceOptions options;
    options.reduceOp = reduction(op);
    finish(given(group).group->allreduce(tensors, options));
  });
}

void tamp_group_broadcast(const tamp_group *group, tamp_tensor *t, int64_t root, char **err) noexcept {
  tamp::guarded(err, [&] {
    std::vector<at::Tensor> tensors{plain(tamp::tensor(t))};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    auto &all = *given(group).group;
    finish(all.begin([&] { return all.broadcast(tensors, options); }));
  });
}

void tamp_group_all_gather(const tamp_group *group, tamp_tensor *all, const tamp_tensor *t, char **err) noexcept {
  tamp::guarded(err, [&] { finish(gather(group, plain(tamp::tensor(all)), plain(tamp::tensor(t)))); });
}

void tamp_group_reduce_scatter(const tamp_group *group, tamp_tensor *part, const tamp_tensor *all,
                               char **err) noexcept {
  tamp::guarded(err, [&] { scatter_sum(group, plain(tamp::tensor(part)), plain(tamp::tensor(all))); });
}

void tamp_group_monitored_barrier(const tamp_group *group, int64_t timeout_ms, char **err) noexcept {
  tamp::guarded(err, [&] {
    c10d::BarrierOptions options;
    options.timeout = milliseconds(timeout_ms);
    given(group).group->monitoredBarrier(options, /*wait_all_ranks=*/true);
  });
}

}  // extern "C"
