// What Muon computes from a whole matrix: the orthogonalized momentum, which a loop or the composed step then applies.
#pragma once

#include <ATen/core/Tensor.h>

#include "optim.h"

namespace tamp::optim {

// How the gradients of a step are unscaled. Each may be undefined.
struct Unscaling {
  at::Tensor inverse;  // the reciprocal of the loss scale
  at::Tensor clip;     // the factor of clipping
};

// Computes the orthogonalized momentum of an entry of Muon, and its learning rate. Does nothing for another algorithm.
// Only the entry itself changes, none of its tensors, so that a failure has changed nothing. If the host knows that the
// step is skipped, memory is allocated but not computed.
void orthogonalize(Entry &e, const Unscaling &unscaling, bool is_skipped);

}  // namespace tamp::optim
