// The loops that convert between half-precision parameters and their master weights.

#include "loops.h"

namespace tamp::kernels {

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
      // `split` has rounded numbers with a remainder from 0x8000 on away from zero, which the subtraction reverses.
      const uint32_t bits = ((static_cast<uint32_t>(high[i].x) - (rest >> 15)) << 16) | rest;
      float out;  // compilers do not vectorize a copy of `bits` to memory
      std::memcpy(&out, &bits, sizeof out);
      to[i] = out;
    }
  });
}

void split(const float *from, c10::BFloat16 *high, int16_t *low, int64_t n) {
  run([&](auto) TAMP_INLINE_LAMBDA {
    TAMP_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      uint32_t bits;
      std::memcpy(&bits, from + i, sizeof bits);
      // All NaNs become this one, because rounding could turn another one into zero.
      bits = from[i] != from[i] ? 0x7fc00000U : bits;
      // The bits are a sign and a magnitude, so this rounds ties away from zero.
      high[i].x = static_cast<uint16_t>((bits + 0x8000U) >> 16);
      low[i] = static_cast<int16_t>(bits & 0xffffU);
    }
  });
}

// The finalizer of MurmurHash3 (Appleby, public domain), in which every bit of the result depends on every bit of the
// argument.
TAMP_INLINE uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bU;
  x = (x ^ (x >> 13)) * 0xc2b2ae35U;
  return x ^ (x >> 16);
}

void round_at_random(const float *from, c10::BFloat16 *to, int64_t n, uint64_t seed, int64_t first) {
  const auto key = static_cast<uint32_t>(seed), other = static_cast<uint32_t>(seed >> 32);
  const auto start = static_cast<uint32_t>(first);
  // The hash uses the lower 32 bits of an index. The upper ones select another key, so that the random numbers do not
  // recur.
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

template void widen<c10::BFloat16>(const c10::BFloat16 *, float *, int64_t);
template void widen<c10::Half>(const c10::Half *, float *, int64_t);
template void narrow<c10::BFloat16>(const float *, c10::BFloat16 *, int64_t);
template void narrow<c10::Half>(const float *, c10::Half *, int64_t);

}  // namespace tamp::kernels
