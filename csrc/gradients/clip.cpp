// Clipping of gradients, between unscaling and the optimizer's step.

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "border/groups.h"
#include "border/guarded.h"
#include "gradients/foreach.h"
#include "gradients/gradients.h"
#include "gradients/norm.h"
#include "gradients/parallel_chunks.h"
#include "gradients/storage.h"

namespace {

using at::Tensor;

using Lists = std::vector<std::vector<Tensor>>;

// Fails for elements without arithmetic, such as Float8.
void check_dtype(const Tensor &gradient) {
  TORCH_CHECK(tamp::with_floating(c10::toRealValueType(gradient.scalar_type()), [](auto *) {}), "a gradient that is ",
              gradient.scalar_type(), " can be neither normed nor clipped");
}

// Checks the gradients of parameters, and returns the parameters that have one, each once.
template <typename F>
std::vector<tamp_tensor *> with_gradients(tamp_tensor *const *parameters, size_t count, const F &check) {
  std::vector<tamp_tensor *> out;
  ska::flat_hash_set<const void *> seen;  // a parameter that is listed twice has one gradient
  seen.reserve(count);
  out.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const Tensor &gradient = tamp::gradient(tamp::tensor(parameters[i]));
    if (!gradient.defined() || !seen.insert(gradient.unsafeGetTensorImpl()).second) continue;
    check(gradient);
    out.push_back(parameters[i]);
  }
  tamp::separate(out.data(), out.size(), /*from_all=*/false);
  return out;
}

void check_normed(const Tensor &gradient) {
  TORCH_CHECK(gradient.layout() == at::kStrided, "the norm of a sparse gradient cannot be taken; make it dense first");
  check_dtype(gradient);
}

Lists by_device(const std::vector<Tensor> &tensors) {
  return tamp::group_by(tensors, [](const Tensor &t) { return t.device(); });
}

// Groups what `f` returns for the gradients of distinct parameters by device.
template <typename F>
Lists groups(tamp_tensor *const *parameters, size_t count, const F &f) {
  std::vector<Tensor> gradients;
  for (size_t i = 0; i < count; ++i) gradients.push_back(f(tamp::gradient(tamp::tensor(parameters[i]))));
  return by_device(gradients);
}

Tensor common_norm(const Lists &groups, double norm_type) {
  std::vector<Tensor> norms;
  for (const auto &group : groups) {
    const Tensor one = at::ones({}, at::TensorOptions().dtype(at::kFloat).device(group.front().device()));
    norms.push_back(tamp::norm(group, norm_type, one));
  }
  return tamp::norm_of_norms(norms, norm_type);
}

void check_clamped(const Tensor &gradient) {
  TORCH_CHECK(gradient.layout() == at::kStrided, "a sparse gradient cannot be clamped; make it dense first");
  TORCH_CHECK(!gradient.is_complex(), "a complex gradient cannot be clamped: complex numbers have no order");
  check_dtype(gradient);
}

// Groups tensors by device and dtype.
Lists alike(const std::vector<Tensor> &tensors) {
  Lists out;
  for (const auto &one : by_device(tensors)) {
    for (auto &list : tamp::by_dtype(one)) out.push_back(std::move(list));
  }
  return out;
}

// The largest finite number of a dtype, and so the largest limit that can change a number.
double largest_of(at::ScalarType dtype) {
  double out = std::numeric_limits<double>::infinity();
  tamp::with_floating(dtype, [&](auto *type) {
    out = static_cast<double>(std::numeric_limits<std::remove_pointer_t<decltype(type)>>::max());
  });
  return out;
}

// Clamps gradients of one device and dtype in two launches, like PyTorch. A NaN stays a NaN.
void clamp(const std::vector<Tensor> &gradients, double max) {
  at::_foreach_clamp_min_(gradients, -max);
  at::_foreach_clamp_max_(gradients, max);
}

void clip_by(const Tensor &norm, double max_norm, const Lists &groups) {
  const Tensor factor = tamp::clip_factor(norm, max_norm);
  // All memory is allocated before the first multiplication.
  std::vector<tamp::Product> products;
  for (const auto &group : groups) products.emplace_back(group, factor);
  for (const auto &product : products) product.run();
}

}  // namespace

extern "C" {

tamp_tensor *tamp_clip_grad_norm(tamp_tensor *const *parameters, size_t count, double max_norm, double norm_type,
                                 uint8_t error_if_nonfinite, uint8_t *is_finite, char **err) noexcept {
  return tamp::guarded(err, [&]() -> tamp_tensor * {
    const c10::NoGradGuard no_grad;
    const auto normed = with_gradients(parameters, count, check_normed);
    if (normed.empty()) return nullptr;
    const auto found = groups(normed.data(), normed.size(), tamp::numbers);
    const auto for_norm = [&](const Tensor &gradient) { return tamp::for_norm(gradient, norm_type); };
    const Tensor norm = norm_type == 2 ? common_norm(found, norm_type)
                                       : common_norm(groups(normed.data(), normed.size(), for_norm), norm_type);
    *is_finite = error_if_nonfinite == 0 || at::isfinite(norm).item<bool>();
    if (*is_finite != 0) clip_by(norm, max_norm, found);
    return tamp::give(norm);
  });
}

void tamp_clip_by_norm(tamp_tensor *const *parameters, size_t count, const tamp_tensor *norm, double max_norm,
                       char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    clip_by(tamp::tensor(norm), max_norm, groups(parameters, count, tamp::numbers));
  });
}

tamp_tensor *tamp_norms_join(tamp_tensor *const *norms, size_t count, double norm_type, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    TORCH_CHECK(count > 0, "no norm");
    std::vector<Tensor> all;
    for (size_t i = 0; i < count; ++i) all.push_back(tamp::tensor(norms[i]));
    return tamp::give(tamp::norm_of_norms(all, norm_type));
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
    std::vector<Tensor> single, lists;
    for (auto *parameter : with_gradients(parameters, count, check_clamped)) {
      const Tensor &gradient = tamp::gradient(tamp::tensor(parameter));
      // libtorch refuses a limit beyond the range of the dtype, which clamps nothing.
      if (max > largest_of(gradient.scalar_type())) continue;
      // On the CPU, one pass over a gradient takes less time than the two of `clamp`.
      (gradient.is_cpu() || gradient.is_neg() ? single : lists).push_back(gradient);
    }
    tamp::end_lazy_copies(lists);
    for (auto &gradient : single) gradient.clamp_(-max, max);
    for (const auto &list : alike(lists)) clamp(list, max);
  });
}

}  // extern "C"
