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

// Converts half-precision gradients to f32. On devices other than the CPU all of them are converted before the first is
// replaced, so that none has changed if memory runs out. On the CPU they are converted one at a time, to save memory.
void widen_gradients(const std::vector<Tensor> &parameters) {
  std::vector<Tensor> wide(parameters.size());
  tamp::Copies copies;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Tensor &before = tamp::gradient(parameters[i]);
    if (!before.defined() || before.scalar_type() == at::kFloat || before.is_cpu()) continue;
    if (before.layout() == at::kStrided) {
      wide[i] = at::empty_like(before, at::kFloat);
      copies.add(wide[i], before);
    } else {
      wide[i] = before.to(at::kFloat);
    }
  }
  copies.run();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Tensor &before = tamp::gradient(parameters[i]);
    if (!before.defined()) {
      parameters[i].set_grad_dtype(at::kFloat);
    } else if (before.scalar_type() != at::kFloat) {
      replace_gradient(parameters[i], at::kFloat, wide[i].defined() ? wide[i] : before.detach().to(at::kFloat));
    }
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

void tamp_gradients_widen(tamp_tensor *const *parameters, size_t count, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    std::vector<at::Tensor> halves;
    for (size_t i = 0; i < count; ++i) {
      const at::Tensor &parameter = tamp::tensor(parameters[i]);
      if (tamp::is_half(parameter)) halves.push_back(parameter);
    }
    tamp::widen_gradients(halves);
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
