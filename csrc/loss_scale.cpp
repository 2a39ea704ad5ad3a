// The check for non-finite numbers for functional loss scales. It gives one answer on the device and changes nothing.

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <utility>
#include <vector>

#include "arithmetic.h"
#include "guarded.h"
#include "memory.h"

namespace {

using at::Tensor;

// Tensors of one device and dtype, whose norms libtorch computes in one launch.
struct NormedGroup {
  at::Device device;
  at::ScalarType dtype;
  std::vector<Tensor> tensors;
};

// Returns a real dense tensor that holds the numbers of `t`. Coalesces a sparse tensor first, because the values of
// duplicate indices can add up to infinity.
Tensor numbers(const Tensor &t) {
  TORCH_CHECK(!t.is_nested(), "a nested tensor is not supported; take its parts with unbind");
  Tensor values = t;
  if (t.is_sparse()) {
    values = t.coalesce()._values();
  } else if (t.layout() != at::kStrided) {
    values = t.values();
  }
  if (values.is_complex()) values = at::view_as_real(values.resolve_conj());
  values = tamp::with_own_numbers(values);
  // libtorch does not implement norms of the 8-bit dtypes.
  return values.element_size() == 1 ? values.to(at::kFloat) : values;
}

void add(std::vector<NormedGroup> &groups, Tensor t) {
  for (auto &group : groups) {
    if (group.device == t.device() && group.dtype == t.scalar_type()) {
      group.tensors.push_back(std::move(t));
      return;
    }
  }
  groups.push_back({t.device(), t.scalar_type(), {std::move(t)}});
}

}  // namespace

extern "C" {

tamp_tensor *tamp_all_finite(tamp_tensor *const *tensors, size_t count, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    // Inside a region, autocast would handle the stacking of the norms, and it refuses half-precision tensors whose
    // dtype is not the region's.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    std::vector<Tensor> looped;
    std::vector<NormedGroup> groups;
    at::Device device = at::kCPU;
    for (size_t i = 0; i < count; ++i) {
      const Tensor &t = tamp::tensor(tensors[i]);
      if (i == 0) device = t.device();
      Tensor values = numbers(t);
      if (values.numel() == 0) continue;
      if (tamp::has_loop(values)) {
        looped.push_back(std::move(values));
      } else {
        add(groups, std::move(values));
      }
    }
    // With a factor of one the tensors are only checked.
    const bool bad = !looped.empty() && tamp::unscale_in_loops(looped, 1.0F, false);
    Tensor finite = at::full({}, !bad, at::TensorOptions().dtype(at::kBool).device(device));
    for (const auto &group : groups) {
      finite = at::logical_and(finite, tamp::on_device(at::isfinite(tamp::largest(group.tensors)), device));
    }
    return tamp::give(finite);
  });
}

}  // extern "C"
