// The statistics of libtorch's allocators, which CUDA's and others keep for each device.

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>

#include <cstdint>

#include "guarded.h"

namespace {

using c10::CachingDeviceAllocator::StatType;

c10::DeviceAllocator &allocator_of(int8_t device_type) {
  const auto type = static_cast<c10::DeviceType>(device_type);
  TORCH_CHECK(type != c10::kCPU, "libtorch does not count the memory of the CPU");
  auto *allocator = dynamic_cast<c10::DeviceAllocator *>(c10::GetAllocator(type));
  TORCH_CHECK(allocator != nullptr, "libtorch's allocator for ", type, " does not count its memory");
  return *allocator;
}

}  // namespace

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

}  // extern "C"
