// Groups of parameters that one kernel launch can step together.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "optim/optim.h"

namespace tamp::optim {

// Entries that are stepped together: those with the same options, dtypes, first step and rate.
struct Batch {
  const tamp_optim_options *options;
  at::ScalarType dtype;
  uint8_t kept_as;
  bool first_step;
  double rate;
  std::vector<at::Tensor> parameters{}, gradients{}, steps{}, states[kStates]{}, direction{};
  std::vector<at::Tensor> coefficients[kCoefficients]{};

  // The places of the states that there are.
  std::vector<int> places() const;
  void add(const Entry &e);
  // Throws if a list is there for some of the parameters only. A step may be missing, where steps are no longer counted.
  void check() const;
  // After a step that wrote to parameters and states.
  void bump_versions() const;
};

std::vector<Batch> batches(const std::vector<Entry> &entries);

}  // namespace tamp::optim
