// The directions of Adafactor, with libtorch's operations in the order of torch.optim.Adafactor. What Python computes
// from numbers on the host is computed in f64 where the parameter is, so that nobody waits for a device.

#include <ATen/ATen.h>

#include <cmath>
#include <limits>
#include <vector>

#include "border/guarded.h"
#include "optim/masters.h"
#include "optim/whole.h"

namespace tamp::optim {
namespace {

using at::Tensor;

// The numbers that the update starts from.
Tensor numbers_of(const Entry &e) {
  if (e.master.kind == TAMP_MASTER_FLOAT) return e.master.tensor;
  return e.master.kind == TAMP_MASTER_REMAINDER ? join(e.parameter, e.master.tensor) : e.parameter;
}

Tensor unscaled(const Entry &e, const Unscaling &unscaling, at::ScalarType wide) {
  Tensor out = e.gradient.to(wide);
  if (unscaling.inverse.defined()) out = out.mul(unscaling.inverse.to(wide));
  if (unscaling.clip.defined()) out = out.mul(unscaling.clip.to(wide));
  return (e.options->flags & TAMP_OPTIM_MAXIMIZE) != 0 ? out.neg() : out;
}

// The larger one of two numbers, or `least` where the other is NaN, as in Python.
Tensor at_least(double least, const Tensor &number) { return at::where(number.gt(least), number, least); }

Tensor norm(const Tensor &t, at::ScalarType precise) { return at::linalg_vector_norm(t, 2).to(precise); }

// The mean squares along a dimension.
Tensor mean_squares(const Tensor &gradient, int64_t dim) {
  return at::linalg_vector_norm(gradient, 2, dim, /*keepdim=*/true).square_().div_(gradient.size(dim));
}

// Moves an average of squares, and returns it as it is before it is rounded to the dtype of the state.
Tensor renew(Entry &e, int place, const Tensor &squares, const Tensor &weight) {
  const Tensor &old = e.factors->states[place];
  Tensor out = old.to(squares.scalar_type()).lerp(squares, weight.to(squares.scalar_type()));
  e.factors->renewed[place] = out.to(old.scalar_type());
  return out;
}

// The estimate of the squares of the gradient.
Tensor estimate(Entry &e, const Tensor &gradient, const Tensor &weight, double eps) {
  if (gradient.dim() < 2) return renew(e, kVariance, gradient.mul(gradient), weight).clone();
  const Tensor rows = renew(e, kRowVar, mean_squares(gradient, -1), weight);
  const Tensor columns = renew(e, kColVar, mean_squares(gradient, -2), weight);
  // Contiguous like Python's product of matrices, since the order of its norm depends on that.
  Tensor out = at::empty(gradient.sizes(), gradient.options());
  at::mul_out(out, rows, columns);
  return out.div_(rows.mean(-2, /*keepdim=*/true).clamp_min_(eps));
}

// Computes the direction of one entry.
void find(Entry &e, const Unscaling &unscaling) {
  const tamp_optim_options &o = *e.options;
  const auto wide = e.parameter.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto precise = e.parameter.is_mps() ? at::kFloat : at::kDouble;
  e.direction = at::empty_like(e.parameter, e.parameter.options().dtype(wide));
  if (e.parameter.numel() == 0) {
    e.factors->coefficients[0] = at::zeros({}, e.parameter.options().dtype(precise));
    return;
  }
  const double root = std::sqrt(static_cast<double>(e.parameter.numel()));
  const double own_eps =
      wide == at::kDouble ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
  const double eps = std::isnan(o.eps) ? own_eps : o.eps;
  const Tensor gradient = unscaled(e, unscaling, wide);
  const Tensor step = e.step.reshape({}).add(1).to(precise), slower = step.sqrt().reciprocal_();
  const Tensor rate = has_device_rates(o) ? at::minimum(device_rate(o).to(precise), slower) : slower.clamp_max(o.lr);
  // By the power of two tensors: that with a number rounds otherwise for some exponents.
  const Tensor weight = step.pow(at::full_like(step, o.beta2_decay));
  const Tensor size = norm(numbers_of(e).to(wide), precise).div(root);
  const Tensor update = estimate(e, gradient, weight, eps).clamp_min_(eps * eps).rsqrt_().mul_(gradient);
  const Tensor excess = norm(update, precise).div(root * o.clip_threshold);
  e.direction.copy_(update);
  e.factors->coefficients[0] = at_least(o.eps2, size).mul(rate).div(at_least(1, excess));
}

}  // namespace

void find_directions(std::vector<Entry> &entries, const Unscaling &unscaling) {
  for (auto &e : entries) {
    if (e.options->algorithm == TAMP_OPTIM_ADAFACTOR) find(e, unscaling);
  }
}

}  // namespace tamp::optim
