// The loops over a row of logits: the statistics that its cross entropy needs, and the gradient, which takes the place of
// the logits.

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "kernels/loops.h"

namespace tamp::kernels {
namespace {

// Numbers that are computed together.
typedef float Floats __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(32)));
template <typename W>
using Lanes = std::conditional_t<std::is_same_v<W, double>, Doubles, Floats>;
template <typename W>
constexpr int64_t kLanes = sizeof(Lanes<W>) / sizeof(W);

// The exponential of numbers that are at most 0, within two units in the last place; 0 where it would be subnormal.
// A NaN stays one. Source: the reduction and the polynomial of Cephes' expf.
template <bool kFma>
TAMP_INLINE Floats exponential(Floats x) {
  typedef int32_t Words __attribute__((vector_size(32)));
  constexpr float kLeast = -87.0F;
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to a whole number
  const Floats least = Floats{} + kLeast;
  const Floats y = x < least ? least : x;
  const Floats shifted = y * 1.44269504F + kRound;
  const Floats n = shifted - kRound;
  const Floats r = (y - n * 0.693359375F) + n * 2.12194440e-4F;
  Floats p = r * 1.9875691500e-4F + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * (r * r) + (r + 1.0F);
  Words exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  exponent = (exponent - 0x4b400000) << 23;
  Words bits;
  std::memcpy(&bits, &p, sizeof bits);
  bits += exponent;
  Floats value;
  std::memcpy(&value, &bits, sizeof value);
  value = x < least ? Floats{} : value;
  return x == x ? value : x;
}

template <bool kFma>
TAMP_INLINE Doubles exponential(Doubles x) {
  for (int64_t i = 0; i < kLanes<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}

template <typename T>
TAMP_INLINE Lanes<Wide<T>> load(const T *from) {
  using W = Wide<T>;
  Lanes<W> out;
  if constexpr (std::is_same_v<T, W>) {
    std::memcpy(&out, from, sizeof out);
  } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
    typedef uint16_t Narrow __attribute__((vector_size(16)));
    typedef uint32_t Words __attribute__((vector_size(32)));
    Narrow bits;
    std::memcpy(&bits, from, sizeof bits);
    const Words wide = __builtin_convertvector(bits, Words) << 16;
    std::memcpy(&out, &wide, sizeof out);
  } else {
    for (int64_t i = 0; i < kLanes<W>; ++i) out[i] = widen(from[i]);
  }
  return out;
}

template <typename T>
TAMP_INLINE void store(Lanes<Wide<T>> x, T *to) {
  using W = Wide<T>;
  if constexpr (std::is_same_v<T, W>) {
    std::memcpy(to, &x, sizeof x);
  } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
    typedef uint16_t Narrow __attribute__((vector_size(16)));
    typedef uint32_t Words __attribute__((vector_size(32)));
    Words bits;
    std::memcpy(&bits, &x, sizeof bits);
    const Words rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;  // to nearest, ties to even
    const Narrow narrow = __builtin_convertvector(x == x ? rounded : Words{} + 0x7fc0U, Narrow);
    std::memcpy(to, &narrow, sizeof narrow);
  } else {
    for (int64_t i = 0; i < kLanes<W>; ++i) narrow(x[i], to[i]);
  }
}

// Calls `f` with the place of each group of lanes in a row, and with how many of them are in the row.
template <typename W, typename F>
TAMP_INLINE void by_lanes(int64_t n, const F &f) {
  const int64_t split = n - n % kLanes<W>;
  for (int64_t i = 0; i < split; i += kLanes<W>) f(i, kLanes<W>);
  if (split < n) f(split, n - split);
}

// The lanes at a place; those beyond the row have `filler`.
template <typename T>
TAMP_INLINE Lanes<Wide<T>> lanes_at(const T *row, int64_t count, Wide<T> filler) {
  if (count == kLanes<Wide<T>>) return load(row);
  Lanes<Wide<T>> out = Lanes<Wide<T>>{} + filler;
  for (int64_t i = 0; i < count; ++i) out[i] = widen(row[i]);
  return out;
}

// The hyperbolic tangent within some units of 2^-24: what is multiplied by a cap needs no more near 0.
template <bool kFma, typename V>
TAMP_INLINE V tangent(V x) {
  const V size = x < V{} ? -x : x;
  const V small = exponential<kFma>(-2 * size);
  const V out = (1 - small) / (1 + small);
  return x < V{} ? -out : out;
}

template <bool kFma, typename V, typename W>
TAMP_INLINE V capped(V x, W cap) {
  return cap == 0 ? x : cap * tangent<kFma>(x / cap);
}

template <typename V>
TAMP_INLINE auto sum_of_lanes(V x) {
  auto sum = x[0];
  for (size_t i = 1; i < sizeof x / sizeof x[0]; ++i) sum += x[i];
  return sum;
}

template <typename W, bool kFma, typename T>
TAMP_INLINE RowStatistics<W> statistics(const T *row, int64_t target, const CrossEntropy<W> &loss) {
  using V = Lanes<W>;
  constexpr W kLeast = -std::numeric_limits<W>::infinity();
  V largest = V{} + kLeast;
  by_lanes<W>(loss.classes, [&](int64_t i, int64_t count) TAMP_INLINE_LAMBDA {
    const V z = lanes_at(row + i, count, kLeast);
    largest = z > largest ? z : largest;
  });
  W most = largest[0];
  for (int64_t i = 1; i < kLanes<W>; ++i) most = largest[i] > most ? largest[i] : most;
  // Caps keep the order.
  most = capped<kFma>(V{} + most, loss.soft_cap)[0];
  V sum = {}, smoothed = {};
  by_lanes<W>(loss.classes, [&](int64_t i, int64_t count) TAMP_INLINE_LAMBDA {
    const V z = capped<kFma>(lanes_at(row + i, count, kLeast), loss.soft_cap);
    V term = exponential<kFma>(z - most);
    if (count < kLanes<W>) {
      for (int64_t j = count; j < kLanes<W>; ++j) term[j] = 0;
    }
    sum += term;
    if (!loss.is_smooth) return;
    V weighted = loss.weights == nullptr ? z : z * lanes_at(loss.weights + i, count, W(0));
    if (count < kLanes<W>) {
      for (int64_t j = count; j < kLanes<W>; ++j) weighted[j] = 0;
    }
    smoothed += weighted;
  });
  const W log_sum = most + std::log(sum_of_lanes(sum));
  const W logit = capped<kFma>(V{} + W(widen(row[target])), loss.soft_cap)[0];
  return {log_sum, logit, sum_of_lanes(smoothed)};
}

template <typename W, bool kFma, typename T>
TAMP_INLINE void gradient(T *row, int64_t target, W log_sum, const RowFactors<W> &factors,
                          const CrossEntropy<W> &loss) {
  using V = Lanes<W>;
  // Of the target, before its logit is gone.
  const W logit = capped<kFma>(V{} + W(widen(row[target])), loss.soft_cap)[0];
  const auto at = [&](V z, V weights) TAMP_INLINE_LAMBDA {
    V g = exponential<kFma>(z - log_sum) * factors.probability;
    if (factors.smoothing != 0) g -= weights * factors.smoothing;
    return g;
  };
  const auto through_cap = [&](V g, V z) TAMP_INLINE_LAMBDA {
    if (loss.soft_cap == 0) return g;
    const V part = z / loss.soft_cap;
    return g * (1 - part * part);
  };
  const auto weights_at = [&](int64_t i, int64_t count) TAMP_INLINE_LAMBDA {
    return loss.weights == nullptr ? V{} + W(1) : lanes_at(loss.weights + i, count, W(0));
  };
  by_lanes<W>(loss.classes, [&](int64_t i, int64_t count) TAMP_INLINE_LAMBDA {
    const V z = capped<kFma>(lanes_at(row + i, count, W(0)), loss.soft_cap);
    const V g = through_cap(at(z, weights_at(i, count)), z);
    if (count == kLanes<W>) return store(g, row + i);
    for (int64_t j = 0; j < count; ++j) narrow(g[j], row[i + j]);
  });
  const V z = V{} + logit;
  const W weight = loss.weights == nullptr ? W(1) : loss.weights[target];
  narrow(through_cap(at(z, V{} + weight) - factors.target, z)[0], row[target]);
}

}  // namespace

template <typename T>
RowStatistics<Wide<T>> row_statistics(const T *row, int64_t target, const CrossEntropy<Wide<T>> &loss) {
  RowStatistics<Wide<T>> out;
  run([&](auto fma) TAMP_INLINE_LAMBDA { out = statistics<Wide<T>, decltype(fma)::value>(row, target, loss); });
  return out;
}

template <typename T>
void row_gradient(T *row, int64_t target, Wide<T> log_sum, const RowFactors<Wide<T>> &factors,
                  const CrossEntropy<Wide<T>> &loss) {
  run([&](auto fma)
          TAMP_INLINE_LAMBDA { gradient<Wide<T>, decltype(fma)::value>(row, target, log_sum, factors, loss); });
}

#define TAMP_ROWS(T)                                                                                 \
  template RowStatistics<Wide<T>> row_statistics(const T *, int64_t, const CrossEntropy<Wide<T>> &); \
  template void row_gradient(T *, int64_t, Wide<T>, const RowFactors<Wide<T>> &, const CrossEntropy<Wide<T>> &);
TAMP_ROWS(float)
TAMP_ROWS(double)
TAMP_ROWS(c10::BFloat16)
TAMP_ROWS(c10::Half)
#undef TAMP_ROWS

}  // namespace tamp::kernels
