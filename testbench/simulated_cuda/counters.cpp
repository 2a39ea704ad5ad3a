#include "counters.h"

#include <c10/util/Backtrace.h>

#include <array>
#include <atomic>
#include <cstdio>

#include "settings.h"
#include "simulated_cuda.h"

namespace simulated {
namespace {

// Per device: the numbers of simulated_cuda.h in their order, and the waits by their reason.
struct Counts {
  std::array<std::atomic<int64_t>, SIMULATED_CUDA_PEAK_BYTES + 1> numbers;
  std::array<std::atomic<int64_t>, 6> waits;
  std::atomic<int64_t> usage_peak;
};

constexpr const char *kWaits[] = {
    "reads of a number", "copies to the host", "copies from the host", "operators", "events", "streams"};

// Static memory: zero before anything runs, and there until the end.
std::array<Counts, kMostDevices> counts;

Counts &of(c10::DeviceIndex device) { return counts.at(static_cast<size_t>(device)); }

// A few words for each device that did anything.
struct Report {
  ~Report() {
    if (!reports()) return;
    for (int device = 0; device < device_count(); ++device) {
      const Counts &c = of(static_cast<c10::DeviceIndex>(device));
      if (c.numbers[SIMULATED_CUDA_ALLOCATIONS] == 0 && c.numbers[SIMULATED_CUDA_LAUNCHES] == 0) continue;
      fprintf(stderr, "simulated cuda:%d  %lld launches, %lld host synchronizations, peak %.3f MiB\n", device,
              static_cast<long long>(c.numbers[SIMULATED_CUDA_LAUNCHES]),
              static_cast<long long>(c.numbers[SIMULATED_CUDA_HOST_SYNCS]),
              static_cast<double>(c.numbers[SIMULATED_CUDA_PEAK_BYTES]) / (1 << 20));
      for (size_t why = 0; why < c.waits.size(); ++why) {
        if (c.waits[why] != 0) fprintf(stderr, "    %lld %s\n", static_cast<long long>(c.waits[why]), kWaits[why]);
      }
    }
  }
};
const Report report;

void raise(std::atomic<int64_t> &peak, int64_t now) {
  int64_t before = peak;
  while (now > before && !peak.compare_exchange_weak(before, now)) {
  }
}

}  // namespace

void note_launches(c10::DeviceIndex device, const std::string &name, int64_t launches) {
  of(device).numbers[SIMULATED_CUDA_LAUNCHES] += launches;
  if (traces_launches())
    fprintf(stderr, "simulated cuda:%d  launch %s x%lld\n", device, name.c_str(), static_cast<long long>(launches));
}

void note_wait(c10::DeviceIndex device, Wait why, const std::string &what) {
  of(device).numbers[SIMULATED_CUDA_HOST_SYNCS] += 1;
  of(device).waits[static_cast<size_t>(why)] += 1;
  if (!traces_launches() && !traces_syncs()) return;
  fprintf(stderr, "simulated cuda:%d  the host waits: %s, %s\n", device, kWaits[static_cast<size_t>(why)],
          what.c_str());
  if (traces_syncs()) fprintf(stderr, "%s\n", c10::get_backtrace(0, 40).c_str());
}

void note_allocation(c10::DeviceIndex device, size_t bytes) {
  auto &numbers = of(device).numbers;
  numbers[SIMULATED_CUDA_ALLOCATIONS] += 1;
  const int64_t now = numbers[SIMULATED_CUDA_BYTES] += static_cast<int64_t>(bytes);
  raise(numbers[SIMULATED_CUDA_PEAK_BYTES], now);
  raise(of(device).usage_peak, now);
}

void note_release(c10::DeviceIndex device, size_t bytes) {
  of(device).numbers[SIMULATED_CUDA_BYTES] -= static_cast<int64_t>(bytes);
}

Usage usage(c10::DeviceIndex device) { return {of(device).numbers[SIMULATED_CUDA_BYTES], of(device).usage_peak}; }

void reset_usage_peak(c10::DeviceIndex device) { of(device).usage_peak = usage(device).now; }

}  // namespace simulated

extern "C" {

int32_t simulated_cuda_kind(void) { return SIMULATED_CUDA_MODEL; }

int64_t simulated_cuda_counter(int32_t device, int32_t counter) {
  using namespace simulated;
  if (device >= 0) return of(static_cast<c10::DeviceIndex>(device)).numbers.at(static_cast<size_t>(counter));
  int64_t sum = 0;
  for (const auto &c : counts) sum += c.numbers.at(static_cast<size_t>(counter));
  return sum;
}

void simulated_cuda_reset(void) {
  for (auto &c : simulated::counts) {
    for (auto &wait : c.waits) wait = 0;
    for (const int number : {SIMULATED_CUDA_LAUNCHES, SIMULATED_CUDA_HOST_SYNCS, SIMULATED_CUDA_ALLOCATIONS}) {
      c.numbers[static_cast<size_t>(number)] = 0;
    }
    c.numbers[SIMULATED_CUDA_PEAK_BYTES] = c.numbers[SIMULATED_CUDA_BYTES].load();
  }
}

}  // extern "C"
