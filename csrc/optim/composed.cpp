// The step of optimizers for which libtorch has no fused kernels, on devices other than the CPU.

#include "optim/composed.h"

#include <ATen/ATen.h>

namespace tamp::optim {
namespace {

using at::Tensor;

// The rows of scratch memory. Those of the states follow, and that of Muon's orthogonalized momentum.
enum Row { kParameter = 0, kGradient = 1, kBetween = 2, kFirstState = 3 };

// Subtracts `direction` times `factor` times the learning rate.
void move(const tamp_optim_options &o, const Tensor &parameter, const Tensor &direction, double factor = 1) {
  if (has_device_rates(o)) {
    parameter.addcmul_(direction, device_rate(o), -factor);
  } else {
    parameter.add_(direction, -o.lr * factor);
  }
}

void decay(const tamp_optim_options &o, const Tensor &parameter) {
  if (has_device_rates(o)) {
    parameter.mul_(device_keep(o));
  } else {
    parameter.mul_(1 - o.lr * o.weight_decay);
  }
}

// The operations of torch.optim.RMSprop, in its order.
void rmsprop(const tamp_optim_options &o, const Tensor &parameter, const Tensor &gradient, const Tensor &between,
             const Tensor *states) {
  Tensor root = between;
  const Tensor &square_avg = states[kSquareAvg], &grad_avg = states[kGradAvg], &buffer = states[kBuffer];
  if (o.weight_decay != 0) gradient.add_(parameter, o.weight_decay);
  square_avg.mul_(o.alpha).addcmul_(gradient, gradient, 1 - o.alpha);
  if ((o.flags & TAMP_OPTIM_CENTERED) != 0) {
    grad_avg.lerp_(gradient, 1 - o.alpha);
    at::addcmul_out(root, square_avg, grad_avg, grad_avg, -1).sqrt_();
  } else {
    at::sqrt_out(root, square_avg);
  }
  root.add_(o.eps);
  if (o.momentum > 0) {
    buffer.mul_(o.momentum).addcdiv_(gradient, root);
    move(o, parameter, buffer);
  } else if (has_device_rates(o)) {
    move(o, parameter, gradient.div_(root));
  } else {
    parameter.addcdiv_(gradient, root, -o.lr);
  }
}

void lion(const tamp_optim_options &o, const Tensor &parameter, const Tensor &gradient, const Tensor &between,
          const Tensor &exp_avg) {
  between.copy_(exp_avg).mul_(o.beta1).add_(gradient, 1 - o.beta1).sign_();
  exp_avg.mul_(o.beta2).add_(gradient, 1 - o.beta2);
  decay(o, parameter);
  move(o, parameter, between);
}

}  // namespace

void move_along(const tamp_optim_options &o, double factor, const Tensor &parameter, const Tensor &orthogonal) {
  decay(o, parameter);
  if (has_device_rates(o)) return move(o, parameter, orthogonal, factor);
  parameter.add_(orthogonal, -factor);
}

bool is_composed(uint8_t algorithm) {
  return algorithm == TAMP_OPTIM_RMSPROP || algorithm == TAMP_OPTIM_LION || algorithm == TAMP_OPTIM_MUON;
}

ComposedStep::ComposedStep(const Batch &batch, Scratch &scratch)
    : batch_(batch), dtype_(batch.dtype == at::kDouble ? at::kDouble : at::kFloat), places_(batch.places()) {
  (void)scratch.rows(dtype_, rows_needed(), largest_chunk(cut(batch_.parameters)));
}

size_t ComposedStep::rows_needed() const { return kFirstState + places_.size() + (batch_.orthogonal.empty() ? 0 : 1); }

// A row for rounded results, in the memory of the gradient and of intermediate results, which are not needed any more.
Tensor ComposedStep::rounded_row(const Chunk &chunk, size_t place) const {
  const Tensor row = chunk.rows[kGradient + place / 2].view(batch_.dtype);
  const int64_t numbers = row.numel() / 2;
  return row.narrow(0, static_cast<int64_t>(place % 2) * numbers, numbers);
}

void ComposedStep::list(const Piece &piece, Chunk &chunk) const {
  const Tensor &like = batch_.parameters[piece.tensor];
  const auto in = [&](const Tensor &t, size_t row) { chunk.in.add(piece.in(chunk.rows[row], like), piece.of(t)); };
  size_t place = 0;
  const auto in_and_out = [&](const Tensor &t, size_t row) {
    in(t, row);
    chunk.written.push_back(piece.of(t));
    chunk.results.push_back(piece.in(chunk.rows[row], like));
    if (batch_.dtype != dtype_) chunk.rounded.push_back(piece.in(rounded_row(chunk, place++), like));
  };
  in_and_out(like, kParameter);
  in(batch_.gradients[piece.tensor], kGradient);
  for (size_t i = 0; i < places_.size(); ++i) in_and_out(batch_.states[places_[i]][piece.tensor], kFirstState + i);
  if (!batch_.orthogonal.empty()) in(batch_.orthogonal[piece.tensor], rows_needed() - 1);
}

void ComposedStep::prepare(Scratch &scratch) {
  for (const auto &pieces : cut(batch_.parameters)) {
    Chunk &chunk = chunks_.emplace_back();
    chunk.rows = scratch.rows(dtype_, rows_needed(), pieces.numbers);
    for (const auto &piece : pieces.list) list(piece, chunk);
  }
}

void ComposedStep::compute(const std::vector<Tensor> &rows, const Prepared &scale) const {
  const tamp_optim_options &o = *batch_.options;
  const Tensor &parameter = rows[kParameter], &gradient = rows[kGradient], &between = rows[kBetween];
  if (scale.unscaling.inverse.defined()) gradient.mul_(scale.unscaling.inverse);
  if (scale.unscaling.clip.defined()) gradient.mul_(scale.unscaling.clip);
  if ((o.flags & TAMP_OPTIM_MAXIMIZE) != 0) gradient.neg_();
  Tensor states[kStates];
  for (size_t i = 0; i < places_.size(); ++i) states[places_[i]] = rows[kFirstState + i];
  if (o.algorithm == TAMP_OPTIM_RMSPROP) {
    rmsprop(o, parameter, gradient, between, states);
  } else if (o.algorithm == TAMP_OPTIM_MUON) {
    states[kMomentumBuffer].lerp_(gradient, 1 - o.momentum);
    move_along(o, batch_.rate, parameter, rows.back());
  } else {
    lion(o, parameter, gradient, between, states[kExpAvg]);
  }
}

void ComposedStep::write(const Chunk &chunk, const Tensor &found_inf) const {
  if (!found_inf.defined()) return at::_foreach_copy_(chunk.written, chunk.results);
  if (chunk.rounded.empty()) return copy_unless(found_inf, chunk.written, chunk.results);
  at::_foreach_copy_(chunk.rounded, chunk.results);
  copy_unless(found_inf, chunk.written, chunk.rounded);
}

void ComposedStep::run(const Prepared &scale) const {
  for (const auto &chunk : chunks_) {
    chunk.in.run();
    compute(chunk.rows, scale);
    write(chunk, scale.found_inf);
  }
  batch_.bump_versions();
}

}  // namespace tamp::optim
