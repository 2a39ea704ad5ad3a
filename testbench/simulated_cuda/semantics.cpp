#include "semantics.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <algorithm>
#include <utility>

#include "cells.h"
#include "costs.h"

namespace simulated {
namespace {

using at::Tensor;

// The squares are added up in f32 as on CUDA, where they overflow in f32; the CPU's own norm adds one after the other
// and is coarse for many numbers.
Tensor norm(const Tensor &t, double order, std::optional<at::ScalarType> dtype) {
  const auto wide = is_half(t.scalar_type()) ? at::kFloat : t.scalar_type();
  const Tensor out = order == 2.0 && !t.is_complex() ? t.to(wide).square().sum().sqrt()
                                                     : at::linalg_vector_norm(t, order, std::nullopt, false, wide);
  return out.to(dtype.value_or(t.scalar_type()));
}

void foreach_norm(const Call &call) {
  const auto &dtype = call.stack[call.first + 2];
  const auto wanted = dtype.isNone() ? std::nullopt : std::make_optional(static_cast<at::ScalarType>(dtype.toInt()));
  const double order = call.stack[call.first + 1].toScalar().toDouble();
  c10::List<Tensor> norms;
  for (const Tensor &t : call.stack[call.first].toTensorVector()) norms.push_back(norm(t, order, wanted));
  call.stack.resize(call.first);
  call.stack.emplace_back(std::move(norms));
}

// CUDA has a kernel for the gradients of an RMSNorm; on the CPU libtorch differentiates its parts. It computes in f32.
void rms_norm_backward(const Call &call) {
  const auto argument = [&](size_t i) -> const c10::IValue & { return call.stack[call.first + i]; };
  const Tensor input = argument(1).toTensor(), rstd = argument(3).toTensor();
  const auto wide = input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto inner = static_cast<int64_t>(argument(2).toIntVector().size()), outer = input.dim() - inner;
  std::vector<int64_t> last, first;
  for (int64_t dim = 0; dim < input.dim(); ++dim) (dim < outer ? first : last).push_back(dim);
  const Tensor grad = argument(0).toTensor().to(wide), normalized = input.to(wide) * rstd.to(wide);
  const Tensor weight = argument(4).isTensor() ? argument(4).toTensor() : Tensor();
  const Tensor weighted = weight.defined() ? grad * weight.to(wide) : grad;
  const Tensor of_input = rstd.to(wide) * (weighted - normalized * (weighted * normalized).mean(last, true));
  const Tensor product = grad * normalized, of_weight = first.empty() ? product : product.sum(first);
  const auto wanted = argument(5).toBoolList();
  const bool has_weight = wanted[1] && weight.defined();
  call.stack.resize(call.first);
  call.stack.emplace_back(wanted[0] ? of_input.to(input.scalar_type()) : Tensor());
  call.stack.emplace_back(has_weight ? of_weight.to(input.scalar_type()) : Tensor());
}

// The fused optimizers of CUDA compute half numbers in f32, and those of the CPU do so only in part.
void widen(const Call &call, Adapted &adapted) {
  for (size_t i = call.first; i < call.stack.size() && call.stack[i].isTensorList(); ++i) {
    std::vector<Tensor> list = call.stack[i].toTensorVector();
    for (auto &t : list) {
      if (!is_half(t.scalar_type())) continue;
      adapted.write_back.emplace_back(t, t.to(at::kFloat));
      t = adapted.write_back.back().second;
    }
    call.stack[i] = list;
  }
}

// Softmax of CUDA takes fp16 and gives f32; its backward takes f32 and gives fp16.
void softmax_forward(const Call &call) {
  if (!call.stack[call.first + 2].toBool()) return;
  const Tensor half = call.stack[call.first].toTensor();
  TORCH_CHECK(half.scalar_type() == at::kHalf, "conversion is supported for Half type only");
  call.stack[call.first] = half.to(at::kFloat);
  call.stack[call.first + 2] = false;
}

std::optional<at::ScalarType> softmax_backward(const Call &call) {
  const auto gradient = call.stack[call.first].toTensor().scalar_type();
  const auto input = static_cast<at::ScalarType>(call.stack[call.first + 3].toInt());
  if (gradient == input) return std::nullopt;
  TORCH_CHECK(gradient == at::kFloat && input == at::kHalf,
              "expected input and grad types to match, or input to be at::Half and grad to be at::Float");
  call.stack[call.first + 3] = static_cast<int64_t>(gradient);
  return input;
}

}  // namespace

bool is_half(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

std::string name_of(const c10::OperatorHandle &op) {
  const auto &full = op.schema().operator_name();
  const std::string name = full.name.substr(full.name.find("::") + 2);
  return full.overload_name.empty() ? name : name + "." + full.overload_name;
}

bool is_one_of(std::string_view name, std::string_view operators) {
  const std::string_view plain = name.substr(0, name.find('.'));
  while (!operators.empty()) {
    const std::string_view one = operators.substr(0, operators.find(' '));
    if (one == name || one == plain) return true;
    operators.remove_prefix(std::min(one.size() + 1, operators.size()));
  }
  return false;
}

void change_versions(const Call &call) {
  const bool is_in_place = call.name.starts_with("_foreach_") && call.schema.returns().empty();
  if (!is_in_place) return;
  // PyTorch 2.13 forgets these where it has one launch for all of their tensors.
  const bool forgets = is_one_of(call.name, "_foreach_zero_") || call.name == "_foreach_lerp_.Scalar";
  if (forgets && share_a_launch(call)) return;
  for (const Tensor &t : call.stack[call.first].toTensorVector()) {
    if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  }
}

void check(const Call &call) {
  if (is_one_of(call.name, "_amp_foreach_non_finite_check_and_unscale_")) {
    for (const Tensor &t : call.stack[call.first].toTensorVector()) {
      TORCH_CHECK_NOT_IMPLEMENTED(t.scalar_type() != at::kBFloat16,
                                  "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'");
    }
  }
  if (call.name.starts_with("_fused_") && call.stack[call.first].isTensorList()) {
    TORCH_CHECK(are_alike(lists_of(call, "state_steps")), call.name,
                ": params, grads and state must have the same dtype, device and layout, sizes and strides");
  }
}

bool compute_alone(const Call &call) {
  if (compute_cell(call)) return true;
  if (call.name == "_fused_rms_norm_backward") {
    rms_norm_backward(call);
  } else if (call.name == "_foreach_norm.Scalar") {
    foreach_norm(call);
  } else {
    return false;
  }
  return true;
}

Adapted adapt(const Call &call) {
  Adapted out;
  if (call.name.starts_with("_fused_") && call.stack[call.first].isTensorList()) widen(call, out);
  if (is_one_of(call.name, "_softmax _log_softmax")) softmax_forward(call);
  if (is_one_of(call.name, "_softmax_backward_data _log_softmax_backward_data")) out.result = softmax_backward(call);
  return out;
}

void finish(const Call &call, const Adapted &adapted) {
  if (adapted.result) call.stack.back() = call.stack.back().toTensor().to(*adapted.result);
  for (const auto &[to, from] : adapted.write_back) to.copy_(from);
}

}  // namespace simulated
