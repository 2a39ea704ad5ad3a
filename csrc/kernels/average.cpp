// The loop that moves averages of weights towards the parameters.

#include "kernels/loops.h"

namespace tamp::kernels {
namespace {

// The weight of an update in the arithmetic of libtorch's lerp, which computes from the nearer end.
template <typename W>
struct Weight {
  bool near;
  W weight, rest;

  explicit Weight(double given) {
    const W rounded = static_cast<W>(given);
    near = std::abs(rounded) < W(0.5);
    weight = near ? rounded : rounded - 1;
    rest = 1 - rounded;
  }
};

template <bool kFma, bool kTail, typename W, typename T>
TAMP_INLINE void lerp(Weight<W> w, W *__restrict averages, const T *__restrict parameters, int64_t begin, int64_t end) {
  TAMP_INDEPENDENT
  for (int64_t i = begin; i < end; ++i) {
    const W parameter = widen(parameters[i]);
    const W away = parameter - averages[i];
    const W far = kTail ? fma<kFma>(-away, w.rest, parameter) : fma<kFma>(w.weight, away, parameter);
    averages[i] = w.near ? fma<kFma>(w.weight, away, averages[i]) : far;
  }
}

}  // namespace

template <typename T>
void lerp(double weight, Wide<T> *averages, const T *parameters, int64_t n) {
  const Weight<Wide<T>> w(weight);
  // libtorch's compiler has contracted other products in the rest that its vectors leave over.
  const int64_t split = n - n % static_cast<int64_t>(32 / sizeof(Wide<T>));
  run([&](auto fma) TAMP_INLINE_LAMBDA {
    lerp<fma, false>(w, averages, parameters, 0, split);
    lerp<fma, true>(w, averages, parameters, split, n);
  });
}

template void lerp(double, float *, const float *, int64_t);
template void lerp(double, double *, const double *, int64_t);
template void lerp(double, float *, const c10::BFloat16 *, int64_t);
template void lerp(double, float *, const c10::Half *, int64_t);

}  // namespace tamp::kernels
