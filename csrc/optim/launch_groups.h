// Groups of parameters that one kernel launch can step together.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "optim/optim.h"
#include "optim/scratch.h"

namespace tamp::optim {

// Entries that are stepped together: those with the same options, dtypes, first step and rate.
struct Batch {
  const tamp_optim_options *options;
  at::ScalarType dtype;
  uint8_t kept_as;
  bool first_step;
  double rate;
  std::vector<at::Tensor> parameters, gradients, steps, states[kStates], direction;
  std::vector<at::Tensor> coefficients[kCoefficients]{};

  // The parts of the parameters that fit into scratch memory together.
  std::vector<Pieces> pieces() const;
  bool takes(const Entry &e) const;
  void add(const Entry &e);
};

std::vector<Batch> batches(const std::vector<Entry> &entries);

}  // namespace tamp::optim
