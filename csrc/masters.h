// Parameters in half precision that are updated in f32: what they are updated from.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "shim.h"

namespace tamp {

// What belongs to a parameter with masters.
struct Master {
  uint8_t kind = TAMP_MASTER_NONE;
  at::Tensor tensor;  // f32, or the remainder
  uint64_t seed = 0;
};

// The seed of a parameter's random numbers in a step (SplitMix64's finalizer; Steele, Lea and Flood 2014).
constexpr uint64_t kSeedStep = 0x9e3779b97f4a7c15, kSeedFirst = 0xbf58476d1ce4e5b9, kSeedSecond = 0x94d049bb133111eb;
uint64_t seed_of_step(uint64_t seed, uint64_t step);

// The f32 numbers of a bf16 parameter and its remainder, and the remainder of f32 numbers.
at::Tensor join(const at::Tensor &parameter, const at::Tensor &remainder);
at::Tensor remainder(const at::Tensor &master);

}  // namespace tamp
