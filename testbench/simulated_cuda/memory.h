// The memory of the devices. Each byte of it has two addresses: the one that everybody sees, at which nothing may be
// read or written, and one for kernels. Host code that touches device memory ends with a message and SIGSEGV.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

namespace simulated {

// Allocates on the current device.
c10::Allocator &device_allocator();

// Where kernels find what a device has at `address`.
void *host_address(const void *address);

// The device whose memory `address` is in; -1 for none.
c10::DeviceIndex device_of(const void *address);

}  // namespace simulated
