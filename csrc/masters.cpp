#include "masters.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "guarded.h"

namespace tamp {
namespace {

using at::Tensor;

constexpr int64_t kLow32 = 0xffffffff;
constexpr int64_t kNaN = 0x7fc00000;

// The bits of f32 numbers as i32. One NaN stands for all.
Tensor bits(const Tensor &numbers) { return numbers.view(at::kInt).masked_fill(numbers.isnan(), kNaN); }

// The upper half of words as bf16.
Tensor upper(const Tensor &words) { return words.bitwise_right_shift(16).to(at::kShort).view(at::kBFloat16); }

Tensor shifted(const Tensor &x, int64_t by, int64_t width) {
  return x.bitwise_right_shift(by).bitwise_and((int64_t{1} << (width - by)) - 1);
}

// `mixed` of kernel_masters.cpp, on 32 bits of an i64.
Tensor mixed(Tensor x) {
  x = (x ^ shifted(x, 16, 32)).mul(int64_t{0x85ebca6b}).bitwise_and(kLow32);
  x = (x ^ shifted(x, 13, 32)).mul(int64_t{0xc2b2ae35}).bitwise_and(kLow32);
  return x ^ shifted(x, 16, 32);
}

constexpr uint64_t kStep = 0x9e3779b97f4a7c15, kFirst = 0xbf58476d1ce4e5b9, kSecond = 0x94d049bb133111eb;

// `seed_of_step` where only the device knows the step.
Tensor seed_on_device(uint64_t seed, const Tensor &step) {
  const auto constant = [](uint64_t x) { return static_cast<int64_t>(x); };
  Tensor x = step.to(at::kLong).mul(constant(kStep)).add(constant(seed));
  x = (x ^ shifted(x, 30, 64)).mul(constant(kFirst));
  x = (x ^ shifted(x, 27, 64)).mul(constant(kSecond));
  return x ^ shifted(x, 31, 64);
}

// What kernels::round_at_random does.
Tensor rounded_at_random(const Tensor &numbers, const Tensor &seed) {
  const Tensor key = seed.bitwise_and(kLow32), other = shifted(seed, 32, 64);
  const Tensor index = at::arange(numbers.numel(), numbers.options().dtype(at::kLong));
  const Tensor page = mixed(other ^ index.bitwise_right_shift(32));
  const Tensor random = shifted(mixed((mixed(index.bitwise_and(kLow32) ^ key) + page).bitwise_and(kLow32)), 16, 32);
  const Tensor words = bits(numbers);
  const Tensor noise = random.to(at::kInt).view(numbers.sizes()).masked_fill(numbers.isfinite().logical_not(), 0);
  return upper(words + noise);
}

}  // namespace

uint64_t seed_of_step(uint64_t seed, uint64_t step) {
  uint64_t x = seed + step * kStep;
  x = (x ^ (x >> 30)) * kFirst;
  x = (x ^ (x >> 27)) * kSecond;
  return x ^ (x >> 31);
}

void widen_gradient(const Tensor &parameter) {
  if (parameter.scalar_type() != at::kBFloat16 && parameter.scalar_type() != at::kHalf) return;
  const Tensor before = tamp::gradient(parameter);
  if (before.defined()) {
    if (before.scalar_type() == at::kFloat) return;
    Tensor wide = before.detach().to(at::kFloat);
    // libtorch does not change the dtype of a gradient that is there.
    parameter.mutable_grad().reset();
    parameter.set_grad_dtype(at::kFloat);
    parameter.mutable_grad() = std::move(wide);
  } else {
    parameter.set_grad_dtype(at::kFloat);
  }
}

Tensor join(const Tensor &parameter, const Tensor &remainder) {
  const Tensor high = parameter.view(at::kShort).to(at::kInt), low = remainder.to(at::kInt).bitwise_and(0xffff);
  return (high - low.bitwise_right_shift(15)).bitwise_left_shift(16).bitwise_or(low).view(at::kFloat);
}

Tensor remainder(const Tensor &master) { return bits(master).bitwise_and(0xffff).to(at::kShort); }

Tensor StandIns::parameter(const Tensor &parameter, const Master &master, const Tensor &step) {
  if (master.kind == TAMP_MASTER_FLOAT) {
    halves_.push_back(parameter);
    floats_.push_back(master.tensor);
    return master.tensor;
  }
  const bool remains = master.kind == TAMP_MASTER_REMAINDER;
  Tensor number = remains ? join(parameter, master.tensor) : parameter.to(at::kFloat);
  rounded_.push_back({parameter, number, step, master});
  return number;
}

Tensor StandIns::gradient(const Tensor &gradient, const Tensor &like) {
  if (gradient.scalar_type() == at::kFloat) return gradient;
  gradients_.push_back(gradient);
  widened_.push_back(at::empty_like(like));
  return widened_.back();
}

void StandIns::fill() const {
  if (!gradients_.empty()) at::_foreach_copy_(widened_, gradients_);
}

void StandIns::write_back() const {
  if (!halves_.empty()) at::_foreach_copy_(halves_, floats_);
  for (const auto &r : rounded_) {
    if (r.master.kind == TAMP_MASTER_REMAINDER) {
      r.parameter.copy_(upper(bits(r.number) + 0x8000));
      r.master.tensor.copy_(remainder(r.number));
    } else {
      r.parameter.copy_(rounded_at_random(r.number, seed_on_device(r.master.seed, r.step)));
    }
  }
}

}  // namespace tamp

extern "C" {

void tamp_gradients_widen(tamp_tensor *const *parameters, size_t count, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    for (size_t i = 0; i < count; ++i) tamp::widen_gradient(tamp::tensor(parameters[i]));
  });
}

tamp_tensor *tamp_master_join(const tamp_tensor *parameter, const tamp_tensor *remainder, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    return tamp::give(tamp::join(tamp::tensor(parameter).detach(), tamp::tensor(remainder)));
  });
}

void tamp_stamps(tamp_tensor *const *parameters, size_t count, tamp_stamp *stamps, char **err) noexcept {
  tamp::guarded(err, [&] {
    for (size_t i = 0; i < count; ++i) {
      const at::Tensor &t = tamp::tensor(parameters[i]);
      const void *data = t.has_storage() ? t.const_data_ptr() : nullptr;
      stamps[i] = {reinterpret_cast<uintptr_t>(data), t.is_inference() ? 0 : static_cast<uint64_t>(t._version())};
    }
  });
}

void tamp_master_renew(const tamp_tensor *parameter, tamp_tensor *master, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    const at::Tensor now = tamp::tensor(parameter).detach();
    at::Tensor &kept = tamp::tensor(master);
    if (kept.scalar_type() == at::kShort) {
      kept.zero_();
    } else {
      kept.copy_(at::where(kept.to(now.scalar_type()).eq(now), kept, now.to(kept.scalar_type())));
    }
  });
}

tamp_tensor *tamp_master_remainder(const tamp_tensor *master, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    return tamp::give(tamp::remainder(tamp::tensor(master)));
  });
}

}  // extern "C"
