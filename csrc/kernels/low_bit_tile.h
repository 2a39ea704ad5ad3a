// The step of whole blocks of 8-bit moments, in vectors. low_bit.cpp includes this in a namespace for each
// instruction set, which has `V`, the vectors' operations, and TAMP_TARGET. It has no include guard for that reason.
//
// It computes what `step_block` does. Blocks go through two loops in tiles, so that none waits for the largest number of
// the one before it: the second writes the codes.

TAMP_TARGET void step_blocks(const LowBit &c, const EightBitSlice &x, Tile &tile, int blocks) {
  const auto first = V::words(kOneSixteenth), exponent = V::words(kExponentBits), sign = V::words(kSignBit);
  const auto sixteenth = V::floats(0.0625F), lerp = V::floats(c.lerp), beta2 = V::floats(c.beta2);
  const auto rest = V::floats(c.one_minus_beta2), keep = V::floats(c.keep), eps = V::floats(c.eps);
  const auto minus_step_size = V::floats(c.minus_step_size);
  for (int i = 0; i < blocks; ++i) {
    read_non_finite(x.exponents[i], x.exp_avg_sq + i * kCodeBlock);
    const auto base = V::words(base_of(x.exponents[i]));
    auto largest = V::words(0);
    for (int64_t j = i * kCodeBlock; j < (i + 1) * kCodeBlock; j += V::kWidth) {
      const auto square = V::add(V::template left<20>(V::unsigned_bytes(x.exp_avg_sq + j)), base);
      const auto unit = V::both(V::add(V::template right<1>(square), V::words(kHalfOfBias)), exponent);
      const auto code = V::signed_bytes(x.exp_avg + j);
      const auto size = V::minus(V::numbers(V::add(V::template left<19>(V::size(code)), first)), sixteenth);
      const auto old = V::times(size, V::numbers(V::either(unit, V::both(code, sign))));
      const auto gradient = V::load(x.gradient + j);
      const auto exp_avg = V::fma(lerp, V::minus(gradient, old), old);
      const auto exp_avg_sq = V::fma(beta2, V::numbers(square), V::times(V::times(rest, gradient), gradient));
      const auto update = V::over(V::times(minus_step_size, exp_avg), V::plus(V::root(exp_avg_sq), eps));
      V::store(x.parameter + j, V::fma(V::load(x.parameter + j), keep, update));
      const auto rounded = V::template right<20>(V::add(V::bits(exp_avg_sq), V::load(c.exp_avg_sq_dither + j)));
      V::store(tile.exp_avg + j, exp_avg);
      V::store(tile.rounded + j, rounded);
      largest = V::larger(largest, rounded);
    }
    tile.largest[i] = V::largest(largest);
  }
  for (int i = 0; i < blocks; ++i) {
    const uint32_t top = top_of(tile.largest[i]);
    x.exponents[i] = static_cast<uint8_t>(top - kLowestTop);
    const auto lowest = V::words(lowest_of(top));
    V::Words codes[kCodeBlock / V::kWidth], squares[kCodeBlock / V::kWidth];
    for (int64_t n = 0; n < kCodeBlock / V::kWidth; ++n) {
      const int64_t j = i * kCodeBlock + n * V::kWidth;
      const auto kept = V::larger(V::load(tile.rounded + j), lowest);
      const auto exp_avg = V::load(tile.exp_avg + j);
      const auto inverse = V::both(V::sub(V::words(kInverseUnit), V::template left<19>(kept)), exponent);
      const auto size = V::numbers(V::without(V::bits(exp_avg), sign));
      const auto scaled = V::bits(V::fma(size, V::numbers(inverse), sixteenth));
      const auto code = V::template right<19>(V::add(scaled, V::load(c.exp_avg_dither + j)));
      codes[n] = V::with_sign_of(V::smaller(code, V::words(c.largest)), V::bits(exp_avg));
      squares[n] = V::sub(kept, lowest);
    }
    V::store_signed(x.exp_avg + i * kCodeBlock, codes);
    V::store_unsigned(x.exp_avg_sq + i * kCodeBlock, squares);
  }
}
