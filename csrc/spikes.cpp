// Spikes of a loss or of the norm of the gradients, judged where the number is.

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "guarded.h"
#include "shim_training.h"

namespace {

using at::Tensor;

// A standard deviation is at least this share of the mean, so that a history that hardly varies has room.
constexpr double kLeastDeviation = 0.01;

// The limit above which the next number is a spike.
Tensor limit(const Tensor &window, const Tensor &used, const Tensor &count, double deviations) {
  const Tensor mean = window.mul(used).sum().div(count.clamp_min(1));
  const Tensor squares = window.sub(mean).square().mul(used).sum();
  const Tensor deviation = squares.div(count.sub(1).clamp_min(1)).sqrt();
  return mean.add(at::maximum(deviation, mean.abs().mul(kLeastDeviation)), deviations);
}

Tensor judge(const Tensor &history, const Tensor &value, const Tensor &given, const tamp_spike_options &o) {
  const auto now = [&](int64_t place) { return history.select(0, place); };
  const Tensor window = history.slice(0, TAMP_SPIKES_WINDOW);
  const Tensor places = at::arange(o.window, history.options());
  const Tensor taken = now(TAMP_SPIKES_TAKEN);
  const Tensor used = places.lt(taken);
  const Tensor bad = at::isfinite(value).logical_not().logical_and(given.logical_not());
  const Tensor above = value.gt(limit(window, used, taken.clamp_max(o.window), o.deviations));
  const Tensor may = taken.ge(o.warmup).logical_and(now(TAMP_SPIKES_IN_A_ROW).lt(o.max_in_a_row));
  const Tensor free = bad.logical_or(given).logical_not();
  const Tensor spike = above.logical_and(may).logical_and(free);
  const Tensor enters = free.logical_and(spike.logical_not());
  const Tensor here = places.eq(taken.remainder(o.window)).logical_and(enters);
  const Tensor in_a_row =
      at::where(spike, now(TAMP_SPIKES_IN_A_ROW).add(1), now(TAMP_SPIKES_IN_A_ROW).masked_fill(enters, 0));
  const Tensor numbers = at::stack({taken.add(enters), in_a_row, now(TAMP_SPIKES_FOUND).add(spike),
                                    now(TAMP_SPIKES_NON_FINITE).add(bad), enters.logical_not().to(at::kDouble)});
  return at::cat({numbers, at::where(here, value, window)});
}

}  // namespace

extern "C" {

tamp_tensor *tamp_spikes_judge(const tamp_tensor *history, const tamp_tensor *value, const tamp_tensor *other,
                               const tamp_spike_options *options, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    const Tensor &given = tamp::tensor(value);
    TORCH_CHECK(given.defined() && given.numel() == 1 && at::isFloatingType(given.scalar_type()),
                "a watched loss must be one floating-point number");
    const Tensor number = given.detach().reshape({}).to(at::kDouble);
    const at::Device device = number.device();
    const Tensor before = history == nullptr ? at::zeros({TAMP_SPIKES_WINDOW + options->window},
                                                         at::TensorOptions(at::kDouble).device(device))
                                             : tamp::on_device(tamp::tensor(history), device);
    TORCH_CHECK(before.dim() == 1 && before.scalar_type() == at::kDouble &&
                    before.size(0) == TAMP_SPIKES_WINDOW + options->window,
                "a history of spikes has another window");
    const Tensor skipped = other == nullptr
                               ? at::zeros({}, at::TensorOptions(at::kBool).device(device))
                               : tamp::on_device(tamp::tensor(other), device).select(0, TAMP_SPIKES_SKIPPED).ne(0);
    return tamp::give(judge(before, number, skipped, *options));
  });
}

tamp_tensor *tamp_spikes_flag(const tamp_tensor *history, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    return tamp::give(tamp::tensor(history).select(0, TAMP_SPIKES_SKIPPED).to(at::kFloat));
  });
}

}  // extern "C"
