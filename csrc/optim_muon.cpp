// Muon's orthogonalization of the momentum of a matrix by Newton-Schulz iterations, with libtorch's operations in the
// order of torch.optim.Muon.

#include "optim_muon.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace tamp::optim {
namespace {

using at::Tensor;

// Returns the momentum that the step makes or, with Nesterov momentum, the gradient that looks ahead along it. Half
// precision is computed in f32.
Tensor momentum_of(const Entry &e, const Unscaling &unscaling) {
  const tamp_optim_options &o = *e.options;
  const auto wide = e.parameter.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor gradient = e.gradient.to(wide, /*non_blocking=*/false, /*copy=*/true);
  if (unscaling.inverse.defined()) gradient.mul_(unscaling.inverse);
  if (unscaling.clip.defined()) gradient.mul_(unscaling.clip);
  const Tensor buffer = e.states[kMomentumBuffer].to(wide).lerp(gradient, 1 - o.momentum);
  return (o.flags & TAMP_OPTIM_NESTEROV) != 0 ? gradient.lerp(buffer, o.momentum) : buffer;
}

// Moves the singular values of a matrix towards one, in bf16.
Tensor newton_schulz(const Tensor &matrix, const tamp_optim_options &o) {
  const bool is_tall = matrix.size(0) > matrix.size(1);
  Tensor x = matrix.to(at::kBFloat16);
  if (is_tall) x = x.t();  // the products are then of the smaller size
  x.div_(at::linalg_vector_norm(x, 2, {0, 1}).clamp(o.eps));
  for (int i = 0; i < o.ns_steps; ++i) {
    const Tensor gram = at::mm(x, x.t());
    const Tensor polynomial = at::addmm(gram, gram, gram, /*beta=*/o.ns_b, /*alpha=*/o.ns_c);
    x = at::addmm(x, polynomial, x, /*beta=*/o.ns_a);
  }
  return is_tall ? x.t() : x;
}

// The factor of the learning rate for the shape of a matrix.
double factor_of(const tamp_optim_options &o, const Tensor &matrix) {
  const auto rows = static_cast<double>(matrix.size(0)), columns = static_cast<double>(matrix.size(1));
  if ((o.flags & TAMP_OPTIM_MATCH_RMS_ADAMW) != 0) return 0.2 * std::sqrt(std::max(rows, columns));
  return std::sqrt(std::max(1.0, rows / std::max(1.0, columns)));
}

}  // namespace

void orthogonalize(Entry &e, const Unscaling &unscaling, bool is_skipped) {
  if (e.options->algorithm != TAMP_OPTIM_MUON) return;
  const double factor = factor_of(*e.options, e.parameter);
  e.rate = has_device_rates(*e.options) ? factor : e.options->lr * factor;
  e.orthogonal = at::empty_like(e.parameter, e.parameter.options().dtype(at::kBFloat16));
  if (is_skipped || e.parameter.numel() == 0) return;
  e.orthogonal.copy_(newton_schulz(momentum_of(e, unscaling), *e.options));
}

}  // namespace tamp::optim
