// Composed attention. The scores, their scale and the mask are one product, and autograd keeps the probabilities once.

#include "autocast/attention.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

#include <cmath>
#include <limits>
#include <optional>

namespace tamp {
namespace {

using at::Tensor;

// What a mask adds to the score of a key that is left out.
constexpr double kLeftOut = -std::numeric_limits<double>::infinity();

// The arguments of scaled_dot_product_attention.
struct Attention {
  explicit Attention(c10::ArrayRef<c10::IValue> arguments)
      : query(arguments[0].toTensor()),
        key(arguments[1].toTensor()),
        value(arguments[2].toTensor()),
        mask(arguments[3].isTensor() ? arguments[3].toTensor() : Tensor()),
        dropout(arguments[4].toDouble()),
        causal(arguments[5].toBool()),
        grouped(arguments[7].toBool()) {
    if (!arguments[6].isNone()) scale = arguments[6].toDouble();
  }

  Tensor query, key, value, mask;
  double dropout;
  bool causal, grouped;
  std::optional<double> scale;

  // The dimensions before rows and columns.
  static at::DimVector batch_of(const Tensor &t) { return at::DimVector(t.sizes().slice(0, t.dim() - 2)); }

  // The same for keys or values, once each of their heads serves as many heads of the queries as it must.
  at::DimVector grouped_batch_of(const Tensor &t) const {
    auto batch = batch_of(t);
    if (grouped) batch.back() = query.size(-3);
    return batch;
  }
};

// The dtypes that autocast casts.
bool is_cast(const Tensor &t) { return t.is_floating_point() && t.scalar_type() != at::kDouble; }

bool is_matrix(const Tensor &t) {
  return t.defined() && t.layout() == at::kStrided && !t.is_nested() && t.dim() >= 2 && t.numel() > 0 && is_cast(t);
}

bool has_fitting_heads(const Attention &call) {
  if (!call.grouped) return true;
  const auto fits = [&](const Tensor &t) { return t.dim() >= 3 && call.query.size(-3) % t.size(-3) == 0; };
  return call.query.dim() >= 3 && fits(call.key) && fits(call.value);
}

bool has_fitting_mask(const Attention &call, at::IntArrayRef scores) {
  const Tensor &mask = call.mask;
  if (!mask.defined()) return true;
  const bool is_mask = mask.scalar_type() == at::kBool || is_cast(mask);
  return !call.causal && is_mask && mask.layout() == at::kStrided && !mask.is_nested() && mask.dim() >= 2 &&
         mask.numel() > 0 && at::is_expandable_to(mask.sizes(), scores);
}

// One matrix for each element of a batch.
Tensor flattened(const Tensor &t, const at::DimVector &batch) {
  at::DimVector sizes(batch);
  sizes.append({t.size(-2), t.size(-1)});
  return t.expand(sizes).reshape({c10::multiply_integers(batch), t.size(-2), t.size(-1)});
}

// Keys or values with as many heads as the queries.
Tensor repeated(const Attention &call, const Tensor &t) {
  const int64_t repeats = call.grouped ? call.query.size(-3) / t.size(-3) : 1;
  return repeats == 1 ? t : t.repeat_interleave(repeats, -3);
}

// What is added to the scores, and the rows without any key, which it leaves as they are: a softmax of negative
// infinities alone would be NaN. Both may be undefined.
struct Mask {
  Tensor added, empty;
};

Mask mask_of(const Attention &call, const at::TensorOptions &options) {
  const Tensor &mask = call.mask;
  // Every row has its first key.
  if (call.causal) return {at::full({call.query.size(-2), call.key.size(-2)}, kLeftOut, options).triu(1), {}};
  if (!mask.defined()) return {};
  const bool is_boolean = mask.scalar_type() == at::kBool;
  const Tensor left_out = is_boolean ? mask.logical_not() : mask.isneginf();
  const Tensor empty = left_out.all(-1, /*keepdim=*/true);
  if (!is_boolean) return {mask.masked_fill(empty, 0), empty};
  return {at::zeros(mask.sizes(), options).masked_fill(left_out.logical_and(empty.logical_not()), kLeftOut), empty};
}

Tensor scores(const Tensor &query, const Tensor &key, const Tensor &mask, double scale) {
  const Tensor transposed = key.transpose(1, 2);
  if (mask.defined()) return at::baddbmm(mask, query, transposed, 1, scale);
  return at::baddbmm(at::zeros({1, 1, 1}, query.options()), query, transposed, 0, scale);
}

}  // namespace

bool can_be_composed(c10::ArrayRef<c10::IValue> arguments, uint64_t most_bytes) {
  const Attention call(arguments);
  const Tensor &query = call.query, &key = call.key, &value = call.value;
  if (!is_matrix(query) || !is_matrix(key) || !is_matrix(value) || !has_fitting_heads(call)) return false;
  if (query.size(-1) != key.size(-1) || key.size(-2) != value.size(-2)) return false;
  const auto queries = Attention::batch_of(query), keys = call.grouped_batch_of(key);
  if (!at::are_expandable(queries, keys)) return false;
  auto batch = at::infer_size_dimvector(queries, keys);
  if (!at::is_expandable_to(call.grouped_batch_of(value), batch)) return false;
  batch.append({query.size(-2), key.size(-2)});
  const auto bytes = static_cast<double>(c10::multiply_integers(batch)) * c10::elementSize(at::kHalf);
  return bytes <= static_cast<double>(most_bytes) && has_fitting_mask(call, batch);
}

void lower_mask(c10::IValue *arguments) {
  if (!arguments[3].isTensor() || !arguments[3].toTensor().is_floating_point()) return;
  const Tensor &mask = arguments[3].toTensor();
  const Tensor largest = mask.detach().amax(-1, /*keepdim=*/true);
  // A row that is -inf everywhere has no key, and stays as it is: -inf - -inf would be NaN.
  arguments[3] = mask - largest.masked_fill(largest.isneginf(), 0);
}

Tensor composed_attention(c10::ArrayRef<c10::IValue> arguments) {
  const Attention call(arguments);
  const auto batch = at::infer_size_dimvector(Attention::batch_of(call.query), call.grouped_batch_of(call.key));
  const Tensor query = flattened(call.query, batch), key = flattened(repeated(call, call.key), batch);
  const Tensor value = flattened(repeated(call, call.value), batch);
  auto [added, empty] = mask_of(call, query.options());
  if (added.defined() && !call.causal) {
    at::DimVector sizes(batch);
    sizes.append({query.size(1), key.size(1)});
    added = added.expand(sizes).reshape({query.size(0), query.size(1), key.size(1)});
  }
  const double scale = call.scale.value_or(1 / std::sqrt(static_cast<double>(query.size(2))));
  Tensor probabilities = at::softmax(scores(query, key, added, scale), -1);
  if (call.dropout > 0) probabilities = at::dropout(probabilities, call.dropout, /*train=*/true);
  at::DimVector sizes(batch);
  sizes.append({query.size(1), value.size(2)});
  const Tensor result = at::bmm(probabilities, value).view(sizes);
  return empty.defined() ? result.masked_fill(empty, 0) : result;
}

}  // namespace tamp
