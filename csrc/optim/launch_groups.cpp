// Groups of parameters that one kernel launch can step together.

#include "optim/launch_groups.h"

namespace tamp::optim {

std::vector<Pieces> Batch::pieces() const {
  std::vector<int64_t> sizes;
  for (const auto &t : parameters) sizes.push_back(t.numel());
  return cut(sizes);
}

bool Batch::takes(const Entry &e) const {
  return options == e.options && dtype == e.parameter.scalar_type() && kept_as == e.kept_as &&
         first_step == e.first_step && rate == e.rate;
}

void Batch::add(const Entry &e) {
  parameters.push_back(e.parameter);
  gradients.push_back(e.gradient);
  if (e.step.defined()) steps.push_back(e.step);
  if (e.direction.defined()) direction.push_back(e.direction);
  for (int i = 0; i < kCoefficients; ++i) {
    if (e.coefficients[i].defined()) coefficients[i].push_back(e.coefficients[i]);
  }
  for (int i = 0; i < kStates; ++i) {
    if (e.states[i].defined()) states[i].push_back(e.states[i]);
  }
}

std::vector<Batch> batches(const std::vector<Entry> &entries) {
  std::vector<Batch> out;
  for (const auto &e : entries) {
    size_t i = 0;
    while (i < out.size() && !out[i].takes(e)) ++i;
    if (i == out.size()) {
      out.push_back({e.options, e.parameter.scalar_type(), e.kept_as, e.first_step, e.rate, {}, {}, {}, {}, {}, {}});
    }
    out[i].add(e);
  }
  return out;
}

}  // namespace tamp::optim
