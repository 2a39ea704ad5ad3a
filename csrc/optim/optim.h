// The parts of an optimizer's step: what belongs to a parameter, and the steps on the CPU and on other devices.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "border/shim.h"
#include "kernels/kernels.h"
#include "optim/masters.h"

namespace tamp::optim {

constexpr int kCoefficients = 3;

// What NAdam and Adafactor have besides: the states of another shape than the parameter, their values after the step,
// and the numbers of the update, for NAdam on devices other than the CPU.
struct Factors {
  at::Tensor states[kStates], renewed[kStates], coefficients[kCoefficients];
};

// A parameter and everything that its update reads and writes.
struct Entry {
  const tamp_optim_options *options = nullptr;
  bool first_step = false, many_steps = false;
  at::Tensor parameter, gradient, step;
  at::Tensor states[kStates];  // by StatePlace; undefined where an algorithm has none
  Master master;
  // Like the parameter: the orthogonalized momentum of Muon, in bf16, or the direction of Adafactor in `dtype`.
  at::Tensor direction{};
  double rate = 0;                     // along the direction; of Muon with rates on the device the factor of these
  std::shared_ptr<Factors> factors{};  // of NAdam and Adafactor alone
  uint8_t kept_as = TAMP_STATES_PLAIN;

  // The dtype of the update's arithmetic, and of the state unless that has fewer bits.
  at::ScalarType dtype() const { return master.kind == TAMP_MASTER_NONE ? parameter.scalar_type() : at::kFloat; }

  // Whether its moments have fewer bits than an f32. They are contiguous then, in the order of the parameter's elements,
  // whatever its memory format, and the steps are counted in an i64.
  bool is_low_bit() const { return kept_as != TAMP_STATES_PLAIN; }
};

// The learning rate on the device, and 1 - lr * weight_decay. A step with a rate on the device takes the same operations
// in a captured iteration and outside of one, so that both give the same numbers.
bool has_device_rates(const tamp_optim_options &o);
at::Tensor device_rate(const tamp_optim_options &o);
at::Tensor device_keep(const tamp_optim_options &o);

// Whether two tensors have the same shape and strides. If they are dense, one index then goes over the memory of both.
bool are_alike(const at::Tensor &one, const at::Tensor &other);

// Steps parameters on the CPU with the loops of kernels/kernels.h. If it throws, it has changed nothing.
void step_on_cpu(std::vector<Entry> entries, const tamp_optim_scale &scale);

class OneDevice;

// A step of parameters on other devices, with libtorch's kernels. The constructor allocates everything that the step
// needs and changes nothing, so that a lack of memory cannot stop the step midway.
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
