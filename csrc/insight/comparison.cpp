// The results of one run beside those of another.

#include "insight/comparison.h"

#include <ATen/ATen.h>

#include <cmath>
#include <string_view>
#include <unordered_set>

#include "border/guarded.h"

namespace tamp {
namespace {

// Operators that only convert or copy. A region makes a program call more of them, or fewer.
bool is_copy(std::string_view name) {
  static const std::unordered_set<std::string_view> copies = {
      "aten::to",     "aten::type_as", "aten::_to_copy", "aten::contiguous", "aten::clone",  "aten::copy_",
      "aten::detach", "aten::detach_", "aten::alias",    "aten::set_",       "aten::resize_"};
  return copies.count(name) != 0;
}

bool is_lower(const std::vector<at::Tensor> &results) {
  for (const auto &t : results) {
    if (at::isReducedFloatingType(t.scalar_type())) return true;
  }
  return false;
}

bool same_sizes(const std::vector<at::Tensor> &a, const std::vector<at::Tensor> &b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!a[i].sizes().equals(b[i].sizes())) return false;
  }
  return true;
}

// The norm of the difference, that of the reference, and the cosine of the angle between them. Where the reference is
// not finite, as in a mask, nothing is compared.
void compare(const std::vector<at::Tensor> &results, const std::vector<at::Tensor> &references,
             tamp_recorded_event &event) {
  double difference = 0, norm = 0, own = 0, product = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    const auto reference = references[i].to(at::kDouble);
    const auto finite = reference.isfinite();
    const auto a = at::where(finite, results[i].detach().to(at::kDouble), 0);
    const auto b = at::where(finite, reference, 0);
    difference += (a - b).square().sum().item<double>();
    norm += b.square().sum().item<double>();
    own += a.square().sum().item<double>();
    product += (a * b).sum().item<double>();
  }
  event.compared = TAMP_COMPARED;
  event.difference = std::sqrt(difference);
  event.norm = std::sqrt(norm);
  event.cosine = own > 0 && norm > 0 ? product / std::sqrt(own) / std::sqrt(norm) : (own == norm ? 1 : 0);
}

// Rounds numbers in f32 as if they had been stored in half precision. Autograd does not see it.
void round(const at::Tensor &t, at::ScalarType dtype) {
  if (t.scalar_type() != at::kFloat) return;
  t.variable_data().copy_(t.detach().to(dtype));
}

// Gives random numbers the values of the reference, unless autograd needs those that were drawn.
void take_over(const std::vector<at::Tensor> &results, const std::vector<at::Tensor> &references) {
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i].requires_grad()) results[i].variable_data().copy_(references[i]);
  }
}

}  // namespace

void Comparison::forward(const std::string &name, const std::vector<at::Tensor> &results, bool drawn,
                         tamp_recorded_event &event) {
  const bool counts = !results.empty() && !is_copy(name);
  bool lower = false;
  if (counts) event.compared = TAMP_COMPARED_ALONE;
  if (counts && how == TAMP_RECORD_REFERENCE) {
    Reference::Result kept{name, {}};
    for (const auto &t : results) kept.numbers.push_back(t.detach().clone());
    reference->results.push_back(std::move(kept));
  } else if (counts) {
    const size_t index = place++;
    auto *other = index < reference->results.size() ? &reference->results[index] : nullptr;
    if (other == nullptr || other->name != name || !same_sizes(results, other->numbers)) {
      differs = true;
    } else {
      if (how == TAMP_RECORD_COMPARED) other->lower = is_lower(results);
      lower = how == TAMP_RECORD_ROUNDED && other->lower;
      if (drawn) take_over(results, other->numbers);
      compare(results, other->numbers, event);
      // Only now: the comparison is about what it was given.
      if (lower) {
        for (const auto &t : results) round(t, dtype);
      }
    }
  }
  for (const auto &number : pending) rounded[number] = lower;
  pending.clear();
}

void Comparison::backward(std::pair<uint64_t, int64_t> node, const std::vector<at::Tensor> &results) const {
  const auto found = rounded.find(node);
  if (how != TAMP_RECORD_ROUNDED || found == rounded.end() || !found->second) return;
  for (const auto &t : results) round(t, dtype);
}

}  // namespace tamp

extern "C" {

tamp_reference *tamp_reference_new(char **err) noexcept {
  return tamp::guarded(err, [] { return new tamp_reference(); });
}

void tamp_reference_free(tamp_reference *reference) noexcept { delete reference; }

}  // extern "C"
