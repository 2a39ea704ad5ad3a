// The step of an optimizer on devices other than the CPU: libtorch's kernels.

#include <ATen/ATen.h>

#include <optional>
#include <utility>
#include <vector>

#include "guarded.h"
#include "optim.h"

namespace tamp::optim {
namespace {

using at::Tensor;

// Entries that one call of libtorch takes.
struct Batch {
  const tamp_optim_options *options;
  at::Device device;
  at::ScalarType dtype;
  bool first_step;
  std::vector<Tensor> parameters, gradients, steps, states[kStates];

  bool takes(const Entry &e) const {
    return options == e.options && device == e.parameter.device() && dtype == e.parameter.scalar_type() &&
           first_step == e.first_step;
  }

  void add(const Entry &e) {
    parameters.push_back(e.parameter);
    // The kernels walk the memory of both with one index.
    const bool alike = e.gradient.strides() == e.parameter.strides();
    gradients.push_back(alike ? e.gradient : at::empty_like(e.parameter).copy_(e.gradient));
    if (e.step.defined()) steps.push_back(e.step);
    for (int i = 0; i < kStates; ++i) {
      if (e.states[i].defined()) states[i].push_back(e.states[i]);
    }
  }
};

// Puts f32 tensors in the place of parameters with masters.
tamp::StandIns stand_in(std::vector<Entry> &entries) {
  tamp::StandIns out;
  for (auto &e : entries) {
    if (e.master.kind == TAMP_MASTER_NONE) continue;
    const Tensor number = out.parameter(e.parameter, e.master, e.step);
    e.gradient = out.gradient(e.gradient, number);
    e.parameter = number;
    e.master = {};
  }
  out.fill();
  return out;
}

std::vector<Batch> batches(const std::vector<Entry> &entries) {
  std::vector<Batch> out;
  for (const auto &e : entries) {
    size_t i = 0;
    while (i < out.size() && !out[i].takes(e)) ++i;
    if (i == out.size()) {
      out.push_back({e.options, e.parameter.device(), e.parameter.scalar_type(), e.first_step, {}, {}, {}, {}});
    }
    out[i].add(e);
  }
  return out;
}

std::optional<Tensor> on_device(const tamp_tensor *t, at::Device device) {
  if (t == nullptr) return std::nullopt;
  return tamp::on_device(tamp::tensor(t), device);
}

void launch(Batch &b, const std::optional<Tensor> &grad_scale, const std::optional<Tensor> &found_inf) {
  const tamp_optim_options &o = *b.options;
  const bool maximize = (o.flags & TAMP_OPTIM_MAXIMIZE) != 0;
  const bool amsgrad = (o.flags & TAMP_OPTIM_AMSGRAD) != 0;
  switch (o.algorithm) {
    case TAMP_OPTIM_SGD:
      at::_fused_sgd_(b.parameters, b.gradients, b.states[kFirst], o.weight_decay, o.momentum, o.lr, o.dampening,
                      (o.flags & TAMP_OPTIM_NESTEROV) != 0, maximize, b.first_step, grad_scale, found_inf);
      break;
    case TAMP_OPTIM_ADAGRAD:
      at::_fused_adagrad_(b.parameters, b.gradients, b.states[kFirst], b.steps, o.lr, o.lr_decay, o.weight_decay, o.eps,
                          maximize, grad_scale, found_inf);
      break;
    case TAMP_OPTIM_ADAM:
      at::_fused_adam_(b.parameters, b.gradients, b.states[kFirst], b.states[kSecond], b.states[kThird], b.steps, o.lr,
                       o.beta1, o.beta2, o.weight_decay, o.eps, amsgrad, maximize, grad_scale, found_inf);
      break;
    default:
      at::_fused_adamw_(b.parameters, b.gradients, b.states[kFirst], b.states[kSecond], b.states[kThird], b.steps, o.lr,
                        o.beta1, o.beta2, o.weight_decay, o.eps, amsgrad, maximize, grad_scale, found_inf);
  }
}

void step_on_device(Batch &b, const tamp_optim_scale &scale) {
  auto grad_scale = on_device(scale.grad_scale, b.device);
  const auto clip = on_device(scale.clip, b.device);
  const auto found_inf = on_device(scale.found_inf, b.device);
  // The kernels divide by this one number.
  if (clip) grad_scale = (grad_scale ? *grad_scale : at::ones_like(*clip, at::kFloat)) / clip->to(at::kFloat);
  if (!b.steps.empty()) at::_foreach_add_(b.steps, 1);
  try {
    launch(b, grad_scale, found_inf);
  } catch (...) {
    if (!b.steps.empty()) at::_foreach_sub_(b.steps, 1);
    throw;
  }
  if (found_inf && !b.steps.empty()) {
    at::_foreach_sub_(b.steps, std::vector<Tensor>(b.steps.size(), found_inf->reshape({})));
  }
}

}  // namespace

void step_on_devices(std::vector<Entry> entries, const tamp_optim_scale &scale) {
  const auto stand_ins = stand_in(entries);
  for (auto &batch : batches(entries)) step_on_device(batch, scale);
  stand_ins.write_back();
}

}  // namespace tamp::optim
