// Moments in eight bits as tensors.

#include "codes.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "guarded.h"
#include "shim.h"

namespace tamp::codes {
namespace {

using at::Tensor;
using kernels::kCodeBlock;

// The same numbers as in kernels/low_bit.cpp, as operations on i32 take them.
constexpr int64_t kSignBit = INT32_MIN, kExponentBits = -0x800000, kOneSixteenth = 0x3d800000;
constexpr int64_t kHalfOfBias = int64_t{127} << 22, kInverseUnit = (int64_t{254} << 23) - kHalfOfBias + 0x7fffff;
constexpr int64_t kLowestTop = 32, kHighestTop = 255, kNonFinite = kHighestTop - kLowestTop, kNaN = 0x7fc00000;

Tensor in_blocks(const Tensor &row) { return row.view({-1, kCodeBlock}); }

Tensor numbers(const Tensor &bits) { return bits.view(at::kFloat); }

}  // namespace

Rows Rows::make(int64_t numbers, at::Device device) {
  const auto words = at::TensorOptions(device).dtype(at::kInt);
  const auto row = [&] { return at::empty({numbers}, words); };
  const int64_t blocks = numbers / kCodeBlock;
  return {row(), row(), row(), row(), at::empty({blocks}, words), at::empty({blocks}, words.dtype(at::kBool))};
}

Rows Rows::of(int64_t numbers) const {
  const auto part = [&](const Tensor &row) { return row.narrow(0, 0, numbers); };
  const auto blocks = [&](const Tensor &row) { return row.narrow(0, 0, numbers / kCodeBlock); };
  return {part(squares), part(between), part(moments), part(spare), blocks(tops), blocks(mask)};
}

void decode(const Moments &from, const Rows &rows) {
  Tensor mask = rows.mask, unit = rows.between, sign = rows.spare;
  at::eq_out(mask, from.exponents, kNonFinite);
  rows.tops.copy_(from.exponents).add_(1).bitwise_left_shift_(23);
  rows.squares.copy_(from.exp_avg_sq).bitwise_left_shift_(20);
  in_blocks(rows.squares).add_(rows.tops.unsqueeze(1)).masked_fill_(mask.unsqueeze(1), kNaN);
  at::bitwise_right_shift_out(unit, rows.squares, 1);
  unit.add_(kHalfOfBias).bitwise_and_(kExponentBits);
  rows.moments.copy_(from.exp_avg);
  at::bitwise_and_out(sign, rows.moments, kSignBit);
  unit.bitwise_or_(sign);
  rows.moments.abs_().bitwise_left_shift_(19).add_(kOneSixteenth);
  numbers(rows.moments).sub_(0.0625).mul_(numbers(unit));
}

void encode(const Rows &rows, const Offsets &offsets, uint32_t largest, const Moments &to) {
  offsets.add_to_exp_avg_sq(rows.squares, rows.spare);
  rows.squares.bitwise_right_shift_(20).bitwise_and_(0xfff);
  Tensor tops = rows.tops, kept = in_blocks(rows.squares), code = rows.between, of_blocks = in_blocks(code);
  at::amax_out(tops, kept, {1});
  tops.bitwise_right_shift_(3).clamp_(kLowestTop, kHighestTop).sub_(kLowestTop);
  to.exponents.copy_(tops);
  const Tensor lowest = tops.add_(1).bitwise_left_shift_(3).unsqueeze(1);
  at::maximum_out(kept, kept, lowest);
  at::sub_out(of_blocks, kept, lowest);
  to.exp_avg_sq.copy_(code.clamp_max_(255));
  const Tensor inverse = rows.squares.bitwise_left_shift_(19).neg_().add_(kInverseUnit).bitwise_and_(kExponentBits);
  Tensor scaled = numbers(rows.between), sign = rows.spare;
  at::abs_out(scaled, numbers(rows.moments));
  scaled.mul_(numbers(inverse)).add_(0.0625);
  offsets.add_to_exp_avg(code, rows.spare);
  code.sub_(kOneSixteenth).bitwise_right_shift_(19).clamp_max_(static_cast<int64_t>(largest));
  at::bitwise_right_shift_out(sign, rows.moments, 31);
  to.exp_avg.copy_(code.bitwise_xor_(sign).sub_(sign));
}

namespace {

// Half of the last bit that stays: numbers that no step has made are rounded to the nearest code.
struct Halves : Offsets {
  void add_to_exp_avg_sq(const Tensor &bits, const Tensor & /*spare*/) const override { bits.add_(1 << 19); }
  void add_to_exp_avg(const Tensor &bits, const Tensor & /*spare*/) const override { bits.add_(1 << 18); }
};

int64_t whole_blocks(int64_t numbers) { return kernels::code_blocks(numbers) * kCodeBlock; }

// Copies of moments that fill their last block with zeros.
Moments padded(const Moments &given) {
  const int64_t n = given.exp_avg.numel(), room = whole_blocks(n);
  const auto pad = [&](const Tensor &t) {
    Tensor out = at::zeros({room}, t.options());
    out.narrow(0, 0, n).copy_(t.reshape({n}));
    return out;
  };
  return {pad(given.exp_avg), pad(given.exp_avg_sq), given.exponents};
}

void check(const Moments &given) {
  const int64_t blocks = kernels::code_blocks(given.exp_avg.numel());
  TORCH_CHECK(given.exp_avg.scalar_type() == at::kChar && given.exp_avg_sq.scalar_type() == at::kByte &&
                  given.exponents.scalar_type() == at::kByte && given.exp_avg.sizes() == given.exp_avg_sq.sizes() &&
                  given.exponents.numel() == blocks,
              "moments in eight bits are i8, u8 and a u8 for each 32 numbers");
}

}  // namespace
}  // namespace tamp::codes

extern "C" {

void tamp_codes_decode(const tamp_tensor *exp_avg, const tamp_tensor *exp_avg_sq, const tamp_tensor *exponents,
                       tamp_tensor **numbers, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    using namespace tamp::codes;
    const Moments given = {tamp::tensor(exp_avg), tamp::tensor(exp_avg_sq), tamp::tensor(exponents).reshape({-1})};
    check(given);
    const int64_t n = given.exp_avg.numel();
    const Rows rows = Rows::make(whole_blocks(n), given.exp_avg.device());
    decode(padded(given), rows);
    const auto shaped = [&](const at::Tensor &bits) {
      const at::Tensor part = bits.view(at::kFloat).narrow(0, 0, n);
      return std::make_unique<at::Tensor>(part.reshape(given.exp_avg.sizes()).clone());
    };
    auto moments = shaped(rows.moments), squares = shaped(rows.squares);
    numbers[0] = tamp::give(std::move(moments));
    numbers[1] = tamp::give(std::move(squares));
  });
}

void tamp_codes_encode(const tamp_tensor *exp_avg, const tamp_tensor *exp_avg_sq, double beta1, double beta2,
                       tamp_tensor *const *codes, char **err) noexcept {
  tamp::guarded(err, [&] {
    const c10::NoGradGuard no_grad;
    using namespace tamp::codes;
    const Moments out = {tamp::tensor(codes[0]), tamp::tensor(codes[1]), tamp::tensor(codes[2])};
    check(out);
    const int64_t n = out.exp_avg.numel();
    const Moments made = padded(out);
    const Rows rows = Rows::make(whole_blocks(n), out.exp_avg.device());
    const auto fill = [&](const at::Tensor &row, const at::Tensor &numbers) {
      row.zero_();
      row.view(at::kFloat).narrow(0, 0, n).copy_(numbers.reshape({n}));
    };
    fill(rows.moments, tamp::tensor(exp_avg));
    fill(rows.squares, tamp::tensor(exp_avg_sq));
    encode(rows, Halves(), tamp::kernels::largest_code(beta1, beta2), made);
    out.exp_avg.copy_(made.exp_avg.narrow(0, 0, n).view(out.exp_avg.sizes()));
    out.exp_avg_sq.copy_(made.exp_avg_sq.narrow(0, 0, n).view(out.exp_avg.sizes()));
  });
}

}  // extern "C"
