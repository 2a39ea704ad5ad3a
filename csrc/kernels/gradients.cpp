// The loops that check, multiply and sum up gradients.

#include <algorithm>
#include <limits>

#include "loops.h"

namespace tamp::kernels {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Calls `f(i)` for every multiple of `step` below `n`, and prefetches the next page at the start of each one. Hardware
// prefetchers stop at the end of a page, and the first access to the next one would take as long as reading a good part
// of it.
template <typename T, typename F>
TAMP_INLINE void by_pages(const T *memory, int64_t n, int64_t step, const F &f) {
  constexpr int64_t kPage = 4096 / sizeof(T);
  for (int64_t page = 0; page < n; page += kPage) {
    if (page + kPage < n) __builtin_prefetch(memory + page + kPage);
    const int64_t end = page + kPage < n ? page + kPage : n;
    for (int64_t i = page; i < end; i += step) f(i);
  }
}

template <typename T>
bool any_non_finite(const T *values, int64_t n) {
  using Bits = decltype(non_finite(values[0]));
  // The loop processes four vectors at a time. The compiler's own loop would process one, which does not use the full
  // bandwidth of the memory.
  typedef Bits Block __attribute__((vector_size(32)));
  constexpr int64_t kBlock = 32 / sizeof(Bits);
  Bits exponent = kExponent<T>, bad = 0;
  run([&](auto) TAMP_INLINE_LAMBDA {
    const auto look = [&](int64_t i) TAMP_INLINE_LAMBDA {
      Block block;
      std::memcpy(&block, values + i, sizeof block);
      return reinterpret_cast<Block>((block & exponent) == exponent);
    };
    Block a = {}, b = {}, c = {}, d = {};
    const int64_t split = n - n % (4 * kBlock);
    by_pages(values, split, 4 * kBlock, [&](int64_t i) TAMP_INLINE_LAMBDA {
      a |= look(i);
      b |= look(i + kBlock);
      c |= look(i + 2 * kBlock);
      d |= look(i + 3 * kBlock);
    });
    const Block all = (a | b) | (c | d);
    for (int64_t i = 0; i < kBlock; ++i) bad |= all[i];
    for (int64_t i = split; i < n; ++i) bad |= non_finite(values[i]);
  });
  return bad != 0;
}

template <typename T>
void multiply(T *values, int64_t n, double factor) {
  const auto wide = static_cast<Wide<T>>(factor);
  run([&](auto) TAMP_INLINE_LAMBDA {
    for (int64_t i = 0; i < n; ++i) narrow(Wide<T>(widen(values[i])) * wide, values[i]);
  });
}

template <typename T>
bool unscale(T *values, int64_t n, float factor, bool recheck) {
  bool bad = any_non_finite(values, n);
  if (factor != 1.0F) {
    multiply(values, n, factor);
    if (recheck) bad |= any_non_finite(values, n);
  }
  return bad;
}

template <typename T>
double sum_of_squares(const T *values, int64_t n, float factor) {
  // Several sums are independent of each other, so that their additions overlap.
  typedef double Sums __attribute__((vector_size(4 * sizeof(double))));
  typedef Wide<T> Block __attribute__((vector_size(4 * sizeof(Wide<T>))));
  double sum = 0;
  // A power of two can be applied to the sum, because all products with it are exact. One that enlarges must be applied
  // to each number, because a product that overflows its dtype makes the sum infinite.
  const double later = is_power_of_two(factor) && factor <= 1 ? factor : 1;
  const auto wide_factor = static_cast<Wide<T>>(factor / later);
  run([&](auto) TAMP_INLINE_LAMBDA {
    const auto one = [&](int64_t i) TAMP_INLINE_LAMBDA {
      T rounded;
      narrow(Wide<T>(widen(values[i])) * wide_factor, rounded);
      return widen(rounded);
    };
    const auto squares = [&](int64_t i) TAMP_INLINE_LAMBDA {
      Block block;
      if constexpr (std::is_same_v<T, Wide<T>>) {
        std::memcpy(&block, values + i, sizeof block);
        if (wide_factor != 1) block *= wide_factor;
      } else {
        block = Block{one(i), one(i + 1), one(i + 2), one(i + 3)};
      }
      const Sums wide = __builtin_convertvector(block, Sums);
      return wide * wide;
    };
    Sums a = {}, b = {}, c = {}, d = {};
    const int64_t split = n - n % 16;
    by_pages(values, split, 16, [&](int64_t i) TAMP_INLINE_LAMBDA {
      a += squares(i);
      b += squares(i + 4);
      c += squares(i + 8);
      d += squares(i + 12);
    });
    const Sums all = (a + b) + (c + d);
    sum = (all[0] + all[1]) + (all[2] + all[3]);
    for (int64_t i = split; i < n; ++i) {
      const double x = one(i);
      sum += x * x;
    }
  });
  return sum * later * later;
}

void ScaledSum::add(double size, double sum) {
  size = std::abs(size);
  if (!(size > 0)) {
    nan_ |= std::isnan(size);
  } else if (size > largest_) {
    const double ratio = largest_ / size;
    sum_ = sum + sum_ * ratio * ratio;
    largest_ = size;
  } else if (size < kInfinity) {
    const double ratio = size / largest_;
    sum_ += sum * ratio * ratio;
  }
}

void ScaledSum::add(const ScaledSum &other) {
  add(other.largest_, other.sum_);
  nan_ |= other.nan_;
}

double ScaledSum::root() const { return nan_ ? std::nan("") : largest_ * std::sqrt(sum_); }

template <typename T>
ScaledSum scaled_sum_of_squares(const T *values, int64_t n, float factor) {
  const auto wide_factor = static_cast<Wide<T>>(factor);
  ScaledSum sum;
  for (int64_t i = 0; i < n; ++i) {
    T rounded;
    narrow(Wide<T>(widen(values[i])) * wide_factor, rounded);
    sum.add(widen(rounded));
  }
  return sum;
}

#define TAMP_INSTANTIATE(T)                                     \
  template bool any_non_finite<T>(const T *, int64_t);          \
  template bool unscale<T>(T *, int64_t, float, bool);          \
  template void multiply<T>(T *, int64_t, double);              \
  template double sum_of_squares<T>(const T *, int64_t, float); \
  template ScaledSum scaled_sum_of_squares<T>(const T *, int64_t, float);

TAMP_INSTANTIATE(float)
TAMP_INSTANTIATE(double)
TAMP_INSTANTIATE(c10::BFloat16)
TAMP_INSTANTIATE(c10::Half)

#undef TAMP_INSTANTIATE

}  // namespace tamp::kernels
