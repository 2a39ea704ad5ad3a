// The step of optimizers for which libtorch has no fused kernels, on devices other than the CPU.

#include "optim/composed.h"

#include <ATen/ATen.h>

namespace tamp::optim {
namespace {

using at::Tensor;

// The rows of scratch memory. Those of the states follow, and that of the direction or of coefficients.
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

// The operations of torch.optim.NAdam, in its order. `fill` writes each parameter's coefficient to `numbers`.
template <typename F>
void nadam(const tamp_optim_options &o, const Tensor &parameter, const Tensor &gradient, const Tensor &between,
           const Tensor &numbers, const Tensor *states, const F &fill) {
  Tensor root = between, along = gradient;
  const Tensor &exp_avg = states[kExpAvg], &exp_avg_sq = states[kExpAvgSq];
  const bool decoupled = (o.flags & TAMP_OPTIM_DECOUPLED_WEIGHT_DECAY) != 0;
  if (o.weight_decay != 0) decoupled ? decay(o, parameter) : (void)gradient.add_(parameter, o.weight_decay);
  exp_avg.lerp_(gradient, 1 - o.beta1);
  exp_avg_sq.mul_(o.beta2).addcmul_(gradient, gradient, 1 - o.beta2);
  fill(0);
  at::div_out(root, exp_avg_sq, numbers).sqrt_().add_(o.eps);
  fill(1);
  parameter.add_(gradient.mul_(numbers).div_(root));
  fill(2);
  parameter.add_(at::mul_out(along, exp_avg, numbers).div_(root));
}

void lion(const tamp_optim_options &o, const Tensor &parameter, const Tensor &gradient, const Tensor &between,
          const Tensor &exp_avg) {
  between.copy_(exp_avg).mul_(o.beta1).add_(gradient, 1 - o.beta1).sign_();
  exp_avg.mul_(o.beta2).add_(gradient, 1 - o.beta2);
  decay(o, parameter);
  move(o, parameter, between);
}

}  // namespace

void move_along(const tamp_optim_options &o, double factor, const Tensor &parameter, const Tensor &direction) {
  decay(o, parameter);
  if (has_device_rates(o)) return move(o, parameter, direction, factor);
  parameter.add_(direction, -factor);
}

bool is_composed(uint8_t algorithm) {
  switch (algorithm) {
    case TAMP_OPTIM_RMSPROP:
    case TAMP_OPTIM_LION:
    case TAMP_OPTIM_MUON:
    case TAMP_OPTIM_NADAM:
    case TAMP_OPTIM_ADAFACTOR:
      return true;
    default:
      return false;
  }
}

ComposedStep::ComposedStep(const Batch &batch, Scratch &scratch)
    : batch_(batch), dtype_(batch.dtype == at::kDouble ? at::kDouble : at::kFloat), places_(batch.places()) {
  (void)scratch.rows(dtype_, rows_needed(), largest_chunk(cut(batch_.parameters)));
}

size_t ComposedStep::rows_needed() const {
  const bool has_more = !batch_.direction.empty() || !batch_.coefficients[0].empty();
  return kFirstState + places_.size() + (has_more ? 1 : 0);
}

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
  if (!batch_.direction.empty()) in(batch_.direction[piece.tensor], rows_needed() - 1);
  if (batch_.coefficients[0].empty()) return;
  const size_t row = batch_.direction.empty() ? rows_needed() - 1 : static_cast<size_t>(kBetween);
  chunk.numbered.push_back(piece.in(chunk.rows[row], like));
  chunk.tensors.push_back(piece.tensor);
}

void ComposedStep::prepare(Scratch &scratch) {
  for (const auto &pieces : cut(batch_.parameters)) {
    Chunk &chunk = chunks_.emplace_back();
    chunk.rows = scratch.rows(dtype_, rows_needed(), pieces.numbers);
    for (const auto &piece : pieces.list) list(piece, chunk);
  }
}

void ComposedStep::fill(const Chunk &chunk, int coefficient) const {
  for (size_t i = 0; i < chunk.numbered.size(); ++i) {
    chunk.numbered[i].fill_(batch_.coefficients[coefficient][chunk.tensors[i]]);
  }
}

void ComposedStep::compute(const Chunk &chunk, const Prepared &scale) const {
  const Tensor &gradient = chunk.rows[kGradient];
  if (scale.unscaling.inverse.defined()) gradient.mul_(scale.unscaling.inverse);
  if (scale.unscaling.clip.defined()) gradient.mul_(scale.unscaling.clip);
  if ((batch_.options->flags & TAMP_OPTIM_MAXIMIZE) != 0) gradient.neg_();
  step(chunk);
}

void ComposedStep::step(const Chunk &chunk) const {
  const auto &rows = chunk.rows;
  const tamp_optim_options &o = *batch_.options;
  const Tensor &parameter = rows[kParameter], &gradient = rows[kGradient], &between = rows[kBetween];
  Tensor states[kStates];
  for (size_t i = 0; i < places_.size(); ++i) states[places_[i]] = rows[kFirstState + i];
  switch (o.algorithm) {
    case TAMP_OPTIM_RMSPROP:
      return rmsprop(o, parameter, gradient, between, states);
    case TAMP_OPTIM_MUON:
      states[kMomentumBuffer].lerp_(gradient, 1 - o.momentum);
      return move_along(o, batch_.rate, parameter, rows.back());
    case TAMP_OPTIM_NADAM:
      return nadam(o, parameter, gradient, between, rows.back(), states, [&](int i) { fill(chunk, i); });
    case TAMP_OPTIM_ADAFACTOR:
      fill(chunk, 0);
      if (o.weight_decay != 0) decay(o, parameter);
      (void)parameter.addcmul_(rows.back(), between, -1);
      return;
    default:
      return lion(o, parameter, gradient, between, states[kExpAvg]);
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
    compute(chunk, scale);
    write(chunk, scale.found_inf);
  }
  batch_.bump_versions();
}

}  // namespace tamp::optim
