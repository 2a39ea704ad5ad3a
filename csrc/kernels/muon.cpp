// The loop of Muon: its momentum, and the update by the orthogonalized momentum, with the arithmetic of the operations
// of torch.optim.Muon.

#include "updates.h"

namespace tamp::kernels {
namespace {

template <typename W>
struct MuonNumbers {
  W keep, minus_rate, lerp;
  bool near;  // whether the new momentum is nearer to the old one than to the gradient

  explicit MuonNumbers(const Muon &o)
      : keep(static_cast<W>(1 - o.lr * o.weight_decay)),
        minus_rate(static_cast<W>(-o.rate)),
        lerp(static_cast<W>(1 - o.momentum)) {
    near = std::abs(lerp) < W(0.5);
    if (!near) lerp = 1 - lerp;
  }
};

template <bool kFma, typename T>
TAMP_INLINE void muon(const MuonNumbers<Wide<T>> c, const Scaling<Wide<T>> s, const Slice<T> x, int64_t n) {
  using W = Wide<T>;
  T *__restrict parameters = x.parameter;
  const T *__restrict gradients = x.gradient;
  T *__restrict buffers = x.states[kMomentumBuffer];
  const c10::BFloat16 *__restrict orthogonal = x.orthogonal;
  TAMP_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    const W g = scaled(s, W(widen(gradients[i])), std::false_type());
    const W old = widen(buffers[i]);
    const W away = g - old;
    narrow(c.near ? fma<kFma>(c.lerp, away, old) : fma<kFma>(-away, c.lerp, g), buffers[i]);
    narrow(fma<kFma>(W(widen(orthogonal[i])), c.minus_rate, W(widen(parameters[i])) * c.keep), parameters[i]);
  }
}

}  // namespace

template <typename T>
void update(const Muon &options, const GradientScale &scale, const Slice<T> &x) {
  const MuonNumbers<Wide<T>> c(options);
  const auto s = multiplying<Wide<T>>(scale, false);
  run([&](auto fma) TAMP_INLINE_LAMBDA { muon<fma>(c, s, x, x.n); });
}

template void update<float>(const Muon &, const GradientScale &, const Slice<float> &);
template void update<double>(const Muon &, const GradientScale &, const Slice<double> &);
template void update<c10::BFloat16>(const Muon &, const GradientScale &, const Slice<c10::BFloat16> &);
template void update<c10::Half>(const Muon &, const GradientScale &, const Slice<c10::Half> &);

}  // namespace tamp::kernels
