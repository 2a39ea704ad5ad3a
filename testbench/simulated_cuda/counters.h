// What the devices have done, and how often the host waited for them.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace simulated {

// Why the host waits for a device.
enum class Wait {
  kItem,          // a number is read
  kCopyToHost,    // a copy that blocks, or one to memory that is not pinned
  kCopyFromHost,  // a copy that blocks
  kOperator,      // an operator that needs a number to go on, such as nonzero
  kEvent,
  kStream,
};

// Notes `launches` kernels of the operator `name`.
void note_launches(c10::DeviceIndex device, const std::string &name, int64_t launches = 1);

// Notes that the host waits; `what` is for the trace.
void note_wait(c10::DeviceIndex device, Wait why, const std::string &what);

// Notes memory that was allocated and freed.
void note_allocation(c10::DeviceIndex device, size_t bytes);
void note_release(c10::DeviceIndex device, size_t bytes);

// The bytes of a device's tensors, and the most since its peak was reset, as an allocator tells them to programs.
struct Usage {
  int64_t now, peak;
};
Usage usage(c10::DeviceIndex device);
void reset_usage_peak(c10::DeviceIndex device);

}  // namespace simulated
