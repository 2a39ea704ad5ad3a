// The numbers of NAdam, which each parameter has of its own, in the order of torch.optim.NAdam.

#include <ATen/ATen.h>

#include <cmath>
#include <vector>

#include "border/groups.h"
#include "optim/whole.h"

namespace tamp::optim {
namespace {

using at::Tensor;

constexpr double kDecay = 0.96;

// The momentum of a step, for numbers and for tensors.
double momentum(const tamp_optim_options &o, double step) {
  return o.beta1 * (1.0 - 0.5 * std::pow(kDecay, step * o.momentum_decay));
}

Tensor momentum(const tamp_optim_options &o, const Tensor &step) {
  return at::pow(kDecay, step.mul(o.momentum_decay)).mul_(0.5).neg_().add_(1).mul_(o.beta1);
}

// Finds the numbers of entries with the same options.
void find(const std::vector<Entry *> &entries) {
  const tamp_optim_options &o = *entries.front()->options;
  std::vector<Tensor> steps, products;
  for (const Entry *e : entries) {
    steps.push_back(e->step.reshape({}));
    products.push_back(e->factors->states[kMuProduct].reshape({}));
  }
  const auto precise = steps.front().is_mps() ? at::kFloat : at::kDouble;
  const Tensor step = at::stack(steps).add_(1).to(precise);
  const Tensor now = momentum(o, step), next = momentum(o, step.add(1));
  const Tensor product = at::stack(products).mul_(now.to(at::kFloat)), known = product.to(precise);
  const Tensor minus_lr = has_device_rates(o) ? device_rate(o).to(precise).neg() : at::full_like(step, -o.lr);
  const Tensor numbers[kCoefficients] = {
      at::pow(o.beta2, step).neg_().add_(1),
      now.neg().add_(1).mul_(minus_lr).div_(known.neg().add_(1)),
      next.mul(minus_lr).div_(known.mul(next).neg_().add_(1)),
  };
  for (size_t i = 0; i < entries.size(); ++i) {
    Factors &factors = *entries[i]->factors;
    const auto place = static_cast<int64_t>(i);
    for (int k = 0; k < kCoefficients; ++k) factors.coefficients[k] = numbers[k].select(0, place);
    factors.renewed[kMuProduct] = product.select(0, place).reshape(factors.states[kMuProduct].sizes());
  }
}

}  // namespace

NAdamNumbers nadam_numbers(const tamp_optim_options &o, double step, float mu_product) {
  const double now = momentum(o, step), next = momentum(o, step + 1);
  const float product = mu_product * static_cast<float>(now);
  const double known = product;
  return {1 - std::pow(o.beta2, step), -o.lr * (1.0 - now) / (1.0 - known), -o.lr * next / (1.0 - known * next),
          product};
}

void nadam_coefficients(std::vector<Entry> &entries) {
  std::vector<Entry *> all;
  for (auto &e : entries) {
    if (e.options->algorithm == TAMP_OPTIM_NADAM) all.push_back(&e);
  }
  for (const auto &group : group_by(all, [](const Entry *e) { return e->options; })) find(group);
}

}  // namespace tamp::optim
