// Arithmetic on lists of tensors.

#include "gradients/foreach.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "border/groups.h"
#include "border/guarded.h"
#include "gradients/cpu_passes.h"
#include "gradients/storage.h"
#include "kernels/kernels.h"

namespace tamp {

using at::Tensor;

Tensor coalesced(const Tensor &gradient) {
  return gradient.is_sparse() && gradient.scalar_type() == at::kHalf ? gradient.coalesce() : gradient;
}

Tensor numbers(const Tensor &gradient) {
  Tensor values = gradient.is_sparse() ? coalesced(gradient)._values() : gradient;
  // A zero tensor has no memory, so a copy takes its place. The gradient itself stays zero, whatever the copy is
  // multiplied by.
  if (values._is_zerotensor()) values = with_own_numbers(values);
  if (!values.is_complex()) return values;
  return at::view_as_real(values.is_conj() ? values.conj() : values);
}

std::vector<std::vector<Tensor>> by_dtype(const std::vector<Tensor> &tensors) {
  return group_by(tensors, [](const Tensor &t) { return t.scalar_type(); });
}

Tensor largest(const std::vector<Tensor> &tensors) {
  // The infinity norm of a tensor with a NaN is NaN.
  const double infinity = std::numeric_limits<double>::infinity();
  return at::linalg_vector_norm(at::stack(at::_foreach_norm(tensors, infinity)), infinity);
}

Tensor inverse_of(const Tensor &scale) {
  if (scale.device().is_mps()) return scale.reciprocal();  // MPS has no f64
  // The f64 number on the host makes one kernel divide in f64 and round to the dtype of the result.
  Tensor out = at::empty({}, scale.options().dtype(at::kFloat));
  return at::div_out(out, at::scalar_tensor(1, at::kDouble), scale.reshape({}));
}

bool unscale_in_loops(const std::vector<Tensor> &tensors, float factor, bool recheck) {
  const auto parts = chunks_of(tensors);
  std::vector<uint8_t> bad(parts.size());
  over(tensors, parts, factor == 1.0F ? Access::kRead : Access::kWrite, [&](auto *memory, int64_t n, size_t i) {
    bad[i] = factor == 1.0F ? kernels::any_non_finite(memory, n) : kernels::unscale(memory, n, factor, recheck);
  });
  if (factor != 1.0F) {
    for (const auto &t : tensors) {
      if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
    }
  }
  return std::any_of(bad.begin(), bad.end(), [](uint8_t b) { return b != 0; });
}

Product::Product(const std::vector<Tensor> &tensors, const Tensor &factor) {
  std::vector<Tensor> other;
  for (const auto &t : tensors) (has_loop(t) ? looped_ : other).push_back(t);
  if (!looped_.empty()) value_ = factor.item<double>();
  end_lazy_copies(other);
  // libtorch multiplies a list by a tensor in one launch only if both have the same dtype. Otherwise it rounds the
  // factor to the dtype of the tensors as well, but multiplies them one by one.
  for (auto &alike : by_dtype(other)) {
    const Tensor rounded = on_device(factor, alike.front().device()).to(alike.front().scalar_type());
    lists_.push_back({std::move(alike), rounded});
  }
}

void Product::run() const {
  if (!looped_.empty() && value_ != 1.0) {
    const auto parts = chunks_of(looped_);
    over(looped_, parts, Access::kWrite,
         [&](auto *memory, int64_t n, size_t) { kernels::multiply(memory, n, value_); });
    for (const auto &t : looped_) {
      if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
    }
  }
  for (const auto &[alike, factor] : lists_) {
    // libtorch's lists take no negated views.
    if (std::any_of(alike.begin(), alike.end(), [](const Tensor &t) { return t.is_neg(); })) {
      for (const auto &t : alike) t.mul_(factor);
    } else {
      at::_foreach_mul_(alike, factor);
    }
  }
}

}  // namespace tamp
