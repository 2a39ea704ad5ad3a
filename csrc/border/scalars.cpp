// Making, writing and reading tensors of one number.

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <vector>

#include "border/guarded.h"

namespace {

using at::Tensor;

// Brings tensors of one device to host memory as f64, in one transfer.
Tensor on_host(const std::vector<Tensor> &numbers) {
  std::vector<Tensor> parts;
  parts.reserve(numbers.size());
  for (const auto &t : numbers) {
    const Tensor flat = t.detach().reshape({-1});
    // MPS has no f64.
    parts.push_back(flat.is_mps() ? flat.to(at::kCPU).to(at::kDouble) : flat.to(at::kDouble));
  }
  return at::cat(parts).to(at::kCPU);
}

}  // namespace

extern "C" {

tamp_tensor *tamp_number_new(double value, int8_t dtype, int8_t device_type, int8_t device_index, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const at::Device device(static_cast<at::DeviceType>(device_type), device_index);
    const auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(dtype)).device(device);
    return tamp::give(at::full({}, value, options));
  });
}

void tamp_number_set(tamp_tensor *number, double value, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    tamp::tensor(number).fill_(value);
  });
}

void tamp_number_limit(tamp_tensor *number, double most, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    Tensor &t = tamp::tensor(number);
    // libtorch refuses to clamp integers in place by a number that is not an integer.
    const bool is_integer = at::isIntegralType(t.scalar_type(), /*includeBool=*/false);
    t.clamp_max_(is_integer ? at::Scalar(static_cast<int64_t>(most)) : at::Scalar(most));
  });
}

void tamp_numbers_read(tamp_tensor *const *tensors, size_t count, double *values, size_t len, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    std::vector<Tensor> numbers;
    for (size_t i = 0; i < count; ++i) numbers.push_back(tamp::tensor(tensors[i]));
    const Tensor read = on_host(numbers);
    TORCH_CHECK(static_cast<size_t>(read.numel()) == len, "there are ", read.numel(), " numbers to read, not ", len);
    std::copy_n(read.const_data_ptr<double>(), len, values);
  });
}

}  // extern "C"
