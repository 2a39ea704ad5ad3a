// The gradients of a list of parameters: describing, taking, dropping and adding them.

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <utility>
#include <vector>

#include "gradients.h"
#include "guarded.h"
#include "memory.h"

namespace tamp {
namespace {

using at::Tensor;

uintptr_t identity(const Tensor &t) { return reinterpret_cast<uintptr_t>(t.unsafeGetTensorImpl()); }

}  // namespace

tamp_gradient inspect(const Tensor &parameter) {
  tamp_gradient out = {};
  if (!parameter.defined()) return out;
  out.parameter = identity(parameter);
  if (parameter.requires_grad()) out.flags |= TAMP_GRADIENT_REQUIRES_GRAD;
  const Tensor &gradient = tamp::gradient(parameter);
  if (!gradient.defined()) return out;
  out.gradient = identity(gradient);
  out.memory = memory_of(gradient);
  out.version = gradient.is_inference() ? 0 : static_cast<uint32_t>(gradient._version());
  out.device_type = static_cast<int8_t>(gradient.device().type());
  out.device_index = static_cast<int8_t>(gradient.device().index());
  out.dtype = static_cast<int8_t>(gradient.scalar_type());
  if (gradient.scalar_type() != parameter.scalar_type()) out.flags |= TAMP_GRADIENT_OTHER_DTYPE;
  if (gradient.is_meta() || gradient.is_nested() || parameter.is_nested()) return out;
  if (gradient.device() != parameter.device() || gradient.sizes() != parameter.sizes()) {
    out.flags |= TAMP_GRADIENT_OTHER_SHAPE;
  }
  if (gradient.is_sparse()) {
    out.flags |= TAMP_GRADIENT_SPARSE;
    if (overlaps(gradient._values())) out.flags |= TAMP_GRADIENT_OVERLAPS;
  } else if (gradient.layout() == at::kStrided) {
    out.flags |= TAMP_GRADIENT_STRIDED;
    // A zero tensor has no memory that its elements could share.
    if (!gradient._is_zerotensor() && overlaps(gradient)) out.flags |= TAMP_GRADIENT_OVERLAPS;
  }
  return out;
}

}  // namespace tamp

using at::Tensor;

extern "C" {

void tamp_gradients_inspect(tamp_tensor *const *parameters, size_t count, uint8_t hold, tamp_gradient *gradients,
                            char **err) noexcept {
  tamp::guarded(err, [&] {
    for (size_t i = 0; i < count; ++i) gradients[i] = tamp::inspect(tamp::tensor(parameters[i]));
    if (hold == 0) return;
    // Nothing fails from here on.
    for (size_t i = 0; i < count; ++i) {
      if (gradients[i].memory != 0) tamp::hold(tamp::gradient(tamp::tensor(parameters[i])));
    }
  });
}

void tamp_gradients_release(const tamp_gradient *gradients, size_t count) noexcept {
  for (size_t i = 0; i < count; ++i) tamp::release(gradients[i].memory);
}

void tamp_gradients_drop(tamp_tensor *const *parameters, size_t count, char **err) noexcept {
  tamp::guarded(err, [&] {
    for (size_t i = 0; i < count; ++i) {
      Tensor &parameter = tamp::tensor(parameters[i]);
      if (tamp::gradient(parameter).defined()) parameter.mutable_grad().reset();
    }
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
    std::vector<Tensor> sums, parts;  // dense gradients, which are added in one launch
    for (size_t i = 0; i < count; ++i) {
      Tensor &gradient = tamp::tensor(parameters[i]).mutable_grad();
      const Tensor &more = tamp::tensor(gradients[i]);
      if (!gradient.defined()) {
        gradient = more;
      } else if (gradient.is_sparse() && !more.is_sparse()) {
        gradient = more + gradient;  // libtorch does not implement the other order
      } else if (gradient.scalar_type() != at::result_type(gradient, more)) {
        gradient = gradient + more;
      } else if (gradient.is_sparse()) {
        gradient = (gradient + more).coalesce();  // the values of duplicate indices could add up to infinity later
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
