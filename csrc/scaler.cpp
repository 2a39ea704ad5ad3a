// Gradients on their way: what the scaler has to know of them, and how they are taken, made and added up.

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "gradients.h"
#include "guarded.h"

namespace {

using at::Tensor;

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
