#include "arithmetic.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "chunks.h"
#include "guarded.h"
#include "kernels.h"
#include "memory.h"

namespace tamp {
namespace {

using at::Tensor;

std::vector<Chunk> chunks_of(const std::vector<Tensor> &tensors) {
  std::vector<int64_t> sizes;
  sizes.reserve(tensors.size());
  for (const auto &t : tensors) sizes.push_back(t.numel());
  return chunks(sizes);
}

enum class Access { kRead, kWrite };

// Returns where the memory of each tensor begins. For kWrite it copies copy-on-write memory, which must not happen
// inside a parallel loop.
std::vector<void *> beginnings(const std::vector<Tensor> &tensors, Access access) {
  std::vector<void *> out;
  out.reserve(tensors.size());
  for (const auto &t : tensors) {
    out.push_back(access == Access::kWrite ? t.mutable_data_ptr() : const_cast<void *>(t.const_data_ptr()));
  }
  return out;
}

// Calls `f(pointer, n, i)` for each chunk `i` of tensors that have a loop.
template <typename F>
void over(const std::vector<Tensor> &tensors, const std::vector<Chunk> &chunks, Access access, const F &f) {
  const auto memory = beginnings(tensors, access);
  for_each(chunks, From::kStart, [&](int64_t i) {
    const Chunk &chunk = chunks[static_cast<size_t>(i)];
    with_floating(tensors[chunk.tensor].scalar_type(), [&](auto *type) {
      auto *begin = static_cast<decltype(type)>(memory[chunk.tensor]) + chunk.begin;
      f(begin, chunk.end - chunk.begin, static_cast<size_t>(i));
    });
  });
}

double sum_of_squares(const std::vector<Tensor> &tensors, float factor) {
  const auto parts = chunks_of(tensors);
  std::vector<double> sums(parts.size());
  over(tensors, parts, Access::kRead,
       [&](auto *memory, int64_t n, size_t i) { sums[i] = kernels::sum_of_squares(memory, n, factor); });
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

// The norm of tensors on the CPU, which is summed up in f64. Tensors without a loop are copied to contiguous memory,
// one at a time.
Tensor norm_on_cpu(const std::vector<Tensor> &tensors, float factor) {
  std::vector<Tensor> plain, other;
  for (const auto &t : tensors) (has_loop(t) ? plain : other).push_back(t);
  double total = sum_of_squares(plain, factor);
  for (const auto &t : other) total += sum_of_squares({with_own_numbers(t).contiguous()}, factor);
  return at::scalar_tensor(std::isnan(total) ? std::nan("") : std::sqrt(total), at::kDouble);
}

// The norm of tensors on another device, by libtorch, with one launch for all tensors of a dtype. Norms of f64 tensors
// are computed in f64 and all others in f32, since a norm in half precision would overflow or be inexact. The result is
// f64 only if all tensors are.
Tensor norm_on_device(const std::vector<Tensor> &tensors, const Tensor &factor) {
  std::vector<Tensor> wide, narrow, norms;
  for (const auto &t : tensors) (t.scalar_type() == at::kDouble ? wide : narrow).push_back(t);
  if (!wide.empty()) norms = at::_foreach_norm(wide, 2);
  if (!narrow.empty()) {
    for (auto &norm : norms) norm = norm.to(at::kFloat);
    for (const auto &alike : by_dtype(narrow)) {
      for (auto &norm : at::_foreach_norm(alike, 2, at::kFloat)) norms.push_back(std::move(norm));
    }
  }
  return at::linalg_vector_norm(at::stack(norms), 2) * factor;
}

}  // namespace

Tensor numbers(const Tensor &parameter) {
  Tensor &gradient = parameter.mutable_grad();
  if (gradient.is_sparse() && gradient.scalar_type() == at::kHalf) gradient = gradient.coalesce();
  Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
  // A zero tensor has no memory, so a copy takes its place. The gradient itself stays zero, whatever the copy is
  // multiplied by.
  if (values._is_zerotensor()) values = with_own_numbers(values);
  if (!values.is_complex()) return values;
  return at::view_as_real(values.is_conj() ? values.conj() : values);
}

std::vector<std::vector<Tensor>> by_dtype(const std::vector<Tensor> &tensors) {
  std::vector<std::vector<Tensor>> out;
  for (const auto &t : tensors) {
    size_t i = 0;
    while (i < out.size() && out[i].front().scalar_type() != t.scalar_type()) ++i;
    if (i == out.size()) out.emplace_back();
    out[i].push_back(t);
  }
  return out;
}

Tensor largest(const std::vector<Tensor> &tensors) {
  // The infinity norm of a tensor with a NaN is NaN.
  const double infinity = std::numeric_limits<double>::infinity();
  return at::linalg_vector_norm(at::stack(at::_foreach_norm(tensors, infinity)), infinity);
}

bool has_loop(const Tensor &t) {
  return is_plain_memory(t) && with_floating(t.scalar_type(), [](auto *) {});
}

bool unscale_in_loops(const std::vector<Tensor> &tensors, float factor, bool recheck) {
  const auto parts = chunks_of(tensors);
  std::vector<uint8_t> bad(parts.size());
  over(tensors, parts, factor == 1.0F ? Access::kRead : Access::kWrite, [&](auto *memory, int64_t n, size_t i) {
    bad[i] = factor == 1.0F ? kernels::any_non_finite(memory, n) : kernels::unscale(memory, n, factor, recheck);
  });
  if (factor != 1.0F) {
    for (const auto &t : tensors) {
      if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
    }
  }
  return std::any_of(bad.begin(), bad.end(), [](uint8_t b) { return b != 0; });
}

Tensor norm(const std::vector<Tensor> &tensors, const Tensor &factor) {
  const bool in_f64 =
      std::all_of(tensors.begin(), tensors.end(), [](const Tensor &t) { return t.scalar_type() == at::kDouble; });
  // All tensors are on one device, so the first one decides.
  const Tensor total = tensors.empty() || tensors.front().is_cpu() ? norm_on_cpu(tensors, factor.item<float>())
                                                                   : norm_on_device(tensors, factor);
  return in_f64 ? total.to(at::kDouble) : narrowed(total);
}

Tensor narrowed(const Tensor &norm) {
  const bool is_too_large = norm.is_cpu() && norm.scalar_type() == at::kDouble && std::isfinite(norm.item<double>()) &&
                            !std::isfinite(static_cast<float>(norm.item<double>()));
  return is_too_large ? norm : norm.to(at::kFloat);
}

Tensor clip_factor(const Tensor &norm, double max_norm) {
  // In Python, a number divided by a tensor is the tensor's reciprocal times the number, which rounds differently from
  // a division in C++.
  return (norm + 1e-6).reciprocal().mul(max_norm).clamp_max(1.0);
}

Product::Product(const std::vector<Tensor> &tensors, const Tensor &factor) {
  std::vector<Tensor> other;
  for (const auto &t : tensors) (has_loop(t) ? looped_ : other).push_back(t);
  if (!looped_.empty()) value_ = factor.item<double>();
  // libtorch multiplies a list by a tensor in one launch only if both have the same dtype. Otherwise it rounds the
  // factor to the dtype of the tensors as well, but multiplies them one by one.
  for (auto &alike : by_dtype(other)) {
    const Tensor rounded = on_device(factor, alike.front().device()).to(alike.front().scalar_type());
    lists_.push_back({std::move(alike), rounded});
  }
}

void Product::run() const {
  if (!looped_.empty() && value_ != 1.0) {
    const auto parts = chunks_of(looped_);
    over(looped_, parts, Access::kWrite,
         [&](auto *memory, int64_t n, size_t) { kernels::multiply(memory, n, value_); });
    for (const auto &t : looped_) {
      if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
    }
  }
  for (const auto &[alike, factor] : lists_) at::_foreach_mul_(alike, factor);
}

}  // namespace tamp
