// Counts what a real GPU is made to do, so that the tests of tests/devices compare their numbers with those of
// PyTorch's kernels and of the CUDA driver. To be preloaded; the functions are those of the simulation.
//
// Launches and synchronizations are the driver's calls, as CUPTI reports them: those of cuBLAS and cuDNN as well.
// Allocations and bytes are those of PyTorch's caching allocator.
#include <c10/cuda/CUDACachingAllocator.h>
#include <cupti.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <string_view>

#include "../simulated_cuda/simulated_cuda.h"

namespace {

using c10::CachingAllocator::StatType;
namespace allocator = c10::cuda::CUDACachingAllocator;

constexpr size_t CALLS = 2048;
constexpr auto ALL = static_cast<size_t>(StatType::AGGREGATE);

std::atomic<int64_t> launches, host_syncs;
std::array<std::atomic<int64_t>, CALLS> calls;
std::array<std::atomic<const char *>, CALLS> names;

bool starts_with(std::string_view name, std::initializer_list<std::string_view> starts) {
  for (const auto start : starts) {
    if (name.substr(0, start.size()) == start) return true;
  }
  return false;
}

bool is_asynchronous(std::string_view name) { return name.find("Async") != name.npos; }

bool is_launch(std::string_view name) {
  return starts_with(name, {"cuLaunch", "cuGraphLaunch", "cuMemset", "cuMemcpyDtoD", "cuMemcpyPeer"});
}

bool is_host_sync(std::string_view name) {
  const bool waits = starts_with(name, {"cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"});
  return waits || (starts_with(name, {"cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpy_"}) && !is_asynchronous(name));
}

void CUPTIAPI on_call(void *, CUpti_CallbackDomain, CUpti_CallbackId id, const void *data) {
  const auto *call = static_cast<const CUpti_CallbackData *>(data);
  if (call->callbackSite != CUPTI_API_ENTER || id >= CALLS) return;
  const std::string_view name = call->functionName;
  calls[id]++;
  names[id] = call->functionName;
  if (is_launch(name)) launches++;
  if (is_host_sync(name)) host_syncs++;
}

// Prints every call of the driver and how often it was made.
void print_calls() {
  std::FILE *file = std::fopen(std::getenv("REAL_CUDA_CALLS"), "a");
  if (file == nullptr) return;
  for (size_t id = 0; id < CALLS; ++id) {
    if (calls[id] > 0) std::fprintf(file, "%10lld %s\n", static_cast<long long>(calls[id]), names[id].load());
  }
  std::fclose(file);
}

void subscribe() {
  static const bool once = [] {
    CUpti_SubscriberHandle subscriber = nullptr;
    if (cuptiSubscribe(&subscriber, on_call, nullptr) != CUPTI_SUCCESS ||
        cuptiEnableDomain(1, subscriber, CUPTI_CB_DOMAIN_DRIVER_API) != CUPTI_SUCCESS) {
      std::fputs("CUPTI does not report the calls of the driver\n", stderr);
      std::abort();
    }
    if (std::getenv("REAL_CUDA_CALLS") != nullptr) std::atexit(print_calls);
    return true;
  }();
  static_cast<void>(once);
}

// Calls `f` with the number of each device whose allocator is in use.
template <typename F>
void each_device(F f) {
  if (!allocator::get()->initialized()) return;
  for (c10::DeviceIndex device = 0; device < c10::cuda::device_count(); ++device) f(device);
}

}  // namespace

extern "C" int32_t simulated_cuda_kind() { return SIMULATED_CUDA_REAL_GPU; }

extern "C" int64_t simulated_cuda_counter(int32_t, int32_t counter) {
  if (counter == SIMULATED_CUDA_LAUNCHES) return launches;
  if (counter == SIMULATED_CUDA_HOST_SYNCS) return host_syncs;
  int64_t sum = 0;
  each_device([&](c10::DeviceIndex device) {
    const auto stats = allocator::getDeviceStats(device);
    if (counter == SIMULATED_CUDA_ALLOCATIONS) sum += stats.allocation[ALL].allocated;
    if (counter == SIMULATED_CUDA_BYTES) sum += stats.allocated_bytes[ALL].current;
    if (counter == SIMULATED_CUDA_PEAK_BYTES) sum += stats.allocated_bytes[ALL].peak;
  });
  return sum;
}

extern "C" void simulated_cuda_reset() {
  subscribe();
  launches = host_syncs = 0;
  each_device([](c10::DeviceIndex device) {
    allocator::resetAccumulatedStats(device);
    allocator::resetPeakStats(device);
  });
}

// No allocation of a real device is made to fail, so that all that were to come before a failure are still to come.
extern "C" int64_t simulated_cuda_fail_allocation(int64_t n) {
  static std::atomic<int64_t> planted;
  return planted.exchange(n);
}
