// Scaled losses, and the check for non-finite numbers for functional loss scales, which gives one answer on the device
// and changes nothing.

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "border/guarded.h"
#include "function/function_node.h"
#include "gradients/cpu_passes.h"
#include "gradients/foreach.h"
#include "gradients/storage.h"

namespace {

using at::Tensor;

Tensor scaled(const Tensor &t, const Tensor &factor, at::ScalarType wide, at::ScalarType result);

// The derivative of a scaled tensor. Autograd's own would multiply in the regions of the program that runs backward.
class ScaleNode final : public torch::autograd::Node {
 public:
  ScaleNode(const Tensor &factor, at::ScalarType wide, at::ScalarType input, torch::autograd::edge_list &&edges)
      : Node(std::move(edges)), factor_(factor, /*is_output=*/false), wide_(wide), input_(input) {}

  std::string name() const override { return "ScaleBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    factor_.reset_data();
  }

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list &&grads) override {
    const tamp::OutsideRegions own;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!grads[0].defined()) return {Tensor()};
    return {scaled(grads[0], factor_.unpack(), wide_, input_)};
  }

 private:
  torch::autograd::SavedVariable factor_;
  at::ScalarType wide_;
  at::ScalarType input_;
};

// Converts a tensor to `wide`, multiplies it by a factor, and converts the product to `result`.
Tensor scaled(const Tensor &t, const Tensor &factor, at::ScalarType wide, at::ScalarType result) {
  const auto compute = [&] { return t.to(wide).mul(factor).to(result); };
  const bool is_recorded = at::GradMode::is_enabled() && t.requires_grad();
  // A factor with a derivative of its own is the program's, and so is forward-mode differentiation.
  if (!is_recorded || factor.requires_grad() || t._fw_grad(/*level=*/0).defined()) return compute();
  Tensor product;
  {
    const c10::NoGradGuard no_grad;
    product = compute();
  }
  auto node = tamp::make_node<ScaleNode>(factor, wide, t.scalar_type(),
                                         torch::autograd::edge_list{torch::autograd::impl::gradient_edge(t)});
  torch::autograd::impl::set_gradient_edge(product, {node, node->add_input_metadata(product)});
  return product;
}

// The dtype of a product: numbers of less than 32 bits could overflow.
at::ScalarType wide_dtype(const Tensor &t) {
  const at::ScalarType dtype = t.scalar_type();
  if (dtype == at::kComplexHalf) return at::kComplexFloat;
  return dtype == at::kDouble || t.is_complex() ? dtype : at::kFloat;
}

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

tamp_tensor *tamp_scaled(const tamp_tensor *tensor, const tamp_tensor *factor, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const Tensor &t = tamp::tensor(tensor), &given = tamp::tensor(factor);
    // An operation takes a single number from the host wherever it runs.
    const bool is_near = given.device() == t.device() || (given.is_cpu() && given.dim() == 0);
    const at::ScalarType wide = wide_dtype(t);
    return tamp::give(scaled(t, is_near ? given : tamp::on_device(given, t.device()), wide, wide));
  });
}

tamp_tensor *tamp_all_finite(tamp_tensor *const *tensors, size_t count, char **err) noexcept {
  return tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
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
