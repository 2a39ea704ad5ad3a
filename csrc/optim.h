// What a step of an optimizer is made of: what belongs to a parameter, and how it is stepped on which device.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "masters.h"
#include "shim.h"

namespace tamp::optim {

enum State { kFirst, kSecond, kThird, kStates };

// A parameter with what its update reads and writes.
struct Entry {
  const tamp_optim_options *options;
  bool first_step;
  at::Tensor parameter, gradient, step, states[kStates];
  Master master;

  // In which the update is computed and the state is kept.
  at::ScalarType dtype() const { return master.kind == TAMP_MASTER_NONE ? parameter.scalar_type() : at::kFloat; }
};

// Steps parameters on the CPU by the loops of kernels.h. Changes everything or, where it throws, nothing.
void step_on_cpu(std::vector<Entry> entries, const tamp_optim_scale &scale);

// Steps parameters by libtorch's kernels for their devices.
void step_on_devices(std::vector<Entry> entries, const tamp_optim_scale &scale);

}  // namespace tamp::optim
