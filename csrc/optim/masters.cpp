// Conversions of parameters, gradients and master weights between half precision and f32.

#include "optim/masters.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "border/guarded.h"
#include "gradients/foreach_copy.h"

namespace tamp {
namespace {

using at::Tensor;

// Returns the bits of f32 numbers as i32. All NaNs become the same one.
Tensor bits(const Tensor &numbers) { return numbers.view(at::kInt).masked_fill(numbers.isnan(), 0x7fc00000); }

// Whether numbers are the same; all NaNs are.
Tensor same(const Tensor &one, const Tensor &other) {
  return one.eq(other).logical_or(one.isnan().logical_and(other.isnan()));
}

// Rounds f32 numbers to the nearest bf16 numbers, with ties away from zero, as `split` does.
Tensor rounded_away(const Tensor &numbers) {
  return bits(numbers).add(0x8000).bitwise_right_shift(16).to(at::kShort).view(at::kBFloat16);
}

// Whether numbers round to those of a parameter, which may have been converted to another dtype since.
Tensor round_to(const Tensor &numbers, const Tensor &parameter) {
  const auto gives = [&](const Tensor &rounded) { return same(rounded.to(parameter.scalar_type()), parameter); };
  const Tensor narrow = numbers.to(at::kFloat);
  return gives(numbers)
      .logical_or(gives(numbers.to(at::kBFloat16)))
      .logical_or(gives(rounded_away(narrow)))
      .logical_or(gives(numbers.to(at::kHalf)));
}

// The dtype of a parameter's gradient, or the one that the next gradient gets.
at::ScalarType gradient_dtype(const Tensor &parameter) {
  const Tensor &gradient = tamp::gradient(parameter);
  return gradient.defined() ? gradient.scalar_type() : parameter.grad_dtype().value_or(parameter.scalar_type());
}

// Converts the gradients of parameters to `dtype`. On devices other than the CPU all of them are converted before the
// first is replaced, so that none has changed if memory runs out. On the CPU they are converted one at a time, to save
// memory. `done` counts those that were replaced.
void convert(const std::vector<Tensor> &parameters, const std::vector<at::ScalarType> &dtypes, size_t &done) {
  std::vector<Tensor> converted(parameters.size());
  tamp::Copies copies;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Tensor &before = tamp::gradient(parameters[i]);
    if (!before.defined() || before.is_cpu()) continue;
    if (before.layout() == at::kStrided) {
      converted[i] = at::empty_like(before, dtypes[i]);
      copies.add(converted[i], before);
    } else {
      converted[i] = before.to(dtypes[i]);
    }
  }
  copies.run();
  for (size_t i = 0; i < parameters.size(); ++i, ++done) {
    const Tensor &before = tamp::gradient(parameters[i]);
    if (!before.defined()) {
      parameters[i].set_grad_dtype(dtypes[i]);
    } else {
      replace_gradient(parameters[i], dtypes[i], converted[i].defined() ? converted[i] : before.detach().to(dtypes[i]));
    }
  }
}

// Converts all, or none if it fails.
void convert(const std::vector<Tensor> &parameters, const std::vector<at::ScalarType> &dtypes) {
  std::vector<at::ScalarType> before;
  for (const auto &parameter : parameters) before.push_back(gradient_dtype(parameter));
  size_t done = 0;
  try {
    convert(parameters, dtypes, done);
  } catch (...) {
    const auto end = static_cast<std::ptrdiff_t>(done);
    convert({parameters.begin(), parameters.begin() + end}, {before.begin(), before.begin() + end}, done);
    throw;
  }
}

}  // namespace

bool is_half(const Tensor &t) { return t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf; }

void narrow_later_gradients(const Tensor &parameter) {
  if (!parameter.defined()) return;
  torch::autograd::AutogradMeta *meta = torch::autograd::impl::get_autograd_meta(parameter);
  if (meta == nullptr || !meta->grad_dtype_) return;
  // libtorch does not change the dtype while there is a gradient, which then has the right one.
  if (!tamp::gradient(parameter).defined()) parameter.set_grad_dtype(parameter.scalar_type());
  // Otherwise a parameter that is converted would still have its gradients in this dtype.
  meta->grad_dtype_.reset();
}

void replace_gradient(const Tensor &parameter, at::ScalarType dtype, Tensor gradient) {
  // libtorch does not change the dtype while there is a gradient.
  Tensor before = std::exchange(parameter.mutable_grad(), Tensor());
  try {
    parameter.set_grad_dtype(dtype);
  } catch (const std::exception &) {
    parameter.mutable_grad() = std::move(before);
    throw;
  }
  parameter.mutable_grad() = std::move(gradient);
}

float next_step(float step, uint8_t master) {
  const float next = step + 1;
  return master == TAMP_MASTER_STOCHASTIC ? std::max(next, std::nextafter(step, kMostSteps)) : next;
}

uint64_t seed_of_step(uint64_t seed, float steps) {
  // A NaN counts as zero.
  const float whole = std::min(std::max(0.0F, steps), kMostSteps);
  uint64_t x = seed + (static_cast<uint64_t>(whole) + 1) * kSeedStep;
  x = (x ^ (x >> 30)) * kSeedFirst;
  x = (x ^ (x >> 27)) * kSeedSecond;
  return x ^ (x >> 31);
}

Tensor join(const Tensor &parameter, const Tensor &remainder) {
  const Tensor high = parameter.view(at::kShort).to(at::kInt);
  // The parameter may have moved to another device since.
  const Tensor low = remainder.to(high.options()).bitwise_and(0xffff);
  return (high - low.bitwise_right_shift(15)).bitwise_left_shift(16).bitwise_or(low).view(at::kFloat);
}

Tensor remainder(const Tensor &master) { return bits(master).bitwise_and(0xffff).to(at::kShort); }

}  // namespace tamp

extern "C" {

void tamp_gradients_widen(tamp_tensor *const *parameters, size_t count, uint8_t *widened, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    std::vector<at::Tensor> halves;
    for (size_t i = 0; i < count; ++i) {
      const at::Tensor &parameter = tamp::tensor(parameters[i]);
      widened[i] = tamp::is_half(parameter) && tamp::gradient_dtype(parameter) != at::kFloat;
      if (widened[i] != 0) halves.push_back(parameter);
    }
    tamp::convert(halves, std::vector<at::ScalarType>(halves.size(), at::kFloat));
  });
}

void tamp_gradients_narrow(tamp_tensor *const *parameters, size_t count, const uint8_t *widened, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    std::vector<at::Tensor> halves;
    std::vector<at::ScalarType> dtypes;
    for (size_t i = 0; i < count; ++i) {
      const at::Tensor &parameter = tamp::tensor(parameters[i]);
      if (!parameter.defined() || (widened != nullptr && widened[i] == 0)) continue;
      if (tamp::gradient_dtype(parameter) == parameter.scalar_type()) continue;
      halves.push_back(parameter);
      dtypes.push_back(parameter.scalar_type());
    }
    tamp::convert(halves, dtypes);
    if (widened != nullptr) return;
    for (size_t i = 0; i < count; ++i) tamp::narrow_later_gradients(tamp::tensor(parameters[i]));
  });
}

tamp_tensor *tamp_master_join(const tamp_tensor *parameter, const tamp_tensor *remainder, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    return tamp::give(tamp::join(tamp::tensor(parameter).detach(), tamp::tensor(remainder)));
  });
}

tamp_tensor *tamp_master_remainder_of(const tamp_tensor *master, const tamp_tensor *parameter, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    const at::Tensor half = tamp::tensor(parameter).detach(), number = tamp::tensor(master).to(half.device());
    const at::Tensor rest = tamp::remainder(number);
    const at::Tensor fits = tamp::bits(tamp::join(half, rest)).eq(tamp::bits(number));
    return tamp::give(at::where(fits, rest, at::zeros({}, rest.options())));
  });
}

tamp_tensor *tamp_master_numbers(const tamp_tensor *master, const tamp_tensor *parameter, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    const at::Tensor now = tamp::tensor(parameter).detach();
    at::Tensor numbers = tamp::tensor(master).to(now.device());
    if (numbers.scalar_type() == at::kShort) numbers = tamp::join(now.to(at::kBFloat16), numbers);
    const auto dtype = now.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    return tamp::give(at::where(tamp::round_to(numbers, now), numbers.to(dtype), now.to(dtype)));
  });
}

}  // extern "C"
