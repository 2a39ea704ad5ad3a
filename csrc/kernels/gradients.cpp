// The loops that check, multiply and sum up gradients.

#include <algorithm>
#include <limits>
#include <type_traits>

#include "kernels/loops.h"

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
  // The loop processes four vectors at a time. The compiler's own loop would process one, which does not use the full
  // bandwidth of the memory.
  typedef Bits<T> Block __attribute__((vector_size(32)));
  constexpr int64_t kBlock = 32 / sizeof(Bits<T>);
  Bits<T> exponent = kExponent<T>, bad = 0;
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

// Returns a value that is multiplied by `factor` and rounded as by `unscale`.
template <typename T>
TAMP_INLINE Wide<T> product(const T &value, Wide<T> factor) {
  T rounded;
  narrow(Wide<T>(widen(value)) * factor, rounded);
  return widen(rounded);
}

typedef double Sums __attribute__((vector_size(4 * sizeof(double))));

TAMP_INLINE double square(double x) { return x * x; }
TAMP_INLINE Sums square(Sums x) { return x * x; }
TAMP_INLINE double size(double x) { return std::abs(x); }
TAMP_INLINE Sums size(Sums x) {
  typedef int64_t Words __attribute__((vector_size(sizeof(Sums))));
  return reinterpret_cast<Sums>(reinterpret_cast<Words>(x) & std::numeric_limits<int64_t>::max());
}

// Returns the sum of `f(x)` for the product `x` of each value with `factor`.
template <typename T, typename F>
double sum_of(const T *values, int64_t n, Wide<T> factor, const F &f) {
  typedef Wide<T> Block __attribute__((vector_size(4 * sizeof(Wide<T>))));
  double sum = 0;
  run([&](auto) TAMP_INLINE_LAMBDA {
    const auto terms = [&](int64_t i) TAMP_INLINE_LAMBDA {
      Block block;
      if constexpr (std::is_same_v<T, Wide<T>>) {
        std::memcpy(&block, values + i, sizeof block);
        if (factor != 1) block *= factor;
      } else {
        block = Block{product(values[i], factor), product(values[i + 1], factor), product(values[i + 2], factor),
                      product(values[i + 3], factor)};
      }
      return f(__builtin_convertvector(block, Sums));
    };
    // Several sums are independent of each other, so that their additions overlap.
    Sums a = {}, b = {}, c = {}, d = {};
    const int64_t split = n - n % 16;
    by_pages(values, split, 16, [&](int64_t i) TAMP_INLINE_LAMBDA {
      a += terms(i);
      b += terms(i + 4);
      c += terms(i + 8);
      d += terms(i + 12);
    });
    const Sums all = (a + b) + (c + d);
    sum = (all[0] + all[1]) + (all[2] + all[3]);
    for (int64_t i = split; i < n; ++i) sum += f(double{product(values[i], factor)});
  });
  return sum;
}

// The part of a factor that can be applied to a sum instead of each of its numbers: a power of two, because all products
// with it are exact. One that enlarges must be applied to each number, because a product that overflows its dtype makes
// the sum infinite.
inline double applied_later(float factor) { return is_power_of_two(factor) && factor <= 1 ? factor : 1; }

template <typename T>
double sum_of_squares(const T *values, int64_t n, float factor) {
  const double later = applied_later(factor);
  const auto squared = [](auto x) TAMP_INLINE_LAMBDA { return square(x); };
  return sum_of(values, n, static_cast<Wide<T>>(factor / later), squared) * later * later;
}

template <typename T>
double sum_of_sizes(const T *values, int64_t n, float factor) {
  const double later = applied_later(factor);
  const auto sized = [](auto x) TAMP_INLINE_LAMBDA { return size(x); };
  return sum_of(values, n, static_cast<Wide<T>>(factor / later), sized) * later;
}

template <typename T>
double sum_of_powers(const T *values, int64_t n, float factor, double unit, double exponent) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double x = product(values[i], static_cast<Wide<T>>(factor));
    sum += std::pow(std::abs(x) / unit, exponent);
  }
  return sum;
}

template <typename T>
double largest(const T *values, int64_t n, float factor) {
  // The bits of positive numbers are in their order, and those of a NaN exceed those of infinity.
  using Order = std::make_signed_t<Bits<T>>;
  Order most = 0;
  run([&](auto) TAMP_INLINE_LAMBDA {
    Order top = 0;
    for (int64_t i = 0; i < n; ++i) {
      Order bits;
      std::memcpy(&bits, values + i, sizeof bits);
      bits = static_cast<Order>(bits & std::numeric_limits<Order>::max());
      top = bits > top ? bits : top;
    }
    most = top;
  });
  T value;
  std::memcpy(&value, &most, sizeof value);
  // Multiplication and rounding are monotonic, so that the product of the largest value is the largest product.
  const double out = product(value, static_cast<Wide<T>>(factor));
  return std::isnan(out) ? std::nan("") : out;
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
  for (int64_t i = 0; i < n; ++i) sum.add(product(values[i], wide_factor));
  return sum;
}

#define TAMP_INSTANTIATE(T)                                                    \
  template bool any_non_finite<T>(const T *, int64_t);                         \
  template bool unscale<T>(T *, int64_t, float, bool);                         \
  template void multiply<T>(T *, int64_t, double);                             \
  template double sum_of_squares<T>(const T *, int64_t, float);                \
  template double sum_of_sizes<T>(const T *, int64_t, float);                  \
  template double sum_of_powers<T>(const T *, int64_t, float, double, double); \
  template double largest<T>(const T *, int64_t, float);                       \
  template ScaledSum scaled_sum_of_squares<T>(const T *, int64_t, float);

TAMP_INSTANTIATE(float)
TAMP_INSTANTIATE(double)
TAMP_INSTANTIATE(c10::BFloat16)
TAMP_INSTANTIATE(c10::Half)

#undef TAMP_INSTANTIATE

}  // namespace tamp::kernels
