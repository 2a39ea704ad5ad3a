// Unscaling and checking gradients, with loops on the CPU, with libtorch's AMP kernels, and with generic operations for
// what these do not support.

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "border/groups.h"
#include "border/guarded.h"
#include "gradients/cpu_passes.h"
#include "gradients/foreach.h"
#include "gradients/norm.h"
#include "gradients/storage.h"

namespace {

using at::Tensor;

float host_reciprocal(const Tensor &scale) { return static_cast<float>(1.0 / scale.item<double>()); }

struct Options {
  bool recheck, check_only, generic;

  // Whether the largest gradients tell if unscaling would overflow, since no kernel checks products that it does not
  // write.
  bool predicts() const { return recheck && check_only; }
};

// The gradients of one device, and everything else that unscaling them needs.
struct UnscaledGroup {
  UnscaledGroup(at::Device where, size_t most_looped) : device(where) { looped.reserve(most_looped); }

  at::Device device;
  std::unique_ptr<Tensor> found_inf;
  std::vector<Tensor> looped, kernel, generic;
  float inverse = 1.0F;  // for the loops
  Tensor factor;         // for the others, on the device
  Tensor divisor;        // the scale, on the device, where only a prediction needs it
  Tensor one;            // for a second check, of the kernel's results
  std::vector<Tensor> full_width;
  tamp::Widened widened;
};

// Whether libtorch's AMP kernel takes a tensor. On CUDA it has none for bf16, and takes an f64 number that f32 cannot
// hold for infinite.
bool has_kernel(const Tensor &t) {
  if (t.is_cuda()) return t.scalar_type() != at::kBFloat16 && t.scalar_type() != at::kDouble;
  return t.is_cpu();
}

using Groups = c10::SmallVector<UnscaledGroup, 1>;

// A parameter, and the coalesced gradient that takes the place of its gradient.
using Replacements = std::vector<std::pair<Tensor, Tensor>>;

// In the order of their first gradients.
Groups groups(tamp_tensor *const *parameters, size_t count, size_t devices, const Options &options,
              Replacements &replacements) {
  Groups out;
  for (size_t i = 0; i < count; ++i) {
    const Tensor &parameter = tamp::tensor(parameters[i]), &gradient = tamp::gradient(parameter);
    const Tensor kept = options.check_only ? gradient : tamp::coalesced(gradient);
    if (!kept.is_same(gradient)) replacements.emplace_back(parameter, kept);
    Tensor t = tamp::numbers(kept);
    const auto takes = [&](const UnscaledGroup &group) { return group.device == t.device(); };
    UnscaledGroup &group = tamp::group_for(out, takes, t.device(), devices == 1 && t.is_cpu() ? count : 0);
    const bool is_generic = options.generic || options.predicts() || !has_kernel(t);
    auto &list = is_generic ? group.generic : (tamp::has_loop(t) ? group.looped : group.kernel);
    list.push_back(std::move(t));
  }
  TORCH_CHECK(out.size() == devices, "the gradients lie on ", out.size(), " devices, not on ", devices);
  return out;
}

// A flag that says that every number is finite.
std::unique_ptr<Tensor> new_flag(at::Device device) {
  const auto number = at::TensorOptions().dtype(at::kFloat).device(device);
  if (!device.is_cpu()) return std::make_unique<Tensor>(at::zeros({}, number));
  auto flag = std::make_unique<Tensor>(at::empty({}, number));
  *flag->mutable_data_ptr<float>() = 0.0F;
  return flag;
}

// Sets `found_inf` if an element is non-finite or, with a defined `factor`, becomes non-finite when it is multiplied by
// that or, with a defined `divisor`, divided by that.
void mark_non_finite(const std::vector<Tensor> &tensors, const Tensor &factor, const Tensor &divisor,
                     Tensor &found_inf) {
  for (const auto &alike : tamp::by_dtype(tensors)) {
    const Tensor largest = tamp::largest(alike);
    Tensor finite = at::isfinite(largest);
    if (factor.defined()) {
      // Multiplication and rounding are monotonic, so that the product of the largest element decides for all.
      const auto wide = largest.to(largest.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
      Tensor product = wide.mul(factor);
      // The fused kernels divide, which can round to infinity where the product does not.
      if (divisor.defined()) product = product.maximum(wide.div(divisor));
      finite = finite.logical_and(at::isfinite(product.to(largest.scalar_type())));
    }
    const Tensor bad = finite.logical_not().to(at::kFloat);
    found_inf.copy_(at::maximum(found_inf, bad.reshape(found_inf.sizes())));
  }
}

// Prepares gradients without an AMP kernel, such as bf16 and f64 on CUDA: checks them, and allocates the memory to
// multiply them in.
void prepare_generic(UnscaledGroup &group, const Options &options) {
  std::vector<Tensor> filled, narrow;
  for (auto &t : group.generic) {
    if (t.numel() > 0) filled.push_back(std::move(t));
  }
  mark_non_finite(filled, options.recheck ? group.factor : Tensor(), group.divisor, *group.found_inf);
  if (options.check_only) return;
  for (auto &t : filled) {
    // As in the kernels, half precision is multiplied in f32.
    auto &list = t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf ? narrow : group.full_width;
    list.push_back(std::move(t));
  }
  tamp::end_lazy_copies(group.full_width);
  group.widened = tamp::Widened(narrow);
}

// Allocates everything that changing a group needs, so that it cannot fail for lack of memory. `inverse` is 1/scale on
// the scale's device, which the first group that needs it computes.
void prepare(UnscaledGroup &group, const Tensor &scale, const Options &options, Tensor &inverse) {
  const at::Device device = group.device;
  const auto number = at::TensorOptions().dtype(at::kFloat).device(device);
  const bool needs_no_factor = options.check_only && !options.recheck;
  Tensor one;
  if (device.is_cpu() || group.kernel.empty()) {
    group.found_inf = new_flag(device);
  } else {
    const Tensor zero_and_one = at::arange(2, number);  // in one launch
    group.found_inf = std::make_unique<Tensor>(zero_and_one.select(0, 0));
    one = zero_and_one.select(0, 1);
  }
  if (device.is_cpu() && (!options.check_only || options.predicts())) group.inverse = host_reciprocal(scale);
  if (options.predicts()) group.divisor = tamp::on_device(scale, device).reshape({});
  const bool plain = group.kernel.empty() && group.generic.empty();
  if (plain || (group.kernel.empty() && needs_no_factor)) {
    if (!plain) prepare_generic(group, options);
    return;
  }
  if (device.is_cpu()) {
    group.factor = at::full({}, group.inverse, number);
  } else if (needs_no_factor) {
    group.factor = one;
  } else {
    if (!inverse.defined()) inverse = tamp::inverse_of(scale);
    group.factor = tamp::on_device(inverse, device);
  }
  if (!options.check_only) tamp::end_lazy_copies(group.kernel);
  if (!group.kernel.empty() && options.recheck) group.one = one.defined() ? one : at::ones({}, number);
  if (!group.generic.empty()) prepare_generic(group, options);
}

// Changes the gradients of a group, and allocates nothing on its device.
uint8_t run(UnscaledGroup &group, const Options &options) {
  const bool bad = tamp::unscale_in_loops(group.looped, group.inverse, options.recheck);
  tamp::fail_point();
  if (!group.kernel.empty()) {
    at::_amp_foreach_non_finite_check_and_unscale_(group.kernel, *group.found_inf, group.factor);
    // Checks the results as well, with a factor of one, which does not change them.
    if (group.one.defined()) {
      at::_amp_foreach_non_finite_check_and_unscale_(group.kernel, *group.found_inf, group.one);
    }
    if (!options.check_only) std::for_each(group.kernel.begin(), group.kernel.end(), tamp::bump_version);
  }
  for (const auto &alike : tamp::by_dtype(group.full_width)) at::_foreach_mul_(alike, group.factor);
  group.widened.multiply(group.factor);
  if (!group.device.is_cpu()) return TAMP_ON_DEVICE;
  float &flag = *group.found_inf->mutable_data_ptr<float>();
  if (bad) flag = 1.0F;
  return flag != 0.0F ? TAMP_NON_FINITE : TAMP_FINITE;
}

// Returns a flag that is one if a norm is not finite, and what the host knows of it.
std::pair<Tensor, uint8_t> non_finite(const Tensor &norm) {
  if (!norm.is_cpu()) {
    Tensor flag = at::empty({}, norm.options().dtype(at::kFloat));
    // Zero times a number that is not finite is NaN, which differs from zero.
    return {at::ne_out(flag, norm.reshape({}).mul(0), 0), TAMP_ON_DEVICE};
  }
  const bool is_finite = std::isfinite(norm.item<double>());
  return {at::scalar_tensor(is_finite ? 0 : 1, at::kFloat), is_finite ? TAMP_FINITE : TAMP_NON_FINITE};
}

}  // namespace

extern "C" {

void tamp_gradients_unscale(tamp_tensor *const *parameters, size_t count, const tamp_tensor *scale,
                            tamp_tensor **found_infs, uint8_t *answers, size_t devices, uint8_t options, uint8_t *begun,
                            char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    const Options chosen = {(options & TAMP_UNSCALE_RECHECK) != 0, (options & TAMP_UNSCALE_CHECK_ONLY) != 0,
                            (options & TAMP_UNSCALE_GENERIC) != 0};
    Replacements replacements;
    Groups all = groups(parameters, count, devices, chosen, replacements);
    Tensor inverse;
    for (auto &group : all) prepare(group, tamp::tensor(scale), chosen, inverse);
    *begun = chosen.check_only ? 0 : 1;
    for (const auto &[parameter, gradient] : replacements) parameter.mutable_grad() = gradient;
    for (size_t i = 0; i < devices; ++i) answers[i] = run(all[i], chosen);
    for (size_t i = 0; i < devices; ++i) found_infs[i] = tamp::give(std::move(all[i].found_inf));
  });
}

tamp_tensor *tamp_gradients_norm(tamp_tensor *const *parameters, size_t count, double norm_type,
                                 const tamp_tensor *scale, tamp_tensor **found_inf, uint8_t *answer,
                                 char **err) noexcept {
  return tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    TORCH_CHECK(count > 0, "there is no gradient to take the norm of");
    std::vector<Tensor> gradients;
    for (size_t i = 0; i < count; ++i) {
      const Tensor &parameter = tamp::tensor(parameters[i]);
      TORCH_CHECK(tamp::gradient(parameter).layout() == at::kStrided,
                  "the norm of a sparse gradient cannot be taken; make it dense first");
      gradients.push_back(tamp::for_norm(tamp::gradient(parameter), norm_type));
    }
    const auto device = gradients.front().device();
    const Tensor factor = scale == nullptr ? at::ones({}, at::TensorOptions(device).dtype(at::kFloat))
                                           : tamp::on_device(tamp::inverse_of(tamp::tensor(scale)), device);
    auto norm = std::make_unique<Tensor>(tamp::norm(gradients, norm_type, factor));
    auto [flag, known] = non_finite(*norm);
    *answer = known;
    *found_inf = tamp::give(std::move(flag));
    return tamp::give(std::move(norm));
  });
}

}  // extern "C"
