// What the loops of all optimizers begin with: the unscaled gradient.
#pragma once

#include "kernels/loops.h"

namespace tamp::kernels {

// Calls `f` with each flag as a type, so that a loop is compiled for each combination of them.
template <typename F>
void with(const F &f) {
  f();
}
template <typename F, typename... Flags>
void with(const F &f, bool flag, Flags... flags) {
  const auto and_others = [&](auto known) { with([&](auto... others) { f(known, others...); }, flags...); };
  flag ? and_others(std::true_type()) : and_others(std::false_type());
}

template <typename W>
struct Scaling {
  W divisor, factor, clip, sign;
  bool divides;

  Scaling(const GradientScale &scale, bool maximize)
      : divisor(scale.divisor), factor(scale.factor), clip(static_cast<W>(scale.clip)), sign(maximize ? -1 : 1) {
    divides = scale.divisor != 1 && !is_power_of_two(scale.divisor);
    // The reciprocal of a power of two is exact, and so is every product with it.
    if (scale.divisor != 1 && !divides) factor = 1 / divisor;
  }
};

// PyTorch unscales gradients in a separate pass for the optimizers without fused kernels: it multiplies by the
// reciprocal, which is computed in f64.
template <typename W>
Scaling<W> multiplying(GradientScale scale, bool maximize) {
  if (scale.divisor != 1) scale.factor = reciprocal(scale.divisor);
  scale.divisor = 1;
  return Scaling<W>(scale, maximize);
}

template <typename W, typename Flag>
TAMP_INLINE W scaled(const Scaling<W> &s, W gradient, Flag divides) {
  return (divides ? gradient / s.divisor : gradient * s.factor * s.clip) * s.sign;
}

}  // namespace tamp::kernels
