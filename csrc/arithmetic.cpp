#include "arithmetic.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "chunks.h"
#include "guarded.h"
#include "kernels.h"
#include "storage.h"

namespace tamp {
namespace {

using at::Tensor;

bool is_f64(const Tensor &t) { return t.scalar_type() == at::kDouble; }

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

// Calls `f` with lists of the tensors that have a loop: with one of those that have one, and one for each of the others,
// which are copied to contiguous memory, one at a time.
template <typename F>
void with_loops(const std::vector<Tensor> &tensors, const F &f) {
  if (std::all_of(tensors.begin(), tensors.end(), has_loop)) return f(tensors);
  std::vector<Tensor> plain, other;
  for (const auto &t : tensors) (has_loop(t) ? plain : other).push_back(t);
  f(plain);
  for (const auto &t : other) f({with_own_numbers(t).contiguous()});
}

double sum_of_squares(const std::vector<Tensor> &tensors, float factor) {
  double total = 0;
  with_loops(tensors, [&](const std::vector<Tensor> &looped) {
    const auto parts = chunks_of(looped);
    std::vector<double> sums(parts.size());
    over(looped, parts, Access::kRead,
         [&](auto *memory, int64_t n, size_t i) { sums[i] = kernels::sum_of_squares(memory, n, factor); });
    for (const double sum : sums) total += sum;
  });
  return total;
}

// The norm of tensors among which are f64 numbers whose squares overflow or underflow.
double scaled_norm(const std::vector<Tensor> &tensors, float factor) {
  kernels::ScaledSum total;
  with_loops(tensors, [&](const std::vector<Tensor> &looped) {
    const auto parts = chunks_of(looped);
    std::vector<kernels::ScaledSum> sums(parts.size());
    over(looped, parts, Access::kRead,
         [&](auto *memory, int64_t n, size_t i) { sums[i] = kernels::scaled_sum_of_squares(memory, n, factor); });
    for (const auto &sum : sums) total.add(sum);
  });
  return total.root();
}

// Below this sum of squares, those that underflowed may be missing in it.
constexpr double kLeastSum = 0x1p-960;

// The norm of tensors on the CPU, which is summed up in f64.
double norm_on_cpu(const std::vector<Tensor> &tensors, float factor) {
  const double total = sum_of_squares(tensors, factor);
  const bool is_exact = total >= kLeastSum && std::isfinite(total);
  if (is_exact || std::none_of(tensors.begin(), tensors.end(), is_f64)) {
    return std::isnan(total) ? std::nan("") : std::sqrt(total);
  }
  return scaled_norm(tensors, factor);
}

// Returns 2^exponent for whole numbers from -1022 to 1023, exactly.
Tensor power_of_two(const Tensor &exponent) {
  return exponent.to(at::kLong).add(1023).bitwise_left_shift(52).view(at::kDouble);
}

// The norms of f64 tensors, divided by `unit`.
struct ScaledNorms {
  Tensor norms, unit;
};

// The norm of each of these f64 tensors on another device, whose squares may overflow or underflow. They are taken of
// copies, a part of the tensors at a time, that are multiplied by a power of two, which changes no other bit.
ScaledNorms scaled_norms_on_device(const std::vector<Tensor> &tensors) {
  constexpr int64_t kNumbers = int64_t{1} << 24;
  std::vector<Tensor> filled, part, norms;
  for (const auto &t : tensors) {
    if (t.numel() > 0) filled.push_back(t);
  }
  if (filled.empty()) {
    const auto options = tensors.front().options();
    return {at::zeros({1}, options), at::ones({}, options)};
  }
  const Tensor exponent = std::get<1>(at::frexp(largest(filled))).clamp(-1000, 1000);
  const Tensor down = power_of_two(exponent.neg());
  int64_t numbers = 0;
  for (const auto &t : filled) {
    part.push_back(t);
    numbers += t.numel();
    if (numbers < kNumbers && !t.is_same(filled.back())) continue;
    for (auto &norm : at::_foreach_norm(at::_foreach_mul(part, down), 2)) norms.push_back(std::move(norm));
    part.clear();
    numbers = 0;
  }
  return {at::stack(norms), power_of_two(exponent)};
}

// The norm of tensors on another device, by libtorch, with one launch for all tensors of a dtype. Norms of f64 tensors
// are computed in f64 and all others in f32, since a norm in half precision would overflow or be inexact. The result is
// f64 only if all tensors are.
Tensor norm_on_device(const std::vector<Tensor> &tensors, const Tensor &factor) {
  std::vector<Tensor> wide, narrow, norms;
  for (const auto &t : tensors) (is_f64(t) ? wide : narrow).push_back(t);
  if (!wide.empty()) {
    const auto [scaled, unit] = scaled_norms_on_device(wide);
    if (narrow.empty()) return at::linalg_vector_norm(scaled, 2).mul(unit) * factor;
    norms = scaled.mul(unit).to(at::kFloat).unbind();
  }
  for (const auto &alike : by_dtype(narrow)) {
    for (auto &norm : at::_foreach_norm(alike, 2, at::kFloat)) norms.push_back(std::move(norm));
  }
  return at::linalg_vector_norm(at::stack(norms), 2) * factor;
}

// Converts a norm to f32, unless it is a finite f64 number on the CPU that is too large for f32.
Tensor narrowed(const Tensor &norm) {
  const bool is_too_large = norm.is_cpu() && is_f64(norm) && std::isfinite(norm.item<double>()) &&
                            !std::isfinite(static_cast<float>(norm.item<double>()));
  return is_too_large ? norm : norm.to(at::kFloat);
}

}  // namespace

Tensor coalesced(const Tensor &gradient) {
  return gradient.is_sparse() && gradient.scalar_type() == at::kHalf ? gradient.coalesce() : gradient;
}

Tensor numbers(const Tensor &gradient) {
  Tensor values = gradient.is_sparse() ? coalesced(gradient)._values() : gradient;
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
  const bool in_f64 = std::all_of(tensors.begin(), tensors.end(), is_f64);
  // All tensors are on one device, so the first one decides.
  const bool on_cpu = tensors.empty() || tensors.front().is_cpu();
  const Tensor total = on_cpu ? at::scalar_tensor(norm_on_cpu(tensors, factor.item<float>()), at::kDouble)
                              : norm_on_device(tensors, factor);
  return in_f64 ? total.to(at::kDouble) : narrowed(total);
}

Tensor norm_of_norms(const std::vector<Tensor> &norms) {
  if (norms.size() == 1) return norms.front();
  const at::Device device = norms.front().device();
  const bool in_f64 = std::all_of(norms.begin(), norms.end(), is_f64);
  if (!in_f64 && !device.is_cpu()) {  // as PyTorch does; other devices than the CPU may lack f64
    std::vector<Tensor> there;
    for (const auto &norm : norms) there.push_back(on_device(norm, device).to(at::kFloat));
    return at::linalg_vector_norm(at::stack(there), 2);
  }
  Tensor total = norms.front().to(at::kDouble);
  for (size_t i = 1; i < norms.size(); ++i) {  // no square overflows or underflows
    const Tensor norm = on_device(norms[i], device).to(at::kDouble);
    // By its standard, a hypotenuse is infinite if one side is, even if the other one is NaN.
    total = at::where(at::isnan(total + norm), total + norm, at::hypot(total, norm));
  }
  return in_f64 ? total : narrowed(total);
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
