// What Muon computes from whole matrices: the orthogonalized momenta, which a loop or the composed step then
// applies.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "optim/optim.h"

namespace tamp::optim {

// How the gradients of a step are unscaled. Each may be undefined.
struct Unscaling {
  at::Tensor inverse;  // the reciprocal of the loss scale
  at::Tensor clip;     // the factor of clipping
};

// Computes the orthogonalized momenta of the entries of Muon among several of one device, and their learning rates.
// Only the entries themselves change, none of their tensors, so that a failure has changed nothing. If the host knows
// that the step is skipped, memory is allocated but not computed.
//
// Matrices are computed together as long as they have at most 2^20 numbers, in up to 10 bytes of scratch memory for
// each number, or 18 in f64: a launch goes over all of them, except that each has its own norm and products.
void orthogonalize(std::vector<Entry> &entries, const Unscaling &unscaling, bool is_skipped);

}  // namespace tamp::optim
