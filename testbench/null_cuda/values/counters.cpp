// The counters of simulated_cuda.h, from those of the runtime and of libtorch's allocator.

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include "../api.h"
#include "../null_cuda.h"
#include "allocations.h"
#include "simulated_cuda.h"

namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

int64_t of_device(c10::DeviceIndex device, int32_t counter) {
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  switch (counter) {
    case SIMULATED_CUDA_LAUNCHES:
      return null_cuda_count(device, "launch/");
    case SIMULATED_CUDA_HOST_SYNCS:
      return null_cuda_count(device, "wait/");
    case SIMULATED_CUDA_ALLOCATIONS:
      return allocator::getDeviceStats(device).allocation[kAll].allocated;
    case SIMULATED_CUDA_BYTES:
      return allocator::getDeviceStats(device).allocated_bytes[kAll].current;
    default:
      return allocator::getDeviceStats(device).allocated_bytes[kAll].peak;
  }
}

}  // namespace

NULL_CUDA_API int32_t simulated_cuda_kind(void) { return SIMULATED_CUDA_REAL_HOST_CODE; }

NULL_CUDA_API int64_t simulated_cuda_counter(int32_t device, int32_t counter) {
  if (!null_cuda::has_allocator()) return 0;
  if (device >= 0) return of_device(static_cast<c10::DeviceIndex>(device), counter);
  int64_t sum = 0;
  for (c10::DeviceIndex each = 0; each < c10::cuda::device_count(); ++each) sum += of_device(each, counter);
  return sum;
}

NULL_CUDA_API void simulated_cuda_reset(void) {
  null_cuda_reset();
  if (!null_cuda::has_allocator()) return;
  for (c10::DeviceIndex device = 0; device < c10::cuda::device_count(); ++device) {
    allocator::resetAccumulatedStats(device);
    allocator::resetPeakStats(device);
  }
}
