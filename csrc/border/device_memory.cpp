// The statistics of libtorch's allocators, which CUDA's and others keep for each device, and what the CPU's reports.

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "border/guarded.h"

namespace {

using c10::CachingDeviceAllocator::StatType;

c10::DeviceAllocator &allocator_of(int8_t device_type) {
  const auto type = static_cast<c10::DeviceType>(device_type);
  TORCH_CHECK(type != c10::kCPU, "libtorch does not count the memory of the CPU");
  auto *allocator = dynamic_cast<c10::DeviceAllocator *>(c10::GetAllocator(type));
  TORCH_CHECK(allocator != nullptr, "libtorch's allocator for ", type, " does not count its memory");
  return *allocator;
}

// Adds up the blocks that the CPU's allocator reports. It may report that one is freed which it has not reported before.
class Count final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void *block, int64_t size, size_t, size_t, c10::Device device) override {
    if (!device.is_cpu()) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    int64_t &counted = blocks_[block];
    now_ -= std::exchange(counted, std::max<int64_t>(size, 0));
    now_ += counted;
    peak_ = std::max(peak_, now_);
    if (counted == 0) blocks_.erase(block);
  }

  bool memoryProfilingEnabled() const override { return true; }

  uint64_t peak() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<uint64_t>(peak_);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<void *, int64_t> blocks_;
  int64_t now_ = 0;
  int64_t peak_ = 0;
};

}  // namespace

struct tamp_allocations {
  std::shared_ptr<Count> count;
  // Restores what the thread had before.
  c10::DebugInfoGuard guard;
};

extern "C" {

void tamp_device_memory_read(int8_t device_type, int8_t index, tamp_device_memory *out, char **err) noexcept {
  tamp::guarded(err, [&] {
    c10::DeviceAllocator &allocator = allocator_of(device_type);
    *out = {};
    // Before the first tensor it has no devices, and nothing to count.
    if (!allocator.initialized()) return;
    const auto stats = allocator.getDeviceStats(static_cast<c10::DeviceIndex>(index));
    const auto aggregate = static_cast<size_t>(StatType::AGGREGATE);
    const auto &allocated = stats.allocated_bytes[aggregate];
    const auto &reserved = stats.reserved_bytes[aggregate];
    *out = {allocated.current, allocated.peak, reserved.current, reserved.peak};
  });
}

void tamp_device_memory_reset(int8_t device_type, int8_t index, char **err) noexcept {
  tamp::guarded(err, [&] {
    c10::DeviceAllocator &allocator = allocator_of(device_type);
    if (allocator.initialized()) allocator.resetPeakStats(static_cast<c10::DeviceIndex>(index));
  });
}

tamp_allocations *tamp_allocations_count(char **err) noexcept {
  return tamp::guarded(err, [] {
    // The callbacks of a profiler look for its own state in this place.
    const auto *outer = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE);
    TORCH_CHECK(outer == nullptr || dynamic_cast<const Count *>(outer) != nullptr,
                "a profiler of libtorch runs on this thread: end it first");
    auto count = std::make_shared<Count>();
    return new tamp_allocations{count, {c10::DebugInfoKind::PROFILER_STATE, count}};
  });
}

uint64_t tamp_allocations_end(tamp_allocations *count) noexcept {
  const std::unique_ptr<tamp_allocations> ended(count);
  return ended->count->peak();
}

}  // extern "C"
