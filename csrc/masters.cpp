// Conversions of parameters, gradients and master weights between half precision and f32.

#include "masters.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <utility>
#include <vector>

#include "copies.h"
#include "guarded.h"

namespace tamp {
namespace {

using at::Tensor;

// Returns the bits of f32 numbers as i32. All NaNs become the same one.
Tensor bits(const Tensor &numbers) { return numbers.view(at::kInt).masked_fill(numbers.isnan(), 0x7fc00000); }

bool is_half(const Tensor &t) { return t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf; }

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

uint64_t seed_of_step(uint64_t seed, uint64_t step) {
  uint64_t x = seed + step * kSeedStep;
  x = (x ^ (x >> 30)) * kSeedFirst;
  x = (x ^ (x >> 27)) * kSeedSecond;
  return x ^ (x >> 31);
}

Tensor join(const Tensor &parameter, const Tensor &remainder) {
  const Tensor high = parameter.view(at::kShort).to(at::kInt), low = remainder.to(at::kInt).bitwise_and(0xffff);
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
      if (widened[i] == 0) continue;
      halves.push_back(tamp::tensor(parameters[i]));
      dtypes.push_back(halves.back().scalar_type());
    }
    tamp::convert(halves, dtypes);
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
    const at::Tensor &number = tamp::tensor(master), half = tamp::tensor(parameter).detach();
    const at::Tensor rest = tamp::remainder(number);
    const at::Tensor fits = tamp::bits(tamp::join(half, rest)).eq(tamp::bits(number));
    return tamp::give(at::where(fits, rest, at::zeros({}, rest.options())));
  });
}

}  // extern "C"
