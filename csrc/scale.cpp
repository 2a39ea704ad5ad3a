// The scale of a scaler: how it grows and backs off.

#include <ATen/ATen.h>

#include <algorithm>

#include "gradients.h"
#include "guarded.h"

namespace {

using at::Tensor;

// One tensor on `device` that is not zero when any of the tensors is not.
Tensor sum_on(tamp_tensor *const *tensors, size_t count, at::Device device) {
  Tensor sum = tamp::on_device(tamp::tensor(tensors[0]), device);
  for (size_t i = 1; i < count; ++i) sum = sum + tamp::on_device(tamp::tensor(tensors[i]), device);
  return sum;
}

// The counts of an iteration, and whether its overflow leaves the scale alone.
struct Patience {
  Tensor counts;
  Tensor tolerated;
};

// A share of overflows is a quotient of f64, as it is in Python.
Patience count(const Tensor &counts, const Tensor &found, const tamp_scale_rule &rule) {
  const Tensor overflow = found.to(at::kLong);
  const Tensor left = (counts[TAMP_PATIENCE_HYSTERESIS] - overflow).clamp_min(0);
  const Tensor iterations = counts[TAMP_PATIENCE_ITERATIONS] + 1;
  const Tensor overflows = counts[TAMP_PATIENCE_OVERFLOWS] + overflow;
  const auto wide = counts.device().is_mps() ? at::kFloat : at::kDouble;  // MPS has no f64
  const Tensor often = overflows.to(wide).div(iterations.to(wide)).ge(rule.tolerance);
  const Tensor backs_off = left.eq(0).logical_and(often);
  return {at::stack({left, iterations, overflows}), found.logical_and(backs_off.logical_not())};
}

// The counts for the next iteration: they begin anew when the scale has backed off or its time to grow has come.
Tensor renew(const Patience &patience, const Tensor &found, const Tensor &tracker, const tamp_scale_rule &rule) {
  const Tensor good = found.logical_not();
  const Tensor grown = good.logical_and(tracker.reshape({}).eq(0));
  const Tensor full = rule.consecutive != 0 ? good : grown;
  const Tensor begun = grown.logical_or(found.logical_and(patience.tolerated.logical_not()));
  const Tensor start = at::zeros_like(patience.counts);
  start[TAMP_PATIENCE_HYSTERESIS].fill_(rule.hysteresis);
  return at::where(at::stack({full, begun, begun}), start, patience.counts);
}

void clamp(Tensor &scale, const tamp_scale_rule &rule) {
  if (!scale.is_cpu()) {
    scale.clamp_(rule.min_scale, rule.max_scale);
    return;
  }
  float &value = *scale.mutable_data_ptr<float>();
  value = std::min(std::max(value, static_cast<float>(rule.min_scale)), static_cast<float>(rule.max_scale));
}

void update(Tensor &scale, Tensor &tracker, const Tensor &found_inf, const tamp_scale_rule &rule) {
  at::_amp_update_scale_(scale, tracker, found_inf, rule.growth_factor, rule.backoff_factor, rule.growth_interval);
  clamp(scale, rule);
}

void update_patiently(Tensor &scale, Tensor &tracker, Tensor &counts, const Tensor &found_inf,
                      const tamp_scale_rule &rule) {
  const Tensor found = found_inf.reshape({}).ne(0);
  const Patience patience = count(counts, found, rule);
  // Whatever needs memory comes before the first change.
  Tensor next = scale.clone(), ticks = tracker.clone();
  update(next, ticks, found_inf, rule);
  next = at::where(patience.tolerated, scale, next);
  const Tensor renewed = renew(patience, found, ticks, rule);
  scale.copy_(next);
  tracker.copy_(ticks);
  counts.copy_(renewed);
}

}  // namespace

extern "C" {

uint8_t tamp_any_nonzero(tamp_tensor *const *tensors, size_t count, char **err) noexcept {
  return tamp::guarded(err, [&]() -> uint8_t {
    if (count == 0) return 0;
    at::Device device = tamp::tensor(tensors[0]).device();
    for (size_t i = 1; i < count && device.is_cpu(); ++i) device = tamp::tensor(tensors[i]).device();
    return sum_on(tensors, count, device).item<float>() != 0.0F;
  });
}

void tamp_scale_update(tamp_tensor *scale, tamp_tensor *tracker, tamp_tensor *patience, tamp_tensor *const *found_infs,
                       size_t count, const tamp_scale_rule *rule, char **err) noexcept {
  tamp::guarded(err, [&] {
    TORCH_CHECK(count > 0, "no found_inf tensor");
    Tensor &value = tamp::tensor(scale);
    const Tensor found_inf = sum_on(found_infs, count, value.device());
    if (patience == nullptr) {
      update(value, tamp::tensor(tracker), found_inf, *rule);
    } else {
      update_patiently(value, tamp::tensor(tracker), tamp::tensor(patience), found_inf, *rule);
    }
  });
}

}  // extern "C"
