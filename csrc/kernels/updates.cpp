// The loops of the optimizers for which libtorch has fused kernels.

#include "kernels/updates.h"

namespace tamp::kernels {
namespace {

// Returns a / d, correctly rounded, for a finite `d` and its rounded reciprocal, in the time of three multiplications.
// The remainder of the first guess is exact, and one correction by it gives the rounded quotient (Markstein 1990; for a
// `d` whose digits are all ones, which his proof excludes, every `a` was tried). An infinite guess is the quotient
// already.
TAMP_INLINE float quotient(float a, float d, float reciprocal) {
  const float guess = a * reciprocal;
  const float remainder = __builtin_fmaf(-guess, d, a);
  const float better = __builtin_fmaf(remainder, reciprocal, guess);
  return guess == __builtin_inff() ? guess : better;
}

// Runs `loop` over the elements that libtorch processes in vectors, and then over the rest, for which its compiler has
// contracted other products into multiply-adds. The vectors of CPUs with fused multiply-add have a loop for each
// combination of the flags; all others, which take most of the compiler's time otherwise, test them as they go.
template <typename T, typename Loop, typename... Flags>
void run_split(const Slice<T> &x, const Loop &loop, Flags... flags) {
  const std::true_type tail;
  const std::false_type vectors;
  const int64_t split = x.n - x.n % static_cast<int64_t>(32 / sizeof(T));
  if (has_fma()) {
    with([&](auto... known) { run_fma([&](auto fma) TAMP_INLINE_LAMBDA { loop(fma, vectors, 0, split, known...); }); },
         flags...);
  } else {
    loop(std::false_type(), vectors, 0, split, flags...);
  }
  if (split < x.n) run([&](auto fma) TAMP_INLINE_LAMBDA { loop(fma, tail, split, x.n, flags...); });
}

// Returns a * b + c * d. libtorch rounds the product c * d in its vectors, and a * b in its scalar loops.
template <bool kFma, bool kTail, typename W>
TAMP_INLINE W sum_of_products(W a, W b, W c, W d) {
  return kTail ? fma<kFma>(c, d, a * b) : fma<kFma>(a, b, c * d);
}

// ---- Adam

template <typename W>
struct AdamNumbers {
  W beta2, one_minus_beta2, lerp, rest, keep, root_correction, reciprocal, eps, minus_step_size, weight_decay;
  bool near;  // whether the new moving average is nearer to the old one than to the gradient

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
    // The compiler has contracted this in libtorch's kernel, too.
    const double kept = has_fma() ? std::fma(-o.lr, o.weight_decay, 1.0) : 1 - o.lr * o.weight_decay;
    keep = o.decoupled ? static_cast<W>(kept) : W(1);
  }
};

template <bool kFma, bool kTail, typename T, typename Near, typename Amsgrad, typename Decays, typename Divides>
TAMP_INLINE void adam(const AdamNumbers<Wide<T>> c, const Scaling<Wide<T>> s, const Slice<T> x, int64_t begin,
                      int64_t end, Near near, Amsgrad amsgrad, Decays decays, Divides divides) {
  using W = Wide<T>;
  T *__restrict parameters = x.parameter;
  const T *__restrict gradients = x.gradient;
  T *__restrict exp_avgs = x.states[kExpAvg];
  T *__restrict exp_avg_sqs = x.states[kExpAvgSq];
  T *__restrict max_exp_avg_sqs = x.states[kMaxExpAvgSq];
  TAMP_INDEPENDENT
  for (int64_t i = begin; i < end; ++i) {
    const W old = widen(parameters[i]);
    W g = scaled(s, W(widen(gradients[i])), divides);
    if (decays) g = fma<kFma>(old, c.weight_decay, g);
    const W old_exp_avg = widen(exp_avgs[i]);
    const W away = g - old_exp_avg;
    // libtorch's vectors and scalar loops compute the same number here, but a zero may have another sign.
    const W exp_avg = near ? fma<kFma>(c.lerp, away, old_exp_avg)
                           : (kTail ? fma<kFma>(-away, c.rest, g) : fma<kFma>(c.lerp, away, g));
    const W exp_avg_sq = sum_of_products<kFma, kTail>(c.one_minus_beta2 * g, g, W(widen(exp_avg_sqs[i])), c.beta2);
    W square = exp_avg_sq;
    if (amsgrad) {
      const W old_max = widen(max_exp_avg_sqs[i]);
      // Either NaN stays, as in PyTorch's vectors and its operations.
      square = old_max < exp_avg_sq || exp_avg_sq != exp_avg_sq ? exp_avg_sq : old_max;
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

template <bool kFma, bool kTail, Momentum kMomentum, typename T, typename First, typename Divides>
TAMP_INLINE void sgd(const SgdNumbers<Wide<T>> c, const Scaling<Wide<T>> s, const Slice<T> x, bool decays,
                     int64_t begin, int64_t end, First first, Divides divides) {
  using W = Wide<T>;
  T *__restrict parameters = x.parameter;
  const T *__restrict gradients = x.gradient;
  T *__restrict buffers = x.states[kMomentumBuffer];
  TAMP_INDEPENDENT
  for (int64_t i = begin; i < end; ++i) {
    const W old = widen(parameters[i]);
    W g = scaled(s, W(widen(gradients[i])), divides);
    if (decays) g = fma<kFma>(old, c.weight_decay, g);
    if constexpr (kMomentum != Momentum::kNone) {
      W buffer = g;
      if (!first) {
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

template <bool kFma, typename T>
TAMP_INLINE void adagrad(const AdagradNumbers<Wide<T>> c, const Scaling<Wide<T>> s, const Slice<T> x, bool decays,
                         bool divides) {
  using W = Wide<T>;
  T *__restrict parameters = x.parameter;
  const T *__restrict gradients = x.gradient;
  T *__restrict sums = x.states[kSum];
  TAMP_INDEPENDENT
  for (int64_t i = 0; i < x.n; ++i) {
    const W old = widen(parameters[i]);
    W g = scaled(s, W(widen(gradients[i])), divides);
    if (decays) g = fma<kFma>(old, c.weight_decay, g);
    const W sum = fma<kFma>(g, g, W(widen(sums[i])));
    narrow(sum, sums[i]);
    narrow(old - c.lr * g / (root(sum) + c.eps), parameters[i]);
  }
}

}  // namespace

// ---- updates

template <typename T>
void update(const Adam &options, const GradientScale &scale, const Slice<T> &x) {
  const AdamNumbers<Wide<T>> c(options);
  const Scaling<Wide<T>> s(scale, options.maximize);
  const bool decays = !options.decoupled && options.weight_decay != 0;
  run_split(
      x,
      [&](auto fma, auto tail, int64_t begin, int64_t end, auto... flags)
          TAMP_INLINE_LAMBDA { adam<fma, tail>(c, s, x, begin, end, flags...); },
      c.near, options.amsgrad, decays, s.divides);
}

template <typename T>
void update(const Sgd &options, const GradientScale &scale, const Slice<T> &x) {
  const SgdNumbers<Wide<T>> c(options);
  const Scaling<Wide<T>> s(scale, options.maximize);
  const bool decays = options.weight_decay != 0;
  const auto go = [&](auto momentum) {
    run_split(
        x,
        [&](auto fma, auto tail, int64_t begin, int64_t end, auto... flags)
            TAMP_INLINE_LAMBDA { sgd<fma, tail, decltype(momentum)::value>(c, s, x, decays, begin, end, flags...); },
        options.first_step, s.divides);
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
  run([&](auto fma) TAMP_INLINE_LAMBDA { adagrad<fma>(c, s, x, decays, s.divides); });
}

#define TAMP_INSTANTIATE(T)                                                       \
  template void update<T>(const Adam &, const GradientScale &, const Slice<T> &); \
  template void update<T>(const Sgd &, const GradientScale &, const Slice<T> &);  \
  template void update<T>(const Adagrad &, const GradientScale &, const Slice<T> &);

TAMP_INSTANTIATE(float)
TAMP_INSTANTIATE(double)
TAMP_INSTANTIATE(c10::BFloat16)
TAMP_INSTANTIATE(c10::Half)

#undef TAMP_INSTANTIATE

}  // namespace tamp::kernels
