#include "kernels.h"

#include <ATen/Version.h>

#include <cmath>
#include <cstring>
#include <string>
#include <type_traits>

// A loop is compiled once for any CPU of the architecture and once for CPUs with fused multiply-add, which libtorch's
// kernels round with. Everything that a loop calls is inlined into it.
#define TAMP_INLINE inline __attribute__((always_inline))
#define TAMP_INLINE_LAMBDA __attribute__((always_inline))
#if defined(__x86_64__)
#define TAMP_FMA __attribute__((target("avx2,fma,f16c")))
#else
#define TAMP_FMA
#endif

// The iterations of the next loop do not depend on each other: a parameter, its gradient and its state never overlap.
#if defined(__clang__)
#define TAMP_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define TAMP_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace tamp::kernels {
namespace {

bool detect_fma() {
#if defined(__x86_64__)
  // What libtorch's own kernels go by, ATEN_CPU_CAPABILITY included.
  const std::string capability = at::get_cpu_capability();
  return capability.rfind("AVX", 0) == 0;
#elif defined(__FP_FAST_FMAF)
  return true;
#else
  return false;
#endif
}

bool has_fma() {
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

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

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

// The bits that are all set in an infinity or a NaN, and nowhere else. No compiler can reason them away.
template <typename T>
constexpr std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>
    kExponent = std::is_same_v<T, double>          ? 0x7ff0000000000000U
                : std::is_same_v<T, float>         ? 0x7f800000U
                : std::is_same_v<T, c10::BFloat16> ? 0x7f80U
                                                   : 0x7c00U;

template <typename T>
TAMP_INLINE auto non_finite(const T &value) {
  std::remove_const_t<decltype(kExponent<T>)> bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<decltype(bits)>((bits & kExponent<T>) == kExponent<T>);
}

// a * b + c, rounded once where the CPU can.
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

// a / d for a finite d and its rounded reciprocal, in the time of three multiplications: the remainder of the first
// guess is exact, and adding it once gives the rounded quotient (Markstein 1990; for a d whose digits are all ones,
// which his proof leaves out, by trying every a). An infinite guess is the quotient already.
TAMP_INLINE float quotient(float a, float d, float reciprocal) {
  const float guess = a * reciprocal;
  const float remainder = __builtin_fmaf(-guess, d, a);
  const float better = __builtin_fmaf(remainder, reciprocal, guess);
  return guess == __builtin_inff() ? guess : better;
}

bool is_power_of_two(float x) {
  int exponent = 0;
  return std::frexp(x, &exponent) == 0.5F && std::abs(exponent) < 120;
}

// Calls `f` with the flag as a type.
template <typename F>
void with(bool flag, const F &f) {
  if (flag) {
    f(std::true_type());
  } else {
    f(std::false_type());
  }
}

// Runs `loop` over what libtorch does in vectors and over the rest, for which its compiler contracted other products.
template <typename T, typename Loop>
void run_split(const Slice<T> &x, const Loop &loop) {
  const int64_t split = x.n - x.n % static_cast<int64_t>(32 / sizeof(T));
  run([&](auto fma) TAMP_INLINE_LAMBDA {
    loop(fma, std::false_type(), 0, split);
    loop(fma, std::true_type(), split, x.n);
  });
}

// a * b + c * d: libtorch rounds c * d first in its vectors and a * b first in its scalar loops.
template <bool kFma, bool kTail, typename W>
TAMP_INLINE W sum_of_products(W a, W b, W c, W d) {
  return kTail ? fma<kFma>(c, d, a * b) : fma<kFma>(a, b, c * d);
}

// ---- the gradient on its way into an update

template <typename W>
struct Scaling {
  W divisor, factor, clip, sign;
  bool divides;

  Scaling(const GradientScale &scale, bool maximize)
      : divisor(scale.divisor), factor(scale.factor), clip(static_cast<W>(scale.clip)), sign(maximize ? -1 : 1) {
    divides = scale.divisor != 1 && !is_power_of_two(scale.divisor);
    if (scale.divisor != 1 && !divides) factor = 1 / divisor;  // exact, and so is every product with it
  }
};

template <bool kDivides, typename W>
TAMP_INLINE W scaled(const Scaling<W> &s, W gradient) {
  return (kDivides ? gradient / s.divisor : gradient * s.factor * s.clip) * s.sign;
}

// ---- Adam

template <typename W>
struct AdamNumbers {
  W beta2, one_minus_beta2, lerp, rest, keep, root_correction, reciprocal, eps, minus_step_size, weight_decay;
  bool near;  // whether the moving average is nearer to the old one than to the gradient

  explicit AdamNumbers(const Adam &o) {
    const W weight = static_cast<W>(1 - o.beta1);
    near = std::abs(weight) < W(0.5);
    lerp = near ? weight : weight - 1;
    rest = 1 - weight;
    beta2 = static_cast<W>(o.beta2);
    one_minus_beta2 = static_cast<W>(1 - o.beta2);
    root_correction = static_cast<W>(std::sqrt(o.correction2));
    reciprocal = 1 / root_correction;
    eps = static_cast<W>(o.eps);
    minus_step_size = static_cast<W>(-(o.lr / o.correction1));
    weight_decay = static_cast<W>(o.weight_decay);
    keep = o.decoupled ? static_cast<W>(1 - o.lr * o.weight_decay) : W(1);
  }
};

template <bool kFma, bool kTail, bool kNear, bool kAmsgrad, bool kDecays, bool kDivides, typename T>
TAMP_INLINE void adam(const AdamNumbers<Wide<T>> c, const Scaling<Wide<T>> s, const Slice<T> x, int64_t begin,
                      int64_t end) {
  using W = Wide<T>;
  T *__restrict parameters = x.parameter;
  const T *__restrict gradients = x.gradient;
  T *__restrict exp_avgs = x.first;
  T *__restrict exp_avg_sqs = x.second;
  T *__restrict max_exp_avg_sqs = x.third;
  TAMP_INDEPENDENT
  for (int64_t i = begin; i < end; ++i) {
    const W old = widen(parameters[i]);
    W g = scaled<kDivides>(s, W(widen(gradients[i])));
    if (kDecays) g = fma<kFma>(old, c.weight_decay, g);
    const W old_exp_avg = widen(exp_avgs[i]);
    const W away = g - old_exp_avg;
    // The same number in vectors and scalar loops, but perhaps not the same zero.
    const W exp_avg = kNear ? fma<kFma>(c.lerp, away, old_exp_avg)
                            : (kTail ? fma<kFma>(-away, c.rest, g) : fma<kFma>(c.lerp, away, g));
    const W exp_avg_sq = sum_of_products<kFma, kTail>(c.one_minus_beta2 * g, g, W(widen(exp_avg_sqs[i])), c.beta2);
    W square = exp_avg_sq;
    if (kAmsgrad) {
      const W old_max = widen(max_exp_avg_sqs[i]);
      square = old_max < exp_avg_sq ? exp_avg_sq : old_max;
      narrow(square, max_exp_avg_sqs[i]);
    }
    W correct;
    if constexpr (kFma && std::is_same_v<T, float>) {
      correct = quotient(root(square), c.root_correction, c.reciprocal);
    } else {
      correct = root(square) / c.root_correction;
    }
    narrow(exp_avg, exp_avgs[i]);
    narrow(exp_avg_sq, exp_avg_sqs[i]);
    narrow(old * c.keep + c.minus_step_size * exp_avg / (correct + c.eps), parameters[i]);
  }
}

// ---- SGD

template <typename W>
struct SgdNumbers {
  W minus_lr, momentum, one_minus_dampening, weight_decay;

  explicit SgdNumbers(const Sgd &o)
      : minus_lr(static_cast<W>(-o.lr)),
        momentum(static_cast<W>(o.momentum)),
        one_minus_dampening(static_cast<W>(1 - o.dampening)),
        weight_decay(static_cast<W>(o.weight_decay)) {}
};

enum class Momentum { kNone, kPlain, kNesterov };

template <bool kFma, bool kTail, Momentum kMomentum, bool kFirst, bool kDivides, typename T>
TAMP_INLINE void sgd(const SgdNumbers<Wide<T>> c, const Scaling<Wide<T>> s, const Slice<T> x, bool decays,
                     int64_t begin, int64_t end) {
  using W = Wide<T>;
  T *__restrict parameters = x.parameter;
  const T *__restrict gradients = x.gradient;
  T *__restrict buffers = x.first;
  TAMP_INDEPENDENT
  for (int64_t i = begin; i < end; ++i) {
    const W old = widen(parameters[i]);
    W g = scaled<kDivides>(s, W(widen(gradients[i])));
    if (decays) g = fma<kFma>(old, c.weight_decay, g);
    if constexpr (kMomentum != Momentum::kNone) {
      W buffer = g;
      if constexpr (!kFirst) {
        buffer = sum_of_products<kFma, kTail>(c.one_minus_dampening, g, W(widen(buffers[i])), c.momentum);
      }
      narrow(buffer, buffers[i]);
      g = kMomentum == Momentum::kNesterov ? fma<kFma>(buffer, c.momentum, g) : buffer;
    }
    narrow(fma<kFma>(g, c.minus_lr, old), parameters[i]);
  }
}

// ---- Adagrad

template <typename W>
struct AdagradNumbers {
  W lr, eps, weight_decay;

  explicit AdagradNumbers(const Adagrad &o)
      : lr(static_cast<W>(o.lr / (1.0 + (o.step - 1.0) * o.lr_decay))),
        eps(static_cast<W>(o.eps)),
        weight_decay(static_cast<W>(o.weight_decay)) {}
};

template <bool kFma, bool kDivides, typename T>
TAMP_INLINE void adagrad(const AdagradNumbers<Wide<T>> c, const Scaling<Wide<T>> s, const Slice<T> x, bool decays,
                         int64_t n) {
  using W = Wide<T>;
  T *__restrict parameters = x.parameter;
  const T *__restrict gradients = x.gradient;
  T *__restrict sums = x.first;
  TAMP_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    const W old = widen(parameters[i]);
    W g = scaled<kDivides>(s, W(widen(gradients[i])));
    if (decays) g = fma<kFma>(old, c.weight_decay, g);
    const W sum = fma<kFma>(g, g, W(widen(sums[i])));
    narrow(sum, sums[i]);
    narrow(old - c.lr * g / (root(sum) + c.eps), parameters[i]);
  }
}

}  // namespace

// ---- passes over gradients

// Calls `f(i)` for every multiple of `step` below `n`. At the start of each page it asks for the next one: prefetchers
// end at the border of a page, and finding it takes as long as reading a good part of it.
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
  // Written in vectors: the compiler's own loop takes one at a time and does not keep the memory busy.
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
  // Four sums that need not wait for each other.
  typedef double Sums __attribute__((vector_size(4 * sizeof(double))));
  typedef Wide<T> Block __attribute__((vector_size(4 * sizeof(Wide<T>))));
  double sum = 0;
  // A power of two can wait: all products with it are exact.
  const double later = is_power_of_two(factor) ? factor : 1;
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

// ---- masters

template <typename T>
void widen(const T *from, float *to, int64_t n) {
  run([&](auto) TAMP_INLINE_LAMBDA {
    TAMP_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) to[i] = widen(from[i]);
  });
}

template <typename T>
void narrow(const float *from, T *to, int64_t n) {
  run([&](auto) TAMP_INLINE_LAMBDA {
    TAMP_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) narrow(from[i], to[i]);
  });
}

void join(const c10::BFloat16 *high, const int16_t *low, float *to, int64_t n) {
  run([&](auto) TAMP_INLINE_LAMBDA {
    TAMP_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t rest = static_cast<uint16_t>(low[i]);
      const uint32_t bits = ((static_cast<uint32_t>(high[i].x) - (rest >> 15)) << 16) | rest;
      std::memcpy(to + i, &bits, sizeof bits);
    }
  });
}

void split(const float *from, c10::BFloat16 *high, int16_t *low, int64_t n) {
  run([&](auto) TAMP_INLINE_LAMBDA {
    TAMP_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      uint32_t bits;
      std::memcpy(&bits, from + i, sizeof bits);
      // One NaN for all: another could round to zero.
      bits = from[i] != from[i] ? 0x7fc00000U : bits;
      high[i].x = static_cast<uint16_t>((bits + 0x8000U) >> 16);
      low[i] = static_cast<int16_t>(bits & 0xffffU);
    }
  });
}

// The finalizer of MurmurHash3 (Appleby, public domain), in which every bit depends on every bit.
TAMP_INLINE uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bU;
  x = (x ^ (x >> 13)) * 0xc2b2ae35U;
  return x ^ (x >> 16);
}

void round_at_random(const float *from, c10::BFloat16 *to, int64_t n, uint64_t seed, int64_t first) {
  const auto key = static_cast<uint32_t>(seed), other = static_cast<uint32_t>(seed >> 32);
  const auto start = static_cast<uint32_t>(first);
  // Beyond 2^32 elements the numbers of others come again, under another key.
  const uint32_t page = mixed(static_cast<uint32_t>(static_cast<uint64_t>(first) >> 32) ^ other);
  run([&](auto) TAMP_INLINE_LAMBDA {
    TAMP_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t random = mixed(mixed((start + static_cast<uint32_t>(i)) ^ key) + page) >> 16;
      uint32_t bits;
      std::memcpy(&bits, from + i, sizeof bits);
      const bool special = (bits & kExponent<float>) == kExponent<float>;
      const uint32_t rounded = special ? (from[i] != from[i] ? 0x7fc00000U : bits) : bits + random;
      to[i].x = static_cast<uint16_t>(rounded >> 16);
    }
  });
}

// ---- updates

template <typename T>
void update(const Adam &options, const GradientScale &scale, const Slice<T> &x) {
  const AdamNumbers<Wide<T>> c(options);
  const Scaling<Wide<T>> s(scale, options.maximize);
  const bool decays = !options.decoupled && options.weight_decay != 0;
  with(options.amsgrad, [&](auto amsgrad) {
    with(decays, [&](auto decays) {
      with(s.divides, [&](auto divides) {
        with(c.near, [&](auto near) {
          run_split(x, [&](auto fma, auto tail, int64_t begin, int64_t end) TAMP_INLINE_LAMBDA {
            adam<fma, tail, near, amsgrad, decays, divides>(c, s, x, begin, end);
          });
        });
      });
    });
  });
}

template <typename T>
void update(const Sgd &options, const GradientScale &scale, const Slice<T> &x) {
  const SgdNumbers<Wide<T>> c(options);
  const Scaling<Wide<T>> s(scale, options.maximize);
  const bool decays = options.weight_decay != 0;
  const auto go = [&](auto momentum) {
    with(options.first_step, [&](auto first) {
      with(s.divides, [&](auto divides) {
        run_split(x, [&](auto fma, auto tail, int64_t begin, int64_t end) TAMP_INLINE_LAMBDA {
          sgd<fma, tail, decltype(momentum)::value, first, divides>(c, s, x, decays, begin, end);
        });
      });
    });
  };
  if (options.momentum == 0) {
    go(std::integral_constant<Momentum, Momentum::kNone>());
  } else if (options.nesterov) {
    go(std::integral_constant<Momentum, Momentum::kNesterov>());
  } else {
    go(std::integral_constant<Momentum, Momentum::kPlain>());
  }
}

template <typename T>
void update(const Adagrad &options, const GradientScale &scale, const Slice<T> &x) {
  const AdagradNumbers<Wide<T>> c(options);
  const Scaling<Wide<T>> s(scale, options.maximize);
  const bool decays = options.weight_decay != 0;
  with(s.divides,
       [&](auto divides) { run([&](auto fma) TAMP_INLINE_LAMBDA { adagrad<fma, divides>(c, s, x, decays, x.n); }); });
}

#define TAMP_INSTANTIATE(T)                                                       \
  template bool any_non_finite<T>(const T *, int64_t);                            \
  template bool unscale<T>(T *, int64_t, float, bool);                            \
  template void multiply<T>(T *, int64_t, double);                                \
  template double sum_of_squares<T>(const T *, int64_t, float);                   \
  template void update<T>(const Adam &, const GradientScale &, const Slice<T> &); \
  template void update<T>(const Sgd &, const GradientScale &, const Slice<T> &);  \
  template void update<T>(const Adagrad &, const GradientScale &, const Slice<T> &);

TAMP_INSTANTIATE(float)
TAMP_INSTANTIATE(double)
TAMP_INSTANTIATE(c10::BFloat16)
TAMP_INSTANTIATE(c10::Half)

template void widen<c10::BFloat16>(const c10::BFloat16 *, float *, int64_t);
template void widen<c10::Half>(const c10::Half *, float *, int64_t);
template void narrow<c10::BFloat16>(const float *, c10::BFloat16 *, int64_t);
template void narrow<c10::Half>(const float *, c10::Half *, int64_t);

}  // namespace tamp::kernels
