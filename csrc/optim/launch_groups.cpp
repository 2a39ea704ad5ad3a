// Groups of parameters that one kernel launch can step together.

#include "optim/launch_groups.h"

#include <algorithm>
#include <iterator>

#include "border/groups.h"
#include "gradients/storage.h"

namespace tamp::optim {

std::vector<int> Batch::places() const {
  std::vector<int> out;
  for (int i = 0; i < kStates; ++i) {
    if (!states[i].empty()) out.push_back(i);
  }
  return out;
}

void Batch::add(const Entry &e) {
  parameters.push_back(e.parameter);
  gradients.push_back(e.gradient);
  if (e.step.defined()) steps.push_back(e.step);
  if (e.direction.defined()) direction.push_back(e.direction);
  for (int i = 0; e.factors && i < kCoefficients; ++i) {
    const at::Tensor &coefficient = e.factors->coefficients[i];
    if (coefficient.defined()) coefficients[i].push_back(coefficient);
  }
  for (int i = 0; i < kStates; ++i) {
    if (e.states[i].defined()) states[i].push_back(e.states[i]);
  }
}

void Batch::check() const {
  const auto is_whole = [this](const std::vector<at::Tensor> &list) {
    return list.empty() || list.size() == parameters.size();
  };
  const bool are_whole = is_whole(direction) && std::all_of(std::begin(states), std::end(states), is_whole) &&
                         std::all_of(std::begin(coefficients), std::end(coefficients), is_whole);
  TORCH_CHECK(are_whole, "a launch would lack a state, a direction or a coefficient of some of its parameters");
}

void Batch::bump_versions() const {
  for (const auto &t : parameters) tamp::bump_version(t);
  for (const auto &list : states) std::for_each(list.begin(), list.end(), tamp::bump_version);
}

std::vector<Batch> batches(const std::vector<Entry> &entries) {
  std::vector<Batch> out;
  for (const auto &e : entries) {
    const at::ScalarType dtype = e.parameter.scalar_type();
    const auto takes = [&](const Batch &b) {
      return b.options == e.options && b.dtype == dtype && b.kept_as == e.kept_as && b.first_step == e.first_step &&
             b.rate == e.rate;
    };
    group_for(out, takes, e.options, dtype, e.kept_as, e.first_step, e.rate).add(e);
  }
  for (const Batch &batch : out) batch.check();
  return out;
}

}  // namespace tamp::optim
