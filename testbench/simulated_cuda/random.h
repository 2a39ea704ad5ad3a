// The generators of random numbers of the devices. Their state is CUDA's: a seed and an offset.
#pragma once

#include <ATen/core/Generator.h>

namespace simulated {

const at::Generator &default_generator(c10::DeviceIndex device);

at::Generator new_generator(c10::DeviceIndex device);

// A generator of the CPU with the numbers that the next kernel gets from `generator`, which advances.
at::Generator numbers_of(const at::Generator &generator);

}  // namespace simulated
