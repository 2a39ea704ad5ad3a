// The loops of the optimizers for which libtorch has no fused kernels.
//
// The arithmetic of RMSprop, NAdam and Adafactor is that of the operations that PyTorch's are composed of, which libtorch's vectors and its scalar
// loops round alike. Lion's is that of its authors' implementation for PyTorch. Unlike in both, half precision is
// computed in f32 and rounded when it is written.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/sqrt.h>

#include <algorithm>

#include "kernels/updates.h"

namespace tamp::kernels {
namespace {

// ---- RMSprop

template <typename W>
struct RmsPropNumbers {
  W minus_lr, alpha, one_minus_alpha, lerp, eps, weight_decay, momentum;
  bool near;  // whether the new average of the gradients is nearer to the old one than to the gradient

  explicit RmsPropNumbers(const RmsProp &o)
      : minus_lr(static_cast<W>(-o.lr)),
        alpha(static_cast<W>(o.alpha)),
        one_minus_alpha(static_cast<W>(1 - o.alpha)),
        lerp(one_minus_alpha),
        eps(static_cast<W>(o.eps)),
        weight_decay(static_cast<W>(o.weight_decay)),
        momentum(static_cast<W>(o.momentum)) {
    near = std::abs(lerp) < W(0.5);
    if (!near) lerp = 1 - lerp;
  }
};

// Takes the roots as libtorch's operation does, which does not round correctly where it calls the vector library of
// MKL. A root does not depend on its place among the others.
template <typename W>
void take_roots(W *squares, int64_t n) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  at::Tensor tensor = at::from_blob(squares, {n}, at::TensorOptions(c10::CppTypeToScalarType<W>::value));
  at::sqrt_(tensor);
}

template <bool kFma, typename T>
TAMP_INLINE Wide<T> rmsprop_gradient(const RmsPropNumbers<Wide<T>> &c, const Scaling<Wide<T>> &s, T parameter,
                                     T gradient) {
  const Wide<T> g = scaled(s, Wide<T>(widen(gradient)), std::false_type());
  return c.weight_decay != 0 ? fma<kFma>(Wide<T>(widen(parameter)), c.weight_decay, g) : g;
}

// Updates the averages, and writes the squares whose roots divide the gradients.
template <bool kFma, bool kCentered, typename T>
TAMP_INLINE void rmsprop_averages(const RmsPropNumbers<Wide<T>> c, const Scaling<Wide<T>> s, const Slice<T> x,
                                  Wide<T> *__restrict squares) {
  using W = Wide<T>;
  const T *__restrict parameters = x.parameter;
  const T *__restrict gradients = x.gradient;
  T *__restrict square_avgs = x.states[kSquareAvg];
  T *__restrict grad_avgs = x.states[kGradAvg];
  TAMP_INDEPENDENT
  for (int64_t i = 0; i < x.n; ++i) {
    const W g = rmsprop_gradient<kFma>(c, s, parameters[i], gradients[i]);
    const W square_avg = fma<kFma>(c.one_minus_alpha * g, g, W(widen(square_avgs[i])) * c.alpha);
    narrow(square_avg, square_avgs[i]);
    squares[i] = square_avg;
    if constexpr (kCentered) {
      const W old_avg = widen(grad_avgs[i]);
      const W away = g - old_avg;
      const W grad_avg = c.near ? fma<kFma>(c.lerp, away, old_avg) : fma<kFma>(-away, c.lerp, g);
      narrow(grad_avg, grad_avgs[i]);
      squares[i] = fma<kFma>(-grad_avg, grad_avg, square_avg);
    }
  }
}

template <bool kFma, bool kMomentum, typename T>
TAMP_INLINE void rmsprop_parameters(const RmsPropNumbers<Wide<T>> c, const Scaling<Wide<T>> s, const Slice<T> x,
                                    const Wide<T> *__restrict roots) {
  using W = Wide<T>;
  T *__restrict parameters = x.parameter;
  const T *__restrict gradients = x.gradient;
  T *__restrict buffers = x.states[kBuffer];
  TAMP_INDEPENDENT
  for (int64_t i = 0; i < x.n; ++i) {
    const W old = widen(parameters[i]);
    const W g = rmsprop_gradient<kFma>(c, s, parameters[i], gradients[i]);
    const W divisor = roots[i] + c.eps;
    if constexpr (kMomentum) {
      const W buffer = W(widen(buffers[i])) * c.momentum + g / divisor;
      narrow(buffer, buffers[i]);
      narrow(fma<kFma>(buffer, c.minus_lr, old), parameters[i]);
    } else {
      narrow(old + c.minus_lr * g / divisor, parameters[i]);
    }
  }
}

// ---- NAdam

template <typename W>
struct NAdamNumbers {
  W beta2, one_minus_beta2, lerp, eps, weight_decay, keep, correction2, along_gradient, along_exp_avg;
  bool near;  // whether the new average of the gradients is nearer to the old one than to the gradient

  explicit NAdamNumbers(const NAdam &o)
      : beta2(static_cast<W>(o.beta2)),
        one_minus_beta2(static_cast<W>(1 - o.beta2)),
        lerp(static_cast<W>(1 - o.beta1)),
        eps(static_cast<W>(o.eps)),
        weight_decay(o.decoupled ? W(0) : static_cast<W>(o.weight_decay)),
        keep(static_cast<W>(o.keep)),
        correction2(static_cast<W>(o.correction2)),
        along_gradient(static_cast<W>(o.along_gradient)),
        along_exp_avg(static_cast<W>(o.along_exp_avg)) {
    near = std::abs(lerp) < W(0.5);
    if (!near) lerp = 1 - lerp;
  }
};

template <bool kFma, typename T>
TAMP_INLINE Wide<T> nadam_gradient(const NAdamNumbers<Wide<T>> &c, const Scaling<Wide<T>> &s, T parameter, T gradient) {
  const Wide<T> g = scaled(s, Wide<T>(widen(gradient)), std::false_type());
  return c.weight_decay != 0 ? fma<kFma>(Wide<T>(widen(parameter)), c.weight_decay, g) : g;
}

// Updates the averages, and writes the squares whose roots divide the gradients and their averages.
template <bool kFma, typename T>
TAMP_INLINE void nadam_averages(const NAdamNumbers<Wide<T>> c, const Scaling<Wide<T>> s, const Slice<T> x,
                                Wide<T> *__restrict squares, Wide<T> *__restrict averages) {
  using W = Wide<T>;
  const T *__restrict parameters = x.parameter;
  const T *__restrict gradients = x.gradient;
  T *__restrict exp_avgs = x.states[kExpAvg];
  T *__restrict exp_avg_sqs = x.states[kExpAvgSq];
  TAMP_INDEPENDENT
  for (int64_t i = 0; i < x.n; ++i) {
    const W g = nadam_gradient<kFma>(c, s, parameters[i], gradients[i]);
    const W old_avg = widen(exp_avgs[i]);
    const W away = g - old_avg;
    averages[i] = c.near ? fma<kFma>(c.lerp, away, old_avg) : fma<kFma>(-away, c.lerp, g);
    narrow(averages[i], exp_avgs[i]);
    const W exp_avg_sq = fma<kFma>(c.one_minus_beta2 * g, g, W(widen(exp_avg_sqs[i])) * c.beta2);
    narrow(exp_avg_sq, exp_avg_sqs[i]);
    squares[i] = exp_avg_sq / c.correction2;
  }
}

template <bool kFma, typename T>
TAMP_INLINE void nadam_parameters(const NAdamNumbers<Wide<T>> c, const Scaling<Wide<T>> s, const Slice<T> x,
                                  const Wide<T> *__restrict roots, const Wide<T> *__restrict averages) {
  using W = Wide<T>;
  T *__restrict parameters = x.parameter;
  const T *__restrict gradients = x.gradient;
  TAMP_INDEPENDENT
  for (int64_t i = 0; i < x.n; ++i) {
    const W g = nadam_gradient<kFma>(c, s, parameters[i], gradients[i]);
    const W divisor = roots[i] + c.eps;
    const W moved = W(widen(parameters[i])) * c.keep + c.along_gradient * g / divisor;
    narrow(moved + c.along_exp_avg * averages[i] / divisor, parameters[i]);
  }
}

// ---- Adafactor

template <bool kFma, typename T>
TAMP_INLINE void along(Wide<T> keep, Wide<T> minus_rate, const Slice<T> x) {
  using W = Wide<T>;
  T *__restrict parameters = x.parameter;
  const auto *__restrict directions = static_cast<const W *>(x.direction);
  TAMP_INDEPENDENT
  for (int64_t i = 0; i < x.n; ++i) {
    narrow(fma<kFma>(directions[i], minus_rate, W(widen(parameters[i])) * keep), parameters[i]);
  }
}

// `n` elements from `begin` on.
template <typename T>
Slice<T> part(const Slice<T> &x, int64_t begin, int64_t n) {
  Slice<T> out = {x.parameter + begin, x.gradient + begin, {}, n};
  for (int i = 0; i < kStates; ++i) out.states[i] = x.states[i] == nullptr ? nullptr : x.states[i] + begin;
  return out;
}

// ---- Lion

template <typename W>
struct LionNumbers {
  W lr, keep, beta1, one_minus_beta1, beta2, one_minus_beta2;

  explicit LionNumbers(const Lion &o)
      : lr(static_cast<W>(o.lr)),
        keep(static_cast<W>(1 - o.lr * o.weight_decay)),
        beta1(static_cast<W>(o.beta1)),
        one_minus_beta1(static_cast<W>(1 - o.beta1)),
        beta2(static_cast<W>(o.beta2)),
        one_minus_beta2(static_cast<W>(1 - o.beta2)) {}
};

template <bool kFma, typename T>
TAMP_INLINE void lion(const LionNumbers<Wide<T>> c, const Scaling<Wide<T>> s, const Slice<T> x, int64_t n) {
  using W = Wide<T>;
  T *__restrict parameters = x.parameter;
  const T *__restrict gradients = x.gradient;
  T *__restrict exp_avgs = x.states[kExpAvg];
  TAMP_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    const W g = scaled(s, W(widen(gradients[i])), std::false_type());
    const W exp_avg = widen(exp_avgs[i]);
    const W along = fma<kFma>(g, c.one_minus_beta1, exp_avg * c.beta1);
    const W sign = W(along > 0) - W(along < 0);  // zero for a NaN, as in libtorch
    narrow(fma<kFma>(g, c.one_minus_beta2, exp_avg * c.beta2), exp_avgs[i]);
    narrow(W(widen(parameters[i])) * c.keep - c.lr * sign, parameters[i]);
  }
}

}  // namespace

// ---- updates

template <typename T>
void update(const RmsProp &options, const GradientScale &scale, const Slice<T> &x) {
  const RmsPropNumbers<Wide<T>> c(options);
  const auto s = multiplying<Wide<T>>(scale, options.maximize);
  constexpr int64_t kBlock = 1024;  // stays in the first-level cache
  alignas(64) Wide<T> roots[kBlock];
  for (int64_t begin = 0; begin < x.n; begin += kBlock) {
    const Slice<T> block = part(x, begin, std::min(kBlock, x.n - begin));
    const auto averages = [&](auto centered) {
      run([&](auto fma) TAMP_INLINE_LAMBDA { rmsprop_averages<fma, centered>(c, s, block, roots); });
    };
    with(averages, options.centered);
    take_roots(roots, block.n);
    const auto parameters = [&](auto momentum) {
      run([&](auto fma) TAMP_INLINE_LAMBDA { rmsprop_parameters<fma, momentum>(c, s, block, roots); });
    };
    with(parameters, options.momentum > 0);
  }
}

template <typename T>
void update(const NAdam &options, const GradientScale &scale, const Slice<T> &x) {
  const NAdamNumbers<Wide<T>> c(options);
  const auto s = multiplying<Wide<T>>(scale, options.maximize);
  constexpr int64_t kBlock = 1024;  // stays in the first-level cache
  alignas(64) Wide<T> roots[kBlock], averages[kBlock];
  for (int64_t begin = 0; begin < x.n; begin += kBlock) {
    const Slice<T> block = part(x, begin, std::min(kBlock, x.n - begin));
    run([&](auto fma) TAMP_INLINE_LAMBDA { nadam_averages<fma>(c, s, block, roots, averages); });
    take_roots(roots, block.n);
    run([&](auto fma) TAMP_INLINE_LAMBDA { nadam_parameters<fma>(c, s, block, roots, averages); });
  }
}

template <typename T>
void update(const Adafactor &options, const GradientScale &, const Slice<T> &x) {
  const auto keep = static_cast<Wide<T>>(options.keep), minus_rate = static_cast<Wide<T>>(-options.rate);
  run([&](auto fma) TAMP_INLINE_LAMBDA { along<fma>(keep, minus_rate, x); });
}

template <typename T>
void update(const Lion &options, const GradientScale &scale, const Slice<T> &x) {
  const LionNumbers<Wide<T>> c(options);
  const auto s = multiplying<Wide<T>>(scale, options.maximize);
  run([&](auto fma) TAMP_INLINE_LAMBDA { lion<fma>(c, s, x, x.n); });
}

#define TAMP_INSTANTIATE(T)                                                            \
  template void update<T>(const RmsProp &, const GradientScale &, const Slice<T> &);   \
  template void update<T>(const NAdam &, const GradientScale &, const Slice<T> &);     \
  template void update<T>(const Adafactor &, const GradientScale &, const Slice<T> &); \
  template void update<T>(const Lion &, const GradientScale &, const Slice<T> &);

TAMP_INSTANTIATE(float)
TAMP_INSTANTIATE(double)
TAMP_INSTANTIATE(c10::BFloat16)
TAMP_INSTANTIATE(c10::Half)

#undef TAMP_INSTANTIATE

}  // namespace tamp::kernels
