// Muon's orthogonalization of the momenta of matrices by Newton-Schulz iterations, with libtorch's operations in the
// order of torch.optim.Muon.

#include "optim/whole.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "border/groups.h"
#include "gradients/foreach_copy.h"
#include "optim/scratch.h"

namespace tamp::optim {
namespace {

using at::Tensor;
using List = std::vector<Tensor>;

// Matrices that are computed together. They have the same options, and their momenta the same dtype. Half precision is
// computed in f32.
struct Group {
  const tamp_optim_options *options;
  at::TensorOptions wide;
  std::vector<const Entry *> entries{};
  std::vector<int64_t> places{};  // in memory for all, aligned as libtorch's own memory is
  int64_t numbers = 0;

  void add(const Entry &e) {
    entries.push_back(&e);
    places.push_back(numbers);
    numbers += (e.parameter.numel() + kRow - 1) / kRow * kRow;
  }
};

bool is_tall(const Entry &e) { return e.parameter.size(0) > e.parameter.size(1); }

// Returns in bf16 the momenta that the step makes or, with Nesterov momentum, the gradients that look ahead along them.
Tensor momenta(const Group &group, const Unscaling &unscaling) {
  const tamp_optim_options &o = *group.options;
  const Tensor gradient = at::empty({group.numbers}, group.wide), buffer = at::empty_like(gradient);
  Copies in;
  for (size_t i = 0; i < group.entries.size(); ++i) {
    const Entry &e = *group.entries[i];
    in.add(place_in(gradient, group.places[i], e.gradient), e.gradient);
    in.add(place_in(buffer, group.places[i], e.parameter), e.states[kMomentumBuffer]);
  }
  in.run();
  if (unscaling.inverse.defined()) gradient.mul_(unscaling.inverse);
  if (unscaling.clip.defined()) gradient.mul_(unscaling.clip);
  buffer.lerp_(gradient, 1 - o.momentum);
  const bool looks_ahead = (o.flags & TAMP_OPTIM_NESTEROV) != 0;
  return (looks_ahead ? gradient.lerp_(buffer, o.momentum) : buffer).to(at::kBFloat16);
}

// Divides matrices by their norms.
void normalize(const List &matrices, double eps) {
  const Tensor norms = at::empty({static_cast<int64_t>(matrices.size())}, matrices.front().options());
  for (size_t i = 0; i < matrices.size(); ++i) {
    Tensor norm = norms[static_cast<int64_t>(i)];
    at::linalg_vector_norm_out(norm, matrices[i], 2, {0, 1});
  }
  norms.clamp_(eps);
  for (size_t i = 0; i < matrices.size(); ++i) matrices[i].div_(norms[static_cast<int64_t>(i)]);
}

// Divides memory among matrices of the sizes of a group's, of which those that were tall are turned.
List dense(const Group &group, const Tensor &memory) {
  List out;
  for (size_t i = 0; i < group.entries.size(); ++i) {
    const Tensor &like = group.entries[i]->parameter;
    const int64_t sides[] = {std::min(like.size(0), like.size(1)), std::max(like.size(0), like.size(1))};
    out.push_back(memory.narrow(0, group.places[i], like.numel()).view(sides));
  }
  return out;
}

List squares(const Group &group) {
  std::vector<int64_t> places;
  int64_t numbers = 0;
  const auto side = [](const Entry *e) { return std::min(e->parameter.size(0), e->parameter.size(1)); };
  for (const Entry *e : group.entries) {
    places.push_back(numbers);
    numbers += (side(e) * side(e) + kRow - 1) / kRow * kRow;
  }
  const Tensor memory = at::empty({numbers}, group.wide.dtype(at::kBFloat16));
  List out;
  for (size_t i = 0; i < places.size(); ++i) {
    const int64_t n = side(group.entries[i]);
    out.push_back(memory.narrow(0, places[i], n * n).view({n, n}));
  }
  return out;
}

// Copies matrices, those that keep their layout in one launch.
void copy(const List &to, const List &from) {
  Copies alike;
  for (size_t i = 0; i < to.size(); ++i) {
    if (from[i].strides() == to[i].strides()) {
      alike.add(to[i], from[i]);
    } else {
      to[i].copy_(from[i]);
    }
  }
  alike.run();
}

// Moves the singular values of normalized matrices towards one. A product is added to a copy of what it is added to,
// because libtorch would make one for each.
void iterate(const List &from, const List &to, const List &grams, const List &polynomials,
             const tamp_optim_options &o) {
  for (size_t i = 0; i < from.size(); ++i) {
    Tensor gram = grams[i];
    at::mm_out(gram, from[i], from[i].t());
  }
  copy(polynomials, grams);
  for (size_t i = 0; i < from.size(); ++i) {
    polynomials[i].addmm_(grams[i], grams[i], /*beta=*/o.ns_b, /*alpha=*/o.ns_c);
  }
  copy(to, from);
  for (size_t i = 0; i < from.size(); ++i) to[i].addmm_(polynomials[i], from[i], /*beta=*/o.ns_a);
}

// Orthogonalizes the matrices of a group, which are in `memory` like the parameters.
void newton_schulz(const Group &group, const Tensor &memory) {
  const tamp_optim_options &o = *group.options;
  List now, results;
  for (size_t i = 0; i < group.entries.size(); ++i) {
    const Entry &e = *group.entries[i];
    const Tensor matrix = place_in(memory, group.places[i], e.parameter);
    now.push_back(is_tall(e) ? matrix.t() : matrix);  // the products are then of the smaller size
    results.push_back(is_tall(e) ? e.direction.t() : e.direction);
  }
  normalize(now, o.eps);
  List next = dense(group, at::empty_like(memory));
  const List grams = squares(group), polynomials = squares(group);
  for (int i = 0; i < o.ns_steps; ++i) {
    iterate(now, next, grams, polynomials, o);
    now = std::exchange(next, i == 0 ? dense(group, memory) : now);
  }
  copy(results, now);
}

// The factor of the learning rate for the shape of a matrix.
double factor_of(const tamp_optim_options &o, const Tensor &matrix) {
  const auto rows = static_cast<double>(matrix.size(0)), columns = static_cast<double>(matrix.size(1));
  if ((o.flags & TAMP_OPTIM_MATCH_RMS_ADAMW) != 0) return 0.2 * std::sqrt(std::max(rows, columns));
  return std::sqrt(std::max(1.0, rows / std::max(1.0, columns)));
}

}  // namespace

void orthogonalize(std::vector<Entry> &entries, const Unscaling &unscaling, bool is_skipped) {
  std::vector<Group> groups;
  for (auto &e : entries) {
    if (e.options->algorithm != TAMP_OPTIM_MUON) continue;
    const double factor = factor_of(*e.options, e.parameter);
    e.rate = has_device_rates(*e.options) ? factor : e.options->lr * factor;
    e.direction = at::empty_like(e.parameter, e.parameter.options().dtype(at::kBFloat16));
    if (is_skipped || e.parameter.numel() == 0) continue;
    const auto wide = e.parameter.options().dtype(e.parameter.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
    const auto takes = [&](const Group &group) {
      return group.options == e.options && group.wide.dtype() == wide.dtype() &&
             group.numbers + e.parameter.numel() <= kChunk;
    };
    group_for(groups, takes, e.options, wide).add(e);
  }
  for (const auto &group : groups) newton_schulz(group, momenta(group, unscaling));
}

}  // namespace tamp::optim
