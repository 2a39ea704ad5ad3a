// Gradient scaling: the AMP kernels of libtorch, and what they leave out.

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "gradients.h"
#include "guarded.h"

namespace {

using at::Tensor;

// ---- inspection

// Whether two elements of a strided tensor can share memory. Exact for the layouts that libtorch makes; a tensor whose
// dimensions interleave counts as overlapping, since unscaling an element twice is worse than refusing it.
bool overlaps(const Tensor &t) {
  if (t.is_non_overlapping_and_dense() || t.numel() <= 1) return false;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t i = 0; i < t.dim(); ++i) {
    if (t.size(i) > 1) dims.emplace_back(t.stride(i), t.size(i));
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 1;  // elements covered by the dimensions so far
  for (const auto &[stride, size] : dims) {
    if (stride < reach) return true;
    reach = stride * (size - 1) + reach;
  }
  return false;
}

uintptr_t identity(const Tensor &t) { return reinterpret_cast<uintptr_t>(t.unsafeGetTensorImpl()); }

tamp_gradient inspect(const Tensor &parameter) {
  tamp_gradient out = {};
  if (!parameter.defined()) return out;
  out.parameter = identity(parameter);
  if (parameter.requires_grad()) out.flags |= TAMP_GRADIENT_REQUIRES_GRAD;
  const Tensor &gradient = tamp::gradient(parameter);
  if (!gradient.defined()) return out;
  out.gradient = identity(gradient);
  out.version = gradient.is_inference() ? 0 : static_cast<uint32_t>(gradient._version());
  out.device_type = static_cast<int8_t>(gradient.device().type());
  out.device_index = static_cast<int8_t>(gradient.device().index());
  out.dtype = static_cast<int8_t>(gradient.scalar_type());
  if (gradient.is_meta()) return out;
  if (gradient.is_sparse()) {
    out.flags |= TAMP_GRADIENT_SPARSE;
    if (overlaps(gradient._values())) out.flags |= TAMP_GRADIENT_OVERLAPS;
  } else if (gradient.layout() == at::kStrided) {
    out.flags |= TAMP_GRADIENT_STRIDED;
    if (overlaps(gradient)) out.flags |= TAMP_GRADIENT_OVERLAPS;
  }
  return out;
}

// ---- unscaling

float host_reciprocal(const Tensor &scale) { return static_cast<float>(1.0 / scale.item<double>()); }

Tensor reciprocal(const Tensor &scale, bool check_only) {
  if (check_only) return at::ones_like(scale);
  if (scale.is_cpu()) return at::scalar_tensor(host_reciprocal(scale), scale.options());
  if (scale.device().is_mps()) return scale.reciprocal();  // MPS has no f64
  return scale.to(at::kDouble).reciprocal().to(at::kFloat);
}

void mark_non_finite(const std::vector<Tensor> &tensors, Tensor &found_inf) {
  std::vector<Tensor> finite;  // the infinity norm of a tensor with a NaN is NaN
  for (const auto &t : tensors) {
    finite.push_back(at::isfinite(at::linalg_vector_norm(t, std::numeric_limits<double>::infinity())));
  }
  const Tensor bad = at::stack(finite).all().logical_not().to(at::kFloat);
  found_inf.copy_(at::maximum(found_inf, bad.reshape(found_inf.sizes())));
}

// For dtypes without an AMP kernel (bf16 on CUDA): the same rounding, in plain operations.
void unscale_generic(const std::vector<Tensor> &tensors, const Tensor &inverse, Tensor &found_inf, bool recheck) {
  std::vector<Tensor> filled;
  for (const auto &t : tensors) {
    if (t.numel() > 0) filled.push_back(t);
  }
  if (filled.empty()) return;
  mark_non_finite(filled, found_inf);
  for (auto &t : filled) {
    // At least f32, as the kernels compute.
    const auto wide = t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    t.copy_(t.to(wide).mul(inverse));
  }
  if (recheck) mark_non_finite(filled, found_inf);
}

bool has_kernel(const Tensor &t) {
  if (t.is_cuda() && t.scalar_type() == at::kBFloat16) return false;
  return t.is_cpu() || t.is_cuda();
}

void unscale_in_kernel(const std::vector<Tensor> &tensors, const Tensor &inverse, Tensor &found_inf, bool recheck) {
  if (tensors.empty()) return;
  at::_amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inverse);
  // A second look at the results, which a scale of one leaves as they are.
  if (recheck) at::_amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, at::ones_like(inverse));
}

void zero(Tensor &t) {
  if (t.is_cpu() && t.scalar_type() == at::kFloat) {
    *t.mutable_data_ptr<float>() = 0.0F;
  } else {
    t.zero_();
  }
}

uint8_t unscale(tamp_tensor *const *parameters, size_t count, const Tensor &scale, Tensor &found_inf, uint8_t options) {
  const bool recheck = (options & TAMP_UNSCALE_RECHECK) != 0;
  const bool check_only = (options & TAMP_UNSCALE_CHECK_ONLY) != 0;
  const bool generic = (options & TAMP_UNSCALE_GENERIC) != 0;
  const bool on_host = found_inf.is_cpu();
  const float inverse = check_only ? 1.0F : (on_host ? host_reciprocal(scale) : 0.0F);
  std::vector<Tensor> looped, kernel, generics;
  zero(found_inf);
  for (size_t i = 0; i < count; ++i) {
    Tensor t = tamp::numbers(tamp::tensor(parameters[i]));
    auto &list = generic || !has_kernel(t) ? generics : (tamp::has_loop(t) ? looped : kernel);
    list.push_back(std::move(t));
  }
  const bool bad = tamp::unscale_in_loops(looped, inverse, recheck);
  if (!kernel.empty() || !generics.empty()) {
    const Tensor factor = on_host ? at::scalar_tensor(inverse, found_inf.options())
                                  : tamp::on_device(reciprocal(scale, check_only), found_inf.device());
    unscale_in_kernel(kernel, factor, found_inf, recheck);
    unscale_generic(generics, factor, found_inf, recheck);
  }
  if (!on_host) return TAMP_ON_DEVICE;
  float &flag = *found_inf.mutable_data_ptr<float>();
  if (bad) flag = 1.0F;
  return flag != 0.0F ? TAMP_NON_FINITE : TAMP_FINITE;
}

}  // namespace

extern "C" {

void tamp_gradients_inspect(tamp_tensor *const *parameters, size_t count, tamp_gradient *gradients,
                            char **err) noexcept {
  tamp::guarded(err, [&] {
    for (size_t i = 0; i < count; ++i) gradients[i] = inspect(tamp::tensor(parameters[i]));
  });
}

void tamp_gradient_drop(tamp_tensor *parameter, char **err) noexcept {
  tamp::guarded(err, [&] { tamp::tensor(parameter).mutable_grad().reset(); });
}

uint8_t tamp_gradients_unscale(tamp_tensor *const *parameters, size_t count, const tamp_tensor *scale,
                               tamp_tensor *found_inf, uint8_t options, char **err) noexcept {
  return tamp::guarded(err, [&]() -> uint8_t {
    const c10::NoGradGuard no_grad;
    return unscale(parameters, count, tamp::tensor(scale), tamp::tensor(found_inf), options);
  });
}

tamp_tensor *tamp_gradients_norm(tamp_tensor *const *parameters, size_t count, const tamp_tensor *scale,
                                 tamp_tensor *found_inf, uint8_t *answer, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    Tensor &found = tamp::tensor(found_inf);
    std::vector<Tensor> gradients;
    for (size_t i = 0; i < count; ++i) {
      const Tensor &parameter = tamp::tensor(parameters[i]);
      TORCH_CHECK(tamp::gradient(parameter).layout() == at::kStrided,
                  "the norm of a sparse gradient cannot be taken; make it dense first");
      gradients.push_back(tamp::numbers(parameter));
    }
    const Tensor factor = tamp::on_device(reciprocal(tamp::tensor(scale), false), found.device());
    const Tensor norm = tamp::norm(gradients, factor);
    found.copy_(at::isfinite(norm).logical_not());
    *answer = TAMP_ON_DEVICE;
    if (found.is_cpu()) *answer = *found.const_data_ptr<float>() != 0.0F ? TAMP_NON_FINITE : TAMP_FINITE;
    return tamp::give(norm);
  });
}

void tamp_gradients_take(tamp_tensor *const *parameters, size_t count, tamp_tensor **gradients, char **err) noexcept {
  tamp::guarded(err, [&] {
    for (size_t i = 0; i < count; ++i) {
      Tensor &parameter = tamp::tensor(parameters[i]);
      if (!tamp::gradient(parameter).defined()) continue;
      gradients[i] = tamp::give(tamp::gradient(parameter));
      parameter.mutable_grad().reset();
    }
  });
}

void tamp_backward(const tamp_tensor *loss, uint8_t retain_graph, char **err) noexcept {
  tamp::guarded(err, [&] { tamp::tensor(loss).backward({}, retain_graph != 0); });
}

void tamp_gradients_add(tamp_tensor *const *parameters, tamp_tensor *const *gradients, size_t count,
                        char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    std::vector<Tensor> sums, parts;  // dense, for one launch
    for (size_t i = 0; i < count; ++i) {
      Tensor &gradient = tamp::tensor(parameters[i]).mutable_grad();
      const Tensor &more = tamp::tensor(gradients[i]);
      if (!gradient.defined()) {
        gradient = more;
      } else if (gradient.is_sparse() && !more.is_sparse()) {
        gradient = more + gradient;  // the other order is not implemented
      } else if (gradient.scalar_type() != at::result_type(gradient, more)) {
        gradient = gradient + more;
      } else if (gradient.is_sparse()) {
        gradient = (gradient + more).coalesce();  // duplicates could add up to infinity later
      } else if (more.is_sparse()) {
        gradient.add_(more);
      } else {
        sums.push_back(gradient);
        parts.push_back(more);
      }
    }
    if (!sums.empty()) at::_foreach_add_(sums, parts);
  });
}

}  // extern "C"
