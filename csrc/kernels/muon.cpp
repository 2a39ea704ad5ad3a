// The loop of Muon: its momentum, and the update by the orthogonalized momentum, with the arithmetic of the operations
// of torch.optim.Muon.

#include "kernels/updates.h"

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

template <bool kFma, typename W>
TAMP_INLINE W momentum(const MuonNumbers<W> &c, W old, W gradient) {
  const W away = gradient - old;
  return c.near ? fma<kFma>(c.lerp, away, old) : fma<kFma>(-away, c.lerp, gradient);
}

template <bool kFma, typename W, typename T>
TAMP_INLINE void move(const MuonNumbers<W> &c, c10::BFloat16 along, T &parameter) {
  narrow(fma<kFma>(W(widen(along)), c.minus_rate, W(widen(parameter)) * c.keep), parameter);
}

template <bool kFma, typename T>
TAMP_INLINE void muon(const MuonNumbers<Wide<T>> c, const Scaling<Wide<T>> s, const Slice<T> x) {
  using W = Wide<T>;
  T *__restrict parameters = x.parameter;
  const T *__restrict gradients = x.gradient;
  T *__restrict buffers = x.states[kMomentumBuffer];
  const auto *__restrict orthogonal = static_cast<const c10::BFloat16 *>(x.direction);
  TAMP_INDEPENDENT
  for (int64_t i = 0; i < x.n; ++i) {
    const W g = scaled(s, W(widen(gradients[i])), std::false_type());
    narrow(momentum<kFma>(c, W(widen(buffers[i])), g), buffers[i]);
    move<kFma>(c, orthogonal[i], parameters[i]);
  }
}

// The same for a bf16 buffer, of at most kDitherPeriod numbers.
template <bool kFma>
TAMP_INLINE void muon(const MuonNumbers<float> c, const Scaling<float> s, const MuonSlice x, const uint32_t *dither) {
  float *__restrict parameters = x.parameter;
  const float *__restrict gradients = x.gradient;
  c10::BFloat16 *__restrict buffers = x.momentum_buffer;
  const c10::BFloat16 *__restrict orthogonal = x.orthogonal;
  TAMP_INDEPENDENT
  for (int64_t i = 0; i < x.n; ++i) {
    const float g = scaled(s, gradients[i], std::false_type());
    cut_off(momentum<kFma>(c, widen(buffers[i]), g), dither[i], buffers[i]);
    move<kFma>(c, orthogonal[i], parameters[i]);
  }
}

}  // namespace

template <typename T>
void update(const Muon &options, const GradientScale &scale, const Slice<T> &x) {
  const MuonNumbers<Wide<T>> c(options);
  const auto s = multiplying<Wide<T>>(scale, false);
  run([&](auto fma) TAMP_INLINE_LAMBDA { muon<fma>(c, s, x); });
}

void update(const LowBitMuon &options, const GradientScale &scale, const MuonSlice &x) {
  const MuonNumbers<float> c(options.options);
  const auto s = multiplying<float>(scale, false);
  run([&](auto fma) TAMP_INLINE_LAMBDA {
    for (int64_t i = 0; i < x.n; i += kDitherPeriod) {
      const int64_t n = x.n - i < kDitherPeriod ? x.n - i : kDitherPeriod;
      const MuonSlice part = {x.parameter + i, x.gradient + i, x.momentum_buffer + i, x.orthogonal + i, n};
      muon<fma>(c, s, part, options.dither);
    }
  });
}

template void update<float>(const Muon &, const GradientScale &, const Slice<float> &);
template void update<double>(const Muon &, const GradientScale &, const Slice<double> &);
template void update<c10::BFloat16>(const Muon &, const GradientScale &, const Slice<c10::BFloat16> &);
template void update<c10::Half>(const Muon &, const GradientScale &, const Slice<c10::Half> &);

}  // namespace tamp::kernels
