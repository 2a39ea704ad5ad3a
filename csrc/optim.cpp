// What happens to gradients between unscaling and the optimizer's step.

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <vector>

#include "guarded.h"

namespace {

std::vector<at::Tensor> gradients(tamp_tensor *const *parameters, size_t count) {
  std::vector<at::Tensor> out;
  for (size_t i = 0; i < count; ++i) {
    const at::Tensor &gradient = tamp::gradient(tamp::tensor(parameters[i]));
    if (gradient.defined()) out.push_back(gradient);
  }
  return out;
}

// As torch.nn.utils.clip_grad_norm_: the norm of the norms, and a factor clamped on the device, so that nobody waits.
at::Tensor clip_norm(const std::vector<at::Tensor> &gradients, double max_norm) {
  const at::Device first = gradients.front().device();
  std::vector<at::Tensor> norms;
  for (const auto &gradient : gradients) {
    norms.push_back(tamp::on_device(at::linalg_vector_norm(gradient, 2), first));
  }
  at::Tensor total = at::linalg_vector_norm(at::stack(norms), 2);
  // Python divides a number by a tensor as reciprocal times number, which rounds otherwise than C++'s division.
  const at::Tensor factor = (total + 1e-6).reciprocal().mul(max_norm).clamp_max(1.0);
  for (const auto &gradient : gradients) gradient.mul_(tamp::on_device(factor, gradient.device()));
  return total;
}

}  // namespace

extern "C" {

tamp_tensor *tamp_clip_grad_norm(tamp_tensor *const *parameters, size_t count, double max_norm, char **err) noexcept {
  return tamp::guarded(err, [&]() -> tamp_tensor * {
    const c10::NoGradGuard no_grad;
    const auto found = gradients(parameters, count);
    return found.empty() ? nullptr : tamp::give(clip_norm(found, max_norm));
  });
}

void tamp_clip_grad_value(tamp_tensor *const *parameters, size_t count, double max, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    for (const auto &gradient : gradients(parameters, count)) gradient.clamp_(-max, max);
  });
}

}  // extern "C"
