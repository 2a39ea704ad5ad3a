// Master weights: what half-precision parameters are updated from in f32.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "border/shim.h"

namespace tamp {

// The master weights of one parameter.
struct Master {
  uint8_t kind = TAMP_MASTER_NONE;
  at::Tensor tensor;  // the f32 copy, or the remainder; undefined for other kinds
  uint64_t seed = 0;
};

// Returns the number of steps after one more. From 2^24 on, f32 has no number for each, and PyTorch's count stands still.
// That of random rounding must not, because the random numbers depend on it: it goes on to the next f32, up to the largest
// number of steps, which is an i64 as well.
constexpr float kMostSteps = 4611686018427387904.0F;  // 2^62
float next_step(float step, uint8_t master);

// Returns the seed of a parameter's random numbers in the step after `steps` others. It is computed by the finalizer of
// SplitMix64 (Steele, Lea and Flood 2014), whose constants these are.
constexpr uint64_t kSeedStep = 0x9e3779b97f4a7c15, kSeedFirst = 0xbf58476d1ce4e5b9, kSeedSecond = 0x94d049bb133111eb;
uint64_t seed_of_step(uint64_t seed, float steps);

// Returns the f32 numbers that a bf16 parameter and its remainder stand for.
at::Tensor join(const at::Tensor &parameter, const at::Tensor &remainder);

// Returns the lower 16 bits of f32 numbers: the remainders of the bf16 numbers that they round to, with ties away from
// zero.
at::Tensor remainder(const at::Tensor &master);

// Whether the dtype of a tensor is bf16 or fp16.
bool is_half(const at::Tensor &t);

// Makes autograd accumulate later gradients in the dtype of their parameter, whichever that is then.
void narrow_later_gradients(const at::Tensor &parameter);

// Replaces the gradient of a parameter by one of this dtype, in which autograd accumulates it from now on. `gradient`
// may be undefined. Changes nothing if it fails.
void replace_gradient(const at::Tensor &parameter, at::ScalarType dtype, at::Tensor gradient);

}  // namespace tamp
