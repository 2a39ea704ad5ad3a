// What some optimizers compute from whole tensors, or for each of them, before a loop or the composed step applies it.
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

// Each function looks at the entries of its own algorithm, on one device. Only the entries themselves change, none of
// their tensors, so that a failure has changed nothing.

// Computes the orthogonalized momenta of Muon, and their learning rates. If the host knows that the step is skipped, it
// allocates the memory and does not compute.
//
// Matrices are computed together as long as they have at most 2^20 numbers, in up to 10 bytes of scratch memory for
// each number, or 18 in f64: a launch goes over all of them, except that each has its own norm and products.
void orthogonalize(std::vector<Entry> &entries, const Unscaling &unscaling, bool is_skipped);

// Computes the directions of Adafactor, how far they go, and the new averages.
void find_directions(std::vector<Entry> &entries, const Unscaling &unscaling);

// The numbers of a parameter in a step of NAdam.
struct NAdamNumbers {
  double correction2, along_gradient, along_exp_avg;
  float mu_product;
};
NAdamNumbers nadam_numbers(const tamp_optim_options &o, double step, float mu_product);

// The same on devices other than the CPU, for all entries of NAdam.
void nadam_coefficients(std::vector<Entry> &entries);

}  // namespace tamp::optim
