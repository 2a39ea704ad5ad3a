// The steps of Adam and AdamW with low-bit moments, in the same bits on every CPU, and the tables of the dither.

#include <cstring>

#include "border/guarded.h"
#include "kernels/updates.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tamp::kernels {
namespace {

constexpr uint32_t kSignBit = 0x80000000, kExponentBits = 0xff800000;
// The bits of 1/16, from which the codes of first moments are counted.
constexpr uint32_t kOneSixteenth = 0x3d800000;
// Added after the bits of a number are halved: half of the exponent's bias.
constexpr uint32_t kHalfOfBias = 127U << 22;
// 1/S has the bits (254 << 23) - S. They are the exponent of this constant less half of the bits of the second moment;
// 0x7fffff makes masking the exponent round up.
constexpr uint32_t kInverseUnit = (254U << 23) - kHalfOfBias + 0x7fffff;
// The range of a block's exponent. The lowest is stored as 0, and keeps the bottom of the window a normal number.
constexpr uint32_t kLowestTop = 32, kHighestTop = 255;
// The exponent of a block with a number that is not finite, and the code that is NaN there. No step stores a larger one.
constexpr uint8_t kNonFinite = kHighestTop - kLowestTop, kNaNCode = 252;

uint32_t bits(float x) {
  uint32_t out;
  std::memcpy(&out, &x, sizeof out);
  return out;
}

float number(uint32_t x) {
  float out;
  std::memcpy(&out, &x, sizeof out);
  return out;
}

// What the code of a second moment is added to, after its three bits of a fraction: the lowest number of the block.
TAMP_INLINE uint32_t base_of(uint8_t exponent) { return ((exponent < kNonFinite ? exponent : kNonFinite) + 1U) << 23; }

// The exponent of a block from its largest number, cut off after three bits of a fraction.
TAMP_INLINE uint32_t top_of(uint32_t largest) {
  const uint32_t top = largest >> 3;
  return top < kLowestTop ? kLowestTop : (top > kHighestTop ? kHighestTop : top);
}

// The lowest number of a block, cut off in the same way.
TAMP_INLINE uint32_t lowest_of(uint32_t top) { return (top - kLowestTop + 1) << 3; }

// If one number of a block was not finite, makes all of them NaN.
TAMP_INLINE void read_non_finite(uint8_t exponent, uint8_t *exp_avg_sq, int64_t n = kCodeBlock) {
  if (exponent >= kNonFinite) std::memset(exp_avg_sq, kNaNCode, static_cast<size_t>(n));
}

// Updates the moments of a number, in whatever format they are kept, and its parameter.
TAMP_INLINE void update(const LowBit &c, float gradient, float &exp_avg, float &exp_avg_sq, float &parameter) {
  exp_avg = __builtin_fmaf(c.lerp, gradient - exp_avg, exp_avg);
  exp_avg_sq = __builtin_fmaf(c.beta2, exp_avg_sq, c.one_minus_beta2 * gradient * gradient);
  const float step = c.minus_step_size * exp_avg / (__builtin_sqrtf(exp_avg_sq) + c.eps);
  parameter = __builtin_fmaf(parameter, c.keep, step);
}

// A block's new moments before they have codes.
struct Tile {
  alignas(64) float exp_avg[kDitherPeriod];
  alignas(64) uint32_t rounded[kDitherPeriod];
  uint32_t largest[kDitherPeriod / kCodeBlock];
};

// Steps the block at `begin`, of `n` numbers, on any CPU.
void step_block(const LowBit &c, const EightBitSlice &x, int64_t begin, int64_t n) {
  uint8_t &exponent = x.exponents[begin / kCodeBlock];
  int8_t *codes = x.exp_avg + begin;
  uint8_t *squares = x.exp_avg_sq + begin;
  float moments[kCodeBlock];
  uint32_t rounded[kCodeBlock], largest = 0;
  read_non_finite(exponent, squares, n);
  for (int64_t j = 0; j < n; ++j) {
    const uint32_t square = (static_cast<uint32_t>(squares[j]) << 20) + base_of(exponent);
    const uint32_t unit = ((square >> 1) + kHalfOfBias) & kExponentBits;
    const auto code = static_cast<uint32_t>(codes[j] < 0 ? -codes[j] : codes[j]);
    const float size = number((code << 19) + kOneSixteenth) - 0.0625F;
    float exp_avg_sq = number(square);
    moments[j] = size * number(unit | (codes[j] < 0 ? kSignBit : 0));
    update(c, x.gradient[begin + j], moments[j], exp_avg_sq, x.parameter[begin + j]);
    rounded[j] = (bits(exp_avg_sq) + c.exp_avg_sq_dither[begin % kDitherPeriod + j]) >> 20;
    largest = largest > rounded[j] ? largest : rounded[j];
  }
  const uint32_t top = top_of(largest), lowest = lowest_of(top);
  exponent = static_cast<uint8_t>(top - kLowestTop);
  for (int64_t j = 0; j < n; ++j) {
    const uint32_t kept = rounded[j] > lowest ? rounded[j] : lowest;
    const float inverse = number((kInverseUnit - (kept << 19)) & kExponentBits);
    const float scaled = __builtin_fmaf(number(bits(moments[j]) & ~kSignBit), inverse, 0.0625F);
    const uint32_t code = (bits(scaled) + c.exp_avg_dither[begin % kDitherPeriod + j]) >> 19;
    const auto size = static_cast<int>(code < c.largest ? code : c.largest);
    codes[j] = static_cast<int8_t>((bits(moments[j]) & kSignBit) != 0 ? -size : size);
    squares[j] = static_cast<uint8_t>(kept - lowest < 255 ? kept - lowest : 255);
  }
}

#if defined(__x86_64__)

#define TAMP_OPERATION TAMP_TARGET static TAMP_INLINE

namespace avx2 {
#define TAMP_TARGET __attribute__((target("avx2,fma")))

struct V {
  using Floats = __m256;
  using Words = __m256i;
  static constexpr int64_t kWidth = 8;

  TAMP_OPERATION Floats floats(float x) { return _mm256_set1_ps(x); }
  TAMP_OPERATION Words words(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  TAMP_OPERATION Floats load(const float *at) { return _mm256_loadu_ps(at); }
  TAMP_OPERATION Words load(const uint32_t *at) { return _mm256_load_si256(reinterpret_cast<const Words *>(at)); }
  TAMP_OPERATION void store(float *at, Floats x) { _mm256_storeu_ps(at, x); }
  TAMP_OPERATION void store(uint32_t *at, Words x) { _mm256_store_si256(reinterpret_cast<Words *>(at), x); }
  TAMP_OPERATION Words unsigned_bytes(const uint8_t *at) { return _mm256_cvtepu8_epi32(bytes(at)); }
  TAMP_OPERATION Words signed_bytes(const int8_t *at) { return _mm256_cvtepi8_epi32(bytes(at)); }
  TAMP_OPERATION Floats numbers(Words x) { return _mm256_castsi256_ps(x); }
  TAMP_OPERATION Words bits(Floats x) { return _mm256_castps_si256(x); }

  TAMP_OPERATION Floats plus(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  TAMP_OPERATION Floats minus(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
  TAMP_OPERATION Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  TAMP_OPERATION Floats over(Floats a, Floats b) { return _mm256_div_ps(a, b); }
  TAMP_OPERATION Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  TAMP_OPERATION Floats root(Floats x) { return _mm256_sqrt_ps(x); }

  TAMP_OPERATION Words add(Words a, Words b) { return _mm256_add_epi32(a, b); }
  TAMP_OPERATION Words sub(Words a, Words b) { return _mm256_sub_epi32(a, b); }
  TAMP_OPERATION Words both(Words a, Words b) { return _mm256_and_si256(a, b); }
  TAMP_OPERATION Words either(Words a, Words b) { return _mm256_or_si256(a, b); }
  TAMP_OPERATION Words without(Words a, Words b) { return _mm256_andnot_si256(b, a); }
  TAMP_OPERATION Words larger(Words a, Words b) { return _mm256_max_epu32(a, b); }
  TAMP_OPERATION Words smaller(Words a, Words b) { return _mm256_min_epu32(a, b); }
  TAMP_OPERATION Words size(Words x) { return _mm256_abs_epi32(x); }
  // A code without a sign is zero where the number is.
  TAMP_OPERATION Words with_sign_of(Words x, Words sign) { return _mm256_sign_epi32(x, sign); }
  template <int kBits>
  TAMP_OPERATION Words left(Words x) {
    return _mm256_slli_epi32(x, kBits);
  }
  template <int kBits>
  TAMP_OPERATION Words right(Words x) {
    return _mm256_srli_epi32(x, kBits);
  }

  TAMP_OPERATION uint32_t largest(Words x) {
    __m128i out = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    out = _mm_max_epu32(out, _mm_shuffle_epi32(out, 0x4e));
    out = _mm_max_epu32(out, _mm_shuffle_epi32(out, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(out));
  }
  TAMP_OPERATION void store_signed(int8_t *at, const Words (&x)[4]) {
    store_bytes(at, _mm256_packs_epi16(_mm256_packs_epi32(x[0], x[1]), _mm256_packs_epi32(x[2], x[3])));
  }
  TAMP_OPERATION void store_unsigned(uint8_t *at, const Words (&x)[4]) {
    store_bytes(at, _mm256_packus_epi16(_mm256_packus_epi32(x[0], x[1]), _mm256_packus_epi32(x[2], x[3])));
  }

 private:
  TAMP_OPERATION __m128i bytes(const void *at) { return _mm_loadl_epi64(static_cast<const __m128i *>(at)); }
  // Packing works in each half of a vector, so that fours of bytes are out of order.
  TAMP_OPERATION void store_bytes(void *at, Words x) {
    const Words order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(static_cast<Words *>(at), _mm256_permutevar8x32_epi32(x, order));
  }
};

#include "kernels/low_bit_tile.h"
#undef TAMP_TARGET
}  // namespace avx2

namespace avx512 {
#if !defined(__clang__)
// g++ 12 takes the operand that its own header leaves undefined for one that is used.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define TAMP_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))

struct V {
  using Floats = __m512;
  using Words = __m512i;
  static constexpr int64_t kWidth = 16;

  TAMP_OPERATION Floats floats(float x) { return _mm512_set1_ps(x); }
  TAMP_OPERATION Words words(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  TAMP_OPERATION Floats load(const float *at) { return _mm512_loadu_ps(at); }
  TAMP_OPERATION Words load(const uint32_t *at) { return _mm512_load_si512(at); }
  TAMP_OPERATION void store(float *at, Floats x) { _mm512_storeu_ps(at, x); }
  TAMP_OPERATION void store(uint32_t *at, Words x) { _mm512_store_si512(at, x); }
  TAMP_OPERATION Words unsigned_bytes(const uint8_t *at) { return _mm512_cvtepu8_epi32(bytes(at)); }
  TAMP_OPERATION Words signed_bytes(const int8_t *at) { return _mm512_cvtepi8_epi32(bytes(at)); }
  TAMP_OPERATION Floats numbers(Words x) { return _mm512_castsi512_ps(x); }
  TAMP_OPERATION Words bits(Floats x) { return _mm512_castps_si512(x); }

  TAMP_OPERATION Floats plus(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  TAMP_OPERATION Floats minus(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  TAMP_OPERATION Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  TAMP_OPERATION Floats over(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  TAMP_OPERATION Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  TAMP_OPERATION Floats root(Floats x) { return _mm512_sqrt_ps(x); }

  TAMP_OPERATION Words add(Words a, Words b) { return _mm512_add_epi32(a, b); }
  TAMP_OPERATION Words sub(Words a, Words b) { return _mm512_sub_epi32(a, b); }
  TAMP_OPERATION Words both(Words a, Words b) { return _mm512_and_si512(a, b); }
  TAMP_OPERATION Words either(Words a, Words b) { return _mm512_or_si512(a, b); }
  TAMP_OPERATION Words without(Words a, Words b) { return _mm512_andnot_si512(b, a); }
  TAMP_OPERATION Words larger(Words a, Words b) { return _mm512_max_epu32(a, b); }
  TAMP_OPERATION Words smaller(Words a, Words b) { return _mm512_min_epu32(a, b); }
  TAMP_OPERATION Words size(Words x) { return _mm512_abs_epi32(x); }
  TAMP_OPERATION Words with_sign_of(Words x, Words sign) {
    return _mm512_mask_sub_epi32(x, _mm512_movepi32_mask(sign), _mm512_setzero_si512(), x);
  }
  template <int kBits>
  TAMP_OPERATION Words left(Words x) {
    return _mm512_slli_epi32(x, kBits);
  }
  template <int kBits>
  TAMP_OPERATION Words right(Words x) {
    return _mm512_srli_epi32(x, kBits);
  }

  TAMP_OPERATION uint32_t largest(Words x) { return _mm512_reduce_max_epu32(x); }
  TAMP_OPERATION void store_signed(int8_t *at, const Words (&x)[2]) {
    for (int i = 0; i < 2; ++i) {
      _mm_storeu_si128(reinterpret_cast<__m128i *>(at + 16 * i), _mm512_cvtepi32_epi8(x[i]));
    }
  }
  TAMP_OPERATION void store_unsigned(uint8_t *at, const Words (&x)[2]) {
    for (int i = 0; i < 2; ++i) {
      _mm_storeu_si128(reinterpret_cast<__m128i *>(at + 16 * i), _mm512_cvtusepi32_epi8(x[i]));
    }
  }

 private:
  TAMP_OPERATION __m128i bytes(const void *at) { return _mm_loadu_si128(static_cast<const __m128i *>(at)); }
};

#include "kernels/low_bit_tile.h"
#undef TAMP_TARGET
}  // namespace avx512

#undef TAMP_OPERATION

#endif

// Steps up to kDitherPeriod numbers, of which the last block may have fewer than the others.
void step_tile(const LowBit &c, const EightBitSlice &x) {
  int64_t whole = 0;
#if defined(__x86_64__)
  static const bool has_avx512 = at::get_cpu_capability() == "AVX512";
  if (has_fma()) {
    Tile tile;
    const auto blocks = static_cast<int>(x.n / kCodeBlock);
    has_avx512 ? avx512::step_blocks(c, x, tile, blocks) : avx2::step_blocks(c, x, tile, blocks);
    whole = blocks * kCodeBlock;
  }
#endif
  for (int64_t begin = whole; begin < x.n; begin += kCodeBlock) {
    step_block(c, x, begin, x.n - begin < kCodeBlock ? x.n - begin : kCodeBlock);
  }
}

// The gradients that moments are made of: unscaled, clipped, negated to maximize and, for Adam, with weight decay.
class Gradients {
 public:
  Gradients(const LowBit &options, const GradientScale &scale)
      : scaling_(multiplying<float>(scale, options.maximize)), weight_decay_(options.weight_decay) {
    is_plain_ = scaling_.factor == 1 && scaling_.clip == 1 && scaling_.sign == 1 && weight_decay_ == 0;
  }

  // Returns up to kDitherPeriod of them, in `room` unless they are the given ones.
  const float *of(const float *parameter, const float *gradient, int64_t n, float *room) const {
    if (is_plain_) return gradient;
    run([&](auto) TAMP_INLINE_LAMBDA {
      for (int64_t i = 0; i < n; ++i) {
        const float g = scaled(scaling_, gradient[i], std::false_type());
        room[i] = weight_decay_ == 0 ? g : __builtin_fmaf(parameter[i], weight_decay_, g);
      }
    });
    return room;
  }

 private:
  Scaling<float> scaling_;
  float weight_decay_;
  bool is_plain_;
};

// Fills a table with the upper `count` bits of the dither's words. `of_step` is the word of element 0.
void fill(uint32_t (&dither)[kDitherPeriod], uint32_t of_step, int count) {
  const bool is_nearest = planted("nearest");
  for (uint32_t i = 0; i < kDitherPeriod; ++i) {
    dither[i] = is_nearest ? 1U << (count - 1) : (of_step + i * Dither::kIndex) >> (32 - count);
  }
}

}  // namespace

uint32_t largest_code(double beta1, double beta2) {
  constexpr uint32_t kMost = 127;
  if (beta1 * beta1 >= beta2) return kMost;
  const double largest = (1 - beta1) / std::sqrt((1 - beta2) * (1 - beta1 * beta1 / beta2));
  const uint32_t code = (bits(static_cast<float>(2 * largest) + 0.0625F) - kOneSixteenth) >> 19;
  return (code < kMost ? code : kMost) + (planted("code_bound") ? 1 : 0);
}

LowBit::LowBit(const Adam &o, uint64_t step, int width)
    : lerp(static_cast<float>(1 - o.beta1)),
      beta2(static_cast<float>(o.beta2)),
      one_minus_beta2(static_cast<float>(1 - o.beta2)),
      keep(o.decoupled ? static_cast<float>(1 - o.lr * o.weight_decay) : 1.0F),
      minus_step_size(static_cast<float>(-o.lr * std::sqrt(o.correction2) / o.correction1)),
      eps(static_cast<float>(o.eps * std::sqrt(o.correction2))),
      weight_decay(o.decoupled ? 0.0F : static_cast<float>(o.weight_decay)),
      largest(largest_code(o.beta1, o.beta2)),
      maximize(o.maximize) {
  const auto now = static_cast<uint32_t>(step);
  const bool is_coded = width == 8;
  fill(exp_avg_dither, now * Dither::kExpAvg, is_coded ? 19 : 16);
  fill(exp_avg_sq_dither, now * Dither::kExpAvgSq, is_coded ? 20 : 16);
  for (uint32_t &offset : exp_avg_dither) offset -= is_coded ? kOneSixteenth : 0;
}

LowBitMuon::LowBitMuon(const Muon &o, uint64_t step) : options(o) {
  fill(dither, static_cast<uint32_t>(step) * Dither::kExpAvg, 16);
}

void update(const LowBit &c, const GradientScale &scale, const EightBitSlice &x) {
  const Gradients gradients(c, scale);
  alignas(64) float room[kDitherPeriod];
  for (int64_t i = 0; i < x.n; i += kDitherPeriod) {
    const int64_t n = x.n - i < kDitherPeriod ? x.n - i : kDitherPeriod;
    const float *gradient = gradients.of(x.parameter + i, x.gradient + i, n, room);
    step_tile(c, {x.parameter + i, gradient, x.exp_avg + i, x.exp_avg_sq + i, x.exponents + i / kCodeBlock, n});
  }
}

void update(const LowBit &c, const GradientScale &scale, const BFloat16Slice &x) {
  const Gradients gradients(c, scale);
  alignas(64) float room[kDitherPeriod];
  for (int64_t i = 0; i < x.n; i += kDitherPeriod) {
    const int64_t n = x.n - i < kDitherPeriod ? x.n - i : kDitherPeriod;
    const float *__restrict gradient = gradients.of(x.parameter + i, x.gradient + i, n, room);
    float *__restrict parameter = x.parameter + i;
    c10::BFloat16 *__restrict exp_avgs = x.exp_avg + i, *__restrict exp_avg_sqs = x.exp_avg_sq + i;
    run([&](auto) TAMP_INLINE_LAMBDA {
      TAMP_INDEPENDENT
      for (int64_t j = 0; j < n; ++j) {
        float exp_avg = widen(exp_avgs[j]), exp_avg_sq = widen(exp_avg_sqs[j]);
        update(c, gradient[j], exp_avg, exp_avg_sq, parameter[j]);
        cut_off(exp_avg, c.exp_avg_dither[j], exp_avgs[j]);
        cut_off(exp_avg_sq, c.exp_avg_sq_dither[j], exp_avg_sqs[j]);
      }
    });
  }
}

}  // namespace tamp::kernels
