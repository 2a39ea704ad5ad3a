// The loops that convert between half-precision parameters and their master weights.

#include "kernels/loops.h"

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

// The two rounds of the finalizer of MurmurHash3 (Appleby, public domain), after which every bit of the result depends
// on every bit of the argument.
TAMP_INLINE uint32_t first_round(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bU;
  return x ^ (x >> 13);
}
TAMP_INLINE uint32_t second_round(uint32_t x) {
  x *= 0xc2b2ae35U;
  return x ^ (x >> 16);
}

// The random bits of two numbers. `page` is added between the rounds, and the shift spreads it, so that another seed
// does not give the same words in another order.
TAMP_INLINE uint32_t random_word(uint32_t index, uint32_t key, uint32_t page) {
  const uint32_t x = first_round(index ^ key) + page;
  return second_round(x ^ (x >> 15));
}

TAMP_INLINE c10::BFloat16 round_up_by(const float &number, uint32_t random) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  // All NaNs become this one, because rounding could turn another one into zero. The lower half of infinity is zero, so
  // that no random number changes the upper one.
  bits = number != number ? 0x7fc00000U : bits;
  return c10::BFloat16(static_cast<uint16_t>((bits + random) >> 16), c10::BFloat16::from_bits());
}

void round_at_random(const float *from, c10::BFloat16 *to, int64_t n, uint64_t seed, int64_t first) {
  constexpr int64_t kHalf = kRandomBlock / 2;
  const auto key = static_cast<uint32_t>(seed), other = static_cast<uint32_t>(seed >> 32);
  // A word is found by the lower 32 bits of an index. The upper ones select another page, so that the random numbers do
  // not recur.
  const uint32_t page = second_round(first_round(static_cast<uint32_t>(static_cast<uint64_t>(first) >> 32) ^ other));
  uint32_t word = static_cast<uint32_t>(first) / 2;
  run([&](auto) TAMP_INLINE_LAMBDA {
    int64_t begin = 0;
    for (; begin + kRandomBlock <= n; begin += kRandomBlock, word += kHalf) {
      TAMP_INDEPENDENT
      for (int64_t i = 0; i < kHalf; ++i) {
        const uint32_t random = random_word(word + static_cast<uint32_t>(i), key, page);
        to[begin + i] = round_up_by(from[begin + i], random & 0xffffU);
        to[begin + kHalf + i] = round_up_by(from[begin + kHalf + i], random >> 16);
      }
    }
    for (int64_t i = 0; i < n - begin; ++i) {
      const uint32_t random = random_word(word + static_cast<uint32_t>(i % kHalf), key, page);
      to[begin + i] = round_up_by(from[begin + i], i < kHalf ? random & 0xffffU : random >> 16);
    }
  });
}

template void widen<c10::BFloat16>(const c10::BFloat16 *, float *, int64_t);
template void widen<c10::Half>(const c10::Half *, float *, int64_t);
template void narrow<c10::BFloat16>(const float *, c10::BFloat16 *, int64_t);
template void narrow<c10::Half>(const float *, c10::Half *, int64_t);

}  // namespace tamp::kernels
