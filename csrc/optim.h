// What a step of an optimizer is made of: what belongs to a parameter, and how it is stepped on which device.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "kernels.h"
#include "masters.h"
#include "shim.h"

namespace tamp::optim {

// A parameter with what its update reads and writes.
struct Entry {
  const tamp_optim_options *options;
  bool first_step;
  at::Tensor parameter, gradient, step;
  at::Tensor states[kStates];  // by StatePlace; undefined where an algorithm has none
  Master master;

  // The dtype of the update's arithmetic and of the state.
  at::ScalarType dtype() const { return master.kind == TAMP_MASTER_NONE ? parameter.scalar_type() : at::kFloat; }
};

// Whether two tensors have one shape and, if they are dense, one index goes over the memory of both alike.
bool are_alike(const at::Tensor &one, const at::Tensor &other);

// Steps parameters on the CPU by the loops of kernels.h. Changes everything or, where it throws, nothing.
void step_on_cpu(std::vector<Entry> entries, const tamp_optim_scale &scale);

class OneDevice;

// A step of parameters on other devices, by libtorch's kernels for these. Everything that it needs is allocated when it
// is made, which changes nothing, so that no lack of memory stops it midway.
class DeviceStep {
 public:
  DeviceStep(const std::vector<Entry> &entries, const tamp_optim_scale &scale);
  ~DeviceStep();
  DeviceStep(const DeviceStep &) = delete;
  DeviceStep &operator=(const DeviceStep &) = delete;

  void run() const;

 private:
  std::vector<OneDevice> devices_;
};

}  // namespace tamp::optim
