// Spikes of a loss or of the norm of the gradients, judged where the number is.

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "border/guarded.h"

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

// The history after one more number. What is not finite, a spike, or `skipped` for another reason does not enter it.
Tensor judge(const Tensor &history, const Tensor &value, const Tensor &skipped, const tamp_spike_options &o) {
  const auto number = [&](int64_t place) { return history.select(0, place); };
  const Tensor window = history.slice(0, TAMP_SPIKES_WINDOW);
  const Tensor places = at::arange(o.window, history.options());
  const Tensor taken = number(TAMP_SPIKES_TAKEN), in_a_row = number(TAMP_SPIKES_IN_A_ROW);
  const Tensor most = limit(window, places.lt(taken), taken.clamp_max(o.window), o.deviations);
  const Tensor non_finite = at::isfinite(value).logical_not().logical_and(skipped.logical_not());
  const Tensor is_judged = non_finite.logical_or(skipped).logical_not();
  const Tensor can_be_spike = taken.ge(o.warmup).logical_and(in_a_row.lt(o.max_in_a_row));
  const Tensor is_spike = value.gt(most).logical_and(can_be_spike).logical_and(is_judged);
  const Tensor is_kept = is_judged.logical_and(is_spike.logical_not());
  const Tensor is_written = places.eq(taken.remainder(o.window)).logical_and(is_kept);
  const Tensor spikes_in_a_row = at::where(is_spike, in_a_row.add(1), in_a_row.masked_fill(is_kept, 0));
  const Tensor numbers =
      at::stack({taken.add(is_kept), spikes_in_a_row, number(TAMP_SPIKES_FOUND).add(is_spike),
                 number(TAMP_SPIKES_NON_FINITE).add(non_finite), is_kept.logical_not().to(at::kDouble)});
  return at::cat({numbers, at::where(is_written, value, window)});
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
