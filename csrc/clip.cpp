// What happens to gradients between unscaling and the optimizer's step.

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <unordered_set>
#include <utility>
#include <vector>

#include "gradients.h"
#include "guarded.h"

namespace {

using at::Tensor;

// The gradients of one device.
struct Group {
  at::Device device;
  std::vector<Tensor> gradients;
};

std::vector<Group> groups(tamp_tensor *const *parameters, size_t count) {
  std::vector<Group> out;
  std::unordered_set<const void *> seen;  // a parameter that is there twice has one gradient
  for (size_t i = 0; i < count; ++i) {
    const Tensor &parameter = tamp::tensor(parameters[i]);
    if (!tamp::gradient(parameter).defined()) continue;
    if (!seen.insert(tamp::gradient(parameter).unsafeGetTensorImpl()).second) continue;
    TORCH_CHECK(tamp::gradient(parameter).layout() == at::kStrided,
                "the norm of a sparse gradient cannot be taken; make it dense first");
    Tensor gradient = tamp::numbers(parameter);
    size_t group = 0;
    while (group < out.size() && out[group].device != gradient.device()) ++group;
    if (group == out.size()) out.push_back({gradient.device(), {}});
    out[group].gradients.push_back(std::move(gradient));
  }
  return out;
}

Tensor common_norm(const std::vector<Group> &groups) {
  std::vector<Tensor> norms;
  const at::Device first = groups.front().device;
  for (const auto &group : groups) {
    const Tensor one = at::ones({}, at::TensorOptions().dtype(at::kFloat).device(group.device));
    norms.push_back(tamp::on_device(tamp::norm(group.gradients, one), first));
  }
  if (norms.size() == 1) return norms.front();
  for (auto &norm : norms) norm = norm.to(at::kFloat);
  return at::linalg_vector_norm(at::stack(norms), 2);
}

}  // namespace

extern "C" {

tamp_tensor *tamp_clip_grad_norm(tamp_tensor *const *parameters, size_t count, double max_norm,
                                 uint8_t error_if_nonfinite, uint8_t *is_finite, char **err) noexcept {
  return tamp::guarded(err, [&]() -> tamp_tensor * {
    const c10::NoGradGuard no_grad;
    const auto found = groups(parameters, count);
    if (found.empty()) return nullptr;
    const Tensor norm = common_norm(found);
    *is_finite = error_if_nonfinite == 0 || at::isfinite(norm).item<bool>();
    if (*is_finite != 0) {
      const Tensor factor = tamp::clip_factor(norm, max_norm);
      for (const auto &group : found) tamp::multiply(group.gradients, tamp::on_device(factor, group.device));
    }
    return tamp::give(norm);
  });
}

tamp_tensor *tamp_clip_factor(const tamp_tensor *norm, double max_norm, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    return tamp::give(tamp::clip_factor(tamp::tensor(norm), max_norm));
  });
}

void tamp_clip_grad_value(tamp_tensor *const *parameters, size_t count, double max, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    for (size_t i = 0; i < count; ++i) {
      const Tensor &gradient = tamp::gradient(tamp::tensor(parameters[i]));
      if (gradient.defined()) gradient.clamp_(-max, max);
    }
  });
}

}  // extern "C"
