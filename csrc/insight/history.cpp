// Histories of steps, whose numbers stay where they are.

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <vector>

#include "border/guarded.h"
#include "insight/shim_insight.h"

namespace {

using at::Tensor;

at::Device device_of(const tamp_tensor *history, const tamp_tensor *count, const tamp_step_number *numbers) {
  std::vector<const tamp_tensor *> tensors = {history, count};
  for (int i = 0; i < TAMP_STEP_NUMBERS; ++i) tensors.push_back(numbers[i].on_device);
  for (const tamp_tensor *t : tensors) {
    if (t != nullptr && !tamp::tensor(t).is_cpu()) return tamp::tensor(t).device();
  }
  return at::kCPU;
}

// The number as a tensor. A norm or a loss that is not known may be any number.
Tensor number_of(const tamp_step_number &number, const at::TensorOptions &options, const Tensor &any) {
  if (number.on_device != nullptr) {
    const Tensor &t = tamp::tensor(number.on_device);
    return tamp::on_device(t.detach().reshape({}), options.device()).to(options.dtype());
  }
  if (any.defined() && std::isnan(number.on_host)) return any;
  return at::full({}, number.on_host, options);
}

// Writes to a row on the CPU without the operators that a device needs.
void write_on_cpu(Tensor &rows, int64_t row, const tamp_step_number *numbers) {
  std::array<double, TAMP_STEP_NUMBERS> step;
  for (int i = 0; i < TAMP_STEP_NUMBERS; ++i) {
    const tamp_tensor *t = numbers[i].on_device;
    step[i] = t == nullptr ? numbers[i].on_host : tamp::tensor(t).item<double>();
  }
  std::copy(step.begin(), step.end(), rows.mutable_data_ptr<double>() + row * TAMP_STEP_NUMBERS);
}

}  // namespace

extern "C" {

tamp_tensor *tamp_history_record(const tamp_tensor *history, int64_t length, int64_t row, tamp_tensor *count,
                                 const tamp_step_number *numbers, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    const at::Device device = device_of(history, count, numbers);
    // MPS has no f64.
    const auto options = at::TensorOptions(device.is_mps() ? at::kFloat : at::kDouble).device(device);
    Tensor rows = history == nullptr ? at::zeros({length, TAMP_STEP_NUMBERS}, options)
                                     : tamp::on_device(tamp::tensor(history), device).to(options.dtype());
    auto given = std::make_unique<Tensor>(rows);
    if (device.is_cpu() && count == nullptr) {
      write_on_cpu(rows, row, numbers);
      return tamp::give(std::move(given));
    }
    std::vector<Tensor> all;
    for (int i = 0; i < TAMP_STEP_NUMBERS; ++i) {
      const bool may_be_missing = i == TAMP_STEP_NORM || i == TAMP_STEP_LOSS;
      all.push_back(number_of(numbers[i], options, may_be_missing ? all.front() : Tensor()));
    }
    const Tensor step = at::stack(all);
    const Tensor place = count == nullptr ? Tensor() : tamp::tensor(count).remainder(length).to(at::kLong).reshape({1});
    // Everything has been allocated.
    if (count == nullptr) {
      rows.select(0, row).copy_(step);
    } else {
      rows.index_copy_(0, place, step.unsqueeze(0));
      tamp::tensor(count).add_(1);
    }
    return tamp::give(std::move(given));
  });
}

}  // extern "C"
