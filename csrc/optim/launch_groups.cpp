// Groups of parameters that one kernel launch can step together.

#include "optim/launch_groups.h"

#include "border/groups.h"

namespace tamp::optim {

std::vector<int> Batch::places() const {
  std::vector<int> out;
  for (int i = 0; i < kStates; ++i) {
    if (!states[i].empty()) out.push_back(i);
  }
  return out;
}

bool Batch::takes(const Entry &e) const {
  return options == e.options && dtype == e.parameter.scalar_type() && kept_as == e.kept_as &&
         first_step == e.first_step && rate == e.rate;
}

void Batch::add(const Entry &e) {
  parameters.push_back(e.parameter);
  gradients.push_back(e.gradient);
  if (e.step.defined()) steps.push_back(e.step);
  if (e.orthogonal.defined()) orthogonal.push_back(e.orthogonal);
  for (int i = 0; i < kStates; ++i) {
    if (e.states[i].defined()) states[i].push_back(e.states[i]);
  }
}

std::vector<Batch> batches(const std::vector<Entry> &entries) {
  std::vector<Batch> out;
  for (const auto &e : entries) {
    const auto takes = [&](const Batch &batch) { return batch.takes(e); };
    group_for(out, takes, e.options, e.parameter.scalar_type(), e.kept_as, e.first_step, e.rate).add(e);
  }
  return out;
}

}  // namespace tamp::optim
