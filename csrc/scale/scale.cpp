// The loss scale of a scaler: how it grows and backs off.

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>

#include <algorithm>

#include "border/guarded.h"
#include "gradients/foreach.h"

namespace {

using at::Tensor;

// The device on which tensors are added: the first that is not the CPU, or the CPU if all of them are there.
at::Device place(tamp_tensor *const *tensors, size_t count) {
  at::Device device = tamp::tensor(tensors[0]).device();
  for (size_t i = 1; i < count && device.is_cpu(); ++i) device = tamp::tensor(tensors[i]).device();
  return device;
}

// A tensor on `device` that is not zero if any of the tensors is not zero.
Tensor sum_on(tamp_tensor *const *tensors, size_t count, at::Device device) {
  Tensor sum = tamp::on_device(tamp::tensor(tensors[0]), device);
  for (size_t i = 1; i < count; ++i) sum = sum + tamp::on_device(tamp::tensor(tensors[i]), device);
  return sum;
}

// The tolerance counts after an iteration, and whether it had an overflow that the scale does not back off at.
struct Tolerance {
  Tensor counts;
  Tensor is_tolerated;
};

// The share of overflows is computed in f64, as it would be in Python.
Tolerance count(const Tensor &counts, const Tensor &found, const tamp_scale_rule &rule) {
  const Tensor overflow = found.to(at::kLong);
  const Tensor left = (counts[TAMP_TOLERANCE_HYSTERESIS] - overflow).clamp_min(0);
  const Tensor iterations = counts[TAMP_TOLERANCE_ITERATIONS] + 1;
  const Tensor overflows = counts[TAMP_TOLERANCE_OVERFLOWS] + overflow;
  const auto wide = counts.device().is_mps() ? at::kFloat : at::kDouble;  // MPS has no f64
  const Tensor often = overflows.to(wide).div(iterations.to(wide)).ge(rule.tolerance);
  const Tensor backs_off = left.eq(0).logical_and(often);
  return {at::stack({left, iterations, overflows}), found.logical_and(backs_off.logical_not())};
}

// The counts for the next iteration. Those of iterations and overflows start again when the scale has backed off or
// could grow.
Tensor renew(const Tolerance &tolerance, const Tensor &found, const Tensor &tracker, const tamp_scale_rule &rule) {
  const Tensor good = found.logical_not();
  const Tensor grown = good.logical_and(tracker.reshape({}).eq(0));
  const Tensor full = rule.consecutive != 0 ? good : grown;
  const Tensor begun = grown.logical_or(found.logical_and(tolerance.is_tolerated.logical_not()));
  const Tensor start = at::zeros_like(tolerance.counts);
  start[TAMP_TOLERANCE_HYSTERESIS].fill_(rule.hysteresis);
  return at::where(at::stack({full, begun, begun}), start, tolerance.counts);
}

void clamp(Tensor &scale, const tamp_scale_rule &rule) {
  if (!scale.is_cpu()) {
    scale.clamp_(rule.min_scale, rule.max_scale);
    return;
  }
  float &value = *scale.mutable_data_ptr<float>();
  value = std::min(std::max(value, static_cast<float>(rule.min_scale)), static_cast<float>(rule.max_scale));
}

void grow_or_back_off(Tensor &scale, Tensor &tracker, const Tensor &found_inf, const tamp_scale_rule &rule) {
  at::_amp_update_scale_(scale, tracker, found_inf, rule.growth_factor, rule.backoff_factor, rule.growth_interval);
  clamp(scale, rule);
}

// A scale at the end of an iteration, and everything that its update allocates.
struct Update {
  Tensor scale, tracker, counts;
  Tensor found_inf;
  Tensor next_scale, next_tracker, next_counts;  // only with tolerance counts
};

Update prepare(const tamp_scale_update &given) {
  TORCH_CHECK(given.count > 0, "no found_inf tensor");
  Update out = {tamp::tensor(given.scale), tamp::tensor(given.tracker), {}, {}, {}, {}, {}};
  out.found_inf = sum_on(given.found_infs, given.count, out.scale.device());
  if (given.tolerance_counts == nullptr) return out;
  out.counts = tamp::tensor(given.tolerance_counts);
  const Tensor found = out.found_inf.reshape({}).ne(0);
  const Tolerance tolerance = count(out.counts, found, given.rule);
  out.next_tracker = out.tracker.clone();
  Tensor moved = out.scale.clone();
  grow_or_back_off(moved, out.next_tracker, out.found_inf, given.rule);
  out.next_scale = at::where(tolerance.is_tolerated, out.scale, moved);
  out.next_counts = renew(tolerance, found, out.next_tracker, given.rule);
  return out;
}

// Allocates nothing, so that no scale stays behind for lack of memory.
void run(Update &update, const tamp_scale_rule &rule) {
  if (tamp::planted("host_read")) *static_cast<volatile float *>(update.scale.data_ptr());
  if (!update.counts.defined()) return grow_or_back_off(update.scale, update.tracker, update.found_inf, rule);
  update.scale.copy_(update.next_scale);
  update.tracker.copy_(update.next_tracker);
  update.counts.copy_(update.next_counts);
}

}  // namespace

extern "C" {

uint8_t tamp_any_nonzero(tamp_tensor *const *tensors, size_t count, char **err) noexcept {
  return tamp::guarded(err, [&]() -> uint8_t {
    if (count == 0) return 0;
    return sum_on(tensors, count, place(tensors, count)).item<float>() != 0.0F;
  });
}

tamp_tensor *tamp_flags_join(tamp_tensor *const *flags, size_t count, char **err) noexcept {
  return tamp::guarded(err, [&] {
    TORCH_CHECK(count > 0, "no found_inf tensor");
    const Tensor sum = sum_on(flags, count, place(flags, count));
    return tamp::give(count == 1 || tamp::planted("two_for_true") ? sum : sum.clamp_max(1));
  });
}

void tamp_scales_update(const tamp_scale_update *updates, size_t count, char **err) noexcept {
  tamp::guarded(err, [&] {
    c10::SmallVector<Update, 1> all;
    for (size_t i = 0; i < count; ++i) all.push_back(prepare(updates[i]));
    for (size_t i = 0; i < count; ++i) run(all[i], updates[i].rule);
  });
}

}  // extern "C"
