// Rows of numbers in eight bits, e4m3, with one factor: a power of two, by which the largest of them is at most 448.
//
// The codes are libtorch's but for the two that are NaN there, which are the infinities: a NaN makes the factor NaN. A
// number that is not 0 gets no code of 0, by which a derivative could divide.

#include "kernels/loops.h"

namespace tamp::kernels {
namespace {

constexpr uint32_t kSignOfRow = 0x80000000, kInfinityOfRow = 0x7f800000;

TAMP_INLINE uint32_t bits_of(float x) {
  uint32_t out;
  std::memcpy(&out, &x, sizeof out);
  return out;
}

TAMP_INLINE float number_of(uint32_t x) {
  float out;
  std::memcpy(&out, &x, sizeof out);
  return out;
}

// The bits of the factor, by which the codes are multiplied, from those of the largest number. 448 is 1.75 * 2^8.
TAMP_INLINE uint32_t factor_of(uint32_t largest) {
  const uint32_t over = (largest + (0x7fffffU - 0x600000U)) & kInfinityOfRow;
  constexpr uint32_t kLowest = 1U << 23, kBelow = 8U << 23;
  return over < kLowest + kBelow ? kLowest : over - kBelow;
}

// The code of a number of at most 448, rounded to nearest with ties to even, or of an infinity. The smallest code takes
// the place of 0 unless `is_zero`.
TAMP_INLINE uint8_t encode(float scaled, bool is_zero) {
  const uint32_t bits = bits_of(scaled), size = bits & ~kSignOfRow;
  // Below 2^-6, the distance of codes is 2^-9: that of f32 numbers from 2^14 on.
  const uint32_t small = bits_of(number_of(size) + 16384.0F) - bits_of(16384.0F);
  const uint32_t large = (size + 0x7ffffU + ((size >> 20) & 1U) - (120U << 23)) >> 20;
  const uint32_t least = is_zero ? 0U : 1U;
  const uint32_t rounded = size < (121U << 23) ? small : large;
  const uint32_t code = rounded < least ? least : rounded;
  return static_cast<uint8_t>((size >= kInfinityOfRow ? 0x7fU : code) | (bits >> 31 << 7));
}

TAMP_INLINE float decode(uint8_t code) {
  const uint32_t size = code & 0x7fU;
  const float small = static_cast<float>(static_cast<int32_t>(size)) * 0x1p-9F;
  const uint32_t large = (size << 20) + (120U << 23);
  const uint32_t bits = size < 8 ? bits_of(small) : size == 0x7f ? kInfinityOfRow : large;
  return number_of(bits | (static_cast<uint32_t>(code & 0x80U) << 24));
}

// The largest of the sizes that are below a limit.
template <typename T>
TAMP_INLINE uint32_t largest_below(const T *__restrict from, int64_t n, int32_t limit) {
  int32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const auto size = static_cast<int32_t>(bits_of(static_cast<float>(widen(from[i]))) & ~kSignOfRow);
    const int32_t counted = size < limit ? size : 0;
    most = most > counted ? most : counted;
  }
  return static_cast<uint32_t>(most);
}

// The same of all sizes.
template <typename T>
TAMP_INLINE uint32_t largest_of(const T *__restrict from, int64_t n) {
  int32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const auto size = static_cast<int32_t>(bits_of(static_cast<float>(widen(from[i]))) & ~kSignOfRow);
    most = most > size ? most : size;
  }
  return static_cast<uint32_t>(most);
}

template <typename T>
TAMP_INLINE void encode(const T *__restrict from, float up, uint8_t *__restrict codes, int64_t n) {
  TAMP_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    const auto x = static_cast<float>(widen(from[i]));
    codes[i] = encode(x * up, (bits_of(x) & ~kSignOfRow) == 0);
  }
}

// The largest finite number of a dtype.
template <typename T>
constexpr float kLargest = std::is_same_v<T, c10::Half> ? 65504.0F : 0x1.fffffep127F;
template <>
inline constexpr float kLargest<c10::BFloat16> = 0x1.fep127F;

template <typename T>
TAMP_INLINE void decode(const uint8_t *__restrict codes, float factor, T *__restrict to, int64_t n) {
  TAMP_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    const float x = decode(codes[i]) * factor;
    // A number that was rounded up does not become an infinity.
    const float low = x > kLargest<T> ? kLargest<T> : x, finite = low < -kLargest<T> ? -kLargest<T> : low;
    narrow((codes[i] & 0x7fU) == 0x7f ? x : finite, to[i]);
  }
}

}  // namespace

template <typename T>
float pack_row(const T *from, uint8_t *codes, int64_t n) {
  float factor = 0;
  run([&](auto) TAMP_INLINE_LAMBDA {
    const uint32_t most = largest_of(from, n);
    factor = number_of(factor_of(most < kInfinityOfRow ? most : largest_below(from, n, kInfinityOfRow)));
    encode(from, 1 / factor, codes, n);
    if (most > kInfinityOfRow) factor = number_of(0x7fc00000U);
  });
  return factor;
}

template <typename T>
void unpack_row(const uint8_t *codes, float factor, T *to, int64_t n) {
  run([&](auto) TAMP_INLINE_LAMBDA { decode(codes, factor, to, n); });
}

#define TAMP_PACKED(T)                                    \
  template float pack_row(const T *, uint8_t *, int64_t); \
  template void unpack_row(const uint8_t *, float, T *, int64_t);
TAMP_PACKED(float)
TAMP_PACKED(c10::BFloat16)
TAMP_PACKED(c10::Half)
#undef TAMP_PACKED

}  // namespace tamp::kernels
