#include "gradients/norm.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "border/guarded.h"
#include "gradients/cpu_passes.h"
#include "gradients/foreach.h"
#include "gradients/foreach_copy.h"
#include "gradients/storage.h"
#include "kernels/kernels.h"

namespace tamp {
namespace {

using at::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool is_f64(const Tensor &t) { return t.scalar_type() == at::kDouble; }

// ---- on the CPU, in f64

// Calls `f(pointer, n)` for each chunk of CPU tensors, and `join(result)` for each of its results, in order.
template <typename F, typename Join>
void over_chunks(const std::vector<Tensor> &tensors, const F &f, const Join &join) {
  with_loops(tensors, [&](const std::vector<Tensor> &looped) {
    const auto parts = chunks_of(looped);
    std::vector<decltype(f(static_cast<float *>(nullptr), 0))> results(parts.size());
    over(looped, parts, Access::kRead, [&](auto *memory, int64_t n, size_t i) { results[i] = f(memory, n); });
    for (const auto &result : results) join(result);
  });
}

template <typename F>
double sum(const std::vector<Tensor> &tensors, const F &f) {
  double total = 0;
  over_chunks(tensors, f, [&](double part) { total += part; });
  return std::isnan(total) ? std::nan("") : total;
}

// Below this sum of squares, those that underflowed may be missing in it.
constexpr double kLeastSum = 0x1p-960;

double two_norm_on_cpu(const std::vector<Tensor> &tensors, float factor) {
  const double total =
      sum(tensors, [&](auto *memory, int64_t n) { return kernels::sum_of_squares(memory, n, factor); });
  const bool is_exact = total >= kLeastSum && std::isfinite(total);
  if (is_exact || std::none_of(tensors.begin(), tensors.end(), is_f64)) return std::sqrt(total);
  // Among the tensors are f64 numbers whose squares overflow or underflow.
  kernels::ScaledSum scaled;
  over_chunks(
      tensors, [&](auto *memory, int64_t n) { return kernels::scaled_sum_of_squares(memory, n, factor); },
      [&](const kernels::ScaledSum &part) { scaled.add(part); });
  return scaled.root();
}

// The largest absolute value, or NaN if there is one.
double largest_on_cpu(const std::vector<Tensor> &tensors, float factor) {
  double out = 0;
  over_chunks(
      tensors, [&](auto *memory, int64_t n) { return kernels::largest(memory, n, factor); },
      [&](double part) { out = std::isnan(out) || part <= out ? out : part; });
  return out;
}

double norm_on_cpu(const std::vector<Tensor> &tensors, double norm_type, float factor) {
  if (norm_type == 2) return two_norm_on_cpu(tensors, factor);
  if (norm_type == 1) {
    return sum(tensors, [&](auto *memory, int64_t n) { return kernels::sum_of_sizes(memory, n, factor); });
  }
  const double largest = largest_on_cpu(tensors, factor);
  if (std::isinf(norm_type) || largest == 0 || !std::isfinite(largest)) return largest;
  // Powers overflow and underflow; those of the ratios to the largest value do not.
  const double total = sum(
      tensors, [&](auto *memory, int64_t n) { return kernels::sum_of_powers(memory, n, factor, largest, norm_type); });
  return largest * std::pow(total, 1 / norm_type);
}

// ---- on other devices, by libtorch

// Whether the terms of a norm are other powers than squares.
bool has_powers(double norm_type) { return norm_type != 1 && norm_type != 2 && !std::isinf(norm_type); }

// Returns what numbers whose largest absolute value is `largest` are divided by, so that their powers neither overflow
// nor underflow: that value, if it is a positive number.
Tensor unit_of(const Tensor &largest) {
  return at::where(at::isfinite(largest).logical_and(largest > 0), largest, at::ones_like(largest));
}

// The norm of the numbers of one tensor, in its dtype.
Tensor vector_norm(const Tensor &numbers, double norm_type) {
  if (!has_powers(norm_type)) return at::linalg_vector_norm(numbers, norm_type);
  const Tensor unit = unit_of(at::linalg_vector_norm(numbers, kInfinity));
  return at::linalg_vector_norm(numbers / unit, norm_type) * unit;
}

// Calls `f` with lists of these tensors, and with how many numbers each list has: about as many as fit into a copy.
template <typename F>
void in_parts(const std::vector<Tensor> &tensors, const F &f) {
  constexpr int64_t kNumbers = int64_t{1} << 24;
  std::vector<Tensor> part;
  int64_t numbers = 0;
  for (const auto &t : tensors) {
    part.push_back(t);
    numbers += t.numel();
    if (numbers < kNumbers) continue;
    f(part, numbers);
    part.clear();
    numbers = 0;
  }
  if (!part.empty()) f(part, numbers);
}

// Returns 2^exponent for whole numbers from -1022 to 1023, exactly.
Tensor power_of_two(const Tensor &exponent) {
  return exponent.to(at::kLong).add(1023).bitwise_left_shift(52).view(at::kDouble);
}

// The norms of some tensors, divided by `unit` if it is defined.
struct Norms {
  std::vector<Tensor> norms;
  Tensor unit;
};

// The 2-norms of f64 tensors, whose squares may overflow or underflow. They are taken of copies that are multiplied by
// a power of two, which changes no other bit.
Norms two_norms_of_f64(const std::vector<Tensor> &filled) {
  const Tensor exponent = std::get<1>(at::frexp(largest(filled))).clamp(-1000, 1000);
  const Tensor down = power_of_two(exponent.neg());
  std::vector<Tensor> norms;
  in_parts(filled, [&](const std::vector<Tensor> &part, int64_t) {
    for (auto &norm : at::_foreach_norm(at::_foreach_mul(part, down), 2)) norms.push_back(std::move(norm));
  });
  return {std::move(norms), power_of_two(exponent)};
}

// The common norm of tensors, whose terms are powers, in a dtype. They are those of copies that are divided by the
// largest absolute value.
Tensor norm_of_powers(const std::vector<Tensor> &filled, double norm_type, at::ScalarType dtype) {
  const Tensor unit = unit_of(largest(filled).to(dtype));
  std::vector<Tensor> sums;
  in_parts(filled, [&](const std::vector<Tensor> &part, int64_t numbers) {
    const Tensor memory = at::empty({numbers}, part.front().options().dtype(dtype));
    std::vector<Tensor> copies;
    int64_t begin = 0;
    for (const auto &t : part) {
      copies.push_back(place_in(memory, begin, t));
      begin += t.numel();
    }
    at::_foreach_copy_(copies, part);
    sums.push_back(memory.div_(unit).abs_().pow_(norm_type).sum());
  });
  return at::stack(sums).sum().pow(1 / norm_type).mul(unit);
}

// The norms of tensors of one dtype, one of each or a common one: f64 ones of f64 tensors, and f32 ones of all others,
// since a norm in half precision would overflow or be inexact. The launches do not depend on the number of tensors.
Norms norms_of(const std::vector<Tensor> &alike, double norm_type) {
  const auto dtype = is_f64(alike.front()) ? at::kDouble : at::kFloat;
  const bool squares_f64 = norm_type == 2 && dtype == at::kDouble;
  if (norm_type == 1 || (norm_type == 2 && !squares_f64)) return {at::_foreach_norm(alike, norm_type, dtype), {}};
  std::vector<Tensor> filled;  // a tensor without elements has no largest one
  for (const auto &t : alike) {
    if (t.numel() > 0) filled.push_back(t);
  }
  if (filled.empty()) return {{at::zeros({}, alike.front().options().dtype(dtype))}, {}};
  if (squares_f64) return two_norms_of_f64(filled);
  if (has_powers(norm_type)) return {{norm_of_powers(filled, norm_type, dtype)}, {}};
  return {at::_foreach_norm(filled, norm_type, dtype), {}};
}

// The norm of tensors on another device. It is f64 only if all of them are.
Tensor norm_on_device(const std::vector<Tensor> &tensors, double norm_type) {
  // Kernels take the type as f32. Beyond its range, a norm is that of the largest number.
  if (std::isfinite(norm_type)) norm_type = std::min(norm_type, double{std::numeric_limits<float>::max()});
  auto lists = by_dtype(tensors);
  if (lists.size() == 1) {
    const auto [norms, unit] = norms_of(lists.front(), norm_type);
    const Tensor total = vector_norm(at::stack(norms), norm_type);
    return unit.defined() ? total.mul(unit) : total;
  }
  // In f32 the order of the squares decides the last bit.
  std::stable_partition(lists.begin(), lists.end(), [](const auto &alike) { return is_f64(alike.front()); });
  std::vector<Tensor> all;
  for (const auto &alike : lists) {
    auto [norms, unit] = norms_of(alike, norm_type);
    if (unit.defined()) norms = at::stack(norms).mul(unit).to(at::kFloat).unbind();
    for (const auto &norm : norms) all.push_back(norm.to(at::kFloat));
  }
  return vector_norm(at::stack(all), norm_type);
}

// ---- of both

// Converts a norm to f32, unless it is a finite f64 number on the CPU that is too large for f32.
Tensor narrowed(const Tensor &norm) {
  const bool is_too_large = norm.is_cpu() && is_f64(norm) && std::isfinite(norm.item<double>()) &&
                            !std::isfinite(static_cast<float>(norm.item<double>()));
  return is_too_large ? norm : norm.to(at::kFloat);
}

// The 2-norm of f64 norms of one device, none of whose squares overflows or underflows.
Tensor hypotenuse(const std::vector<Tensor> &norms) {
  Tensor total = norms.front();
  for (size_t i = 1; i < norms.size(); ++i) {
    // By its standard, a hypotenuse is infinite if one side is, even if the other one is NaN.
    const Tensor sum = total + norms[i];
    total = at::where(at::isnan(sum), sum, at::hypot(total, norms[i]));
  }
  return total;
}

}  // namespace

Tensor for_norm(const Tensor &gradient, double norm_type) {
  if (!gradient.is_complex() || norm_type == 2) return numbers(gradient);
  const Tensor own = gradient._is_zerotensor() ? with_own_numbers(gradient) : gradient;
  // libtorch does not compute with complex numbers of two fp16.
  return at::abs(own.scalar_type() == at::kComplexHalf ? own.to(at::kComplexFloat) : own);
}

Tensor norm(const std::vector<Tensor> &tensors, double norm_type, const Tensor &factor) {
  const bool in_f64 = std::all_of(tensors.begin(), tensors.end(), is_f64);
  // All tensors are on one device, so the first one decides.
  const bool on_cpu = tensors.empty() || tensors.front().is_cpu();
  const Tensor total = on_cpu ? at::scalar_tensor(norm_on_cpu(tensors, norm_type, factor.item<float>()), at::kDouble)
                              : norm_on_device(tensors, norm_type) * factor;
  return in_f64 ? total.to(at::kDouble) : narrowed(total);
}

Tensor norm_of_norms(const std::vector<Tensor> &norms, double norm_type) {
  if (norms.size() == 1) return norms.front();
  const at::Device device = norms.front().device();
  const bool in_f64 = std::all_of(norms.begin(), norms.end(), is_f64);
  // Otherwise as PyTorch does; other devices than the CPU may lack f64.
  const auto dtype = in_f64 || device.is_cpu() ? at::kDouble : at::kFloat;
  std::vector<Tensor> there;
  for (const auto &norm : norms) there.push_back(on_device(norm, device).to(dtype));
  const bool sums_squares = norm_type == 2 && dtype == at::kDouble;
  const Tensor total = sums_squares ? hypotenuse(there) : vector_norm(at::stack(there), norm_type);
  return in_f64 ? total : narrowed(total);
}

Tensor clip_factor(const Tensor &norm, double max_norm) {
  // In Python, a number divided by a tensor is the tensor's reciprocal times the number, which rounds differently from
  // a division in C++.
  return (norm + 1e-6).reciprocal().mul(max_norm).clamp_max(1.0);
}

}  // namespace tamp
