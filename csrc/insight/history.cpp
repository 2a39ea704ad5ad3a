// Histories of steps, whose numbers stay where they are.

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <memory>
#include <vector>

#include "guarded.h"
#include "shim_insight.h"

namespace {

using at::Tensor;

at::Device device_of(const tamp_tensor *history, const tamp_step_number *numbers) {
  if (history != nullptr && !tamp::tensor(history).is_cpu()) return tamp::tensor(history).device();
  for (int i = 0; i < TAMP_STEP_NUMBERS; ++i) {
    const tamp_tensor *number = numbers[i].on_device;
    if (number != nullptr && !tamp::tensor(number).is_cpu()) return tamp::tensor(number).device();
  }
  return at::kCPU;
}

}  // namespace

extern "C" {

tamp_tensor *tamp_history_record(const tamp_tensor *history, int64_t length, int64_t row, tamp_tensor *count,
                                 const tamp_step_number *numbers, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    const at::Device device = device_of(history, numbers);
    // MPS has no f64.
    const auto options = at::TensorOptions(device.is_mps() ? at::kFloat : at::kDouble).device(device);
    std::vector<Tensor> all;
    for (int i = 0; i < TAMP_STEP_NUMBERS; ++i) {
      const auto &[on_device, on_host] = numbers[i];
      all.push_back(on_device == nullptr
                        ? at::full({}, on_host, options)
                        : tamp::on_device(tamp::tensor(on_device).detach().reshape({}), device).to(options.dtype()));
    }
    const Tensor step = at::stack(all);
    Tensor rows = history == nullptr ? at::zeros({length, TAMP_STEP_NUMBERS}, options)
                                     : tamp::on_device(tamp::tensor(history), device).to(options.dtype());
    const Tensor place = count == nullptr ? Tensor() : tamp::tensor(count).remainder(length).to(at::kLong).reshape({1});
    auto given = std::make_unique<Tensor>(rows);
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
