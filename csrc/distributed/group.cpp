// Process groups and their collectives.

// libtorch is built with gloo, whose headers it does not bring: see gloo_headers.
#define USE_C10D_GLOO

#include <c10/core/InferenceMode.h>
#include <torch/headeronly/version.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdlib>
#include <cstring>
#include <future>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "distributed/agreement.h"
#include "gradients/storage.h"

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

// How long a group waits for the end of a backend: one that is dropped, and one that has failed.
constexpr milliseconds kEnd(5000), kAbort(1000);

// Lets a thread end a backend, by `how` first, and waits for it for at most `wait`. It may take forever: Gloo's end waits
// for the operations of this rank that have begun, and NCCL's for other ranks and for a thread that may read from the
// store of a host that is gone.
template <typename F>
void end(c10::intrusive_ptr<c10d::Backend> backend, milliseconds wait, F how) noexcept {
  // Owned by the thread. Without one it is lost, because its end might not return.
  c10d::Backend *last = backend.release();
  try {
    std::promise<void> ended;
    const std::future<void> is_over = ended.get_future();
    std::thread([last, how, ended = std::move(ended)]() mutable {
      auto owned = c10::intrusive_ptr<c10d::Backend>::reclaim(last);
      try {
        how(*owned);
      } catch (const std::exception &) {
        // Another rank has ended, which its own calls say.
      }
      owned.reset();
      ended.set_value();
    }).detach();
    is_over.wait_for(wait);
  } catch (const std::exception &) {
    // No thread could be started.
  }
}

// Shuts NCCL's backend down or, if that fails, aborts it. A backend that is destroyed without either warns of a leak.
void shut_down(c10d::Backend &nccl) {
  try {
    TORCH_CHECK(!tamp::planted("nccl_shutdown"), "a planted failure");
    nccl.shutdown();
  } catch (const std::exception &) {
    nccl.abort();
  }
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
  return group.begin(part, [&] {
#if TORCH_VERSION_MINOR >= 13
    return group.all_gather_single(all, part);
#else
    return group._allgather_base(all, part);
#endif
  });
}

void scatter_sum(const tamp_group *given_group, at::Tensor part, at::Tensor all) {
  auto &group = *given(given_group).group;
  if (part.is_cpu()) {
    // What gloo does, but in a work that has a future.
    std::vector<at::Tensor> sum{all.clone()};
    finish(group.allreduce(sum, {}));
    part.copy_(sum[0].narrow(0, group.getRank() * part.size(0), part.size(0)));
    return;
  }
  finish(group.begin(part, [&] {
#if TORCH_VERSION_MINOR >= 13
    return group.reduce_scatter_single(part, all);
#else
    return group._reduce_scatter_base(part, all);
#endif
  }));
}

// How often a group that waits looks whether another rank has failed.
constexpr milliseconds kLook{500};

bool has_failure(const c10::weak_intrusive_ptr<c10d::Store> &store) {
  try {
    const auto alive = store.lock();
    return alive != nullptr && alive->check({"failure"});
  } catch (const std::exception &) {
    // The process of the store has ended, perhaps rightly, and its reason went with it.
    return false;
  }
}

}  // namespace

namespace tamp::distributed {

c10::intrusive_ptr<Future> Operations::add(Future &done) {
  auto future = c10::make_intrusive<Future>(done.elementType());
  uint64_t number = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    number = ++count_;
    begun_.emplace(number, future);
  }
  done.addCallback([all = shared_from_this(), number](Future &result) {
    const auto mine = all->take(number);
    if (mine == nullptr) return;
    if (result.hasError()) {
      mine->setError(result.exception_ptr());
    } else {
      mine->markCompleted(result.value());
    }
  });
  return future;
}

c10::intrusive_ptr<Future> Operations::take(uint64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = begun_.find(number);
  if (found == begun_.end()) return {};
  auto future = std::move(found->second);
  begun_.erase(found);
  return future;
}

void Operations::fail(const char *why) {
  std::exception_ptr failure;
  decltype(begun_) ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_ == nullptr) failure_ = std::make_exception_ptr(std::runtime_error(why));
    failure = failure_;
    ended.swap(begun_);
  }
  changed_.notify_all();
  // Not under the lock, because what waits for an operation can go on at once.
  for (const auto &[number, future] : ended) future->setError(failure);
}

bool Operations::have_failed_within(milliseconds time) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, time, [&] { return failure_ != nullptr; });
}

uint64_t Operations::oldest() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return begun_.empty() ? 0 : begun_.begin()->first;
}

c10::intrusive_ptr<c10d::Work> Group::broadcast(std::vector<at::Tensor> &tensors,
                                                const c10d::BroadcastOptions &options) {
  return begin(tensors[0], [&] { return ProcessGroup::broadcast(tensors, options); });
}

void Group::watch(const c10::intrusive_ptr<c10d::Store> &store) {
  // Neither the group nor the store, which the program may drop.
  const c10::weak_intrusive_ptr<c10d::Store> weak(store);
  std::thread([operations = operations_, weak] {
    uint64_t seen = 0;
    while (!operations->have_failed_within(kLook)) {
      const uint64_t oldest = operations->oldest();
      if (oldest != 0 && oldest == seen && has_failure(weak)) operations->fail("another rank has failed");
      seen = oldest;
    }
  }).detach();
}

Group::~Group() { leave(); }

void Group::release_resources() {
  leave();
  ProcessGroup::release_resources();
}

void Group::leave() {
  operations_->fail("the group has ended");
  deviceTypeToBackend_.clear();
  for (auto &[type, backend] : backendTypeToBackend_) {
    // Without this, NCCL's backend aborts what other ranks are still receiving, and warns of it.
    if (type != BackendType::GLOO) end(std::move(backend), kEnd, shut_down);
  }
  backendTypeToBackend_.clear();
}

void Group::close() {
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
    if (gloo == nullptr) {
      end(std::move(backend), kAbort, [](c10d::Backend &nccl) { nccl.abort(); });
      continue;
    }
    for (const auto &context : Connections::of(*gloo)) context->closeConnections();
    end(std::move(backend), milliseconds(0), [](c10d::Backend &) {});
  }
  operations_->fail("the group has failed");
}

}  // namespace tamp::distributed

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
    group->watch(prefixed);
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
    finish(given(group).group->broadcast(tensors, options));
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
