// The devices, their streams and events, as libtorch's guards see them.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace simulated {

// The calling thread's current device.
c10::DeviceIndex current_device();

// The calling thread's current stream of a device, which has a number.
c10::Stream current_stream(c10::Device device);

// Makes a device the current one; returns the one before. Fails where there is none of that number.
c10::DeviceIndex exchange_device(c10::DeviceIndex device);

// The device, with the current one's number where it has none.
c10::Device whole(c10::Device device);

// Waits for all that devices do.
void synchronize(c10::DeviceIndex device);

}  // namespace simulated
