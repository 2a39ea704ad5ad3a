// Histories of steps, whose numbers stay where they are.

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <limits>
#include <memory>
#include <vector>

#include "guarded.h"
#include "shim_insight.h"

namespace {

using at::Tensor;

at::Device device_of(const tamp_tensor *history, const tamp_tensor *const *numbers) {
  if (history != nullptr && !tamp::tensor(history).is_cpu()) return tamp::tensor(history).device();
  for (int i = 0; i < TAMP_STEP_NUMBERS; ++i) {
    if (numbers[i] != nullptr && !tamp::tensor(numbers[i]).is_cpu()) return tamp::tensor(numbers[i]).device();
  }
  return at::kCPU;
}

}  // namespace

extern "C" {

tamp_tensor *tamp_history_record(const tamp_tensor *history, int64_t length, int64_t row,
                                 const tamp_tensor *const *numbers, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    const at::Device device = device_of(history, numbers);
    // MPS has no f64.
    const auto options = at::TensorOptions(device.is_mps() ? at::kFloat : at::kDouble).device(device);
    std::vector<Tensor> all;
    for (int i = 0; i < TAMP_STEP_NUMBERS; ++i) {
      all.push_back(numbers[i] == nullptr
                        ? at::full({}, std::numeric_limits<double>::quiet_NaN(), options)
                        : tamp::on_device(tamp::tensor(numbers[i]).detach().reshape({}), device).to(options.dtype()));
    }
    const Tensor step = at::stack(all);
    Tensor rows = history == nullptr ? at::zeros({length, TAMP_STEP_NUMBERS}, options)
                                     : tamp::on_device(tamp::tensor(history), device).to(options.dtype());
    auto given = std::make_unique<Tensor>(rows);
    // Everything has been allocated.
    rows.select(0, row).copy_(step);
    return tamp::give(std::move(given));
  });
}

}  // extern "C"
