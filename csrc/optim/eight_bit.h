// 8-bit moments as tensors, by libtorch's operations: what kernels/low_bit.cpp does in its loops, bit by bit.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/kernels.h"
#include "optim/scratch.h"

namespace tamp::codes {

// The moments of numbers in memory order: i8, u8, and for each 32 of them an exponent, a u8.
struct Moments {
  at::Tensor exp_avg, exp_avg_sq, exponents;
};

// Rows of scratch memory for a number of whole blocks: 16 bytes for each number.
struct Rows {
  // i32: the bits of exp_avg_sq, intermediate results, the bits of exp_avg, and intermediate results.
  at::Tensor squares, between, moments, spare;
  // One i32 and one bool for each block.
  at::Tensor tops, mask;

  static Rows in(Scratch &scratch, int64_t numbers);
};

// Writes the f32 numbers that moments stand for to `rows.moments` and `rows.squares`, as bits.
void decode(const Moments &moments, const Rows &rows);

// What has to be added to the bits of numbers before they are cut off.
struct Offsets {
  virtual ~Offsets() = default;
  // `spare` is scratch memory of the same size.
  virtual void add_to_exp_avg_sq(const at::Tensor &bits, const at::Tensor &spare) const = 0;
  virtual void add_to_exp_avg(const at::Tensor &bits, const at::Tensor &spare) const = 0;
};

// Writes the codes of the numbers in `rows.moments` and `rows.squares`. No code of a first moment is beyond `largest`.
void encode(const Rows &rows, const Offsets &offsets, uint32_t largest, const Moments &moments);

}  // namespace tamp::codes
