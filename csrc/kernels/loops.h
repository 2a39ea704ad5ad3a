// The basis of the kernels' loops: dispatch by the capabilities of the CPU, and arithmetic that rounds like libtorch's.
#pragma once

#include <ATen/Version.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>

#include "kernels/kernels.h"

// A loop is compiled twice: for every CPU of the architecture, and for CPUs with fused multiply-add, which libtorch's
// kernels use there. Everything that a loop calls is inlined into it, so that it is compiled twice as well.
#define TAMP_INLINE inline __attribute__((always_inline))
#define TAMP_INLINE_LAMBDA __attribute__((always_inline))
#if defined(__x86_64__)
#define TAMP_FMA __attribute__((target("avx2,fma,f16c")))
#else
#define TAMP_FMA
#endif

// Declares the iterations of the next loop independent of each other: a parameter, its gradient and its state never
// overlap.
#if defined(__clang__)
#define TAMP_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define TAMP_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace tamp::kernels {

inline bool detect_fma() {
#if defined(__x86_64__)
  // libtorch chooses its own kernels by this, and takes ATEN_CPU_CAPABILITY into account.
  const std::string capability = at::get_cpu_capability();
  return capability.rfind("AVX", 0) == 0;
#elif defined(__FP_FAST_FMAF)
  return true;
#else
  return false;
#endif
}

inline bool has_fma() {
  static const bool known = detect_fma();
  return known;
}

template <typename Loop>
TAMP_FMA void run_fma(const Loop &loop) {
  loop(std::true_type());
}

template <typename Loop>
void run(const Loop &loop) {
  if (has_fma()) {
    run_fma(loop);
  } else {
    loop(std::false_type());
  }
}

// ---- numbers

TAMP_INLINE float widen(float x) { return x; }
TAMP_INLINE double widen(double x) { return x; }
TAMP_INLINE float widen(c10::BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.x) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
TAMP_INLINE float widen(c10::Half x) { return static_cast<float>(x); }

TAMP_INLINE void narrow(float x, float &out) { out = x; }
TAMP_INLINE void narrow(double x, double &out) { out = x; }
TAMP_INLINE void narrow(float x, c10::BFloat16 &out) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;  // to nearest, ties to even
  out.x = static_cast<uint16_t>(x != x ? 0x7fc0U : rounded);
}
TAMP_INLINE void narrow(float x, c10::Half &out) { out = c10::Half(x); }

// Cuts a number off to bf16 after the dither was added. Infinity and the NaN have no lower bits that could carry.
TAMP_INLINE void cut_off(float x, uint32_t dither, c10::BFloat16 &out) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  out.x = static_cast<uint16_t>((x != x ? 0x7fc00000U : bits + dither) >> 16);
}

// The unsigned integer that holds the bits of a number.
template <typename T>
using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;

// The exponent bits, which are all set only in an infinity or a NaN. Unlike a comparison of numbers, a test of these
// bits cannot be optimized away.
template <typename T>
constexpr Bits<T> kExponent = std::is_same_v<T, double>          ? 0x7ff0000000000000U
                              : std::is_same_v<T, float>         ? 0x7f800000U
                              : std::is_same_v<T, c10::BFloat16> ? 0x7f80U
                                                                 : 0x7c00U;

template <typename T>
TAMP_INLINE auto non_finite(const T &value) {
  std::remove_const_t<decltype(kExponent<T>)> bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<decltype(bits)>((bits & kExponent<T>) == kExponent<T>);
}

// Returns a * b + c, rounded once if the CPU supports it.
template <bool kFma>
TAMP_INLINE float fma(float a, float b, float c) {
  return kFma ? __builtin_fmaf(a, b, c) : a * b + c;
}
template <bool kFma>
TAMP_INLINE double fma(double a, double b, double c) {
  return kFma ? __builtin_fma(a, b, c) : a * b + c;
}
TAMP_INLINE float root(float x) { return __builtin_sqrtf(x); }
TAMP_INLINE double root(double x) { return __builtin_sqrt(x); }

// Whether products with `x` and with its reciprocal are exact.
inline bool is_power_of_two(float x) {
  int exponent = 0;
  return std::frexp(x, &exponent) == 0.5F && std::abs(exponent) < 120;
}

}  // namespace tamp::kernels
