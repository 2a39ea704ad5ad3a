// Parameters in half precision that are updated in f32: what they are updated from, and how the result is written back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "shim.h"

namespace tamp {

// What belongs to a parameter with masters.
struct Master {
  uint8_t kind = TAMP_MASTER_NONE;
  at::Tensor tensor;  // f32, or the remainder
  uint64_t seed = 0;
};

// The seed of a parameter's random numbers in a step (SplitMix64's finalizer; Steele, Lea and Flood 2014).
uint64_t seed_of_step(uint64_t seed, uint64_t step);

// Makes half gradients f32, and has autograd add up in f32 from now on.
void widen_gradient(const at::Tensor &parameter);

// The f32 numbers of a bf16 parameter and its remainder, and the remainder of f32 numbers.
at::Tensor join(const at::Tensor &parameter, const at::Tensor &remainder);
at::Tensor remainder(const at::Tensor &master);

// f32 tensors in the place of parameters with masters, for kernels that know nothing of these.
class StandIns {
 public:
  // What is to be updated instead of the parameter, and by what gradient. Both are filled by `fill`.
  at::Tensor parameter(const at::Tensor &parameter, const Master &master, const at::Tensor &step);
  at::Tensor gradient(const at::Tensor &gradient, const at::Tensor &like);

  void fill() const;

  // Writes the results to the parameters. Without an update nothing changes.
  void write_back() const;

 private:
  struct Rounded {
    at::Tensor parameter, number, step;
    Master master;
  };

  std::vector<at::Tensor> halves_, floats_;      // parameters with f32 copies, and these
  std::vector<at::Tensor> gradients_, widened_;  // half gradients, and f32 ones
  std::vector<Rounded> rounded_;                 // the other parameters
};

}  // namespace tamp
